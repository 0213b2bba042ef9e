# SPDX-License-Identifier: Apache-2.0
"""Weights that change in place: entries of the old weights are not found, and entries of the new ones are not stored
under the old name."""

import logging

import pytest
import tiny_transformers as tiny
import torch

import ashlar

PROMPT = torch.tensor([tiny.tokens(300, 7)])
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def other(model):
    return {name: weight.clone() for name, weight in tiny.build("qwen3", seed=1).state_dict().items()}


@torch.no_grad()
def copy(model, weights):
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])


def copy_data(model, weights):  # like weight loaders: neither address nor version changes
    for name, weight in model.named_parameters():
        weight.data.copy_(weights[name])


def one_by_data(model, weights):  # like a merge of an adapter
    model.model.layers[1].mlp.down_proj.weight.data += 0.3 * torch.randn(
        32, 64, generator=torch.Generator().manual_seed(1)
    )


def replace(model, weights):
    for name, weight in model.named_parameters():
        weight.data = weights[name]


def replace_module(model, weights):
    old = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(64, 32, bias=False).eval()
    model.kept = [old]  # a tensor that is not a parameter: the weights do not change


WAYS = {
    "load_state_dict": lambda model, weights: model.load_state_dict(weights),
    "load_state_dict, assigned": lambda model, weights: model.load_state_dict(weights, assign=True),
    "copy": copy,
    "copy of data": copy_data,
    "one matrix by data": one_by_data,
    "data": replace,
    "module": replace_module,
}


@pytest.mark.parametrize("way", WAYS)
def test_changed_weights_run_without_the_cache(daemon, caplog, way):
    model = tiny.build("qwen3")
    first = model.generate(PROMPT, **GREEDY)
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        for cached in (0, 292):
            assert torch.equal(model.generate(PROMPT, **GREEDY), first) and reuse.last.cached_tokens == cached
        WAYS[way](model, other(model))
        with caplog.at_level(logging.WARNING, "ashlar.transformers"):
            for _ in range(2):
                changed = model.generate(PROMPT, **GREEDY)
                assert reuse.last.skip_reason == "weights" and reuse.last.cached_tokens == 0
            with torch.no_grad():
                model(PROMPT, logits_to_keep=1)
            assert reuse.last.skip_reason == "weights"
        said = [record.message for record in caplog.records if "weights" in record.message]
        assert len(said) == 1 and "open a new one" in said[0], "it is said once"
    assert torch.equal(model.generate(PROMPT, **GREEDY), changed)
    # Another cache names the new weights: it finds no entries of the old ones, and an engine with the old ones finds
    # none of these.
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        for cached in (0, 292):
            assert torch.equal(model.generate(PROMPT, **GREEDY), changed) and reuse.last.cached_tokens == cached
    model = tiny.build("qwen3")
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        assert torch.equal(model.generate(PROMPT, **GREEDY), first) and reuse.last.cached_tokens == 292


def test_weights_that_change_while_a_prompt_is_computed_are_not_offered(daemon):
    model = tiny.build("qwen3")

    def train(input_ids, scores):
        if input_ids.shape[1] == 303:
            copy(model, other(model))
        return scores

    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        model.generate(PROMPT, **GREEDY, logits_processor=[train])
        assert reuse.last.commits == [] and reuse.faults == 1
    model = tiny.build("qwen3")
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        model.generate(PROMPT, **GREEDY)
        assert reuse.last.cached_tokens == 0, "nothing was stored"


def test_a_cache_of_another_model_serves_nothing(daemon):
    model, stranger = tiny.build("qwen3"), tiny.build("qwen3", seed=1)
    wanted = stranger.generate(PROMPT, **GREEDY)
    with ashlar.cache_for(model, daemon, tokens=1024) as cache:
        with ashlar.attach(model, cache):
            model.generate(PROMPT, **GREEDY)
        with ashlar.attach(stranger, cache) as reuse:
            assert torch.equal(stranger.generate(PROMPT, **GREEDY), wanted) and reuse.last.skip_reason == "weights"


def test_changes_that_keep_the_weights_are_served(daemon):
    model = tiny.build("qwen3")
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        for change in (lambda: None, model.eval, lambda: model.requires_grad_(False), model.state_dict, lambda: model.to("cpu"),
                       lambda: model.zero_grad(), lambda: model.float()):  # fmt: skip
            change()
            model.generate(PROMPT, **GREEDY)
            assert reuse.last.skip_reason is None and reuse.last.fault is None
