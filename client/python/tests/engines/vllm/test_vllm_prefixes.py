# SPDX-License-Identifier: Apache-2.0
"""Prefixes through the connector: a loaded prefix gives the same tokens and log-probabilities as a computed one."""

import pytest
from tiny_engines import BLOCK, CLOSE, MODELS, PAIR, Child, connector, count, prompt, repeated, same, saved

import ashlar.daemon


@pytest.mark.parametrize("model", MODELS)
def test_the_second_request_is_resumed_with_the_same_answer(model, engine, expected):
    child, block = engine(model), BLOCK[model]
    assert child.call("block_size") == block
    text = prompt(f"second {model}", 2 * block + 100)
    wanted = expected(model, [text])
    same(child.generate([text]), wanted)
    before = saved(child)
    child.call("erase")
    same(child.generate([text]), wanted)
    # There may be more, if other tests' prompts have diverged at such depths.
    assert repeated(model, len(text)) <= saved(child) - before < len(text)


@pytest.mark.parametrize("model", MODELS)
def test_another_engine_is_resumed_with_the_same_answer(model, engine, expected, shared_daemon):
    block = BLOCK[model]
    text = prompt(f"another {model}", 2 * block + 10)
    wanted = expected(model, [text])
    same(engine(model).generate([text]), wanted)
    with Child(model, connector(shared_daemon)) as other:
        same(other.generate([text]), wanted)
        assert saved(other) == repeated(model, len(text))
        # Two engines run at once on one cache: each computes one text and loads the other's.
        mine, theirs = (prompt(f"beside {model} {i}", 2 * block + 10) for i in range(2))
        engine(model).send("generate", [mine], 6)
        same(other.generate([theirs]), expected(model, [theirs]))
        same(engine(model).wait(), expected(model, [mine]))
        before = saved(other), saved(engine(model))
        engine(model).send("generate", [theirs], 6)
        same(other.generate([mine]), expected(model, [mine]))
        same(engine(model).wait(), expected(model, [theirs]))
        assert (saved(other) - before[0], saved(engine(model)) - before[1]) == (repeated(model, len(text)),) * 2


@pytest.mark.parametrize("model", PAIR)
def test_prompts_that_are_not_worth_a_load_are_not_looked_up(model, engine, expected):
    child = engine(model)
    before = child.call("metrics")
    for tokens in (5, 16):  # the last token is computed in any case
        text = prompt(f"short {tokens}", tokens)
        for _ in range(2):
            child.call("erase")
            same(child.generate([text], 4), expected(model, [text], 4))
    after = child.call("metrics")
    lookups = [{key: value for key, value in each.items() if key[0] in ("lookups", "hits")} for each in (before, after)]
    assert lookups[0] == lookups[1]


def test_small_blocks_that_the_engine_has_are_part_of_a_larger_object(shared_daemon, expected, model="qwen3"):
    """Objects have 256 tokens. An object whose first blocks the engine has lands in spare blocks in their place."""
    text = prompt("small blocks", 600)
    wanted = expected(model, [text])
    options = dict(block_size=32, num_gpu_blocks_override=512)
    with (
        Child(model, connector(shared_daemon), **options) as child,
        Child(model, connector(shared_daemon), **options) as other,
    ):
        same(child.generate([text]), wanted)
        for present in (96, 32, 320):
            other.call("erase")
            other.generate([text[:present] + prompt("another end", 20)])
            free, before = other.call("free_blocks"), saved(other)
            same(other.generate([text]), wanted)
            assert saved(other) - before == len(text) - 8 - present
            assert other.call("free_blocks") == free, "spare blocks are given back"
        assert count(other, "load_failures") == 0


@pytest.mark.parametrize("model", PAIR)
def test_a_longer_prefix_than_the_engines_own_is_loaded_after_it(model, engine, expected):
    """The engine's own blocks are shared by running requests, and must not change."""
    child, block = engine(model), BLOCK[model]
    first = prompt(f"own {model}", 2 * block + 1)
    longer = first[: 2 * block] + prompt("behind", 2 * block + 50)
    same(child.generate([longer]), expected(model, [longer]))
    child.call("erase")
    same(child.generate([first]), expected(model, [first]))  # loaded: two blocks, which the engine now has
    before = saved(child)
    same(child.generate([longer]), expected(model, [longer]))
    least = repeated(model, len(longer)) - 2 * block
    assert least <= saved(child) - before < len(longer) - 2 * block, "of four blocks two were there"


@pytest.mark.parametrize("model", PAIR)
def test_chunked_prefill_of_several_requests_in_flight(model, shared_daemon, expected):
    block = BLOCK[model]
    lengths = [3 * block + 17, 5 * block + 1, 2 * block, 40, 4 * block - 1]
    texts = [prompt(f"chunks {model} {i}", length) for i, length in enumerate(lengths)]
    with Child(model, connector(shared_daemon), max_num_batched_tokens=2 * block, max_num_seqs=3) as child:
        wanted = expected(model, texts)
        same(child.generate(texts), wanted, CLOSE)
        child.call("erase")
        before = saved(child)
        same(child.generate(texts), wanted, CLOSE)
        assert saved(child) - before >= (3 + 5 + 1 + 3) * block - 2 * block
        assert count(child, "load_failures") == 0


@pytest.mark.parametrize("model", PAIR)
def test_preempted_requests_resume_with_the_same_answer(model, shared_daemon, expected):
    block = BLOCK[model]
    texts = [prompt(f"preempt {model} {i}", 2 * block - 8) for i in range(3)]
    blocks = {"qwen3": 8, "qwen3_5": 22}[model]  # prompts fit together, but not with their decoded tokens
    limits = dict(
        num_gpu_blocks_override=blocks, max_num_seqs=3, max_num_batched_tokens=8 * block, max_model_len=3 * block
    )
    with Child(model, connector(shared_daemon), **limits) as child:
        wanted = expected(model, texts, 24)
        for _ in range(2):
            answers = child.generate(texts, 24)
            if model == "qwen3":
                same(answers, wanted, CLOSE)
            for (tokens, logs, _), (other, others) in zip(answers, wanted):
                # A preempted hybrid recomputes its decoded tokens with different rounding, also without the cache. A
                # token may then differ, but no token before the preemption.
                parting = next((i for i, pair in enumerate(zip(tokens, other)) if pair[0] != pair[1]), len(tokens))
                assert parting >= 8, (tokens, other)
                assert max(abs(a - b) for a, b in zip(logs[:parting], others)) < 0.06
        preempted = child.call(
            "evaluate", "sum(m.value for m in llm.get_metrics() if m.name == 'vllm:num_preemptions')"
        )
        assert preempted > 0
        child.call("erase")
        assert child.call("free_blocks") == blocks - 1, "nothing is held that is not used"


@pytest.mark.parametrize("model", PAIR)
def test_a_restarted_daemon_serves_from_its_disk(model, tmp_path, expected):
    block = BLOCK[model]
    text = prompt(f"disk {model}", 2 * block + 30)
    with ashlar.daemon.start(
        dram="128MiB", arena="8MiB", ssd="256MiB", admission="all", folder=str(tmp_path)
    ) as daemon:
        with Child(model, connector(daemon)) as child:
            same(child.generate([text]), expected(model, [text]))
            daemon.stop()
            same(child.generate([text]), expected(model, [text]))
            daemon.start()
            child.call("evaluate", "__import__('time').sleep(2)")
            child.call("erase")
            same(child.generate([text]), expected(model, [text]))
            assert count(child, "hits", "ssd", "keys" if model == "qwen3" else "states_and_keys") == 1


@pytest.mark.parametrize("model", ["qwen3_5"])
def test_engine_core_in_a_separate_process(model, engine, shared_daemon, expected):
    text = prompt(f"processes {model}", 2 * BLOCK[model] + 9)
    same(engine(model).generate([text]), expected(model, [text]))
    with Child(model, connector(shared_daemon), processes=True, worker_extension_cls="tiny_engines.Wide") as child:
        same(child.generate([text]), expected(model, [text]))
        assert child.generate([text])[0][2] == repeated(model, len(text))


def test_states_and_keys_hit_only_together(engine, expected):
    """Keys without the state at their depth are not a hit: the engine would continue from a zero state."""
    child, block = engine("qwen3_5"), BLOCK["qwen3_5"]
    whole = prompt("together", 5 * block + 1)  # one step of prefill: its states are saved at 5 blocks only
    same(child.generate([whole]), expected("qwen3_5", [whole]))
    part = whole[: 3 * block + 50]
    child.call("erase")
    before = saved(child)
    same(child.generate([part]), expected("qwen3_5", [part]))
    assert saved(child) == before
    child.call("erase")
    same(child.generate([part]), expected("qwen3_5", [part]))
    assert saved(child) - before == 3 * block


def test_a_model_without_states_is_found_at_every_depth(engine, expected):
    child = engine("qwen3")
    whole = prompt("depths", 1500)
    child.generate([whole])
    for tokens, found in ((300, 256), (800, 768), (1450, 1280)):
        part = whole[:tokens]
        child.call("erase")
        before = saved(child)
        same(child.generate([part]), expected("qwen3", [part]))
        assert found <= saved(child) - before < tokens
