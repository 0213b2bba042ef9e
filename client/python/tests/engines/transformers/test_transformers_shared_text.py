# SPDX-License-Identifier: Apache-2.0
"""Prompts with a common text: how much of it the second prompt finds, also if it is shorter than the first."""

import pytest
import tiny_transformers as tiny
import torch

import ashlar
from ashlar.transformers import branches

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def ask(model, reuse, document, question):
    ids = torch.tensor([[*document, *question]])
    answer = model.generate(ids, **GREEDY)
    assert reuse.last.fault is None and reuse.last.skip_reason is None
    return answer, reuse.last.cached_tokens


def found(model, daemon, length, questions):
    document, expected = tiny.tokens(length, length), []
    for seed, count in enumerate(questions):
        expected.append(model.generate(torch.tensor([[*document, *tiny.tokens(count, 50 + seed)]]), **GREEDY))
    with ashlar.cache_for(model, daemon, tokens=length + 512) as cache, ashlar.attach(model, cache) as reuse:
        cached = []
        for seed, (count, answer) in enumerate(zip(questions, expected, strict=True)):
            said, tokens = ask(model, reuse, document, tiny.tokens(count, 50 + seed))
            assert torch.equal(said, answer)
            cached.append(tokens)
    return cached


@pytest.mark.parametrize("family", tiny.PLAIN)
@pytest.mark.parametrize("length", [300, 1000, 2000])
def test_the_second_prompt_over_a_text_finds_its_whole_blocks(family, length, daemon):
    first, second, third = found(tiny.build(family), daemon, length, (20, 40, 30))
    print(f"{family}: {length} shared, {first}, {second}, {third} found")
    assert first == 0 and second == length // 256 * 256
    assert third >= length // 64 * 64 >= second, "the third goes on from where the first two parted"


@pytest.mark.parametrize("family", tiny.LINEAR)
def test_the_second_prompt_of_a_hybrid_finds_most_of_a_text(family, daemon):
    for length in (300, 1000):
        first, second, third = found(tiny.build(family), daemon, length, (20, 40, 30))
        print(f"{family}: {length} shared, {first}, {second}, {third} found")
        assert first == 0 and second >= length - max(128, length // 8)
        assert third >= length // 64 * 64


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("length", [200, 300, 700])
def test_a_prompt_one_token_shorter_has_a_hit(family, length, daemon):
    model, ids = tiny.build(family), torch.tensor([tiny.tokens(length, 9)])
    shorter = model.generate(ids[:, :-1], **GREEDY)
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        model.generate(ids, **GREEDY)
        assert torch.equal(model.generate(ids[:, :-1], **GREEDY), shorter)
        assert reuse.last.cached_tokens >= length // 2


def test_the_last_messages_beginning_is_kept_if_tokens_end_messages(daemon):
    """A chat template produces a system prompt with a document, a question, and the beginning of the answer."""
    model = tiny.build("qwen3_next")
    model.generation_config.eos_token_id = [253, 254]
    model.generation_config.pad_token_id = 254
    prompts = [[*tiny.tokens(500, 5), 254, *tiny.tokens(count, 60 + count), 254, 7, 8] for count in (20, 90)]
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        for cached, prompt in zip((0, 501), prompts, strict=True):
            model.generate(torch.tensor([prompt]), **GREEDY)
            assert reuse.last.cached_tokens == cached and reuse.last.skip_reason is None


def test_a_turn_of_a_conversation_keeps_no_additional_depth(daemon):
    """Little is computed after a hit, so writing one more state in every turn would not pay."""
    model = tiny.build("qwen3_next")
    text = tiny.tokens(400, 3)
    with ashlar.cache_for(model, daemon, tokens=2048) as cache, ashlar.attach(model, cache) as reuse:
        for turn in range(4):
            text = [*model.generate(torch.tensor([text]), **GREEDY)[0].tolist(), *tiny.tokens(60, turn)]
            # The end, the depth before the prompt's last tokens, and the depth where the next prompt may diverge.
            most = 2 if turn else 3
            assert len(reuse.last.commits) == most


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_turn_with_rewritten_last_tokens_is_resumed_before_them(family, daemon):
    """Chat templates drop the reasoning of earlier turns, and with it the `<think>` at the prompt's end."""
    model = tiny.build(family)
    text, opening, shared = tiny.tokens(379, 3), [251, 252], 0
    with ashlar.cache_for(model, daemon, tokens=2048) as cache, ashlar.attach(model, cache) as reuse:
        for turn in range(4):
            prompt = torch.tensor([[*text, *opening]])
            wanted = reuse.assembler.model.generate.__wrapped__(prompt, **GREEDY)
            assert torch.equal(model.generate(prompt, **GREEDY), wanted)
            if turn:
                assert reuse.last.cached_tokens == shared - 6, "eight tokens before the earlier prompt's end"
            shared = len(text)
            text = [*text, *tiny.tokens(90, turn)]


def test_depths_are_bounded_and_fit_one_commit():
    attends = ashlar.Model("m", "w", [ashlar.Attention(2, 16, 16)], 16)
    assert branches.whole_blocks(attends, 0, 256) == [] and branches.whole_blocks(attends, 0, 257) == [256]
    assert branches.whole_blocks(attends, 300, 1024) == [512, 768]
    many = branches.whole_blocks(attends, 0, 1 << 20)
    assert len(many) <= 60 and many[0] == 256 and many == sorted(set(many))
    hybrid = ashlar.Model("m", "w", [ashlar.Attention(2, 16, 16), ashlar.Linear(ashlar.Family.GDN, 2, 2, 16, 16)], 16)
    assert branches.whole_blocks(hybrid, 0, 5000) == []
