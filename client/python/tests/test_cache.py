# SPDX-License-Identifier: Apache-2.0
"""The package with a real daemon: correct and incorrect use by engines."""

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
import shortest
from frozen import freeze

import ashlar

RULES, ARCH, STONE = "Answer from these pages.", "An arch stands because all fall.", "Ashlar is cut to one face."
CONVERSATION = bytes(range(16))


def open_cache(daemon, **options):
    return ashlar.Cache(shortest.MODEL, daemon.rpc_socket, daemon.session_socket, **{"pages": 64, **options})


def prompt(*parts):
    return np.frombuffer("".join(parts).encode(), np.uint8).astype(np.int32)


def test_segments_come_from_the_cache_in_any_order_with_the_same_answer(daemon):
    engine = shortest.Engine(daemon.rpc_socket, daemon.session_socket)
    first, _ = engine.serve([RULES, ARCH, STONE], "Why?", 8)
    again, cached = engine.serve([RULES, ARCH, STONE], "Why?", 8)
    assert again == first
    interiors = len(ARCH) + len(STONE) - 2 * (shortest.MODEL.head + shortest.MODEL.tail)
    assert cached == len(RULES) + interiors
    other, cached_too = shortest.Engine(daemon.rpc_socket, daemon.session_socket).serve([RULES, STONE, ARCH], "Why?", 8)
    assert cached_too == cached, "another engine finds the same segments in another order"
    assert len(other) == 8
    assert engine.cache.stored_segments()["segments"] == 2, "the first one is a prefix, and kept whole"


def test_the_plan_says_what_was_missed_and_why(daemon):
    with open_cache(daemon) as cache, cache.begin(prompt(RULES, ARCH, "?"), [len(RULES), len(ARCH)]) as request:
        plan = request.plan
        assert [segment.miss for segment in plan.segments] == ["never_seen", "never_seen"]
        assert plan.computed() == [(0, len(RULES) + len(ARCH) + 1)]
        assert plan.cached_tokens == 0 and plan.exact
        assert request.plan_bytes() == b""


def test_a_prefill_step_is_committed_as_part_of_its_prompt(daemon):
    tokens = prompt("a step of prefill" * 16)
    table, state = np.arange(64, dtype=np.int32), np.ones(shortest.HEADS * shortest.DIM**2, np.float32)
    with open_cache(daemon, capture_tokens=16) as cache:
        offered = [(len(tokens), [ashlar.LinearTensors(shortest.LINEAR, state)])]
        assert cache.commit(tokens, offered, prompt_tokens=len(tokens) + 100, page_table=table) == ["kept"]
        with cache.begin(np.concatenate([tokens, prompt("!")]), page_table=table) as request:
            assert request.plan.prefix_tokens == len(tokens)


def test_a_text_is_committed_and_resumed_by_another_engine(daemon):
    tokens = prompt(RULES, ARCH, "and more words than one block of two hundred and fifty-six tokens needs." * 4)
    table = np.arange(64, dtype=np.int32)
    state = np.arange(shortest.HEADS * shortest.DIM**2, dtype=np.float32)
    with open_cache(daemon, capture_tokens=16) as cache:
        keys, values = cache.page_rows(shortest.ATTENTION)
        keys[:] = np.arange(keys.size, dtype=np.float32).reshape(keys.shape)
        values[:] = -keys
        linear = [ashlar.LinearTensors(shortest.LINEAR, state)]
        assert cache.commit(tokens, [(len(tokens), linear)], page_table=table) == ["kept"]
        assert cache.commit(tokens, [(len(tokens), linear)], page_table=table) == ["already_present"]
    with open_cache(daemon, capture_tokens=16) as cache:
        longer = np.concatenate([tokens, prompt("!")])
        with cache.begin(longer, page_table=table) as request:
            assert request.plan.prefix_tokens == len(tokens)
            assert request.plan.computed() == [(len(tokens), len(longer))]
            landed = np.zeros_like(state)
            assert request.advance(shortest.LINEAR, 0, len(tokens), landed) == ashlar.Verdict.OK
            assert request.wait_layer(shortest.ATTENTION) == ashlar.Verdict.OK
            assert request.finish() == ashlar.Verdict.OK
            np.testing.assert_array_equal(landed, state)
            there, _ = cache.page_rows(shortest.ATTENTION)
            rows = there.reshape(-1, shortest.HEADS * shortest.DIM)[: len(tokens)]
            np.testing.assert_array_equal(rows.ravel(), np.arange(rows.size, dtype=np.float32))


def test_prompts_hit_only_under_their_own_salt(daemon):
    tokens = np.arange(600, dtype=np.int32) % 199
    lengths, table = [100, 200], np.arange(64, dtype=np.int32)
    state = np.zeros(shortest.HEADS * shortest.DIM**2, np.float32)
    linear = [ashlar.LinearTensors(shortest.LINEAR, state)]
    with open_cache(daemon, capture_tokens=16) as cache:

        def found(salt):
            with cache.begin(tokens, lengths, table, salt=salt) as request:
                assert request.finish() == ashlar.Verdict.OK
                return request.plan.cached_tokens

        salts = ["", "mine", b"theirs", "наш"]
        for stored, salt in enumerate(salts):
            assert [found(each) > 0 for each in salts] == [i < stored for i in range(len(salts))]
            assert cache.commit(tokens[:592], [(592, linear)], page_table=table, salt=salt) == ["kept"]
        assert found("mine") == found(b"mine") == 592
        assert asyncio.run(cache.begin_async(tokens, salt="mine")).plan.prefix_tokens == 592
        with cache.begin(tokens, page_table=table, salt="mine") as request:
            assert request.finish() == ashlar.Verdict.OK
            with pytest.raises(ValueError, match=r"^salt: differs from the salt of the request's prompt"):
                cache.commit(tokens, [(len(tokens), linear)], request=request, page_table=table)
        assert cache.handoff(tokens[:592], "nowhere", salt="mine") == "unavailable"
        with pytest.raises(ValueError, match="^salt: out of range; expected at most 4096"):
            cache.begin(tokens, salt="x" * 4097)


def test_another_process_lands_the_plan(daemon):
    engine = shortest.Engine(daemon.rpc_socket, daemon.session_socket)
    engine.serve([RULES, ARCH], "?", 1)
    scheduler = ashlar.Cache(
        shortest.MODEL, daemon.rpc_socket, daemon.session_socket, memory_kind=ashlar.MemoryKind.NONE
    )
    request = scheduler.start_begin(prompt(RULES, ARCH, "?"), [len(RULES), len(ARCH)])
    assert request.wait_plan() == ashlar.Verdict.OK
    plan = request.plan_bytes()
    assert plan
    with engine.cache.land(plan, engine.table) as landing:
        assert landing.plan == request.plan
        assert landing.finish() == ashlar.Verdict.OK
    with pytest.raises(ValueError, match=r"^plan\.checksum"):
        engine.cache.land(plan[:-1] + b"!", engine.table)


def test_a_landing_does_not_write_pages_that_are_present(daemon):
    tokens = np.arange(600, dtype=np.int32) % 256
    table = np.arange(64, dtype=np.int32)
    state = np.arange(shortest.HEADS * shortest.DIM**2, dtype=np.float32)
    with open_cache(daemon, capture_tokens=16) as cache:
        keys, values = cache.page_rows(shortest.ATTENTION)
        keys[:], values[:] = 3, 4
        linear = [ashlar.LinearTensors(shortest.LINEAR, state)]
        assert cache.commit(tokens[:592], [(592, linear)], page_table=table) == ["kept"]
        scheduler = open_cache(daemon, capture_tokens=16, pages=0, memory_kind=ashlar.MemoryKind.NONE)
        request = scheduler.begin(tokens)
        plan = request.plan
        assert (plan.prefix_tokens, plan.prefix_tier, plan.prefix_span_tokens) == (592, "dram", 0)
        keys[:], values[:] = -1, -2
        with pytest.raises(ValueError, match=r"^present_tokens: 601; the prompt has 600"):
            cache.land(request.plan_bytes(), table, present_tokens=601)
        with cache.land(request.plan_bytes(), table, present_tokens=300) as landing:
            assert landing.finish() == ashlar.Verdict.OK
        rows = keys.reshape(-1, shortest.HEADS * shortest.DIM)
        assert (rows[:256] == -1).all(), "a whole block that was there"
        assert (rows[256:592] == 3).all() and (rows[592:] == -1).all()
        request.end()
        scheduler.close()


def test_tokens_and_pages_may_be_any_integers_and_nothing_else(daemon):
    with open_cache(daemon) as cache:
        tokens = prompt(RULES, ARCH)
        first = np.ascontiguousarray(tokens, np.int32)
        frozen = first.copy()
        frozen.flags.writeable = False
        every_other = np.repeat(first, 2)[::2]
        others = [first.astype(kind) for kind in (np.int64, np.uint64, np.uint32, np.uint8)]
        shapes = [first, frozen, every_other, first.tolist(), tuple(first.tolist()), memoryview(first), *others]
        plans = []
        for given in shapes:
            with cache.begin(given, [len(first) - 1], np.arange(64)[::-1]) as request:
                plans.append(request.plan)
                assert request.finish() == ashlar.Verdict.OK
        assert all(plan == plans[0] and hash(plan) == hash(plans[0]) for plan in plans)
        assert plans[0].steps is plans[0].steps and "cached_tokens=0" in repr(plans[0])
        with cache.begin(first[:-1]) as request:
            assert request.plan != plans[0]
        for name, call in {
            "tokens: not a list": lambda: cache.begin(first.reshape(-1, 1)),
            "page_table: not a list": lambda: cache.begin(first, page_table=np.zeros((4, 4), np.int32)),
            "tokens: not a list of integers": lambda: cache.begin(first + 0.5),
            "tokens: 4294967296 has more than 32 bits": lambda: cache.begin([1, 2**32]),
            "tokens: -2147483649 has more": lambda: cache.begin([-(2**31) - 1, 1]),
            "tokens: 18446744073709551615 has more": lambda: cache.begin(np.full(3, 2**64 - 1, np.uint64)),
            "page_table: 4294967296 has more": lambda: cache.begin(first, page_table=np.arange(64) + 2**32),
        }.items():
            with pytest.raises(ValueError, match=name):
                call()
        with pytest.raises(ValueError):
            cache.begin(["some", "words"])
        with pytest.raises(TypeError):
            ashlar.Request()


def compute_all(engine, request):
    """Publishes every missing run in separate pages after the prompt's. All of its numbers equal its first token."""
    runs = []
    for i, run in enumerate(request.missing):
        table = engine.table[32 + 2 * i : 34 + 2 * i]
        engine.keys[table] = engine.values[table] = run.tokens[0]
        state = np.full((shortest.HEADS, shortest.DIM, shortest.DIM), run.tokens[0], np.float32)
        tensors = ashlar.LinearTensors(shortest.LINEAR, state, transition=np.full(shortest.HEADS, -0.5, np.float32))
        runs.append(ashlar.ComputedRun(i, [tensors], table))
    return runs


def expect_all_lands(engine, request, tokens, segments):
    before = request.plan
    assert request.plan is before, "nothing has changed it"
    request.look_again(engine.table[:32])
    after = request.plan
    assert all(segment.used for segment in after.segments) and not any(segment.used for segment in before.segments)
    assert request.finish() == ashlar.Verdict.OK and request.plan is after
    assert (
        request.drop_segments([0]) == ashlar.Verdict.RESTART
        and not request.plan.segments[0].used
        and after.segments[0].used
    )
    starts = np.cumsum([0, *segments])[:-1] + shortest.MODEL.head
    rows = engine.values.reshape(-1, shortest.HEADS * shortest.DIM)
    np.testing.assert_array_equal(rows[starts, 0], tokens[starts])


def test_many_runs_are_published_by_one_call(daemon):
    engine = shortest.Engine(daemon.rpc_socket, daemon.session_socket)
    segments = [24] * 12
    tokens = np.repeat(np.arange(1, 14, dtype=np.int32), 24)[: 12 * 24 + 1]
    with engine.cache.begin(tokens, segments, engine.table[:32], fill=True) as request:
        runs = compute_all(engine, request)
        assert len(runs) == 12
        for message, wrong in {
            r"runs\[1\].missing: out of range; the request has 12": [runs[0], ashlar.ComputedRun(12, [], None)],
            r"^runs\[1\].missing: 3 is given twice": [runs[3], runs[3]],
            r"^runs\[0\].page_table: ": [dataclasses.replace(runs[0], first_position=30)],
            r"runs\[0\].linear\[0\].state: 3 elements": [
                dataclasses.replace(runs[0], linear=[ashlar.LinearTensors(0, np.zeros(3, np.float32))])
            ],
        }.items():
            with pytest.raises(ValueError, match=message):
                request.publish_many(wrong)
        assert request.publish_many([]) == []
        assert request.publish_many(runs[::-1]) == ["published"] * 12
        expect_all_lands(engine, request, tokens, segments)


def first_tokens_of_new_texts(first):
    """Yields the first tokens of texts of 13 tokens, one each 5 ms, for at most 60 s: another engine may connect late."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        yield first
        first += 13
        time.sleep(0.005)


def test_another_engine_computes_a_part_of_a_cold_prompt(daemon):
    served, stop = [], threading.Event()

    def serve():
        other = shortest.Engine(daemon.rpc_socket, daemon.session_socket)
        while not stop.is_set():
            with other.cache.serve_prefill(wait_ms=100) or contextlib.nullcontext() as work:
                if work is not None:
                    served.append(len(work.missing))
                    (run,) = compute_all(other, work)
                    work.publish(run.missing, run.linear, run.page_table)
        other.cache.close()

    thread = threading.Thread(target=serve)
    thread.start()
    engine = shortest.Engine(daemon.rpc_socket, daemon.session_socket)
    segments, elsewhere = [24] * 12, 0
    try:
        for first in first_tokens_of_new_texts(1):
            tokens = np.repeat(np.arange(first, first + 13, dtype=np.int32), 24)[: 12 * 24 + 1]
            with engine.cache.begin(tokens, segments, engine.table[:32], fill=True, cold_parallel=True) as request:
                elsewhere, done, verdict = request.segments_computed_elsewhere, 0, ashlar.Verdict.RESTART
                assert len(request.missing) + elsewhere == 12
                while verdict == ashlar.Verdict.RESTART:
                    own = compute_all(engine, request)[done:]
                    request.publish_many(own)
                    done += len(own)
                    verdict = request.wait_cold(30_000)
                assert verdict == ashlar.Verdict.OK
                expect_all_lands(engine, request, tokens, segments)
            if elsewhere > 0:
                break
    finally:
        stop.set()
        thread.join(60)
    assert elsewhere > 0 and set(served) == {1}
    assert engine.cache.serve_prefill(wait_ms=1) is None


def publish_alone(engine, run, first):
    """Publishes a run that another process has taken. Nothing else may have reserved it."""
    before = [] if first else [1]
    tokens = [*[0] * len(before), *run.tokens, 0]
    with engine.cache.begin(tokens, [*before, len(run.tokens)], engine.table[:32], fill=True) as request:
        (number,) = [i for i, each in enumerate(request.missing) if each.segment == len(before)]
        computed = compute_all(engine, request)[number]
        return request.publish(computed.missing, computed.linear, computed.page_table)


def test_processes_without_pages_serve_and_ask_for_those_that_publish(daemon):
    """Two engines of two processes each: one looks up, without pages; the other computes and publishes."""
    no_pages = dict(pages=0, memory_kind=ashlar.MemoryKind.NONE)
    outcomes, stop = [], threading.Event()

    def serve():
        worker = shortest.Engine(daemon.rpc_socket, daemon.session_socket)
        with open_cache(daemon, **no_pages) as scheduler:
            while not stop.is_set():
                with scheduler.serve_prefill(wait_ms=100) or contextlib.nullcontext() as work:
                    if work is None:
                        continue
                    (run,) = work.missing
                    with pytest.raises(ValueError, match="^missing: 1 is out of range"):
                        work.mark_published(1)
                    outcomes.append(publish_alone(worker, run, not run.transition))
                    work.mark_published(0)
                    with pytest.raises(RuntimeError, match="no other process publishes"):
                        work.mark_published(0)
        worker.cache.close()

    thread = threading.Thread(target=serve)
    thread.start()
    engine = shortest.Engine(daemon.rpc_socket, daemon.session_socket)
    segments, elsewhere, own = [24] * 12, 0, 0
    deadline = time.monotonic() + 60
    try:
        with open_cache(daemon, **no_pages) as scheduler:
            for first in range(10_001, 2**30, 13):  # until a plan has found the other engine waiting
                tokens = np.repeat(np.arange(first, first + 13, dtype=np.int32), 24)[: 12 * 24 + 1]
                with scheduler.begin(tokens, segments, fill=True, cold_parallel=True) as request:
                    elsewhere = request.segments_computed_elsewhere
                    if elsewhere == 0 and time.monotonic() < deadline:
                        assert not request.missing
                        continue
                    missing = request.missing
                    assert len(missing) + elsewhere == 12
                    own = [publish_alone(engine, run, run.segment == 0) for run in missing]
                    while request.wait_cold(30_000) != ashlar.Verdict.OK:
                        pass
                    break
            with scheduler.begin(tokens, segments) as request:
                assert all(segment.miss is None for segment in request.plan.segments)
            with pytest.raises(ValueError, match="fill: .*expected cold_parallel"):
                scheduler.begin(tokens, segments, fill=True)
        with engine.cache.begin(tokens, segments, engine.table[:32], fill=True) as request:
            assert not request.missing
    finally:
        stop.set()
        thread.join(60)
    assert outcomes == ["published"] * elsewhere and elsewhere > 0 and own == ["published"] * (12 - elsewhere)


def test_calls_that_wait_can_be_started_and_polled(daemon):
    """One thread opens two engines and polls both calls. Neither call blocks the other."""
    where = shortest.MODEL, daemon.rpc_socket, daemon.session_socket
    opening = ashlar.Cache.start_open(*where, pages=64)
    opened = opening.result()
    assert opening.poll() and opened.connected and opened.pages == 64 and len(opened.places) == 1
    with pytest.raises(ConnectionError):
        ashlar.Cache.start_open(shortest.MODEL, "/nowhere/rpc", "/nowhere/session", pages=4).result()
    with pytest.raises(TypeError):
        ashlar.Cache.start_open(*where, no_such_option=1)
    assert asyncio.run(ashlar.Cache.open_async(*where, pages=8)).pages == 8

    engine, other = (shortest.Engine(daemon.rpc_socket, daemon.session_socket) for _ in range(2))
    segments, served = [24] * 12, 0
    serving = other.cache.start_serve_prefill(wait_ms=30_000)
    assert not serving.poll()
    for first in first_tokens_of_new_texts(1_000_001):
        tokens = np.repeat(np.arange(first, first + 13, dtype=np.int32), 24)[: 12 * 24 + 1]
        request = engine.cache.begin(tokens, segments, engine.table[:32], fill=True, cold_parallel=True)
        if request.segments_computed_elsewhere > 0:
            break
    assert request.segments_computed_elsewhere > 0
    request.publish_many(compute_all(engine, request))
    waiting = request.start_wait_cold(30_000)
    while not waiting.poll():
        if not serving.poll():
            continue
        with serving.result() or contextlib.nullcontext() as work:
            if work is not None:
                served += 1
                (run,) = compute_all(other, work)
                work.publish(run.missing, run.linear, run.page_table)
        serving = other.cache.start_serve_prefill(wait_ms=100)
    assert waiting.result() == ashlar.Verdict.OK and served > 0
    with request:
        expect_all_lands(engine, request, tokens, segments)


def test_the_end_of_a_request_ends_the_wait_that_it_has_started(daemon):
    engine, other = (shortest.Engine(daemon.rpc_socket, daemon.session_socket) for _ in range(2))
    serving = other.cache.start_serve_prefill(wait_ms=30_000)  # an engine that takes work and never computes it
    for first in first_tokens_of_new_texts(2_000_001):
        tokens = np.repeat(np.arange(first, first + 13, dtype=np.int32), 24)[: 12 * 24 + 1]
        request = engine.cache.begin(tokens, [24] * 12, engine.table[:32], fill=True, cold_parallel=True)
        if request.segments_computed_elsewhere > 0:
            break
    request.publish_many(compute_all(engine, request))
    assert request.segments_computed_elsewhere > 0 and serving.result() is not None
    waiting = request.start_wait_cold(60_000)
    request.end()
    ended = time.monotonic()
    assert waiting.result() != ashlar.Verdict.OK and time.monotonic() - ended < 30


def test_invalid_arguments_are_refused_by_name_and_change_nothing(daemon):
    with open_cache(daemon) as cache:
        state = np.zeros(shortest.HEADS * shortest.DIM**2, np.float32)
        rows = np.zeros((4, shortest.HEADS * shortest.DIM), np.float32)
        one = np.lib.stride_tricks.as_strided(rows, rows.shape, (0, 4))  # the first one, four times
        with pytest.raises(ValueError, match=r"^segments\[0\]"):
            cache.begin(prompt(RULES), [10_000])
        with pytest.raises(ValueError, match="conversation: .* bytes were given; expected 16"):
            cache.begin(prompt(RULES), conversation=b"short")
        with cache.begin(prompt("abcd"), page_table=np.arange(64)) as request:
            advance = request.advance
            for message, call in {
                "layer: 1 is not a linear layer": lambda: advance(1, 0, 4, state, k=rows, v=rows),
                "state: 5 elements; expected 512": lambda: advance(0, 0, 4, np.zeros(5, np.float32), k=rows, v=rows),
                "state: expected an array": lambda: advance(0, 0, 4, state.astype(np.float64), k=rows, v=rows),
                "k: 8 floats a token; expected 32": lambda: advance(0, 0, 4, state, k=rows[:, :8], v=rows),
                "v: expected as many tokens": lambda: advance(0, 0, 4, state, k=rows, v=rows[:2]),
                "q: required with out": lambda: advance(0, 0, 4, state, k=rows, v=rows, out=rows),
                "k: the tokens' rows overlap": lambda: advance(0, 0, 4, state, k=one, v=rows),
                "v: the tokens' rows overlap": lambda: advance(0, 0, 4, state, k=rows, v=one),
                "out: the tokens' rows overlap": lambda: advance(0, 0, 4, state, q=rows, k=rows, v=rows, out=one),
                "missing: out of range; the request has 0": lambda: request.publish(0, []),
            }.items():
                with pytest.raises(ValueError, match=message):
                    call()
            with pytest.raises(TypeError, match="^k: ndarray was given; expected an array of float32"):
                advance(0, 0, 4, state, k=rows.astype(np.float64), v=rows)
            assert advance(0, 0, 4, state, k=rows, v=rows) == ashlar.Verdict.OK, "it goes on as if nothing had been"
    with pytest.raises(ValueError, match="weights_digest"):
        ashlar.Cache(ashlar.Model("m", "", shortest.MODEL.layers, 16), daemon.rpc_socket, daemon.session_socket)
    with pytest.raises(ConnectionError):
        ashlar.Cache(shortest.MODEL, "/nowhere/rpc", "/nowhere/session", pages=4)


def test_rows_may_be_strided_and_are_not_copied(daemon):
    wide = np.ascontiguousarray(np.random.default_rng(1).normal(size=(6, 3 * 32)).astype(np.float32))
    parts = wide[:, :32], wide[:, 32:64], wide[:, 64:]
    with open_cache(daemon) as cache, cache.begin(prompt("abcdef"), page_table=np.arange(64)) as request:
        states = [np.zeros(512, np.float32) for _ in range(2)]
        outs = [np.zeros((6, 64), np.float32)[:, :32] for _ in range(2)]
        for rows, state, out in zip([parts, [np.ascontiguousarray(p) for p in parts]], states, outs, strict=True):
            request.advance(0, 0, 6, state, q=rows[0], k=rows[1], v=rows[2], out=out)
        np.testing.assert_array_equal(*states)
        np.testing.assert_array_equal(*outs)
        assert np.abs(outs[0]).max() > 0


def test_a_dead_daemon_is_a_miss(daemon):
    engine = shortest.Engine(daemon.rpc_socket, daemon.session_socket)
    first, _ = engine.serve([RULES, ARCH], "?", 6)
    daemon.kill()
    again, cached = engine.serve([RULES, ARCH], "?", 6)
    assert cached == 0
    assert engine.cache.serve_prefill(wait_ms=1) is None
    daemon.start()
    deadline = time.monotonic() + 20
    while not engine.cache.connected and time.monotonic() < deadline:
        time.sleep(0.02)
    engine.serve([RULES, ARCH], "?", 6)
    once_more, cached = engine.serve([RULES, ARCH], "?", 6)
    assert cached > 0 and once_more == first
    assert len(again) == 6


def test_arrays_keep_the_memory_and_requests_outlive_their_cache(daemon):
    cache = open_cache(daemon)
    keys, _ = cache.page_rows(shortest.ATTENTION)
    request = cache.begin(prompt(RULES), page_table=np.arange(64))
    del cache
    gc.collect()
    keys[:] = 7
    assert float(keys[63, 15, 1, 15]) == 7.0
    assert request.finish() == ashlar.Verdict.OK
    request.end()


def test_waiting_does_not_block_other_threads(daemon):
    with open_cache(daemon, timeout_ms=500) as cache:
        counted, stop = [0], threading.Event()

        def count():
            while not stop.is_set():
                counted[0] += 1
                time.sleep(0)

        thread = threading.Thread(target=count)
        thread.start()
        freeze(daemon)
        before = counted[0]
        with cache.begin(prompt(RULES)) as request:  # waits for an answer that does not come
            during = counted[0] - before
            assert request.plan.cached_tokens == 0
        os.kill(daemon.pid, signal.SIGCONT)
        stop.set()
        thread.join()
        assert during > 100


def test_async_forms_do_not_block_the_loop(daemon):
    async def run():
        with open_cache(daemon, capture_tokens=16) as cache:
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)

            ticking = asyncio.create_task(tick())
            tokens = prompt(RULES)
            requests = await asyncio.gather(
                *(cache.begin_async(tokens, page_table=np.arange(8 * i, 8 * i + 8)) for i in range(8))
            )
            verdicts = await asyncio.gather(*(request.finish_async() for request in requests))
            state = np.zeros(512, np.float32)
            outcomes = await cache.commit_async(
                tokens, [(len(tokens), [ashlar.LinearTensors(0, state)])], page_table=np.arange(64)
            )
            ticking.cancel()
            return verdicts, outcomes, ticks

    verdicts, outcomes, ticks = asyncio.run(run())
    assert verdicts == [ashlar.Verdict.OK] * 8
    assert len(outcomes) == 1
    assert ticks > 10


def test_the_example_commits_a_text_and_resumes_from_it(capsys):
    import prefixes

    assert prefixes.main()
    assert capsys.readouterr().out == "kept; 600 of 620 tokens from the cache\n"
