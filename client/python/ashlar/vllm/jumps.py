# SPDX-License-Identifier: Apache-2.0
"""Scheduler half of segments: decides which parts of a prompt come from the cache, and when.

A prompt with segments is scheduled like any other. The scheduler looks its segments up; if nothing is found, the prompt
is computed in the same step. Otherwise it waits until a worker has landed the hits. The prompt then computes up to the
first interior, *jumps* over it by a higher `num_computed_tokens`, and continues from there, in ordinary steps. The
worker writes the interior's keys, values and states before the forward of the step after the jump. Segments that are
missing, late or not worth a step are computed.

Missing segments are computed separately later (see cold_segments.py).
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import ashlar
from ashlar.vllm.cold_segments import ColdSegments
from ashlar.vllm.fetches import Fetches
from ashlar.vllm.held_blocks import HeldBlocks
from ashlar.vllm.lookups import SegmentLookups, await_plan, finds_segments, lookup_wait, missing_segments
from ashlar.vllm.messages import Fetch, Fetched, Jump
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options
from ashlar.vllm.segments import Names, segment_tokens, segment_tuples
from ashlar.vllm.sharing import Sharing
from ashlar.vllm.stats import AshlarStats

_PAUSE = 1.0  # seconds without lookups after a late lookup
_USUAL_PATIENCE = 5.0  # seconds allowed for a landing while the engine's prefill rate is unknown
_STEP = 64  # cost of a jump's step, in tokens, when segments are compared with an exact prefix


@dataclasses.dataclass(frozen=True)
class Interior:
    """A range of positions whose keys, values and states a worker has landed."""

    begin: int
    end: int
    first: bool  # the prompt's first segment: exact, loaded before the first step


@dataclasses.dataclass
class _Prompt:
    request: Any
    lengths: list[int]
    names: Names
    preemptions: int
    own_salt: str  # the caller's salt
    fetch: int | None = None  # number of its fetch; None: not requested
    since: float = 0.0  # time at which the scheduler first considered the request; 0: not yet
    lookup: ashlar.Request | None = None  # the scheduler's own lookup, which comes before a fetch
    found: ashlar.Request | None = None  # `lookup` with hits, until the fetch ends: lower tiers copy them
    asked_others: bool = False  # the daemon was asked whether other engines compute its missing segments
    sharing: Sharing | None = None  # the wait for these engines; None: they compute nothing
    own: list[bytes] = dataclasses.field(default_factory=list)  # segments that this engine runs alone meanwhile
    landed: list[Interior] | None = None  # landed interiors before `decide`
    ready: bool = False  # the request no longer waits
    salt: str = ""  # generation of the engine's weights and caller's salt
    computed: int = 0  # tokens found in the engine's own cache at the last query
    jumps: list[Interior] = dataclasses.field(default_factory=list)  # remaining jumps, in order
    refuses_prefix: bool = False
    exact: int | None = None  # number of tokens before the first composed token; None: all are exact
    tier: str = "dram"
    jumped: bool = False
    counted: int = 0  # end of the last jump in the request's number of cached tokens
    jumping: Interior | None = None  # a jump that was scheduled but not yet sent to a worker
    held: HeldBlocks = dataclasses.field(default_factory=HeldBlocks)  # blocks with the states before the jump
    sources: dict[int, int] = dataclasses.field(default_factory=dict)  # as `Jump.sources`, of `jumping`


class Jumps:
    def __init__(
        self,
        described: Described,
        options: Options,
        hash_tokens: int,
        publishes: bool,
        stats: AshlarStats,
        ranks: int = 1,
        step_tokens: int = sys.maxsize,
        model_tokens: int = sys.maxsize,
    ):
        """`hash_tokens`: tokens per block hash of the engine. Other arguments: as of `ColdSegments`."""
        self._described, self._options, self._stats = described, options, stats
        self._hash_tokens = hash_tokens
        self._tokens_ahead = segment_tokens(described, options) // 2
        self._segments_ahead = segment_tuples(described, options) // 2
        self.tokens_per_second = options.tokens_per_second  # changed by set_rate
        self.generation = ""  # generation of the engine's weights
        self._prompts: dict[str, _Prompt] = {}
        self._fetches = Fetches(ranks)
        self.cold = ColdSegments(described, options, publishes, stats, ranks, step_tokens, model_tokens)
        # Kept after their lookups end, because dropping one blocks until its call to the daemon is over.
        self._ending: list[Sharing] = []
        self._paused_until = 0.0
        self._states = sorted({place.group for place in described.linear})
        self.lookups = SegmentLookups(described, options)

    def close(self) -> None:
        self.cold.close()
        for prompt in self._prompts.values():
            self._end_lookup(prompt)
        self.lookups.close()

    def set_rate(self, tokens_per_second: float) -> None:
        """Stores a measured rate of prefill, and reports it to the daemon for later lookups."""
        self.tokens_per_second = tokens_per_second
        self.lookups.set_rate(tokens_per_second)

    def refresh(self) -> None:
        """Reopens the cache of lookups after `set_rate`. Call it in each step."""
        used = any(prompt.lookup or prompt.found or prompt.sharing for prompt in self._prompts.values())
        unused = not used and all(each.ended for each in self._ending)
        if self.cold.serving is None:
            self.lookups.refresh(unused)
        else:
            self.cold.serving.when_unused(lambda: self.lookups.refresh(unused))

    # ---- prompts

    def add(self, request: Any, lengths: list[int], salt: str = "") -> None:
        names = Names(request, self._hash_tokens)
        self._prompts[request.request_id] = _Prompt(request, lengths, names, request.num_preemptions, salt)

    def drop(self, request: Any, pool: Any) -> None:
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None:
            self._leave(prompt, pool)

    def reset(self, pool: Any, generation: str = "") -> None:
        """Discards what was landed or found missing with former weights. Requests that have jumped stay composed."""
        self.cold.reset(pool, generation)
        self.generation = generation
        for prompt in self._prompts.values():
            if prompt.jumping is None:
                self._leave(prompt, pool)
            prompt.ready, prompt.landed, prompt.jumps = True, None, []

    def _leave(self, prompt: _Prompt, pool: Any) -> None:
        """Releases everything that the prompt holds."""
        if prompt.fetch is not None:
            self._fetches.release(prompt.fetch)
            prompt.fetch = None
        self._end_lookup(prompt)
        prompt.held.free(pool)
        prompt.jumping, prompt.landed, prompt.sources = None, None, {}

    def _end_lookup(self, prompt: _Prompt) -> None:
        self._ending = [each for each in self._ending if not each.ended]
        if prompt.sharing is not None:
            self._ending.append(prompt.sharing)
        prompt.sharing, prompt.own = None, []
        for lookup in (prompt.lookup, prompt.found):
            if lookup is not None:
                lookup.end()
        prompt.lookup = prompt.found = None

    def _current(self, request: Any, pool: Any) -> _Prompt | None:
        """Returns the request's prompt. A preempted request starts over."""
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and prompt.preemptions != request.num_preemptions:
            self._leave(prompt, pool)
            prompt.names.reset()
            prompt.preemptions, prompt.exact = request.num_preemptions, None
            prompt.jumps, prompt.ready, prompt.refuses_prefix, prompt.since = [], False, False, 0.0
        return prompt

    def starts_over(self, request: Any, pool: Any) -> bool:
        """Returns whether the request was preempted after a jump was decided. Its blocks now have the names of an exact
        prompt again, so the engine's own cache must be queried again."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.exact is None:
            return False
        self._current(request, pool)
        return prompt.exact is None

    def exact_tokens(self, request: Any) -> int | None:
        """Returns the number of tokens before the first composed token; None if nothing is composed."""
        prompt = self._prompts.get(request.request_id)
        return None if prompt is None else prompt.exact

    # ---- before the first step

    def start(self, request: Any, computed: int, pool: Any) -> None:
        """Starts the lookup of the request's segments. Call it when the request is next, before `waits`."""
        prompt = self._current(request, pool)
        if prompt is None or prompt.ready:
            return
        prompt.computed = computed
        now = time.monotonic()
        prompt.since = prompt.since or now
        if prompt.fetch is not None or prompt.lookup is not None:
            return
        if now < self._paused_until or sum(prompt.lengths) - computed < max(1, self._options.min_tokens):
            self._abandon(prompt, pool)
        elif not self.lookups.available:
            # A worker can look the prompt up, but not ask other engines. The layout comes with the engine's first step.
            if not self._options.cold_parallel:
                self._ask(prompt)
        else:
            prompt.salt, prompt.since = self.generation + prompt.own_salt, now  # each lookup has its own lookup_ms
            prompt.lookup = self.lookups.start(_text(prompt), prompt.lengths, prompt.salt)
            if prompt.lookup is None:
                self._abandon(prompt, pool)

    def waits(self, request: Any, computed: int, pool: Any, found: int | None = 0) -> bool:
        """Returns whether the request waits for its segments, after a short wait for their lookup.

        `found`: tokens of an exact prefix after `computed` that can be loaded; None: not known yet.
        """
        self.start(request, computed, pool)
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.ready:
            return False
        if prompt.sharing is not None:
            self._share(prompt, prompt.sharing)
        elif prompt.lookup is not None and not self._looked_up(prompt, found, pool):
            return not prompt.ready
        if prompt.landed is None and prompt.sharing is None:
            self._check_wait(prompt, pool)
        return not prompt.ready

    def _looked_up(self, prompt: _Prompt, found: int | None, pool: Any) -> bool:
        """Returns whether the scheduler's lookup has found segments, which a worker then lands, or others compute
        some."""
        lookup, options = prompt.lookup, self._options
        assert lookup is not None
        wait = lookup_wait(options, sum(prompt.lengths) - prompt.computed, self.tokens_per_second)
        verdict = await_plan(lookup, prompt.since + wait)
        if verdict == ashlar.Verdict.PENDING:
            if time.monotonic() - prompt.since > options.lookup_ms / 1000:
                self._late(prompt, pool)
            return False
        plan = lookup.plan
        if verdict == ashlar.Verdict.OK and prompt.asked_others and lookup.segments_computed_elsewhere > 0:
            self._stats.add(lookup.segments_computed_elsewhere, "shared_segments")
            seconds = min(options.land_ms / 1000, self._computing_seconds(sum(prompt.lengths)))
            prompt.sharing = Sharing(lookup, time.monotonic() + seconds)
            return True
        if verdict == ashlar.Verdict.OK and self._may_share(prompt) and missing_segments(plan):
            if found is None:
                return False
            if prompt.computed + found < prompt.lengths[0]:
                self._end_lookup(prompt)
                prompt.asked_others, prompt.since = True, time.monotonic()  # the second plan has its own lookup_ms
                prompt.lookup = self.lookups.start(_text(prompt), prompt.lengths, prompt.salt, shares=True)
                if prompt.lookup is not None:
                    return False
        if verdict == ashlar.Verdict.OK and finds_segments(plan):
            if prompt.asked_others:
                self._end_lookup(prompt)
            else:
                prompt.found, prompt.lookup = lookup, None
            self._ask(prompt)
            return True
        self._end_lookup(prompt)
        if verdict == ashlar.Verdict.OK:
            self._add_cold(prompt, missing_segments(plan))
        self._abandon(prompt, pool)
        return False

    def _may_share(self, prompt: _Prompt) -> bool:
        able = self._options.cold_parallel and self.cold.publishes
        return able and not prompt.asked_others and not prompt.salt

    def _share(self, prompt: _Prompt, sharing: Sharing) -> None:
        """Runs this engine's part. Looks the prompt up again when all parts are there, or late."""
        over = sharing.over()
        prompt.own += self._add_cold(prompt, sharing.take_own(), 2)  # run even if the engine is not idle
        if not over or (self.cold.has_any(prompt.own) and not sharing.late):
            return
        self._end_lookup(prompt)
        prompt.since = time.monotonic()
        self._ask(prompt)

    def _late(self, prompt: _Prompt, pool: Any) -> None:
        """Abandons the prompt and all prompts that no worker has answered, and pauses lookups: the daemon is slow."""
        self._stats.add(1, "lookups", "timed_out")
        self._paused_until = time.monotonic() + _PAUSE
        self._abandon(prompt, pool)
        for other in self._fetches.waiting():
            self._leave(other, pool)

    def _ask(self, prompt: _Prompt) -> None:
        prompt.salt = self.generation + prompt.own_salt
        prompt.fetch = self._fetches.ask(prompt, _text(prompt), prompt.lengths, prompt.salt)

    def _ask_ahead(self) -> None:
        """Requests segments of later requests, in at most half of the worker's memory."""
        if time.monotonic() < self._paused_until or self._options.cold_parallel:  # others may compute missing ones
            return
        tokens_left = self._tokens_ahead - self._fetches.tokens
        segments_left = self._segments_ahead - self._fetches.segments
        for prompt in self._prompts.values():
            tokens = sum(prompt.lengths)
            idle = prompt.fetch is None and prompt.lookup is None and not prompt.ready
            if idle and prompt.preemptions == prompt.request.num_preemptions:
                tokens_left -= tokens
                segments_left -= len(prompt.lengths)
                if min(tokens_left, segments_left) < 0:
                    return
                if tokens >= max(1, self._options.min_tokens):
                    self._ask(prompt)

    def _check_wait(self, prompt: _Prompt, pool: Any) -> None:
        """Ends a wait for a worker that has lasted `lookup_ms` longer than computing would take. A landing is timed
        from its first answer. Before that, the fetch waits for other fetches, so the daemon need not be slow."""
        options, now = self._options, time.monotonic()
        begun = None if prompt.fetch is None else self._fetches.landing_since(prompt.fetch)
        if prompt.fetch is None:  # no worker has reported the layout of segments
            limit = 0.0
        elif begun is None:
            limit = self._computing_seconds(self._fetches.tokens_ahead(prompt.fetch))
        else:
            limit = self._computing_seconds(sum(prompt.lengths))
        waited = now - max(prompt.since, begun or 0.0)
        if waited <= min(options.land_ms / 1000, options.lookup_ms / 1000 + limit):
            return
        if prompt.fetch is not None and begun is None:
            self._stats.add(1, "lookups", "queued")
            self._abandon(prompt, pool)
        else:
            self._late(prompt, pool)

    def _computing_seconds(self, tokens: int) -> float:
        return tokens / self.tokens_per_second if self.tokens_per_second else _USUAL_PATIENCE

    def _abandon(self, prompt: _Prompt, pool: Any) -> None:
        self._leave(prompt, pool)
        prompt.ready = True

    def requests_of(self, fetches: Iterable[int]) -> list[Any]:
        """Returns the requests that need a decision."""
        found = self._fetches.prompts_of(fetches)
        # Before the scheduler has considered a request, the exact tokens in the engine's own cache are unknown.
        return [prompt.request for prompt in found if prompt.landed is not None and prompt.since > 0]

    def decide(self, request: Any, found: int, pool: Any) -> bool:
        """Decides which landed segments are used. `found`: tokens of an exact prefix that can be loaded. False: none
        landed.

        This renames blocks after a jump, so the engine's own cache may have other blocks of the request afterwards.
        """
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.landed is None:
            return False
        landed, prompt.landed, prompt.ready = prompt.landed, None, True
        known = prompt.computed
        after = [each for each in landed if self._is_ahead(each, found)]
        jumps = [each for each in landed if self._is_ahead(each, known) or (each.first and each.end > known)]
        if found > known:
            # A prefix that ends inside a segment is loaded only if that saves more.
            prompt.refuses_prefix = found + _tokens(after, found) < known + _tokens(jumps, known)
            jumps = jumps if prompt.refuses_prefix else after
        if not jumps:
            self._abandon(prompt, pool)
            return True
        prompt.jumps = jumps
        composed = [each for each in jumps if not each.first]
        if composed:
            prompt.exact = composed[0].begin
            prompt.names.set([(each.begin, each.end) for each in composed])
        return True

    def may_have_more(self, request: Any, pool: Any) -> bool:
        """Returns whether the engine's own cache has the block of the first jump under its new name."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.exact is None:
            return False
        block = self._described.block
        name = (prompt.exact // block + 1) * block // self._hash_tokens - 1
        names, group = request.block_hashes, self._described.key_groups[0]
        return name < len(names) and pool.get_cached_block(names[name], [group]) is not None

    def refuses_prefix(self, request: Any) -> bool:
        """Returns whether the segments save more than the exact prefix."""
        prompt = self._prompts.get(request.request_id)
        return prompt is not None and prompt.refuses_prefix

    def external(self, request: Any, computed: int, pool: Any) -> int:
        """Returns the number of tokens after `computed` that are loaded from the first segment before the first
        step."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or not prompt.jumps:
            return 0
        ahead = (
            each for each in prompt.jumps if self._is_ahead(each, computed) or (each.first and each.end > computed)
        )
        prompt.jumps = list(ahead)
        if not prompt.jumps:  # the engine's own cache has the whole segment
            self._leave(prompt, pool)
            return 0
        return prompt.jumps[0].end - computed if prompt.jumps[0].first else 0

    def allocated(self, request: Any, external: int) -> bool:
        """Returns whether the external tokens belong to the first segment."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or not prompt.jumps or not prompt.jumps[0].first:
            return False
        first = prompt.jumps.pop(0)
        prompt.jumping = Interior(first.end - external, first.end, True)
        return True

    # ---- in the scheduler's loop

    def leap(self, request: Any, tokens: int, managers: Sequence[Any], pool: Any) -> int | None:
        """Moves a running request over a landed interior if it has reached the interior's start.

        Returns the number of `tokens` for the next step; None: the engine chooses it.
        """
        prompt = self._current(request, pool)
        if prompt is None or not (prompt.jumps or prompt.jumping or prompt.held):
            return None
        at: int = request.num_computed_tokens
        block = self._described.block
        # The step before this one may have computed one token of the interior: see `next_stop`.
        while prompt.jumps and not self._is_ahead(prompt.jumps[0], at - 1):
            prompt.jumps.pop(0)
        if not (prompt.jumps or prompt.jumping or prompt.held):
            self._leave(prompt, pool)
            return None
        tables = [managers[group].req_to_blocks[request.request_id] for group in self._states]
        index = -(-at // block) - 1
        if prompt.jumps and prompt.jumps[0].begin <= at and prompt.jumping is None:
            jump = prompt.jumps[0]
            over = at % block > 0 and index < jump.end // block
            source = jump.begin // block - 1 if jump.begin < at and tables else index
            there = all(0 <= source <= index < len(table) for table in tables)
            there = there and not any(table[each].is_null for table in tables for each in (source, index))
            if there and (source == index or prompt.held.hold(tables, source, False, pool)):
                if source < index:
                    prompt.sources = {group: table[source].block_id for group, table in zip(self._states, tables)}
                prompt.held.hold(tables, index, over, pool)
                prompt.jumping = prompt.jumps.pop(0)
                request.num_computed_tokens = jump.end
        start: int = request.num_computed_tokens
        tokens = min(tokens, request.num_tokens - start)
        stop, ends = self.next_stop(request, start), (start // block + 1) * block
        if stop is not None and stop <= start + tokens:
            if stop > ends > start and start % block and not prompt.held.hold(tables, start // block, True, pool):
                stop = ends
            return stop - start
        # The state's block was taken from the request: the step must reach the next block, or waits.
        gone = start % block and start // block < min(map(len, tables), default=0)
        return 0 if gone and any(table[start // block].is_null for table in tables) else None

    def next_stop(self, request: Any, start: int) -> int | None:
        """Returns where the step that begins at `start` must end because a jump follows.

        Only running requests jump. If a waiting request's prefix ends where an interior begins, its first step computes
        one token, and then it jumps with the states from before this step.
        """
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return None
        ahead = (each.begin for each in prompt.jumps if self._is_ahead(each, start))
        return min((max(begin, start + 1) for begin in ahead), default=None)

    def _is_ahead(self, interior: Interior, start: int) -> bool:
        """Returns whether a waiting request with `start` computed tokens can jump over the interior. A step from within
        a block overwrites the states from before it."""
        kept = not self._states or start % self._described.block == 0
        return interior.begin > start or (interior.begin == start and kept)

    # ---- with each step

    def step(self, output: Any, pool: Any) -> tuple[list[Fetch], list[Jump], list[int]]:
        jumps = []
        for name, prompt in self._prompts.items():
            if name not in output.num_scheduled_tokens:
                continue
            prompt.held.free(pool)  # later writers run after this step's copies
            if (made := prompt.jumping) is None:
                continue
            assert prompt.fetch is not None
            end = made.end + output.num_scheduled_tokens[name]
            blocks = tuple(output.kv_connector_block_state.get_block_ids(name))
            state_block = self._described.count(end) - 1
            jumps.append(Jump(prompt.fetch, made.begin, made.end, blocks, state_block, prompt.sources))
            self._count(prompt, made)
            prompt.jumping, prompt.sources = None, {}
            if not prompt.jumps:
                self._leave(prompt, pool)
        if jumps:
            output.has_sync_kv_loads = True  # makes vLLM call the worker before the forward
        self._ask_ahead()
        fetches, released = self._fetches.take()
        return fetches, jumps, released

    def _count(self, prompt: _Prompt, made: Interior) -> None:
        tokens, stats = made.end - made.begin, prompt.request.prefill_stats
        self._stats.add(1, "jumps")
        self._stats.add(tokens, "saved_tokens", prompt.tier, "composed")
        if not prompt.jumped:
            prompt.jumped = True
            self._stats.add(1, "hits", prompt.tier, "composed")
        # vLLM counts the tokens before the first step, unless the request was preempted. A jump that is repeated after a
        # preemption counts once.
        repeated = stats is None or made.begin < (prompt.counted or stats.num_cached_tokens)
        if not repeated and not (made.first and prompt.request.num_preemptions == 0):
            prompt.counted = made.end
            external = stats.num_external_cached_tokens + tokens
            stats.set(prompt.request.num_prompt_tokens, stats.num_local_cached_tokens, external)

    # ---- what workers report

    def hear(self, fetched: dict[tuple[int, int], Fetched], pool: Any) -> None:
        """`fetched`: answers by number of the fetch, and rank. A prompt uses what all ranks have landed."""
        for prompt, answers in self._fetches.hear(fetched):
            first = answers[0]
            if any(answer.late for answer in answers):
                self._late(prompt, pool)
                continue
            self._add_cold(prompt, sorted({lacking for answer in answers for lacking in answer.missing}))
            self._stats.add(first.refused, "segments_refused", "no_gain")
            self._stats.add(first.unfit, "segments_refused", "no_space")
            if any(answer.failure for answer in answers):
                self._stats.add(1, "load_failures")
            self._stats.add(max(answer.seconds for answer in answers), "load_seconds")
            prompt.tier = first.tier
            jumps = [jump for jump in first.jumps if all(jump in answer.jumps for answer in answers)]
            prompt.landed = [Interior(*jump) for jump in jumps]
            self._end_lookup(prompt)
            if not prompt.landed:
                self._abandon(prompt, pool)

    def _add_cold(self, prompt: _Prompt, missing: Sequence[int], asked: int = 1) -> list[bytes]:
        """Returns the names of the segments that this engine will run alone."""
        return self.cold.add(prompt.request.all_token_ids, prompt.lengths, prompt.salt, missing, asked)


def _text(prompt: _Prompt) -> npt.NDArray[np.int32]:
    """Returns the tokens of all segments and one more."""
    return np.array(prompt.request.all_token_ids[: sum(prompt.lengths) + 1], np.int32)


def _tokens(interiors: Sequence[Interior], computed: int) -> int:
    """Returns the number of tokens saved, minus the cost of the steps."""
    return sum(each.end - max(each.begin, computed) - _STEP for each in interiors)
