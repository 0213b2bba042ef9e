# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: each rank saves and loads its own shard, and a prefix hits if it hits on all ranks."""

import os
import signal
import time

import pytest
from tiny_engines import BLOCK, Child, connector, count, prompt, same, saved

MODEL, RANKS = "qwen3_5", 2


@pytest.fixture(scope="module")
def texts():
    return [prompt(f"ranks {i}", 2 * BLOCK[MODEL] + 20 + i) for i in range(3)]


@pytest.fixture(scope="module")
def wanted(texts):
    """The answers of an engine of two ranks without a cache. A single rank adds in a different order."""
    with Child(MODEL, tensor_parallel_size=RANKS) as child:
        answers = []
        for text in texts:
            child.call("erase")
            answers.append(child.generate([text])[0][:2])
    assert len({tuple(tokens) for tokens, _ in answers}) > 1, "an answer depends on its prompt"
    return answers


def two_ranks(daemon, **options):
    return Child(
        MODEL, connector(daemon, **options), tensor_parallel_size=RANKS, worker_extension_cls="tiny_engines.Watched"
    )


def by_rank(child, name, *args):
    return child.call("evaluate", f"llm.collective_rpc({name!r}, args={args!r})")


def test_every_rank_loads_its_own_shard(daemon, texts, wanted):
    depth = 2 * BLOCK[MODEL]
    with two_ranks(daemon) as child:
        by_rank(child, "watch")
        same(child.generate(texts[:1]), wanted[:1])
        child.call("erase")
        same(child.generate(texts[:1]), wanted[:1])
        assert saved(child) == depth
        ranks = by_rank(child, "watched")
        assert [each["rank"] for each in ranks] == [0, 1]
        assert [each["loads"] for each in ranks] == [1, 1] and [each["saves"] for each in ranks] == [2, 2]
        assert all(each["states"] for each in ranks) and ranks[0]["states"] != ranks[1]["states"], "shards differ"
    with two_ranks(daemon) as child:  # restarted: everything that it finds is in the daemon
        by_rank(child, "watch")
        same(child.generate(texts[:1]), wanted[:1])
        assert saved(child) == depth
        again = by_rank(child, "watched")
        assert [each["states"] for each in again] == [each["states"] for each in ranks], "each rank has its own again"


def test_a_load_that_fails_on_one_rank_is_computed_on_all(daemon, texts, wanted):
    depth = 2 * BLOCK[MODEL]
    with two_ranks(daemon, call_ms=400, land_ms=600, quiet_ms=200, lookup_ms=100) as child:
        by_rank(child, "watch")
        same(child.generate(texts[:1]), wanted[:1])
        child.call("erase")
        free = child.call("free_blocks")
        for rank in range(RANKS):
            by_rank(child, "spoil", rank)
            failures, before = count(child, "load_failures"), saved(child)
            same(child.generate(texts[:1]), wanted[:1])
            if rank == 0:  # only the first rank's counts are kept
                assert count(child, "load_failures") == failures + 1 and saved(child) == before
            child.call("erase")
        by_rank(child, "spoil", None)
        before = saved(child)
        same(child.generate(texts[:1]), wanted[:1])
        assert saved(child) - before == depth
        # Without a daemon, and after the daemon returns.
        os.kill(daemon.pid, signal.SIGSTOP)
        same(child.generate(texts[1:2]), wanted[1:2])
        os.kill(daemon.pid, signal.SIGCONT)
        daemon.kill()
        same(child.generate(texts[2:3]), wanted[2:3])
        daemon.start()
        deadline, before = time.monotonic() + 20, saved(child)
        while saved(child) == before and time.monotonic() < deadline:
            child.call("erase")
            same(child.generate(texts[:1]), wanted[:1])
        assert saved(child) > before, "the restarted daemon is used by both ranks"
        deadline = time.monotonic() + 20
        while child.call("erase") and child.call("free_blocks") != free and time.monotonic() < deadline:
            time.sleep(0.2)
        assert child.call("free_blocks") == free
