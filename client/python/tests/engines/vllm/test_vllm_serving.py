# SPDX-License-Identifier: Apache-2.0
"""Segments for other engines, without an engine or a daemon: what runs, and what the daemon is told."""

import time
import types
import weakref

import numpy as np
import pytest
from test_vllm_jumps import Engine

import ashlar
from ashlar.vllm import serving
from ashlar.vllm.serving import Serving

TOKENS = np.arange(100, dtype=np.int32)


class Work:
    """What the daemon gives; `marked`, `refused`: runs that were reported as published, or as never computed."""

    def __init__(self, first=False):
        self.missing = [types.SimpleNamespace(tokens=TOKENS, transition=not first)]
        self.marked, self.refused, self.ended = [], [], False

    def mark_published(self, run):
        self.marked.append(run)

    def abandon(self, run):
        self.refused.append(run)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended = True
        return False


class Daemon:
    """Gives each work once, to the thread that asks."""

    def __init__(self, *works):
        self.works, self.waits = list(works), []

    @property
    def asked(self):
        return len(self.waits)

    def serve_prefill(self, wait_ms):
        self.waits.append(wait_ms)
        return self.works.pop(0) if self.works else None


def serve(engine, daemon, may_serve=lambda: True, seconds=60):
    woken = []
    engine.jumps.cold.serving = Serving(lambda: daemon, may_serve, lambda: woken.append(1), seconds)
    return engine.jumps.cold.serving, woken


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_segment_runs_once_the_engine_is_idle_and_is_reported_after_its_publication():
    engine, work = Engine([100], 120), Work()
    given, woken = serve(engine, Daemon(work))
    until(lambda: given.pending)
    assert woken == [1] and engine.jumps.cold.pending
    assert engine.jumps.cold.next(False, engine.pool) is None
    alone = engine.jumps.cold.next(True, engine.pool)
    assert alone.tokens.tolist() == TOKENS.tolist() and not alone.first and alone.salt == ""
    assert engine.jumps.cold.next(True, engine.pool) is None and not work.ended
    engine.jumps.cold.ran({(alone.number, 0): 1}, engine.pool)
    until(lambda: work.ended)
    assert work.marked == [0] and engine.stats.data["served_segments|published"] == 1
    assert all(block.references == 0 for block in engine.pool.taken)
    given.close()


def test_segments_that_are_not_published_are_reported_as_failed():
    engine, works = Engine([100], 120), [Work(first=True), Work(), Work()]
    given, _ = serve(engine, Daemon(*works))
    until(lambda: given.pending)
    alone = engine.jumps.cold.next(True, engine.pool)
    assert alone.first
    engine.jumps.cold.ran({(alone.number, 0): 0}, engine.pool)
    until(lambda: works[0].ended and given.pending)
    engine.pool.free = 1  # too few blocks
    assert engine.jumps.cold.next(True, engine.pool) is None
    until(lambda: works[1].ended and given.pending)
    engine.pool.free = 100
    engine.jumps.reset(engine.pool, "other weights")
    assert engine.jumps.cold.next(True, engine.pool) is None
    until(lambda: works[2].ended)
    assert not any(work.marked or work.refused for work in works)
    assert engine.stats.data["served_segments|failed"] == 3, "they may succeed later"
    given.close()


@pytest.mark.parametrize("limit", ["the model's", "segment_tokens", "half of the blocks"])
def test_segments_that_the_engine_can_never_run_are_refused(limit):
    engine, work = Engine([100], 120, segment_tokens=101 if limit == "segment_tokens" else 0), Work()
    if limit == "the model's":
        engine.jumps.cold._model_tokens = 99
    elif limit == "half of the blocks":
        engine.pool.num_gpu_blocks = 10  # one block is never free
    given, _ = serve(engine, Daemon(work))
    until(lambda: given.pending)
    assert engine.jumps.cold.next(True, engine.pool) is None
    until(lambda: work.ended)
    assert work.refused == [0] and not work.marked and engine.stats.data["served_segments|failed"] == 1
    given.close()


def test_a_segment_at_the_engines_limits_runs():
    engine, work = Engine([100], 120, segment_tokens=102), Work()
    engine.jumps.cold._model_tokens, engine.pool.num_gpu_blocks = 100, 11
    given, _ = serve(engine, Daemon(work))
    until(lambda: given.pending)
    alone = engine.jumps.cold.next(True, engine.pool)
    engine.jumps.cold.ran({(alone.number, 0): 1}, engine.pool)
    until(lambda: work.ended)
    assert work.marked == [0] and not work.refused
    given.close()


def test_an_engine_that_gets_requests_returns_the_segment(monkeypatch):
    monkeypatch.setattr(serving, "_PATIENCE", 0.05)
    engine, work = Engine([100], 120), Work()
    given, _ = serve(engine, Daemon(work))
    until(lambda: work.ended)
    assert not work.marked and not given.pending
    assert engine.jumps.cold.next(True, engine.pool) is None
    assert engine.stats.data["served_segments|busy"] == 1
    given.close()


def test_a_run_has_a_limit():
    engine, work = Engine([100], 120), Work()
    given, _ = serve(engine, Daemon(work), seconds=0.05)
    until(lambda: given.pending or work.ended)
    alone = engine.jumps.cold.next(True, engine.pool)
    until(lambda: work.ended)
    assert not work.marked
    if alone is not None:
        engine.jumps.cold.ran({(alone.number, 0): 1}, engine.pool)
        assert all(block.references == 0 for block in engine.pool.taken), "a late run frees its blocks"
    given.close()


def test_a_busy_engine_does_not_ask():
    daemon, busy = Daemon(), [True]
    given, _ = serve(Engine([100], 120), daemon, lambda: not busy[0])
    given._ended.wait(0.3)
    assert daemon.asked == 0
    busy[0] = False
    until(lambda: daemon.asked > 0)
    given.close()


def test_a_result_is_reported_at_once_if_the_engine_has_requests_by_then():
    engine, works, idle = Engine([100], 120), [Work(), Work()], [True]
    daemon = Daemon(*works)
    given, _ = serve(engine, daemon, lambda: idle[0])
    until(lambda: given.pending)
    idle[0] = False
    alone = engine.jumps.cold.next(True, engine.pool)
    engine.jumps.cold.ran({(alone.number, 0): 1}, engine.pool)
    until(lambda: daemon.asked == 3)
    assert works[0].marked == [0] and works[1].ended and not works[1].marked
    given._ended.wait(0.3)
    assert daemon.asked == 3 and daemon.waits[1:] == [0, 0], "it reports both segments, and waits for no further one"
    assert engine.jumps.cold.next(True, engine.pool) is None
    assert engine.stats.data["served_segments|busy"] == 1
    given.close()


def test_the_cache_is_not_replaced_before_all_results_are_reported():
    engine, work, idle, replaced = Engine([100], 120), Work(), [True], []
    given, _ = serve(engine, Daemon(work), lambda: idle[0])
    until(lambda: given.pending)
    given.when_unused(lambda: replaced.append(1))
    assert not replaced, "the next call to the same cache reports the segment"
    alone, idle[0] = engine.jumps.cold.next(True, engine.pool), False
    engine.jumps.cold.ran({(alone.number, 0): 1}, engine.pool)
    until(lambda: given.when_unused(lambda: replaced.append(1)) or replaced)
    assert work.marked == [0]
    given.close()


def test_the_engines_own_segments_come_later():
    engine, work = Engine([100], 120), Work()
    engine.jumps._add_cold(engine.jumps._prompts["one"], [0], 5)
    given, _ = serve(engine, Daemon(work))
    until(lambda: given.pending)
    alone = engine.jumps.cold.next(True, engine.pool)
    engine.jumps.cold.ran({(alone.number, 0): 1}, engine.pool)
    until(lambda: work.ended)
    assert work.marked == [0]
    own = engine.jumps.cold.next(True, engine.pool)
    assert own.first and own.tokens.tolist() == list(range(100))
    given.close()


class Job:
    def __init__(self):
        self.verdict, self.results = None, 0

    def poll(self):
        return self.verdict is not None

    def result(self):
        self.results += 1
        assert self.results == 1, "call it once"
        return self.verdict


class Lookup:
    """A lookup of two segments, both missing; another engine computes the second one."""

    def __init__(self, elsewhere):
        self.segments_computed_elsewhere, self.ended = elsewhere, False
        self.missing = [types.SimpleNamespace(segment=0)]
        self.jobs = []
        segments = [types.SimpleNamespace(miss="never_seen") for _ in range(2)]
        self.plan = types.SimpleNamespace(segments=segments, steps=[])
        self.verdict = ashlar.Verdict.OK

    def poll_plan(self):
        return self.verdict

    def start_wait_cold(self, timeout_ms):
        self.jobs.append(Job())
        return self.jobs[-1]

    def end(self):
        self.ended = True


class Lookups:
    available = True

    def __init__(self, elsewhere=1):
        self.elsewhere, self.made, self.shares = elsewhere, [], []

    def start(self, tokens, lengths, salt, shares=False):
        self.shares.append(shares)
        self.made.append(Lookup(self.elsewhere if shares else 0))
        return self.made[-1]


def cold_engine(elsewhere=1, salt="", **options):
    engine = Engine([100, 100], 220, cold_parallel=True, tokens_per_second=10.0, **options)
    engine.jumps._prompts["one"].own_salt = salt
    engine.jumps.lookups = Lookups(elsewhere)
    return engine


def waits(engine, found=0):
    return engine.jumps.waits(engine.request, 0, engine.pool, found)


def test_a_cold_prompt_waits_for_other_engines_while_this_one_runs_its_part():
    engine = cold_engine()
    while len(engine.jumps.lookups.made) < 2:
        assert waits(engine)
    assert engine.jumps.lookups.shares == [False, True] and waits(engine)
    lookup = engine.jumps.lookups.made[1]
    while not lookup.jobs:
        assert waits(engine)
    assert waits(engine)
    alone = engine.jumps.cold.next(False, engine.pool)
    assert alone.first and len(alone.tokens) == 100, "although the engine has a request"
    lookup.jobs[0].verdict = ashlar.Verdict.RESTART  # the other engine has failed
    lookup.missing.append(types.SimpleNamespace(segment=1))
    assert waits(engine)
    lookup.jobs[1].verdict = ashlar.Verdict.OK
    assert waits(engine) and engine.step({})[0] == [], "this engine's parts are not there"
    for _ in range(2):
        engine.jumps.cold.ran({(alone.number, 0): 1}, engine.pool)
        alone = engine.jumps.cold.next(False, engine.pool) or alone
    assert waits(engine) and lookup.ended
    ((fetch,), _, _) = engine.step({})
    assert fetch.lengths == [100, 100] and engine.stats.data["shared_segments"] == 1


def test_the_first_prompt_waits_for_the_layout_of_segments():
    engine = cold_engine()
    engine.jumps.lookups.available = False
    assert waits(engine) and engine.step({})[0] == []
    engine.jumps.lookups.available = True
    while len(engine.jumps.lookups.made) < 2:
        assert waits(engine)
    assert engine.jumps.lookups.shares == [False, True]


def test_other_engines_are_not_asked_in_vain():
    alone = cold_engine(elsewhere=0)
    while waits(alone):
        pass
    assert alone.jumps.lookups.shares == [False, True] and len(alone.jumps.cold._segments) == 2
    salted = cold_engine(salt="secret")
    while waits(salted):
        pass
    assert salted.jumps.lookups.shares == [False]
    resumed = cold_engine()
    assert waits(resumed, None) and waits(resumed, None), "a prefix may be found"
    while waits(resumed, 150):
        pass
    assert resumed.jumps.lookups.shares == [False]


def test_a_prompt_does_not_wait_longer_than_it_computes(monkeypatch):
    now = [100.0]
    for module in ("jumps", "sharing"):
        monkeypatch.setattr(f"ashlar.vllm.{module}.time.monotonic", lambda: now[0])
    engine = cold_engine()
    while not (made := engine.jumps.lookups.made)[1:] or not made[1].jobs:
        assert waits(engine)
    now[0] += 19
    assert waits(engine) and engine.step({})[0] == []
    now[0] += 2
    assert waits(engine) and len(engine.step({})[0]) == 1 and engine.jumps.lookups.made[1].ended


def test_the_end_of_a_prompt_does_not_wait_for_the_daemon():
    engine = cold_engine()
    while not (made := engine.jumps.lookups.made)[1:] or not made[1].jobs:
        assert waits(engine)
    job = weakref.ref(made[1].jobs.pop())
    engine.jumps.drop(engine.request, engine.pool)
    assert made[1].ended and job() is not None, "dropping it would wait for it"
    job().verdict = ashlar.Verdict.PENDING
    engine.jumps.add(engine.request, [100, 100])
    engine.jumps.drop(engine.request, engine.pool)
    assert job() is None


def test_the_lookup_that_asks_others_has_its_own_limit(monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr("ashlar.vllm.jumps.time.monotonic", lambda: now[0])
    engine = cold_engine(lookup_ms=200)
    made = engine.jumps.lookups.made
    assert waits(engine, None)
    now[0] += 0.15
    assert waits(engine) and len(made) == 2
    made[1].verdict = ashlar.Verdict.PENDING
    now[0] += 0.15
    assert waits(engine)
    now[0] += 0.15
    assert not waits(engine) and made[1].ended
