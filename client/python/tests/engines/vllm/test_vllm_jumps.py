# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of segments, without an engine: when a request jumps, and what happens to its blocks and names."""

import dataclasses
import hashlib
import types

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler as Engines
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

import ashlar
from ashlar.vllm import device_counts, stops
from ashlar.vllm.jumps import Jumps
from ashlar.vllm.messages import NO_SPACE, UNAVAILABLE, Fetched
from ashlar.vllm.options import Options
from ashlar.vllm.scheduler import Scheduler
from ashlar.vllm.segments import Names
from ashlar.vllm.stats import AshlarStats

BLOCK = 32


@dataclasses.dataclass(eq=False)
class Block:
    block_id: int
    is_null: bool = False
    references: int = 1


class Pool:
    null_block = Block(0, True)

    def __init__(self):
        self.free, self.num_gpu_blocks = 100, 101

    def touch(self, blocks):
        for block in blocks:
            block.references += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.references -= 1

    def get_num_free_blocks(self):
        return self.free

    def get_new_blocks(self, count):
        self.taken = [Block(50 + i) for i in range(count)]
        return self.taken


class Request:
    def __init__(self, tokens, name="one"):
        self.request_id, self.all_token_ids, self.cache_salt = name, list(range(tokens)), None
        self.num_prompt_tokens, self.num_computed_tokens, self.num_preemptions = tokens, 0, 0
        self.prefill_stats, self.block_hashes = None, []
        self._block_hasher = hasher
        self.update_block_hashes()

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def update_block_hashes(self):
        self.block_hashes.extend(self._block_hasher(self))


def hasher(request):
    """Like the engine's hasher: each name depends on the previous one and on a block's tokens."""
    found, last = [], request.block_hashes[-1] if request.block_hashes else b""
    for begin in range(len(request.block_hashes) * BLOCK, request.num_tokens // BLOCK * BLOCK, BLOCK):
        last = hashlib.sha256(last + repr(request.all_token_ids[begin : begin + BLOCK]).encode()).digest()
        found.append(last)
    return found


class Engine:
    """One group of attention, and one with a linear layer."""

    def __init__(self, lengths, tokens, step_tokens=1000, **options):
        place = types.SimpleNamespace(group=1)
        described = types.SimpleNamespace(
            linear=[place], block=BLOCK, key_groups=[0], count=lambda tokens: -(-tokens // BLOCK), segments=[]
        )
        self.stats, self.pool = AshlarStats(), Pool()
        given = described, Options(segments=True, **options), BLOCK, True, self.stats
        self.jumps = Jumps(*given, step_tokens=step_tokens)
        self.request = Request(tokens)
        self.jumps.add(self.request, lengths, "salt")
        self.tables = [[Block(i + 1) for i in range(20)], [Block(30)]]
        self.managers = [types.SimpleNamespace(req_to_blocks={"one": table}) for table in self.tables]

    def land(self, jumps, missing=(), found=0, computed=0):
        assert self.jumps.waits(self.request, computed, self.pool)
        ((fetch,), made, _) = self.step({})
        assert not made and fetch.salt == "salt"
        self.jumps.hear({(fetch.number, 0): Fetched(True, jumps, list(missing))}, self.pool)
        self.jumps.decide(self.request, found, self.pool)
        return fetch.number

    def step(self, scheduled):
        ids = [[block.block_id for block in table] for table in self.tables]
        state = types.SimpleNamespace(get_block_ids=lambda name: ids)
        self.output = types.SimpleNamespace(
            num_scheduled_tokens=scheduled, kv_connector_block_state=state, has_sync_kv_loads=False
        )
        return self.jumps.step(self.output, self.pool)

    def at(self, computed, tokens=1000):
        """Returns the request's position then, and the tokens of its step."""
        self.request.num_computed_tokens = computed
        count = self.jumps.leap(self.request, tokens, self.managers, self.pool)
        return self.request.num_computed_tokens, count


def test_a_request_jumps_where_an_interior_begins_and_stops_before():
    engine = Engine([100, 100], 220)
    fetch = engine.land([(8, 92, False), (108, 192, False)])
    assert not engine.jumps.waits(engine.request, 0, engine.pool)
    assert engine.jumps.external(engine.request, 0, engine.pool) == 0
    assert engine.jumps.next_stop(engine.request, 0) == 8
    assert engine.at(8) == (92, 16)
    _, (jump,), released = engine.step({"one": 16})
    assert (jump.fetch, jump.begin, jump.end, jump.state_block) == (fetch, 8, 92, 3)
    assert engine.output.has_sync_kv_loads and not released
    engine.tables[1][:] = [Pool.null_block] * 3 + [Block(31)]
    assert engine.at(108) == (192, None)
    _, (jump,), released = engine.step({"one": 28})
    assert (jump.begin, jump.end, jump.state_block) == (108, 192, 6) and released == [fetch]
    assert engine.stats.data["jumps"] == 2 and engine.stats.data["saved_tokens|dram|composed"] == 168


def test_a_block_with_a_jumped_end_gets_no_name():
    """The block has the state of the jump's start. The worker copies it in this step; until then no other request gets
    the block."""
    engine = Engine([100, 100], 220)
    engine.land([(8, 92, False)])
    (state,) = engine.tables[1]
    engine.at(8)
    assert engine.tables[1] == [Pool.null_block] and state.references == 1
    engine.step({"one": 16})
    assert state.references == 0


@pytest.mark.parametrize("begin, end", [(8, 28), (32, 92)], ids=["within a block", "from a block's end"])
def test_a_state_at_its_blocks_end_is_kept(begin, end):
    engine = Engine([100, 100], 220)
    engine.land([(begin, end, False)])
    (state,) = engine.tables[1]
    engine.at(begin)
    assert engine.tables[1] == [state] and state.references == 2
    engine.step({"one": 4})
    assert state.references == 1


def test_a_seam_across_a_block_end_is_one_step():
    """The block's own state is discarded for it; if the step has no space for that, the request waits."""
    engine = Engine([100, 100], 220)
    engine.land([(8, 28, False), (36, 92, False)])
    (state,) = engine.tables[1]
    assert engine.at(8) == (28, 8), "over 32"
    assert engine.tables[1] == [Pool.null_block] and state.references == 2
    assert engine.at(28, 3) == (28, 0), "to 31 it would compute in a block that is gone"
    assert engine.at(28, 8) == (28, 8)
    _, (jump,), _ = engine.step({"one": 8})
    assert (jump.begin, jump.end, jump.state_block) == (8, 28, 1) and state.references == 0


def test_a_seam_without_space_ends_with_its_block():
    engine = Engine([100, 100], 220)
    engine.land([(8, 28, False), (36, 92, False)])
    (state,) = engine.tables[1]
    assert engine.at(8, 7) == (28, None) and engine.tables[1] == [state]


def test_a_request_jumps_where_its_cached_prefix_ends():
    """Its first step computes one token, which the jump replaces: the jump begins with the states from before it."""
    engine = Engine([56, 100], 220)
    engine.land([(64, 148, False)], computed=64)
    assert engine.jumps.external(engine.request, 64, engine.pool) == 0
    assert engine.jumps.next_stop(engine.request, 64) == 65
    source, running = Block(31), Block(32)
    engine.tables[1][:] = [Pool.null_block, source, running]
    assert engine.at(65) == (148, None)
    assert engine.tables[1] == [Pool.null_block, source, Pool.null_block], "no other request gets the token's states"
    assert source.references == 2 and running.references == 1
    _, (jump,), _ = engine.step({"one": 20})
    assert (jump.begin, jump.end, jump.state_block, jump.sources) == (64, 148, 5, {1: 31})
    assert source.references == 1 and running.references == 0


def test_a_prefix_that_ends_in_a_block_at_an_interiors_start_counts_without_the_interior():
    """The request's next step would overwrite the states from which the jump begins."""
    engine = Engine([100, 100], 220)
    engine.land([(8, 92, False), (108, 192, False)], found=108)
    assert [each.begin for each in engine.jumps._prompts["one"].jumps] == []
    engine = Engine([100, 100], 220)
    engine.jumps._states = []  # a model with only attention
    engine.land([(108, 192, False)], found=108)
    assert engine.jumps.next_stop(engine.request, 108) == 109
    assert engine.at(109)[0] == 192


def test_a_preempted_prompts_jumps_count_once_as_cached_tokens():
    engine = Engine([100, 100], 220)
    stats = engine.request.prefill_stats = PrefillStats(220, 220)
    interiors = [(8, 92, False), (108, 192, False)]
    engine.land(interiors)
    engine.at(8)
    engine.step({"one": 16})
    assert stats.num_cached_tokens == 84
    engine.request.num_preemptions, engine.request.num_computed_tokens = 1, 0
    engine.tables[1][:] = [Block(30)]
    assert engine.jumps.waits(engine.request, 0, engine.pool)
    ((fetch,), _, _) = engine.step({})
    engine.jumps.hear({(fetch.number, 0): Fetched(True, interiors)}, engine.pool)
    engine.jumps.decide(engine.request, 0, engine.pool)
    engine.at(8)
    engine.step({"one": 16})
    assert stats.num_cached_tokens == 84
    engine.tables[1][:] = [Pool.null_block] * 3 + [Block(31)]
    engine.at(108)
    engine.step({"one": 28})
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (168, 52)


def test_a_jump_waits_until_its_request_is_scheduled():
    engine = Engine([100, 100], 220)
    engine.land([(8, 92, False)])
    engine.at(8)
    assert engine.step({})[1] == [] and engine.step({"other": 3})[1] == []
    assert engine.at(92) == (92, None)
    assert len(engine.step({"one": 16})[1]) == 1


def test_a_preempted_request_asks_again_and_is_exact_until_then():
    engine = Engine([100, 100], 220)
    names = list(engine.request.block_hashes)
    fetch = engine.land([(8, 92, False)])
    assert engine.request.block_hashes != names and engine.jumps.exact_tokens(engine.request) == 8
    (state,) = engine.tables[1]
    engine.at(8)
    engine.request.num_preemptions, engine.request.num_computed_tokens = 1, 0
    assert engine.jumps.waits(engine.request, 0, engine.pool)
    assert state.references == 0 and engine.request.block_hashes == names
    assert engine.jumps.exact_tokens(engine.request) is None
    (again,), jumps, released = engine.step({"one": 8})
    assert jumps == [] and released == [fetch] and again.number != fetch


def test_a_preempted_request_does_not_resume_from_composed_blocks_as_exact_ones():
    """The engine's own cache still has them, under their composed names."""
    engine = Engine([100, 100], 220)
    names = list(engine.request.block_hashes)
    engine.land([(8, 92, False)])
    engine.at(8)
    engine.request.num_preemptions, engine.request.num_computed_tokens = 1, 0
    half = types.SimpleNamespace(
        _followed={"one": types.SimpleNamespace()},
        _loads=True,
        _jumps=engine.jumps,
        _pool=engine.pool,
        _match_prefix=lambda request, computed: (0, False),
    )
    assert Scheduler.match(half, engine.request, 192) == (None, False)
    assert engine.request.block_hashes == names and engine.jumps.exact_tokens(engine.request) is None


def test_an_ended_request_frees_everything():
    engine = Engine([100, 100], 220)
    fetch = engine.land([(8, 92, False)])
    (state,) = engine.tables[1]
    engine.at(8)
    engine.jumps.drop(engine.request, engine.pool)
    assert state.references == 0 and engine.step({"one": 1}) == ([], [], [fetch])


def test_the_first_segment_is_taken_before_the_first_step():
    engine = Engine([100, 100], 220)
    engine.land([(0, 100, True), (108, 192, False)])
    assert engine.jumps.external(engine.request, 32, engine.pool) == 68
    assert engine.jumps.allocated(engine.request, 68)
    _, (jump,), _ = engine.step({"one": 8})
    assert (jump.begin, jump.end) == (32, 100)
    assert engine.jumps.exact_tokens(engine.request) == 108, "what stands before the next jump is exact"


@pytest.mark.parametrize(
    "found, refused, left",
    [(0, False, [8, 408]), (150, True, [8, 408]), (395, False, [408]), (780, False, [])],
)
def test_an_exact_prefix_is_loaded_unless_the_segments_save_more(found, refused, left):
    engine = Engine([400, 400], 820)
    engine.land([(8, 392, False), (408, 792, False)], found=found)
    assert engine.jumps.refuses_prefix(engine.request) == refused
    assert [each.begin for each in engine.jumps._prompts["one"].jumps] == left


def test_computed_segments_are_not_taken_from_the_cache():
    engine = Engine([100, 100], 220)
    fetch = engine.land([(8, 92, False), (108, 192, False)], computed=96)
    assert engine.jumps.next_stop(engine.request, 96) == 108
    assert engine.jumps.external(engine.request, 192, engine.pool) == 0, "the engine has more behind the new names"
    assert engine.step({})[2] == [fetch]


def test_a_late_lookup_is_abandoned_and_the_next_ones_are_skipped():
    """Prompts whose lookups wait for the same thread are also abandoned."""
    engine = Engine([100, 100], 220)
    second, third = Request(220, "second"), Request(220, "third")
    engine.jumps.add(second, [100, 100])
    assert engine.jumps.waits(engine.request, 0, engine.pool) and engine.jumps.waits(second, 0, engine.pool)
    fetch, other = engine.step({})[0]
    engine.jumps.hear({(fetch.number, 0): Fetched(True, late=True)}, engine.pool)
    engine.jumps.add(third, [100, 100])
    for request in (engine.request, second, third):
        assert not engine.jumps.waits(request, 0, engine.pool)
    assert engine.step({})[::2] == ([], [fetch.number, other.number])
    assert engine.stats.data["lookups|timed_out"] == 1


def test_a_lookup_after_a_pause_has_its_own_time(monkeypatch):
    """The engine had no space for the second prompt during the pause that began when the first lookup was late."""
    now, ended = [100.0], []
    monkeypatch.setattr("ashlar.vllm.jumps.time.monotonic", lambda: now[0])
    monkeypatch.setattr("ashlar.vllm.lookups.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    engine, second = Engine([100, 100], 220, lookup_ms=200), Request(220, "second")
    engine.jumps.add(second, [100, 100])
    assert engine.jumps.waits(engine.request, 0, engine.pool) and engine.jumps.waits(second, 0, engine.pool)
    fetch, _ = engine.step({})[0]
    engine.jumps.hear({(fetch.number, 0): Fetched(True, late=True)}, engine.pool)
    now[0] += 3.0
    lookup = types.SimpleNamespace(poll_plan=lambda: ashlar.Verdict.PENDING, end=lambda: ended.append(True))
    engine.jumps.lookups = types.SimpleNamespace(available=True, start=lambda *given: lookup)
    assert engine.jumps.waits(second, 0, engine.pool) and not ended
    now[0] += 0.15
    assert engine.jumps.waits(second, 0, engine.pool) and engine.stats.data == {"lookups|timed_out": 1}
    now[0] += 0.1
    assert not engine.jumps.waits(second, 0, engine.pool) and ended and engine.stats.data == {"lookups|timed_out": 2}


def test_a_lookup_that_waits_for_others_is_not_late(monkeypatch):
    """A prompt waits as long as computing its tokens and those before it would take. Then it is computed, and other
    prompts are still looked up."""
    now = [100.0]
    monkeypatch.setattr("ashlar.vllm.jumps.time.monotonic", lambda: now[0])
    engine = Engine([100, 100], 220, lookup_ms=200, tokens_per_second=100.0)
    second, third = Request(220, "second"), Request(220, "third")
    engine.jumps.add(second, [100, 100])
    for request in (engine.request, second):
        assert engine.jumps.waits(request, 0, engine.pool)
    engine.step({})
    now[0] += 2.1
    assert engine.jumps.waits(engine.request, 0, engine.pool)
    now[0] += 0.2
    assert not engine.jumps.waits(engine.request, 0, engine.pool)
    now[0] += 1.8
    assert engine.jumps.waits(second, 0, engine.pool), "4.1 s; the tokens of both take 4 s"
    engine.jumps.add(third, [100, 100])
    assert engine.jumps.waits(third, 0, engine.pool)
    assert engine.stats.data == {"lookups|queued": 1}


def test_the_time_of_a_landing_begins_after_the_wait_for_others(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("ashlar.vllm.jumps.time.monotonic", lambda: now[0])
    engine = Engine([100, 100], 220, lookup_ms=200, tokens_per_second=100.0)
    engine.jumps.waits(engine.request, 0, engine.pool)
    ((fetch,), _, _) = engine.step({})
    now[0] += 2.0
    engine.jumps.hear({(fetch.number, 0): Fetched(False)}, engine.pool)
    now[0] += 2.1
    assert engine.jumps.waits(engine.request, 0, engine.pool)
    now[0] += 0.2
    assert not engine.jumps.waits(engine.request, 0, engine.pool)
    assert engine.stats.data == {"lookups|timed_out": 1}


def test_a_landing_has_the_time_of_computing_its_tokens(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("ashlar.vllm.jumps.time.monotonic", lambda: now[0])
    engine = Engine([100, 100], 220, lookup_ms=200, tokens_per_second=100.0)
    engine.jumps.waits(engine.request, 0, engine.pool)
    ((fetch,), _, _) = engine.step({})
    engine.jumps.hear({(fetch.number, 0): Fetched(False)}, engine.pool)
    now[0] += 2.1
    assert engine.jumps.waits(engine.request, 0, engine.pool)
    now[0] += 0.2
    assert not engine.jumps.waits(engine.request, 0, engine.pool)


def test_later_requests_fetch_segments_in_half_of_the_memory():
    """Meanwhile the segments of later requests land. Nothing is decided before a request is next."""
    engine = Engine([100, 100], 220, segment_tokens=1000)
    for number in range(3):
        engine.jumps.add(Request(220, str(number)), [100, 100])
    fetches, _, _ = engine.step({})
    assert len(fetches) == 2, "400 of 500 tokens"
    engine.jumps.hear({(fetches[0].number, 0): Fetched(True, [(8, 92, False)])}, engine.pool)
    assert engine.jumps.requests_of([fetches[0].number]) == []
    names = list(engine.request.block_hashes)
    assert engine.jumps.waits(engine.request, 96, engine.pool)
    assert engine.jumps.requests_of([fetches[0].number]) == [engine.request]
    engine.jumps.decide(engine.request, 96, engine.pool)
    assert engine.request.block_hashes == names, "the engine has all of what has landed"


def test_later_requests_fetch_segments_in_half_of_the_memory_of_tuples():
    engine = Engine([100, 100], 220)
    engine.jumps._segments_ahead = 5
    for number in range(3):
        engine.jumps.add(Request(220, str(number)), [100, 100])
    first, second = engine.step({})[0]
    engine.jumps.drop(engine.request, engine.pool)
    fetches, _, released = engine.step({})
    assert released == [first.number] and len(fetches) == 1, "four of five segments"


def test_the_engines_own_cache_is_queried_again_if_it_has_a_renamed_block():
    engine = Engine([100, 100], 220)
    engine.land([(40, 92, False)])
    wanted = engine.request.block_hashes[1]
    engine.pool.get_cached_block = lambda name, groups: "block" if name == wanted and groups == [0] else None
    assert engine.jumps.may_have_more(engine.request, engine.pool)
    engine.pool.get_cached_block = lambda name, groups: None
    assert not engine.jumps.may_have_more(engine.request, engine.pool)


def test_missing_segments_run_alone_when_idle_or_asked_for_twice():
    engine = Engine([100, 100], 220)
    engine.land([], missing=[1])
    assert engine.jumps.cold.next(False, engine.pool) is None, "others are served"
    again = Request(220, "again")
    engine.jumps.add(again, [100, 100], "salt")
    engine.jumps.waits(again, 0, engine.pool)
    ((fetch,), _, _) = engine.step({})
    engine.jumps.hear({(fetch.number, 0): Fetched(True, missing=[0, 1])}, engine.pool)
    alone = engine.jumps.cold.next(False, engine.pool)
    assert not alone.first and alone.tokens.tolist() == list(range(100, 200)) and len(alone.pages[0]) == 4
    assert engine.jumps.cold.next(True, engine.pool) is None, "one at a time"
    engine.jumps.cold.ran({(alone.number, 0): 1}, engine.pool)
    assert all(block.references == 0 for block in engine.pool.taken)
    first = engine.jumps.cold.next(True, engine.pool)
    assert first.first and first.tokens.tolist() == list(range(100))
    engine.jumps.cold.ran({(first.number, 0): 0}, engine.pool)
    assert not engine.jumps.cold.pending


@pytest.mark.parametrize("answers", [[0], [NO_SPACE], [1, NO_SPACE], [NO_SPACE, 0]])
def test_a_segment_that_was_not_published_runs_again_only_when_idle(answers):
    """The cache may decline a segment that lands more slowly than it is computed. If a rank finds too few free pages,
    it may find too few again."""
    engine = Engine([100, 100], 220)
    engine.jumps.cold._ranks = len(answers)
    for _ in range(2):
        engine.jumps._add_cold(engine.jumps._prompts["one"], [1])
    alone = engine.jumps.cold.next(False, engine.pool, 0)
    engine.jumps.cold.ran({(alone.number, rank): answer for rank, answer in enumerate(answers)}, engine.pool)
    dropped = NO_SPACE in answers
    assert engine.stats.data == ({"dropped_segments": 1} if dropped else {"published_segments": 0})
    for _ in range(2):
        engine.jumps._add_cold(engine.jumps._prompts["one"], [1])
    assert engine.jumps.cold.next(False, engine.pool) is None
    again = engine.jumps.cold.next(True, engine.pool)
    engine.jumps.cold.ran({(again.number, rank): 1 for rank in range(len(answers))}, engine.pool)
    assert engine.stats.data["published_segments"] == 1
    for _ in range(2):
        engine.jumps._add_cold(engine.jumps._prompts["one"], [1])
    assert engine.jumps.cold.next(False, engine.pool) is not None


def test_a_segment_that_could_not_be_offered_runs_again_when_two_requests_have_it():
    """No daemon answered. A busy engine is never idle."""
    engine = Engine([100, 100], 220)
    for _ in range(2):
        for _ in range(2):
            engine.jumps._add_cold(engine.jumps._prompts["one"], [1])
        alone = engine.jumps.cold.next(False, engine.pool)
        engine.jumps.cold.ran({(alone.number, 0): UNAVAILABLE}, engine.pool)
    assert engine.stats.data == {"published_segments": 0}


def test_a_run_alone_fits_into_its_step_and_every_second_step_leaves_space_for_it():
    engine, wanted = Engine([100, 200], 320, step_tokens=150), np.arange(300)
    cold = engine.jumps.cold
    assert len(cold.add(wanted, [100, 100, 100], "", [0, 1, 2], asked=2)) == 3 and cold.reserve(engine.pool) == 100
    assert cold.next(False, engine.pool, 51) is None, "51 + 100 tokens are more than a step's"
    assert cold.reserve(engine.pool) == 0 and cold.next(False, engine.pool, 150) is None, "requests have the whole step"
    assert cold.reserve(engine.pool) == 100
    alone = cold.next(False, engine.pool, 50)
    assert len(alone.tokens) == 100 and cold.reserve(engine.pool) == 0, "one at a time"
    cold.ran({(alone.number, 0): 1}, engine.pool)
    assert cold.next(False, engine.pool, 20) is not None, "a step that is not full needs no reservation"
    engine = Engine([100], 120, step_tokens=150)
    assert engine.jumps.cold.add(wanted, [100], "", [0]) and engine.jumps.cold.reserve(engine.pool) == 0, "asked once"
    engine.jumps.cold.add(wanted, [100], "", [0])
    engine.pool.free = 9
    assert engine.jumps.cold.reserve(engine.pool) == 0, "requests need the blocks"
    assert engine.jumps.cold.add(np.arange(70000), [65535], "", [0]) == [], "longer than segment_tokens"


def test_a_step_has_fewer_tokens_for_requests_if_a_segment_runs_alone_in_it(monkeypatch):
    limits = []
    monkeypatch.setattr(Engines, "_mamba_block_aligned_split", Engines._mamba_block_aligned_split)
    monkeypatch.setattr(Engines, "schedule", lambda self: limits.append(self.max_num_scheduled_tokens))
    if hasattr(Engines._mamba_block_aligned_split, "stops_for_ashlar"):
        monkeypatch.delattr(Engines._mamba_block_aligned_split, "stops_for_ashlar")
    stops.install()
    ours = types.SimpleNamespace(reserved_tokens=lambda: 100)
    for connector in (ours, types.SimpleNamespace(_connectors=[types.SimpleNamespace(), ours]), None):
        manager = types.SimpleNamespace(allocate_slots=None)
        scheduler = types.SimpleNamespace(connector=connector, max_num_scheduled_tokens=150, kv_cache_manager=manager)
        Engines.schedule(scheduler)
        assert scheduler.max_num_scheduled_tokens == 150
    assert limits == [50, 50, 150]


def test_no_segment_runs_alone_in_blocks_that_requests_need():
    engine = Engine([100, 100], 220)
    engine.land([], missing=[0])
    engine.pool.free = 9
    assert engine.jumps.cold.next(True, engine.pool) is None and not engine.jumps.cold.pending


def test_names_depend_on_the_tokens_and_earlier_jumps():
    whole, grown, other, plain = Request(200), Request(100), Request(200), Request(200)
    for request, jumps in ((whole, [(40, 60), (120, 160)]), (grown, [(40, 60), (120, 160)]), (other, [(40, 60)])):
        Names(request, BLOCK).set(jumps)
    grown.all_token_ids = list(range(200))
    grown.update_block_hashes()
    assert grown.block_hashes == whole.block_hashes, "whenever tokens were appended"
    assert whole.block_hashes[0] == plain.block_hashes[0]
    assert not set(whole.block_hashes[1:]) & set(plain.block_hashes)
    assert other.block_hashes[:3] == whole.block_hashes[:3] and other.block_hashes[3] != whole.block_hashes[3]


def test_blocks_filled_by_decoding_after_a_jump_have_separate_names():
    request, plain = Request(60), Request(96)
    Names(request, BLOCK).set([(40, 50)])
    request.all_token_ids = list(range(96))
    request.update_block_hashes()
    assert request.block_hashes[0] == plain.block_hashes[0]
    assert not set(request.block_hashes[1:]) & set(plain.block_hashes)


def test_names_follow_a_token_that_a_sessions_next_turn_replaces():
    """vLLM discards the last sampled token, and with it the name of the block that the token ends."""
    request, other = Request(3 * BLOCK), Request(5 * BLOCK)
    Names(request, BLOCK).set([(40, 50)])
    kept = request.all_token_ids[:-1]
    request.all_token_ids = other.all_token_ids = [*kept, *range(1000, 1000 + 2 * BLOCK)]
    del request.block_hashes[len(kept) // BLOCK :]
    request.update_block_hashes()
    other.block_hashes.clear()
    Names(other, BLOCK).set([(40, 50)])
    assert request.block_hashes == other.block_hashes and len(request.block_hashes) == 4


@pytest.mark.parametrize("jumps, counts", [(True, [700, 300, 50]), (False, [400, 300, 50])])
def test_the_device_counts_the_tokens_of_requests_that_jumped(jumps, counts, monkeypatch):
    """`a` jumps from 400 tokens to 700. `b` decodes: the scheduler's number includes a rejected draft. `c` is not
    scheduled."""
    monkeypatch.setattr(GPUModelRunner, "update_requests", lambda runner, output: None)
    device_counts.install()
    states = types.SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1, "c": 2},
        prefill_len=types.SimpleNamespace(np=np.array([900, 280, 60])),
        num_computed_tokens=types.SimpleNamespace(gpu=torch.tensor([400, 300, 50])),
    )
    cached = types.SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[700, 301])
    output = types.SimpleNamespace(scheduled_cached_reqs=cached, has_sync_kv_loads=jumps)
    GPUModelRunner.update_requests(types.SimpleNamespace(req_states=states), output)
    assert states.num_computed_tokens.gpu.tolist() == counts
