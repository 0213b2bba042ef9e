# SPDX-License-Identifier: Apache-2.0
"""16-bit models: the error that reuse adds stays below their own rounding. Tuples and states of 16 bits."""

import math

import pytest
import tiny_transformers as tiny
import torch

import ashlar
from ashlar.transformers.caches import cache_class
from ashlar.transformers.rules import continuing

FAMILIES = ["qwen3_next", "falcon_h1", "jamba", "minimax"]  # dense, scalar, elementwise, scalar without convolution
SEGMENTS = [tiny.tokens(100, seed) for seed in range(4)]
QUERY = tiny.tokens(16, 99)
PROMPT = torch.tensor([tiny.tokens(300, 7)])
GREEDY = {"max_new_tokens": 8, "do_sample": False}
# Bound for logits: how far bfloat16 composition may differ from float32 composition, as a multiple of the difference
# between a full recompute in the two types. A bfloat16 model rounds in each layer, but the cache rounds keys once.
TIMES_OWN_ROUNDING = 3.0


def build(family, dtype):
    return tiny.build(family).to(dtype)


def apart(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_continuing_from_a_cached_prefix_is_like_the_model(family, daemon):
    model = build(family, torch.bfloat16)
    tokens = torch.tensor([tiny.tokens(320, 5)])
    # Jamba and MiniMax cannot continue with several tokens on the caches that they create.
    parts = cache_class(model)(config=model.config)
    with torch.no_grad(), continuing(model):
        model(tokens[:, :256], logits_to_keep=1, past_key_values=parts)
        parted = model(tokens[:, 256:], logits_to_keep=1, past_key_values=parts).logits
        whole = model(tokens, logits_to_keep=1).logits
    with ashlar.cache_for(model, daemon, tokens=1024, capture_tokens=256) as cache:
        assert cache.model.dtype == "bfloat16"
        with ashlar.attach(model, cache) as reuse, torch.no_grad():
            model(tokens[:, :256], logits_to_keep=1)
            resumed = model(tokens, logits_to_keep=1).logits
            assert reuse.last.cached_tokens == 256 and reuse.last.exact
    print(f"{family}: resumed {apart(resumed, parted):.1e} from the model's own in two parts, which is "
          f"{apart(parted, whole):.1e} from one run")  # fmt: skip
    assert torch.equal(resumed, parted), "the states and keys are bitwise those that the model left"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_prompt_again_has_the_same_answer(family, daemon):
    model = build(family, torch.bfloat16)
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        first = model.generate(PROMPT, **GREEDY)
        assert torch.equal(model.generate(PROMPT, **GREEDY), first) and reuse.last.cached_tokens == 292
        assert reuse.faults == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_round_no_more_than_the_model_does(family, daemon):
    prompt, logits, whole = ashlar.Prompt(SEGMENTS, QUERY), {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build(family, dtype)
        with torch.no_grad():
            whole[dtype] = model(torch.tensor([prompt.tokens.tolist()])).logits[:, -len(QUERY) :].float()
        with ashlar.cache_for(model, daemon, tokens=1024) as cache, torch.no_grad():
            with ashlar.attach(model, cache) as reuse:
                model(prompt)
                logits[dtype] = model(prompt).logits.float()
                assert reuse.faults == 0 and reuse.last.cached_tokens == 100 + 3 * 84
    own = apart(whole[torch.bfloat16], whole[torch.float32])
    found = apart(logits[torch.bfloat16], logits[torch.float32])
    print(f"{family}: composed {found:.1e}, full recompute {own:.1e} between the types; composed from full "
          f"{apart(logits[torch.bfloat16], whole[torch.bfloat16]):.1e} in bfloat16, "
          f"{apart(logits[torch.float32], whole[torch.float32]):.1e} in float32")  # fmt: skip
    assert found <= TIMES_OWN_ROUNDING * own


@pytest.mark.parametrize("method", ["kernels", "identity"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_tuples_take_fewer_bytes_and_round_once(family, method, daemon):
    model, prompt, logits, bytes_of = tiny.build(family), ashlar.Prompt(SEGMENTS, QUERY), {}, {}
    for dtype in ("float32", "float16"):
        with ashlar.cache_for(model, daemon, tokens=1024, segment_dtype=dtype) as cache, torch.no_grad():
            states = [layer.state_dtype.name for layer in cache.model.layers if isinstance(layer, ashlar.Linear)]
            assert set(states) == {"F32" if dtype == "float32" else "F16"}
            with ashlar.attach(model, cache, tuple_method=method) as reuse:
                model(prompt)
                assert reuse.last.published == len(SEGMENTS)
                logits[dtype] = model(prompt).logits
                assert reuse.faults == 0 and reuse.last.cached_tokens == 100 + 3 * 84
                # Exact prefixes are rounded too.
                first = model.generate(PROMPT, **GREEDY)
                again = model.generate(PROMPT, **GREEDY)
                assert reuse.last.cached_tokens == 292 and reuse.last.exact
                assert dtype == "float16" or torch.equal(again, first)
            stored, numbers = cache.stored_segments(), sum(math.prod(place.state) for place in cache.shape.linear)
            bytes_of[dtype] = stored["own_bytes"]
    found = apart(logits["float16"], logits["float32"])
    print(f"{family}: {found:.1e} apart, {bytes_of}")
    assert 0 < found <= 3e-3
    # Keys and values keep their type. Exponents, and the list of a segment's parts, take some bytes more.
    assert bytes_of["float32"] - bytes_of["float16"] > 0.8 * 2 * numbers * stored["segments"] > 0
