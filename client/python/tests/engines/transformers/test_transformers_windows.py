# SPDX-License-Identifier: Apache-2.0
"""Layers with sliding windows: their keys and values are stored whole, and the model's mask cuts the window."""

import pytest
import tiny_transformers as tiny
import torch
import transformers

import ashlar
from ashlar.transformers.caches import cache_class

SEGMENTS = [
    tiny.tokens(count, seed) for seed, count in enumerate((70, 41, 90, 18))
]  # the query sees the seam of the last
QUERY = tiny.tokens(20, 99)


def apart(one, other):
    return float((one - other).norm() / other.norm())


def mistral(layers, window):
    config = tiny.build("mistral").config
    config.num_hidden_layers, config.sliding_window = layers, window
    torch.manual_seed(0)
    return tiny.tuned(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@pytest.mark.parametrize("family", tiny.WINDOWED)
def test_whole_windows_give_the_logits_of_the_models_own_cache(family):
    model, tokens = tiny.build(family), torch.tensor([tiny.tokens(160, 1)])
    own, whole = transformers.DynamicCache(config=model.config), cache_class(model)(config=model.config)
    assert own.is_sliding == whole.is_sliding and any(own.is_sliding)
    for begin, end in ((0, 70), (70, 100), (100, 101), (101, 160)):
        with torch.no_grad():
            wanted, found = (
                model(tokens[:, begin:end], past_key_values=cache).logits for cache in (own, whole)
            )  # fmt: skip
        assert apart(found, wanted) < 1e-5
    held = [layer.keys.shape[-2] for layer in whole.layers]
    assert held == [160] * len(held) and min(layer.keys.shape[-2] for layer in own.layers) < 32


# A key of layer l depends on the (window − 1) · l tokens before it. If the seam is as wide, no interior depends on the
# segments before it.
@pytest.mark.parametrize(("layers", "window"), [(1, 16), (3, 8)])
def test_composition_is_exact_with_seams_as_wide_as_the_windows_reach(layers, window, daemon):
    model, reach = mistral(layers, window), (layers - 1) * (window - 1)
    prompt = ashlar.Prompt(SEGMENTS, QUERY)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt.tokens.tolist()]), logits_to_keep=len(QUERY)).logits
        found = {}
        for head in (0, reach):
            with ashlar.cache_for(model, daemon, tokens=1024, head=head, tail=0) as cache:
                with ashlar.attach(model, cache) as reuse:
                    for _ in range(2):
                        found[head] = apart(model(prompt).logits, wanted)
                    assert reuse.last.cached_tokens == 219 - 3 * head and not reuse.last.exact
        model.config.sliding_window = 512
        assert apart(model(torch.tensor([prompt.tokens.tolist()]), logits_to_keep=len(QUERY)).logits, wanted) > 1e-2
    assert found[reach] < 1e-5
    if layers > 1:
        assert found[0] > 1e-4, "a narrower seam is approximate"


def test_segments_with_windows_are_not_shared_in_place(daemon):
    with pytest.raises(ValueError, match=r"layers\[0\]: shared_tokens: its attention has a sliding window; set"):
        ashlar.cache_for(tiny.build("mistral"), daemon, shared_tokens=256)
