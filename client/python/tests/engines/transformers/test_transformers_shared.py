# SPDX-License-Identifier: Apache-2.0
"""Segments that concurrent prompts share in place: the same answers as with copies, one copy in memory, and refusals of
what the attention over shared rows does not support."""

import contextlib
import copy
import gc
import json
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import pytest
import tiny_transformers as tiny
import torch
import transformers

import ashlar
from ashlar.transformers.model import turn
from ashlar.transformers.shared_attention import SharedRows, attend
from ashlar.transformers.shared_cache import SharedCache, key_value_bytes

SOURCE = pathlib.Path(os.environ["ASHLAR_SOURCE"])
TEXTS = [tiny.tokens(90 + 7 * seed, seed) for seed in range(4)]
QUERY = tiny.tokens(12, 99)
GREEDY = {"max_new_tokens": 6, "do_sample": False}
ORDERS = [(0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1)]
PROMPTS = [ashlar.Prompt([TEXTS[i] for i in order], QUERY) for order in ORDERS]
CACHED = 90 + sum(97 + 7 * i - 16 for i in range(3))
PAGE = 16


@pytest.fixture(scope="module")
def model():
    return tiny.build("qwen3_next")


@contextlib.contextmanager
def attached(model, daemon, shared_tokens=0, **options):
    with ashlar.cache_for(model, daemon, tokens=1024, shared_tokens=shared_tokens, **options) as cache:
        with ashlar.attach(model, cache) as reuse, torch.no_grad():
            yield reuse


def answers(model, prompts=PROMPTS):
    """The logits of each prompt and of the next tokens, while all prompts are held."""
    outputs = [model(prompt, logits_to_keep=1) for prompt in prompts]
    caches, rows = [output.past_key_values for output in outputs], [[output.logits[0, -1]] for output in outputs]
    for token in tiny.tokens(3, 5):
        for row, cache in zip(rows, caches, strict=True):
            row.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    return torch.stack([torch.stack(row) for row in rows]), caches


def shared_pages(segment):
    """Pages with tokens of the interior; the segment's last token is the last of its page, or its first of the first."""
    length = len(TEXTS[segment])
    if segment == 0:
        return -(-length // PAGE)
    first = -length % PAGE
    return -(-(first + length - 8) // PAGE) - (first + 8) // PAGE


def apart(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


# ---------------------------------------------------------------------------------------------------- attention


def expected(query, keys, values, scale, frequencies):
    """Attention over all rows at their positions, by torch."""
    if frequencies is not None:
        positions = range(keys.shape[2])
        keys = torch.stack([turn(keys[:, :, at], frequencies, at) for at in positions], 2)
    heads, count, total = query.shape[1], query.shape[2], keys.shape[2]
    group = heads // keys.shape[1]
    mask = torch.ones(count, total, dtype=torch.bool).tril(total - count)
    return torch.nn.functional.scaled_dot_product_attention(
        query.double(),
        keys.double().repeat_interleave(group, 1),
        values.double().repeat_interleave(group, 1),
        attn_mask=mask,
        scale=scale,
    )


@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_parts_equal_one_softmax_over_all_rows(count, rotated, dtype):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    key_heads, dim = chance.choice([1, 2, 3]), 24
    heads = key_heads * chance.choice([1, 4])
    frequencies = 10000 ** -(torch.arange(8, dtype=torch.float64) / 8) if rotated else None
    lengths = [chance.randint(1, 60) for _ in range(4)]
    total = sum(lengths) + 5 + count
    query = (3 * torch.randn(1, heads, count, dim)).to(dtype)
    keys, values = (torch.randn(1, key_heads, total, dim).to(dtype) for _ in range(2))
    shared, start = SharedRows(None, frequencies), 0
    for length in lengths:
        slot = chance.randint(0, 500)  # the segment's keys are rotated as if it began here
        rows = keys[0, :, start : start + length].transpose(0, 1)
        if rotated:
            rows = torch.stack([turn(row, frequencies, slot + i) for i, row in enumerate(rows)])
        shared.add(rows.to(dtype), values[0, :, start : start + length].transpose(0, 1), start - slot)
        start += length
    own = keys[:, :, start:]
    turned_query, turned_own = query, own
    if rotated:
        turned_query = torch.stack([turn(query[:, :, i], frequencies, total - count + i) for i in range(count)], 2)
        turned_own = torch.stack([turn(own[:, :, i], frequencies, start + i) for i in range(own.shape[2])], 2)
    found = attend(turned_query.to(dtype), turned_own.to(dtype), values[:, :, start:], shared, 0.3)
    exact = expected(turned_query, keys, values, 0.3, frequencies)
    assert apart(found, exact) < (2e-6 if dtype == torch.float32 else 2e-2)
    assert not torch.isnan(found).any() and shared.tokens == sum(lengths)


# ---------------------------------------------------------------------------------------------------- prompts


SDPA = ["qwen3_next", "qwen3_5", "falcon_h1", "nemotron_h", "zamba2", "jamba", "minimax", "qwen3", "llama"]


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*((family, "sdpa") for family in SDPA), ("qwen3_next", "eager"), ("llama", "eager")],
)
def test_concurrent_prompts_read_one_copy_and_answer_as_with_copies(family, implementation, daemon):
    model = tiny.build(family)
    model.set_attn_implementation(implementation)
    with attached(model, daemon) as reuse:
        model(PROMPTS[0])
        copies, held = answers(model)
        assert reuse.last.cached_tokens == CACHED and reuse.last.shared_tokens == 0 and reuse.faults == 0
        copied, _ = key_value_bytes(held)
    with attached(model, daemon, shared_tokens=512) as reuse:
        shared, held = answers(model)
        assert reuse.last.cached_tokens == reuse.last.shared_tokens == CACHED and reuse.faults == 0
        assert reuse.last.not_shared is None and reuse.last.published == 0
    assert apart(shared, copies) < 1e-5
    own, once = key_value_bytes(held)
    length = len(PROMPTS[0].tokens) + 3
    assert all(cache.get_seq_length() == length for cache in held)
    each = copied // (3 * length)  # bytes of a token
    assert own == 3 * (length - CACHED) * each
    assert once == PAGE * sum(map(shared_pages, range(4))) * each, "whole pages, once"
    assert model.config._attn_implementation == implementation, "restored"


def test_segments_are_published_on_their_first_use(model, daemon):
    with attached(model, daemon, shared_tokens=512) as reuse:
        model(PROMPTS[0])
        assert reuse.last.published == 4 and reuse.last.shared_tokens == CACHED
        model(PROMPTS[1])
        assert reuse.last.published == 0 and reuse.last.shared_tokens == CACHED


def test_sixteen_bit_rows_differ_less_than_the_model_rounds(daemon):
    model = tiny.build("qwen3_next")
    with attached(model, daemon):
        model(PROMPTS[0])
        exact, _ = answers(model)
    model = model.to(torch.bfloat16)
    with attached(model, daemon):
        model(PROMPTS[0])
        copies, _ = answers(model)
    with attached(model, daemon, shared_tokens=512) as reuse:
        shared, _ = answers(model)
        assert reuse.last.shared_tokens == CACHED
    print(f"copies {apart(copies, exact):.1e}, shared {apart(shared, exact):.1e} from float32")
    assert apart(shared, exact) < 2 * apart(copies, exact)


def test_pages_return_when_the_last_copy_of_a_cache_is_gone(model, daemon):
    others = ashlar.Prompt([tiny.tokens(100, 20 + seed) for seed in range(4)], QUERY)
    with attached(model, daemon, shared_tokens=448) as reuse:
        held = model(PROMPTS[0]).past_key_values
        branch = copy.deepcopy(held)
        model(others)
        assert reuse.last.shared_tokens == 0 and reuse.last.cached_tokens > 0 and reuse.faults == 0
        assert reuse.last.not_shared.startswith("shared_tokens: ")
        del held
        gc.collect()
        model(others)
        assert reuse.last.shared_tokens == 0, "the branch still reads the pages"
        del branch
        gc.collect()
        model(others)
        assert reuse.last.shared_tokens == reuse.last.cached_tokens > 0


def test_branches_of_a_cache_share_and_continue_alone(model, daemon):
    with attached(model, daemon, shared_tokens=512):
        held = model(PROMPTS[0]).past_key_values
        branch = copy.deepcopy(held)
        tokens = [torch.tensor([[token]]) for token in (3, 4)]
        first = [model(token, past_key_values=held).logits for token in tokens]
        again = [model(token, past_key_values=branch).logits for token in tokens]
        assert all(map(torch.equal, first, again))
        own, once = key_value_bytes([held, branch])
        assert (2 * key_value_bytes([held])[0], key_value_bytes([held])[1]) == (own, once)


def test_a_segment_in_scattered_pages_is_several_spans(model, daemon):
    texts = [tiny.tokens(count, 40 + i) for i, count in enumerate((64, 48, 80, 48, 150))]
    with attached(model, daemon):
        for text in texts:
            model(ashlar.Prompt([texts[0], text, texts[2]], QUERY))
        copies, _ = answers(model, [ashlar.Prompt([texts[0], texts[4]], QUERY)])
    with attached(model, daemon, shared_tokens=288) as reuse:
        held = {i: model(ashlar.Prompt([texts[0], texts[i]], QUERY)).past_key_values for i in (1, 2, 3)}
        assert reuse.last.shared_tokens > 0
        del held[1], held[3]  # their pages lie around those that are held
        gc.collect()
        shared, caches = answers(model, [ashlar.Prompt([texts[0], texts[4]], QUERY)])
        assert reuse.last.shared_tokens == reuse.last.cached_tokens > 0
        assert len(caches[0].layers[2].shared.spans) > 2
    assert apart(shared, copies) < 1e-5


def test_threads_generate_at_the_same_time(model, daemon):
    with attached(model, daemon):
        model(PROMPTS[0])
        alone = [model.generate(prompt, **GREEDY) for prompt in PROMPTS]
    with attached(model, daemon, shared_tokens=512) as reuse:
        found, both = {}, threading.Barrier(len(PROMPTS), timeout=300)

        class Meet(transformers.StoppingCriteria):
            """All prompts have been assembled when one of them has decoded its first token."""

            def __init__(self):
                self.met = False

            def __call__(self, ids, scores, **options):
                if not self.met:
                    both.wait()
                self.met = True
                return torch.zeros(ids.shape[0], dtype=torch.bool)

        def serve(i):
            found[i] = model.generate(PROMPTS[i], **GREEDY, stopping_criteria=[Meet()])

        threads = [threading.Thread(target=serve, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[i], alone[i]) for i in range(len(PROMPTS)))
        assert reuse.faults == 0 and reuse.last.shared_tokens == CACHED


def test_plain_tokens_and_conversations_are_cached_as_without_sharing(model, daemon):
    tokens = torch.tensor([tiny.tokens(300, 7)])
    plain = model.generate(tokens, **GREEDY)
    with attached(model, daemon, shared_tokens=512) as reuse:
        for cached in (0, 292):
            assert torch.equal(model.generate(tokens, **GREEDY), plain)
            assert (reuse.last.cached_tokens, reuse.last.shared_tokens) == (cached, 0)
        model.generate(ashlar.Prompt(PROMPTS[0].segments, QUERY, conversation=bytes(range(16))), **GREEDY)
        assert reuse.last.not_shared == "conversation" and "kept" in reuse.last.commits
        twins = torch.tensor([tiny.tokens(40, 7), tiny.tokens(40, 8)])
        mask = torch.ones_like(twins)
        mask[0, :10] = 0
        padded = model.generate(twins, attention_mask=mask, **GREEDY)
    assert torch.equal(padded, model.generate(twins, attention_mask=mask, **GREEDY)), "the model's own attention"


def test_generate_continues_a_shared_cache(model, daemon):
    with attached(model, daemon, shared_tokens=512):
        whole = model.generate(PROMPTS[1], **GREEDY)
        output = model(PROMPTS[1])
        ids = torch.cat([torch.tensor([PROMPTS[1].tokens.tolist()]), output.logits[:, -1:].argmax(-1)], 1)
        rest = {**GREEDY, "max_new_tokens": 5}
        assert torch.equal(model.generate(ids, past_key_values=output.past_key_values, **rest), whole)


def test_a_daemon_that_died_costs_the_next_prompt_only(model, daemon):
    with attached(model, daemon, shared_tokens=512, timeout_ms=500, land_ms=500, quiet_ms=500) as reuse:
        held, token = model(PROMPTS[0]).past_key_values, torch.tensor([[7]])
        before = model(token, past_key_values=copy.deepcopy(held)).logits
        daemon.stop()
        assert torch.equal(model(token, past_key_values=held).logits, before), "the memory stays"
        computed = model(PROMPTS[1]).logits
        assert reuse.last.cached_tokens == reuse.last.shared_tokens == 0
    with torch.no_grad():
        plain = model(torch.tensor([PROMPTS[1].tokens.tolist()]), logits_to_keep=len(QUERY)).logits
    assert apart(computed, plain) < 1e-5


def test_prompts_share_again_after_a_restart_of_the_daemon(model, daemon):
    with attached(model, daemon, shared_tokens=512, timeout_ms=2000, land_ms=2000, quiet_ms=2000) as reuse:
        held, token = model(PROMPTS[0]).past_key_values, torch.tensor([[7]])
        before = model(token, past_key_values=copy.deepcopy(held)).logits
        daemon.stop()
        daemon.start()
        deadline, again = time.monotonic() + 120, held
        while again is held or reuse.last.shared_tokens == 0:
            assert time.monotonic() < deadline, reuse.last
            again = model(PROMPTS[1]).past_key_values
        assert torch.equal(model(token, past_key_values=held).logits, before)
        assert not set(held.layers[2].shared.pages) & set(again.layers[2].shared.pages), "other memory"


# ---------------------------------------------------------------------------------------------------- refusals


def test_models_that_cannot_share_are_refused_by_name(model, daemon):
    latent = tiny.build("kimi_linear")
    with pytest.raises(ValueError, match=r"^model\.layers\[2\]: shared_tokens: keys of 16 and values of 8 dimensions"):
        ashlar.cache_for(latent, daemon, shared_tokens=512)
    ashlar.cache_for(latent, daemon).close()  # copies work
    with pytest.raises(ValueError, match=r"^shared_tokens: -1"):
        ashlar.cache_for(model, daemon, shared_tokens=-1)


def test_attention_that_is_not_a_softmax_over_all_keys_is_refused_by_name(daemon, monkeypatch):
    scope = sys.modules[transformers.LlamaForCausalLM.__module__]
    model = tiny.build("llama")
    model.set_attn_implementation("eager")
    own = scope.LlamaAttention.forward

    def capped(self, *given, **options):
        return own(self, *given, **options, softcap=30.0)

    with monkeypatch.context() as patched:
        patched.setattr(scope.LlamaAttention, "forward", capped)
        with pytest.raises(ValueError, match="^shared_tokens: softcap: not supported by shared attention; set shared"):
            ashlar.cache_for(model, daemon, shared_tokens=512)

    # keys that the cache returns are not the ones that are attended
    with monkeypatch.context() as patched:
        patched.setattr(transformers.DynamicCache, "update", copied(transformers.DynamicCache.update))
        with pytest.raises(ValueError, match=r"^model\.layers\[0\]: shared_tokens: its attention does not read"):
            ashlar.cache_for(model, daemon, shared_tokens=512)
    assert model.config._attn_implementation == "eager"
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="^model.config._attn_implementation: flex_attention; shared_tokens needs"):
        ashlar.cache_for(model, daemon, shared_tokens=512)


def copied(update):
    def call(*given, **options):
        return tuple(rows.clone() for rows in update(*given, **options))

    return call


def test_misuses_of_a_shared_cache_are_refused_by_name(daemon):
    model = tiny.build("llama")
    with attached(model, daemon, shared_tokens=512):
        held, token = model(PROMPTS[0]).past_key_values, torch.tensor([[7]])
        assert isinstance(held, SharedCache)
        mask = torch.ones(1, held.get_seq_length() + 1, dtype=torch.int64)
        model(token, past_key_values=copy.deepcopy(held), attention_mask=mask)
        mask[0, 5] = 0
        with pytest.raises(ValueError, match="^attention_mask: hides tokens"):
            model(token, past_key_values=held, attention_mask=mask)
        with pytest.raises(ValueError, match="^query: 2 sequences; a cache with shared rows has 1"):
            twice = copy.deepcopy(held)
            twice.batch_repeat_interleave(2)
            model(token.repeat(2, 1), past_key_values=twice)
        with pytest.raises(ValueError, match="^tokens_to_remove: 400; only the last "):
            held.layers[0].crop(-400)
        length = held.get_seq_length()
        held.layers[0].crop(-2)
        assert held.layers[0].get_seq_length() == length - 2
    with pytest.raises(RuntimeError, match="^past_key_values: its segments are shared in place; use it inside"):
        model(token, past_key_values=held)


def test_the_example_prints_and_writes_its_figures(tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, SOURCE / "examples/python/transformers_in_place.py", "--segments", "3", "--tokens", "96",
               "--layers", "4", "--hidden", "128", "--requests", "3", "--decode", "2", "--json", file]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "key_value_ratio" in done.stdout
    figures = json.loads(file.read_text())
    assert figures["published"] == 3 and figures["equal_tokens"] == 1 and figures["largest_difference"] < 1e-4
    assert figures["copies"]["shared_bytes"] == 0 < figures["in_place"]["shared_bytes"]
    assert figures["key_value_ratio"] > 1.5
