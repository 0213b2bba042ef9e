# SPDX-License-Identifier: Apache-2.0
"""Each family of tiny models: cached and composed runs are compared with the model alone."""

import contextlib
import sys

import numpy as np
import pytest
import tiny_transformers as tiny
import torch
import transformers

import ashlar
from ashlar.transformers.assembly import Assembler
from ashlar.transformers.caches import cache_class
from ashlar.transformers.rules import Tape, continuing

SEGMENTS = [tiny.tokens(count, seed) for seed, count in enumerate((70, 41, 90, 64))]
QUERY = tiny.tokens(20, 99)


@pytest.fixture(params=tiny.FAMILIES)
def model(request):
    return tiny.build(request.param)


def run(model, tokens, cache=None, first=0, **options):
    ids = torch.tensor([[int(token) for token in tokens]])
    positions = torch.arange(first, first + ids.shape[1]).unsqueeze(0)
    with torch.no_grad(), continuing(model):
        return model(ids, position_ids=positions, past_key_values=cache, use_cache=True, **options).logits


def fresh(model):
    return cache_class(model)(config=model.config.get_text_config(decoder=True))


def apart(one, other):
    return float((one - other).detach().norm() / other.detach().norm())


def test_a_prefill_in_two_parts_leaves_the_same_states(model):
    tokens, parts, whole = tiny.tokens(150, 1), fresh(model), fresh(model)
    once = run(model, tokens, whole)
    run(model, tokens[:83], parts)
    np.testing.assert_allclose(run(model, tokens[83:], parts, 83), once[:, 83:], atol=1e-4)
    for one, other in zip(parts.layers, whole.layers, strict=True):
        if getattr(other, "recurrent_states", {}).get(0) is not None:
            assert apart(one.recurrent_states[0], other.recurrent_states[0]) < 1e-4


def test_generate_continues_from_an_exact_prefix_with_the_same_tokens(model, daemon):
    tokens = torch.tensor([tiny.tokens(300, 2)])
    plain = model.generate(tokens, max_new_tokens=12, do_sample=False)
    longer = torch.cat([plain, torch.tensor([tiny.tokens(30, 3)])], 1)
    plain_longer = model.generate(longer, max_new_tokens=12, do_sample=False)
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), plain)
        assert reuse.last.cached_tokens == 0 and "kept" in reuse.last.commits
        assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), plain)
        assert reuse.last.cached_tokens >= 256 and reuse.last.exact
        assert torch.equal(model.generate(longer, max_new_tokens=12, do_sample=False), plain_longer)
        assert reuse.last.cached_tokens >= 256, "the next turn goes on behind the last answer"
        with torch.no_grad():
            logits = model(longer, logits_to_keep=1).logits
        assert reuse.last.cached_tokens >= 256
        assert reuse.faults == 0
    np.testing.assert_allclose(logits, run(model, longer[0].tolist(), logits_to_keep=1), atol=1e-4)


def test_segments_are_published_once_and_reused_in_any_order(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        first = model.generate(ashlar.Prompt(SEGMENTS, QUERY), max_new_tokens=8, do_sample=False)
        assert reuse.last.published == len(SEGMENTS)
        again = model.generate(ashlar.Prompt(SEGMENTS, QUERY), max_new_tokens=8, do_sample=False)
        assert torch.equal(first, again)
        interiors = sum(len(segment) - 16 for segment in SEGMENTS[1:])
        assert reuse.last.cached_tokens == len(SEGMENTS[0]) + interiors and not reuse.last.exact
        others = [SEGMENTS[0], SEGMENTS[3], SEGMENTS[1], SEGMENTS[2]]
        model.generate(ashlar.Prompt(others, QUERY), max_new_tokens=8, do_sample=False)
        assert reuse.last.cached_tokens == len(SEGMENTS[0]) + interiors and reuse.last.published == 0
        assert reuse.last.misses == {} and reuse.faults == 0


@pytest.mark.parametrize("tuple_method", ["kernels", "identity"])
def test_the_first_layer_is_composed_exactly(model, daemon, tuple_method):
    prompt, whole = ashlar.Prompt(SEGMENTS, QUERY), fresh(model)
    run(model, prompt.tokens, whole)
    with ashlar.cache_for(model, daemon, tokens=1024) as cache:
        assembler = Assembler(model, cache, model.forward, tuple_method)
        for hit in (False, True):
            with torch.no_grad():
                assembled = assembler.assemble(prompt, len(prompt.tokens), 1, 0)
            assert assembled.plan.cached_tokens > 200
            assert assembled.published == (0 if hit else 4)
            mine, real = assembled.cache.layers[0], whole.layers[0]
            if getattr(real, "recurrent_states", {}).get(0) is not None:
                assert apart(mine.recurrent_states[0], real.recurrent_states[0]) <= 1e-5
                if real.conv_states[0] is not None:
                    assert apart(mine.conv_states[0][..., 1:], real.conv_states[0][..., 1:]) <= 1e-5
            if getattr(real, "keys", None) is not None:
                assert apart(mine.keys, real.keys) <= 1e-5
                assert apart(mine.values, real.values) <= 1e-5
            assembler.end(assembled)


def whole_run(model, tokens):
    tape = cache_class(model, Tape)(model.config.get_text_config(decoder=True))
    with torch.no_grad(), tape.recording(model):
        model.base_model(input_ids=torch.tensor([tokens]), past_key_values=tape, use_cache=True)
    return tape


def compose(call, transition, state, before):
    """The state after a tuple: [heads, d_k, d_v], or [heads, d_v, d_k] of Mamba."""
    if call.rule.family in (ashlar.Family.MAMBA2, ashlar.Family.LIGHTNING):
        return transition.exp()[:, None, None] * before + state
    if call.rule.family is ashlar.Family.MAMBA1:
        return (call.arguments["A"] * transition[..., None]).exp() * before + state
    return transition @ before + state


@pytest.mark.parametrize("family", tiny.LINEAR)
def test_tuples_of_one_run_compose_to_the_whole_run_in_every_layer(family):
    model = tiny.build(family)
    tape = whole_run(model, tiny.tokens(260, 4))
    assert tape.calls
    for layer, call in tape.calls.items():
        composed = torch.zeros_like(tape.layers[layer].recurrent_states[0][0])
        for begin, end in ((0, 1), (1, 70), (70, 133), (133, 197), (197, 260)):
            state, transition = call.tuple_by_identity(begin, end)
            composed = compose(call, transition, state, composed)
        real = tape.layers[layer].recurrent_states[0][0]
        assert apart(composed, real) <= 1e-5, f"layer {layer}"
        without = compose(call, torch.zeros_like(transition), state, composed)
        assert apart(without, real) > 0.05, "the heads remember: a lost state would show"


@pytest.mark.parametrize("family", tiny.LINEAR)
def test_kernels_and_identity_give_the_same_tuples_in_every_layer(family, daemon):
    model = tiny.build(family)
    with ashlar.cache_for(model, daemon, tokens=512) as cache:
        table, prompt = cache.take(256), ashlar.Prompt([SEGMENTS[0], SEGMENTS[2]], QUERY)
        with cache.begin(prompt.tokens, prompt.lengths, table, fill=True) as request:
            missing, run_ = next((i, run) for i, run in enumerate(request.missing) if run.transition)
            tape = whole_run(model, run_.tokens.tolist())
            assemblers = [Assembler(model, cache, model.forward, method) for method in ("kernels", "identity")]
            for place in cache.shape.linear:
                one, other = (assembler._tuple(request, missing, run_, tape, place) for assembler in assemblers)
                assert apart(one.state, other.state) <= 1e-5, f"layer {place.layer}"
                assert apart(one.transition, other.transition) <= 1e-5, f"layer {place.layer}"
                assert np.array_equal(one.conv_tail, other.conv_tail)  # None without a convolution


def test_kernels_of_a_wide_mamba1_layer_take_its_channels_as_heads(daemon):
    """The kernels take at most 256 dimensions per head; this layer has 384 channels."""
    config = tiny.build("jamba").config
    config.hidden_size = 192
    model = tiny.tuned(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    prompt, whole = ashlar.Prompt(SEGMENTS, QUERY), fresh(model)
    run(model, prompt.tokens, whole)
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, torch.no_grad():
        assert cache.shape.linear[0].state == (2, 192, 8)
        assembler = Assembler(model, cache, model.forward)
        assembled = assembler.assemble(prompt, len(prompt.tokens), 1, 0)
        assert assembled.plan.cached_tokens > 200
        assert apart(assembled.cache.layers[0].recurrent_states[0], whole.layers[0].recurrent_states[0]) <= 1e-5
        assembler.end(assembled)


def test_mamba1_continues_only_on_caches_of_the_adapter_and_only_within_the_block():
    """Transformers starts each scan of several tokens from zero."""
    model, tokens = tiny.build("jamba"), tiny.tokens(40, 6)
    module = sys.modules[type(model).__module__]
    own, plain = module.mamba_selective_scan, lambda: transformers.DynamicCache(config=model.config)

    def in_parts(cache, block):
        with torch.no_grad(), block:
            model(torch.tensor([tokens[:25]]), past_key_values=cache)
            return model(torch.tensor([tokens[25:]]), past_key_values=cache).logits

    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[:, 25:]
    assert apart(in_parts(fresh(model), continuing(model)), wanted) <= 1e-5
    as_it_is = in_parts(plain(), contextlib.nullcontext())
    assert apart(as_it_is, wanted) > 1e-3
    assert torch.equal(in_parts(fresh(model), contextlib.nullcontext()), as_it_is)
    assert torch.equal(in_parts(plain(), continuing(model)), as_it_is)
    with continuing(model):
        cache = fresh(model)
        with pytest.raises(RuntimeError, match="on purpose"), torch.no_grad():
            model(torch.tensor([tokens[:25]]), past_key_values=cache)
            failing = model.model.layers[0].mamba.x_proj.register_forward_hook(on_purpose)
            model(torch.tensor([tokens[25:]]), past_key_values=cache)
        failing.remove()
        assert torch.equal(in_parts(plain(), continuing(model)), as_it_is), "the failed layer's state is not used"
        assert module.mamba_selective_scan is not own
    assert module.mamba_selective_scan is own


def on_purpose(*_):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("family", ["jamba", "minimax"])
def test_a_returned_cache_continues_with_several_tokens(family, daemon):
    model, more = tiny.build(family), tiny.tokens(30, 8)
    prompt = ashlar.Prompt([], tiny.tokens(200, 7))
    with torch.no_grad():
        wanted = model(torch.tensor([[*prompt.tokens.tolist(), *more]])).logits[:, -30:]
        with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
            for cached in (0, 128):
                held = model(prompt, logits_to_keep=1).past_key_values
                assert reuse.last.cached_tokens == cached
                found = model(torch.tensor([more]), past_key_values=held).logits
                assert apart(found, wanted) <= 1e-5
            assert reuse.faults == 0


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "falcon_h1", "jamba", "minimax", "gemma3"])
def test_a_cached_prefix_is_bitwise_equal_to_the_models_states(family, daemon):
    model, tokens = tiny.build(family), np.array(tiny.tokens(320, 5), np.int32)
    with ashlar.cache_for(model, daemon, tokens=1024) as cache:
        assembler = Assembler(model, cache, model.forward)
        with torch.no_grad():
            first = assembler.assemble(ashlar.Prompt([], tokens), 319, 0, 0)
            assert assembler.commit(first, tokens[:319], b"")[-1] == "kept"
            assembler.end(first)
            second = assembler.assemble(ashlar.Prompt([], tokens), 319, 0, 0)
        assert second.plan.cached_tokens == 319
        for one, other in zip(first.cache.layers, second.cache.layers, strict=True):
            if getattr(one, "recurrent_states", {}).get(0) is not None:
                assert torch.equal(one.recurrent_states[0], other.recurrent_states[0])
                if one.conv_states[0] is not None:
                    assert torch.equal(one.conv_states[0][..., 1:], other.conv_states[0][..., 1:])
            if getattr(one, "keys", None) is not None:
                assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        assembler.end(second)
