# SPDX-License-Identifier: Apache-2.0
"""Prefixes of hybrids whose states are opaque bytes: Mamba-2 (Granite-4, Falcon-H1, Nemotron-H) and short convolutions (LFM2)."""

import random
import threading

import pytest
from tiny_engines import BLOCK, STATES, Child, connector, count, prompt, repeated, same, saved, serves_again, settle

import ashlar.daemon

# Digests of tail and state by layer: of what a worker saves at each depth, and of what it loads.
WATCH = """
import hashlib, torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
half = get_kv_transfer_group()._worker
server.undo, server.kept, server.filled = (half._saves.commit, half._caches.copy_states), {}, {}
def filled_in(blocks, depth):
    return [states.parts(blocks[states.group][half._described.count(depth) - 1]) for states in half._caches.states]
def digests(layers):
    found = []
    for parts in layers:
        assert all(part.float().abs().max() > 0 for part in parts), "a state of zeros says nothing"
        found.append([hashlib.sha256(part.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for part in parts])
    return found
def committed(cache, saving):
    save = saving.save
    for depth in save.depths:
        copied = saving.running is not None and depth == save.depths[-1]
        server.kept[depth] = digests(saving.running if copied else filled_in(save.blocks, depth))
    return server.undo[0](cache, saving)
def filled(handle, load):
    done = server.undo[1](handle, load)
    server.filled[load.tokens] = digests(filled_in(load.blocks, load.tokens))
    return done
half._saves.commit, half._caches.copy_states = committed, filled
"""
# Loads whose states or tails are replaced by zeros.
SPOIL = """
from vllm.distributed.kv_transfer import get_kv_transfer_group
half = get_kv_transfer_group()._worker
server.undo = half._saves.commit, half._caches.copy_states
def spoiled(handle, load):
    done = server.undo[1](handle, load)
    for states in half._caches.states:
        states.{part}(load.blocks[states.group][half._described.count(load.tokens) - 1]).zero_()
    return done
half._caches.copy_states = spoiled
"""
UNDO = """
from vllm.distributed.kv_transfer import get_kv_transfer_group
half = get_kv_transfer_group()._worker
half._saves.commit, half._caches.copy_states = server.undo
"""


@pytest.mark.parametrize("model", STATES)
def test_prompts_are_resumed_with_the_same_answer_and_the_same_states(model, engine, expected, shared_daemon):
    child, block = engine(model), BLOCK[model]
    assert child.call("block_size") == block
    # After one token the answer depends on a convolution's tail; after many it depends on the recurrence, if that has a
    # long memory.
    texts = [
        prompt(f"states {model} {length}", length) for length in (2 * block + 1, 2 * block + 100, 4 * block, block + 2)
    ]
    wanted = expected(model, texts)
    child.call("execute", WATCH)
    for text, answer in zip(texts, wanted):
        same(child.generate([text]), [answer])
        kept = child.call("evaluate", "server.kept")
        for _ in range(2):
            before = saved(child)
            child.call("erase")
            same(child.generate([text]), [answer])
            assert saved(child) - before == repeated(model, len(text))
        assert child.call("evaluate", "server.filled")[repeated(model, len(text))] == kept[repeated(model, len(text))]
    child.call("execute", UNDO)
    with Child(model, connector(shared_daemon)) as other:  # a new engine finds only what is in the daemon
        other.call("execute", WATCH)
        for text, answer in zip(texts, wanted):
            before = saved(other)
            same(other.generate([text]), [answer])
            assert saved(other) - before == repeated(model, len(text))
        filled = other.call("evaluate", "server.filled")
        assert filled == {at: kept[at] for at in filled}
        assert count(other, "load_failures") == 0
        assert count(other, "hits", "dram", "states_and_keys") == len(texts)


@pytest.mark.parametrize(
    "model, part", [(model, "state") for model in STATES] + [("granite", "tail"), ("falcon_h1", "tail")]
)
def test_a_state_that_is_not_loaded_is_detected(model, part, engine, expected):
    """Shows that the values compared in the other tests distinguish zeros from the right states and tails."""
    child = engine(model)
    text = prompt(f"zeros {model}", 2 * BLOCK[model] + 1)
    ((tokens, logs),) = expected(model, [text])
    same(child.generate([text]), [(tokens, logs)])
    child.call("execute", SPOIL.format(part=part))
    child.call("erase")
    ((wrong, others, _),) = child.generate([text])
    child.call("execute", UNDO)
    assert wrong != tokens or max(abs(a - b) for a, b in zip(logs, others)) > 1e-3
    child.call("erase")
    same(child.generate([text]), [(tokens, logs)])


def test_a_longer_prefix_than_the_engines_own_is_loaded_after_it(engine, expected, model="falcon_h1"):
    child, block = engine(model), BLOCK[model]
    first = prompt(f"own {model}", 2 * block + 1)
    longer = first[: 2 * block] + prompt("behind", 2 * block + 1)
    same(child.generate([longer]), expected(model, [longer]))
    child.call("erase")
    same(child.generate([first]), expected(model, [first]))
    before = saved(child)
    same(child.generate([longer]), expected(model, [longer]))
    assert saved(child) - before == 2 * block, "of four blocks two were there"


def test_segments_are_refused(engine, model="lfm2"):
    text = "__import__('ashlar.vllm.segments').vllm.segments.unsupported(server.connector()._scheduler._described)"
    assert engine(model).call("evaluate", text) == "not for models with states of SHORT_CONV"


def test_several_requests_in_flight_and_a_daemon_that_is_killed(tmp_path, expected, model="granite"):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    block = BLOCK[model]
    lengths = [3 * block + 17, 5 * block + 1, 40, 2 * block + 1]
    texts = [prompt(f"flight {model} {i}", length) for i, length in enumerate(lengths)]
    wanted = expected(model, texts)
    waits = dict(call_ms=400, land_ms=600, quiet_ms=200)
    with (
        ashlar.daemon.start(dram="256MiB", arena="8MiB", folder=str(tmp_path)) as daemon,
        Child(model, connector(daemon, **waits), max_num_batched_tokens=2 * block, max_num_seqs=3) as child,
    ):
        same(child.generate(texts), wanted)
        child.call("erase")
        free, before = child.call("free_blocks"), saved(child)
        same(child.generate(texts), wanted)
        assert (
            saved(child) - before >= sum(repeated(model, each) for each in lengths) - 2 * block
        )  # a lookup may be late
        child.call("erase")
        killer = threading.Timer(random.Random(seed).uniform(0, 0.25), daemon.kill)
        killer.start()
        same(child.generate(texts), wanted)
        killer.join()
        child.call("erase")
        same(child.generate(texts), wanted)
        daemon.start()
        serves_again(child, texts, wanted)
        settle(child, free)


@pytest.mark.parametrize("dtype, states", [("float16", "float16"), ("bfloat16", "float32")])
def test_states_of_16_bits_are_resumed_like_the_engines_own(dtype, states, shared_daemon, model="granite"):
    text = prompt(f"{dtype} {model}", 2 * BLOCK[model] + 30)
    with Child(model, connector(shared_daemon), dtype=dtype, mamba_ssm_cache_dtype=states) as child:
        spec = child.call(
            "evaluate", "str(server.core().scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.dtypes)"
        )
        assert spec == f"(torch.{dtype}, torch.{states})"
        child.generate([text])
        own = [each[:2] for each in child.generate([text])]
        assert saved(child) == 0
        child.call("erase")
        same(child.generate([text]), own, 1e-6)
        assert saved(child) == repeated(model, len(text))


def test_every_rank_has_its_own_states(shared_daemon, model="granite"):
    text = prompt(f"ranks {model}", 2 * BLOCK[model] + 1)
    with Child(model, connector(shared_daemon), tensor_parallel_size=2) as child:
        wanted = [each[:2] for each in child.generate([text])]
        child.call("erase")
        same(child.generate([text]), wanted)
        assert saved(child) == repeated(model, len(text))
