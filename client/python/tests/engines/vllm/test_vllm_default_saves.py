# SPDX-License-Identifier: Apache-2.0
"""Saves as in production: after the step, while the next steps run. In other tests a step waits for its saves."""

import os
import random
import threading

import pytest
from tiny_engines import (
    BLOCK,
    CLOSE,
    MODELS,
    PAIR,
    Child,
    connector,
    count,
    prompt,
    repeated,
    same,
    saved,
    serves_again,
    settle,
)  # fmt: skip


def by_default(daemon, **options):
    found = connector(daemon, **options)
    del found["wait_for_saves"]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_prompts_are_resumed_with_the_same_answer_while_others_are_saved(model, shared_daemon, expected):
    block = BLOCK[model]
    texts = [prompt(f"default {model} {i}", (2 + i % 3) * block + 30 + i) for i in range(6)]
    longer = [text + prompt("more", block) for text in texts[:2]]
    wanted, wanted_longer = expected(model, texts), expected(model, longer)
    with Child(model, by_default(shared_daemon)) as child:
        assert not child.call("evaluate", "server.connector()._options.wait_for_saves"), "what users get"
        free = child.call("free_blocks")
        for text, answer in zip(texts, wanted):  # each is saved while the next one is computed over freed blocks
            same(child.generate([text]), [answer])
        # A gated delta net that resumes inside a block rounds differently, as the engine does with steps of other
        # lengths.
        same(child.generate(longer), wanted_longer, CLOSE if model == "qwen3" else 6e-2)
        settle(child, free)
        assert count(child, "stores", "kept") >= len(texts)
        before = saved(child)
        for text, answer in zip(texts, wanted):
            same(child.generate([text]), [answer])
        least, most = sum(repeated(model, len(text)) for text in texts), sum(len(text) - 1 for text in texts)
        assert least <= saved(child) - before <= most, "at least their ends; depths where prompts part may lie deeper"
        settle(child, free)
        same(child.generate(texts[:4]), wanted[:4], CLOSE)  # all in one call
        assert count(child, "load_failures") == 0


@pytest.mark.parametrize("model", PAIR)
def test_blocks_are_held_until_their_save_ends(model, shared_daemon, expected):
    """The engine has capacity for little more than one prompt: without a hold it would compute the next prompt over
    blocks being saved."""
    block = BLOCK[model]
    blocks = {"qwen3": 6, "qwen3_5": 16}[model]
    texts = [prompt(f"tight {model} {i}", 2 * block + 30) for i in range(4)]
    wanted = expected(model, texts)
    limits = dict(num_gpu_blocks_override=blocks, max_num_seqs=1, max_model_len=3 * block)
    with Child(model, by_default(shared_daemon), **limits) as child:
        child.call(
            "execute",
            "import time\nfrom vllm.distributed.kv_transfer import get_kv_transfer_group\nhalf = get_kv_transfer_group()._worker\nserver.real = half._saves.commit\n"
            "def slow(cache, save):\n    time.sleep(0.3)\n    return server.real(cache, save)\nhalf._saves.commit = slow",
        )
        for text, answer in zip(texts, wanted):
            same(child.generate([text]), [answer])
        settle(child, blocks - 1)
        before = saved(child)
        for text, answer in zip(texts, wanted):
            child.call("erase")
            same(child.generate([text]), [answer])
        assert saved(child) - before > 0


@pytest.mark.parametrize("model", PAIR)
def test_a_daemon_killed_while_it_saves_changes_no_answer(model, daemon, expected):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    texts = [prompt(f"default killed {model} {i}", 2 * BLOCK[model] + 20 + i) for i in range(3)]
    wanted = expected(model, texts)
    moments = int(os.environ.get("ASHLAR_VLLM_KILLS", "6"))
    with Child(model, by_default(daemon, call_ms=400, land_ms=600, quiet_ms=200, lookup_ms=100)) as child:
        free = child.call("free_blocks")
        for _ in range(moments):
            child.call("erase")
            killer = threading.Timer(draw.uniform(0, 0.25), daemon.kill)
            killer.start()
            same(child.generate(texts), wanted, CLOSE)
            killer.join()
            daemon.start()
        serves_again(child, texts, wanted, CLOSE)
        settle(child, free)


@pytest.mark.parametrize("model", PAIR)
def test_preempted_requests_resume_with_the_same_answer(model, shared_daemon, expected):
    block = BLOCK[model]
    texts = [prompt(f"default preempt {model} {i}", 2 * block - 8) for i in range(3)]
    blocks = {"qwen3": 8, "qwen3_5": 22}[model]  # prompts fit together, but not with their decoded tokens
    limits = dict(
        num_gpu_blocks_override=blocks, max_num_seqs=3, max_num_batched_tokens=8 * block, max_model_len=3 * block
    )
    wanted = expected(model, texts, 24)
    with Child(model, by_default(shared_daemon), **limits) as child:
        for _ in range(2):
            for (tokens, logs, _), (other, others) in zip(child.generate(texts, 24), wanted):
                # After a preemption, decoded tokens are recomputed as part of the prompt, which rounds differently. A
                # token may then differ, but no token before the preemption.
                parting = next((i for i, pair in enumerate(zip(tokens, other)) if pair[0] != pair[1]), len(tokens))
                assert parting >= (24 if model == "qwen3" else 8), (tokens, other)
                assert max(abs(a - b) for a, b in zip(logs[:parting], others)) < (CLOSE if model == "qwen3" else 0.06)
        preempted = child.call(
            "evaluate", "sum(m.value for m in llm.get_metrics() if m.name == 'vllm:num_preemptions')"
        )
        assert preempted > 0
        settle(child, blocks - 1)
