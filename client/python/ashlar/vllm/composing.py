# SPDX-License-Identifier: Apache-2.0
"""Worker half of segments: lands them for waiting prompts, writes them to the engine's blocks, and publishes new ones.

A separate thread calls the daemon. Keys and values land in pages of this process, because only the engine's writer has
the layout of the engine's blocks. Tuples are copied to host memory (landed_tuples.py). After a prompt's segments are
reported as landed, a later step does not depend on the daemon. Only the engine's thread runs the model and writes
blocks, in the order of the engine's own work on its device. The other thread reads what a run has left only after that
work. A jump does not wait for the device: landed data stays in host memory until the device has copied it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

import ashlar
from ashlar.request import Step, StepKind
from ashlar.tensors import EPSILON, compose, scaled_half
from ashlar.vllm import landed_tuples
from ashlar.vllm.forward import EngineModel, rotate
from ashlar.vllm.host_memory import HostMemory, Lease, pieces, pin, unpin
from ashlar.vllm.landed_tuples import LandedTuple, state_shape, transition_shape
from ashlar.vllm.lookups import await_plan, missing_segments
from ashlar.vllm.memory import States, bytes_of
from ashlar.vllm.messages import NO_SPACE, UNAVAILABLE, Alone, Fetch, Fetched, Jump
from ashlar.vllm.model import Described, LinearPlace
from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.order import Mark, Order
from ashlar.vllm.pace import Pace
from ashlar.vllm.ranks import RanksApart
from ashlar.vllm.runs import Run, linear_of
from ashlar.vllm.segments import (
    KEY_TYPES,
    NORM_EPSILON,
    PAGE_TOKENS,
    segment_tokens,
    segment_tuples,
    segments_model,
    token_bytes,
    tuple_memory,
)
from ashlar.vllm.state import State

logger = init_logger("vllm.ashlar")

_TRIES = 4  # plans per prompt; each uses fewer hits
_POLL = 0.0005  # seconds
_PAGES_POLL = 0.01  # seconds between two attempts to publish a run that waits for pages
_PAGES_WAIT = 2.0  # seconds that a run waits for pages, at most land_ms; no other segment runs meanwhile
_QUIESCED_POLL = 0.5  # seconds between two calls to the daemon for kept pages while a run waits for pages


class NotLanded(Exception):
    """No segment landed; the engine computes the prompt."""


class Pages:
    """Memory of this process in which keys and values land, and from which they are published. Thread-safe.

    The daemon allocates all of it when the cache is opened. A landing takes its pages together with the right to keep
    its segments' tuples in host memory, so that it never holds one of them while it waits for the other.
    """

    def __init__(self, model: ashlar.Model, tokens: int, device: torch.device, tuples: int = sys.maxsize) -> None:
        """`device`: the engine's, which copies from this memory. `tuples`: number of segments whose tuples fit into
        host memory together."""
        self.count, self.tuples = -(-tokens // PAGE_TOKENS), tuples
        self.places: list[ashlar.PagePlace] = []
        size = 0
        for index, layer in enumerate(model.layers):
            if isinstance(layer, ashlar.Attention):
                width = KEY_TYPES[layer.dtype].itemsize
                keys, values = layer.key_dim * width, layer.value_dim * width
                token = token_bytes(layer)
                place = ashlar.PagePlace(
                    index, size, size + layer.kv_heads * keys, token * PAGE_TOKENS, token, keys, values
                )
                self.places.append(place)
                size += -(-token * PAGE_TOKENS * self.count // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size = size
        self.descriptor = os.memfd_create("vllm-segments", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.kept = 0  # number of pages that the cache keeps, because the daemon may still write to them
        self._memory = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        self._pinned = pin(self._memory, device)
        self._model, self._device = model, device
        self._rows: dict[int, torch.Tensor] = {}  # by layer: [pages, PAGE_TOKENS, numbers of a token's keys and values]
        for place in self.places:
            begin, size = place.key_offset, place.page_stride * self.count
            rows = self._memory[begin : begin + size].view(KEY_TYPES[self._attention(place.layer).dtype])
            self._rows[place.layer] = rows.view(self.count, PAGE_TOKENS, -1)
        # Pages and numbers of tuples that the device may still copy; guarded by _changed.
        self._left: list[tuple[Mark, Sequence[int], int]] = []
        self._free, self._free_tuples = list(range(self.count)), tuples
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, tokens: int, deadline: float, wanted: Callable[[], bool], tuples: int = 0) -> npt.NDArray[np.int32]:
        """Returns free pages for this number of tokens, and waits for them and for the tuples of this number of
        segments. NotLanded: `wanted` returned False, the deadline has passed, or the memory is too small."""
        count = -(-tokens // PAGE_TOKENS)
        with self._changed:
            while not self._has(count, tuples):
                fits = count <= self.count and tuples <= self.tuples
                if not fits or not wanted() or time.monotonic() >= deadline:
                    free = len(self._free) * PAGE_TOKENS
                    raise NotLanded(
                        f"space for {tokens} tokens and {tuples} tuples is needed; {free} of "
                        f"{self.count * PAGE_TOKENS} tokens and {self._free_tuples} of {self.tuples} tuples are free, "
                        f"and the daemon may still write to {self.kept * PAGE_TOKENS} tokens; raise segment_tokens"
                    )
                self._changed.wait(0.01)
            self._free.sort()  # a jump copies consecutive pages together
            taken, self._free = self._free[:count], self._free[count:]
            self._free_tuples -= tuples
        return np.array(taken, np.int32)

    def give(self, pages: Sequence[int], mark: Mark | None = None, tuples: int = 0) -> None:
        """Frees pages and tuples once the device's work before the mark has ended; None: it has ended."""
        with self._changed:
            if mark is None:
                self._free += pages
                self._free_tuples += tuples
            else:
                self._left.append((mark, pages, tuples))
            self._changed.notify_all()

    def _has(self, count: int, tuples: int) -> bool:
        self._collect()
        return len(self._free) >= count and self._free_tuples >= tuples

    def _collect(self) -> None:
        left, self._left = self._left, []
        for mark, pages, tuples in left:
            if mark.query():
                self._free += pages
                self._free_tuples += tuples
            else:
                self._left.append((mark, pages, tuples))

    def _attention(self, layer: int) -> ashlar.Attention:
        attention = self._model.layers[layer]
        assert isinstance(attention, ashlar.Attention)
        return attention

    def rows(self, layer: int, table: npt.NDArray[np.int32], begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of positions [begin, end) on the device, [tokens, heads, dim]. The pages must not
        change before the device has copied them."""
        held, shape, first = self._rows[layer], self._attention(layer), begin // PAGE_TOKENS
        pages = table[first : -(-end // PAGE_TOKENS)].tolist()
        parts = [
            held[page : page + last - start].to(self._device, non_blocking=True)
            for start, last, page in pieces(held, pages)
        ]
        both = torch.cat(parts).flatten(0, 1)[begin - first * PAGE_TOKENS : end - first * PAGE_TOKENS]
        sizes = [shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim]
        keys, values = (each.unflatten(1, (shape.kv_heads, -1)).contiguous() for each in both.split(sizes, 1))
        return keys, values

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, table: npt.NDArray[np.int32]) -> None:
        """Writes keys and values in CPU memory, [tokens, heads, dim], from position 0 on."""
        positions = np.arange(len(keys))
        pages = torch.from_numpy(table[positions // PAGE_TOKENS].astype(np.int64))
        slots = torch.from_numpy(positions % PAGE_TOKENS)
        self._rows[layer][pages, slots] = torch.cat([keys.flatten(1), values.flatten(1)], 1)

    def close(self) -> None:
        """Call it when the device copies no pages."""
        if self._pinned:
            unpin(self._memory)
            self._pinned = False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclasses.dataclass(eq=False)
class _Landing:
    fetch: Fetch
    is_current: Callable[[], bool]  # whether the weights are those that the scheduler names
    since: float = dataclasses.field(default_factory=time.monotonic)
    abandoned: bool = False
    pages: list[int] = dataclasses.field(default_factory=list)
    segments: int = 0  # number of segments whose tuples it may keep
    # The page of each PAGE_TOKENS positions; an arbitrary one of `pages` where nothing lands.
    table: npt.NDArray[np.int32] | None = None
    tuples: dict[int, dict[str, LandedTuple]] = dataclasses.field(
        default_factory=dict
    )  # by end of the jump and name of the layer
    memory: Lease | None = None  # memory of the tuples
    mark: Mark | None = None  # the engine's work up to the last jump, which reads the table and the tuples


class Composer:
    """Lands and publishes segments. The engine's thread calls all methods above "the composer's thread"."""

    def __init__(
        self,
        engine: EngineModel,
        described: Described,
        options: Options,
        states: list[States],
        most_tokens: int,
        publishes: bool,
        pace: Pace,
        order: Order,
    ) -> None:
        """`most_tokens`: limit of a segment. `publishes`: whether segments are run alone and stored. Raises
        Unsupported."""
        self._engine, self._described, self._options, self._pace = engine, described, options, pace
        self._order = order
        self._states = {place.name: (place, held) for place, held in zip(described.linear, states, strict=True)}
        self._most, self._publishes = most_tokens, publishes
        ropes = engine.ropes(described)  # first: it runs the model, as all ranks must
        # The layout keeps the first weights' decay tables. Tuples and jumps use those of the weights at that time.
        tables = {place.name: engine.decays(place.name) for place in described.linear}
        decays = {name: table for name, table in tables.items() if table is not None}
        self.model = segments_model(described, ropes, decays, options)
        tokens, tuples = segment_tokens(described, options), segment_tuples(described, options)
        self._pages = Pages(self.model, tokens, engine.device, tuples)
        self._host = HostMemory(engine.device, tuple_memory(described, options))
        self._tokens_per_second = options.tokens_per_second
        self._told_shortage = False
        self._landings: dict[int, _Landing] = {}
        self._kept: Run | None = None  # a run between two parts
        self._fetched: queue.SimpleQueue[tuple[int, Fetched]] = queue.SimpleQueue()
        self._ran: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        # A complete run that waits for pages, and since when; used by the composer's thread only. The scheduler begins no
        # other run before this one is answered.
        self._unpublished: tuple[Run, float] | None = None
        self._open_answers = 0
        self._lock = threading.Lock()
        self._asked: queue.Queue[_Landing | Run | None] = queue.Queue()
        self._opening = Opening(self._open, described.identity.weights, options, "segments", State("segments"))
        self._thread = threading.Thread(target=self._serve, name="ashlar-compose", daemon=True)
        self._thread.start()

    def _open(self) -> ashlar.Cache:
        options, pages = self._options, self._pages
        return ashlar.Cache(
            self._described.named(dataclasses.replace(self.model, tokens_per_second=self._tokens_per_second)),
            options.rpc_socket, options.session_socket, name="vllm-segments", timeout_ms=options.call_ms,
            memory_kind=ashlar.MemoryKind.MEMFD, memfd=pages.descriptor, memory_bytes=pages.size, pages=pages.count,
            places=pages.places, land_ms=options.land_ms, quiet_ms=options.quiet_ms,
            epsilon=EPSILON[options.segment_dtype],
        )  # fmt: skip

    def close(self) -> None:
        for landing in self._landings.values():
            landing.abandoned = True
        self._asked.put(None)
        self._thread.join(timeout=3)
        self._opening.close()
        for landing in self._landings.values():
            self._drop(landing)
        self._host.close()
        self._pages.close()

    # ---- the engine's thread

    def fetch(self, fetch: Fetch, is_current: Callable[[], bool]) -> None:
        landing = self._landings[fetch.number] = _Landing(fetch, is_current)
        self._open_answers += 1
        self._asked.put(landing)

    def set_rate(self, tokens_per_second: float) -> None:
        """Reports a measured rate of prefill to the daemon before a later lookup, unless the options have a rate."""
        if not self._options.tokens_per_second:
            self._tokens_per_second = tokens_per_second
            self._opening.reopen()

    def release(self, numbers: Sequence[int]) -> None:
        """Releases the landed segments of these fetches."""
        for number in numbers:
            landing = self._landings.pop(number, None)
            if landing is not None:
                self._drop(landing)

    def _drop(self, landing: _Landing) -> None:
        with self._lock:  # either thread may drop it
            landing.abandoned = True
            pages, landing.pages = landing.pages, []
            memory, landing.memory = landing.memory, None
            segments, landing.segments = landing.segments, 0
        landing.tuples = {}
        if memory is not None:
            memory.give(landing.mark)
        self._pages.give(pages, landing.mark, segments)

    @property
    def busy(self) -> bool:
        """Returns whether the thread has not answered all fetches."""
        return self._open_answers > 0

    def take_fetched(self) -> dict[int, Fetched]:
        found: dict[int, Fetched] = {}
        while not self._fetched.empty():
            number, fetched = self._fetched.get()
            found[number] = fetched
            self._open_answers -= fetched.ended
        return found

    def take_ran(self) -> dict[int, int]:
        """Returns the runs that have ended, with answers as of WorkerReport.ran."""
        found: dict[int, int] = {}
        while not self._ran.empty():
            number, published = self._ran.get()
            found[number] = published
            self._open_answers -= 1
        return found

    def apply(self, jump: Jump) -> None:
        """Writes keys, values and states of a jump to the request's blocks. Call it before the forward of the step
        after it.

        The engine has already copied the running state to the block in which this step leaves its state. If the request
        has computed more tokens since, `jump.sources` has the states.
        """
        landing = self._landings[jump.fetch]
        assert landing.table is not None and landing.memory is not None
        targets = {}
        for group in self._described.key_groups:
            slots = self._engine.slots(jump.blocks[group], jump.begin, jump.end)
            # A window's earlier tokens have the null block, which is number 0.
            slots = landing.memory.copy(slots[slots >= self._described.block])
            targets[group] = slots.to(self._engine.device, non_blocking=True)
        for layer, name, group in self._described.keys:
            if len(targets[group]) > 0:
                rows = self._pages.rows(layer, landing.table, jump.end - len(targets[group]), jump.end)
                self._engine.put_keys(name, *rows, targets[group])
        whole = jump.end % self._described.block == 0
        for name, found in landing.tuples[jump.end].items():
            place, states = self._states[name]
            block = jump.blocks[place.group][jump.state_block]
            state = self._state(states, block, place)
            update = found.state_on(state.device)
            if jump.sources:
                state.copy_(self._state(states, jump.sources[place.group], place))
                states.tail(block).copy_(states.tail(jump.sources[place.group]))
            if found.transition is None:
                state.copy_(update)
            else:
                transition = found.transition.to(state.device, non_blocking=True)
                compose(state, transition, update, self._linear(place), self._engine.decays(name))
            if found.tail is not None:
                states.fill_tail(block, found.tail)
            # If the block that ends here is allocated, the engine's own cache names it.
            before = jump.blocks[place.group][self._described.count(jump.end) - 1]
            if whole and before not in (0, block):
                self._state(states, before, place).copy_(state)
                if found.tail is not None:
                    states.fill_tail(before, found.tail)
        landing.mark = self._order.mark()

    def run_alone(self, alone: Alone, is_current: Callable[[], bool]) -> None:
        """Runs a part of a segment from a zero state or from the state after the part before it, in blocks that belong
        to no request. After the last part, the thread publishes the segment.

        RanksApart: as of `Ranks.together`. Other errors end the run, on all ranks.
        """
        self._open_answers += 1
        ranks, forward, answer = self._engine.ranks, None, UNAVAILABLE
        run, self._kept = self._kept, None
        try:
            if not self._may_run(alone):
                answer = 0
            elif self._opening.cache is not None:
                run = Run(self._states, self.model) if alone.begin == 0 else run
                forward = None if run is None else run.prepare(alone, self._engine, is_current)
        except Exception as error:  # no request depends on it
            answer = 0
            logger.warning("Ashlar: cannot prepare to compute a segment alone: %s: %s", type(error).__name__, error)
        if not ranks.all(forward is not None) or run is None or forward is None:
            self._ran.put((alone.number, answer))
            return
        try:
            with ranks.together():
                forward()
                run.mark = self._order.mark()
        except RanksApart:
            raise
        except Exception as error:
            logger.warning("Ashlar: cannot compute a segment alone: %s: %s", type(error).__name__, error)
            self._ran.put((alone.number, 0))
            return
        if not run.complete:
            self._kept = run  # the next part comes after the thread's answer for this one
        self._asked.put(run)

    def _may_run(self, alone: Alone) -> bool:
        fits = len(alone.tokens) + 2 - alone.first <= self._pages.count * PAGE_TOKENS  # as in _publish
        return self._publishes and fits and len(alone.tokens) <= self._most and self._engine.has_tokens(alone.tokens)

    def keep_run(self, number: int) -> None:
        """Releases the computed parts of any other run than this one."""
        if self._kept is not None and self._kept.alone.number != number:
            self._kept = None

    def _state(self, states: States, block: int, place: LinearPlace) -> torch.Tensor:
        return states.state(block).view(state_shape(self._linear(place)))

    def _linear(self, place: LinearPlace) -> ashlar.Linear:
        return linear_of(self.model, place)

    # ---- the composer's thread

    def _serve(self) -> None:
        quiesced_at = 0.0
        while True:
            try:
                work = self._asked.get(timeout=None if self._unpublished is None else _PAGES_POLL)
            except queue.Empty:
                if time.monotonic() >= quiesced_at + _QUIESCED_POLL:
                    self._take_quiesced()
                    quiesced_at = time.monotonic()
                self._publish_waiting()
                continue
            if work is None:
                return
            self._take_quiesced()
            quiesced_at = time.monotonic()
            self._opening.refresh(self._pages.kept == 0)
            if isinstance(work, _Landing):
                self._answer(work)
            elif work.complete:
                self._unpublished = work, time.monotonic()
            else:
                self._end_run(work, lambda run: run.release_device(self._order))
            self._publish_waiting()

    def _answer(self, work: _Landing) -> None:
        number, fetched = work.fetch.number, Fetched(ended=True)
        try:
            if not work.abandoned:
                fetched = self._land(work)
        except NotLanded as reason:
            fetched.failure = str(reason)
        except Exception as error:  # the engine computes the request instead
            fetched.failure = f"{type(error).__name__}: {error}"
        if fetched.failure and not work.abandoned:
            logger.warning("Ashlar: a prompt is computed without its cached segments: %s", fetched.failure)
        fetched.seconds = time.monotonic() - work.since
        if work.abandoned or not fetched.jumps:
            self._drop(work)
        self._fetched.put((number, fetched))

    def _publish_waiting(self) -> None:
        """Publishes the run that waits, if pages are free for it. Landings do not wait for it."""
        if self._unpublished is None:
            return
        run, since = self._unpublished
        try:
            self._end_run(run, self._publish)
        except NotLanded as reason:
            waited = time.monotonic() - since
            if waited < min(_PAGES_WAIT, self._options.land_ms / 1000):
                return
            logger.warning(
                "Ashlar: a segment is not published: too few pages were free for %d ms: %s", waited * 1000, reason
            )
            self._ran.put((run.alone.number, NO_SPACE))
        self._unpublished = None

    def _end_run(self, run: Run, end: Callable[[Run], int]) -> None:
        """Answers for a part. NotLanded: too few pages are free."""
        try:
            answer = end(run)
        except NotLanded:
            raise
        except Exception as error:
            logger.warning("Ashlar: cannot publish a segment: %s: %s", type(error).__name__, error)
            answer = 0
        self._ran.put((run.alone.number, answer))

    def _take_quiesced(self) -> None:
        """Takes back kept pages to which the daemon no longer writes."""
        cache = self._opening.cache
        if cache is not None and self._pages.kept:
            quiesced = cache.take_quiesced_pages(self._pages.count)
            self._pages.kept -= len(quiesced)
            self._pages.give(quiesced)

    def _land(self, landing: _Landing) -> Fetched:
        cache, fetch, options = self._opening.cache, landing.fetch, self._options
        if cache is None:
            return Fetched(ended=True)
        with cache.start_begin(fetch.tokens, fetch.lengths, salt=fetch.salt) as lookup:  # without pages nothing lands
            verdict = await_plan(lookup, time.monotonic() + options.lookup_ms / 1000)
            if verdict == ashlar.Verdict.PENDING:
                return Fetched(ended=True, late=True)
            if verdict != ashlar.Verdict.OK:
                raise NotLanded("the lookup failed")
            found = Fetched(ended=True, missing=missing_segments(lookup.plan))
            hits = [step for step in lookup.plan.steps if step.kind is not StepKind.COMPUTE]
            paying = [step for step in hits if self._pays(step.end - step.begin)]
            found.refused = len(hits) - len(paying)
            wanted = self._fitting(paying)
            found.unfit = len(paying) - len(wanted)
            if not wanted:
                return found
            if len(wanted) < len(hits):
                lookup.drop_segments([step.segment for step in hits if step not in wanted and step.segment is not None])
            plan, entries = lookup.plan_bytes(), _entries(wanted)
            deadline = time.monotonic() + options.land_ms / 1000
            tokens = len(entries) * PAGE_TOKENS
            pages = self._pages.take(tokens, deadline, lambda: not landing.abandoned, len(wanted))
            table = np.full(-(-len(fetch.tokens) // PAGE_TOKENS), pages[0], np.int32)
            table[entries] = pages
            self._fetched.put((fetch.number, Fetched(ended=False)))
            return self._land_plan(cache, landing, plan, table, pages.tolist(), len(wanted), found)

    def _fitting(self, steps: list[Step]) -> list[Step]:
        """Returns the first steps that fit into all memory together. Ranks have memory for the same steps."""
        fitting: list[Step] = []
        entries: set[int] = set()
        for step in steps:
            entries.update(_entries([step]))
            if len(entries) > self._pages.count or len(fitting) == self._pages.tuples:
                break
            fitting.append(step)
        if len(fitting) < len(steps) and not self._told_shortage:
            self._told_shortage = True
            logger.warning(
                "Ashlar: a prompt's cached segments need space for %d tokens and %d tuples; only the first %d of %d "
                "segments are used; raise segment_tokens (%d), which has space for %d tuples",
                len(_entries(steps)) * PAGE_TOKENS, len(steps), len(fitting), len(steps),
                self._pages.count * PAGE_TOKENS, self._pages.tuples,
            )  # fmt: skip
        return fitting

    def _land_plan(
        self,
        cache: ashlar.Cache,
        landing: _Landing,
        plan: bytes,
        table: npt.NDArray[np.int32],
        pages: list[int],
        segments: int,
        landed: Fetched,
    ) -> Fetched:
        """Lands a plan of this number of segments. Returns `landed` with the jumps over all that landed; without jumps
        if nothing landed."""
        request: ashlar.Request | None = None
        memory = self._host.lease()
        try:
            request = cache.land(plan, table, wait=False)
            request.wait_plan()
            for _ in range(_TRIES):
                memory.give(None)  # a failed attempt's tuples
                steps = [(i, step) for i, step in enumerate(request.plan.steps) if step.kind is not StepKind.COMPUTE]
                if not steps:
                    return landed
                tuples = self._copy(request, steps, landing, memory)
                if tuples is not None and request.finish() == ashlar.Verdict.OK:
                    break
                if landing.abandoned or request.finish() == ashlar.Verdict.OTHER_PAGES:
                    raise NotLanded("pages are unresolved after a failed landing")
            else:
                raise NotLanded("the landing failed")
            if not landing.is_current():
                raise NotLanded("the weights have changed")
            tiers = {segment.tier for segment in request.plan.segments if segment.used and segment.tier}
            landed.tier = "ssd" if "ssd" in tiers else next(iter(tiers), "dram")
            landed.jumps = [(step.begin, step.end, step.kind is StepKind.CHECKPOINT) for _, step in steps]
            landing.tuples, landing.table = tuples, table
            return landed
        finally:
            is_quiesced = True
            if request is not None:
                request.cancel()
                is_quiesced = request.poll_quiesced() == ashlar.Verdict.OK
                request.end()
            if landed.jumps:
                landing.pages, landing.segments, landing.memory = pages, segments, memory
            else:
                memory.give(None)
                self._pages.give(pages if is_quiesced else [], None, segments)
                if not is_quiesced:
                    self._pages.kept += len(pages)

    def _pays(self, tokens: int) -> bool:
        """Returns whether a hit of this number of tokens saves more time than the step that it costs."""
        least = self._options.min_segment_tokens
        return tokens >= least if least else tokens > self._pace.break_even_tokens

    def _copy(
        self, request: ashlar.Request, steps: Sequence[tuple[int, Step]], landing: _Landing, memory: Lease
    ) -> dict[int, dict[str, LandedTuple]] | None:
        """Waits for all layers and copies the tuples of these steps. Returns None if something did not land, or the
        landing was abandoned."""
        for layer in range(len(self.model.layers)):
            while (verdict := request.poll_layer(layer)) == ashlar.Verdict.PENDING and not landing.abandoned:
                time.sleep(_POLL)
            if verdict != ashlar.Verdict.OK:
                return None
        found: dict[int, dict[str, LandedTuple]] = {}
        for number, step in steps:
            tuples = found[step.end] = {}
            for name, (place, _) in self._states.items():
                taken = self._take_tuple(request, number, step, place, memory)
                if taken is None:
                    return None
                tuples[name] = taken
        return found

    def _take_tuple(
        self, request: ashlar.Request, number: int, step: Step, place: LinearPlace, memory: Lease
    ) -> LandedTuple | None:
        shape = self._linear(place)
        state, transition = torch.empty(state_shape(shape)), torch.empty(transition_shape(shape))
        read = request.conv_tail(number, place.layer) if shape.conv_kernel else None
        if (read is None and shape.conv_kernel) or not request.read_tuple(number, place.layer, state, transition):
            return None
        tail = None if read is None else bytes_of(read)
        if step.kind is StepKind.CHECKPOINT:
            return landed_tuples.keep(memory, shape, state, None, tail)
        if shape.rope is not None:  # its family's states are [heads, d_k, d_v]
            keys = state.transpose(1, 2).reshape(-1, shape.d_k).double()
            turned = rotate(keys, shape.rope, step.begin - self.model.head)
            state.copy_(turned.float().view(-1, shape.d_v, shape.d_k).transpose(1, 2))
        return landed_tuples.keep(memory, shape, state, transition, tail)

    # ---- publishing

    def _publish(self, run: Run) -> int:
        """Returns the number of stored segments, or UNAVAILABLE. NotLanded: too few pages are free."""
        cache, alone = self._opening.cache, run.alone
        if run.mark is not None:
            run.mark.synchronize()
        if cache is None:
            return UNAVAILABLE
        if not all([is_current() for is_current in run.is_current]):
            return 0
        # A segment that is not the first follows a segment of one token, which is not published.
        before = [] if alone.first else [1]
        tokens = np.array([*([0] if before else []), *alone.tokens, 0], np.int32)
        try:
            table = self._pages.take(len(tokens), 0.0, lambda: True)  # without a wait, which would delay landings
        except NotLanded:
            run.release_device(self._order)  # it waits outside vLLM's budget of device memory
            raise
        quiesced = True
        try:
            with cache.start_begin(tokens, [*before, len(alone.tokens)], table, fill=True, salt=alone.salt) as request:
                if request.wait_plan() != ashlar.Verdict.OK:  # OTHER_PAGES: the cache may keep the pages
                    quiesced = request.poll_quiesced() == ashlar.Verdict.OK
                    return 0
                published = 0
                for number, missing in enumerate(request.missing):
                    captured = missing.capture_begin, missing.capture_end
                    if missing.segment != len(before) or captured != run.interior:
                        request.abandon(number)
                        continue
                    with self._order.copies():
                        for layer, name, _ in self._described.keys:
                            self._write(layer, run.keys[name], table)
                        linear = [self._tensors(cache, request, number, run, name) for name in self._states]
                    published += request.publish(number, linear, table) == "published"
                request.cancel()
                quiesced = request.poll_quiesced() == ashlar.Verdict.OK
                return published
        finally:
            if quiesced:
                self._pages.give(table.tolist())
            else:
                self._pages.kept += len(table)

    def _tensors(
        self, cache: ashlar.Cache, request: ashlar.Request, number: int, run: Run, name: str
    ) -> ashlar.LinearTensors:
        """Returns what is stored of a layer, in CPU memory. Call it in the context of copies."""
        place, _ = self._states[name]
        shape, rows, tail = self._linear(place), run.inputs[name].cpu(), None
        if shape.conv_kernel:
            tail = torch.nn.functional.pad(rows, (0, 0, shape.conv_kernel - 1 - len(rows), 0)).contiguous()
            if shape.conv_order is ashlar.TailOrder.CHANNEL_FIRST:
                tail = tail.T.contiguous()
        halves = shape.state_dtype is ashlar.DType.F16
        if name not in run.rows:
            state, *outputs = (each.cpu() for each in run.tuples.get(name) or (run.ends[name],))
            state, exponents = scaled_half(state) if halves else (state, None)
            names = dict(zip(("transition", "decay"), outputs))
            return ashlar.LinearTensors(place.layer, state, tail, exponents=exponents, **names)
        state = torch.empty(state_shape(shape), dtype=KEY_TYPES[shape.state_dtype])
        exponents = torch.empty(shape.value_heads, dtype=torch.int32) if halves else None
        made: dict[str, Any] = dict(transition=torch.empty(transition_shape(shape)), exponents=exponents)
        made["decay"] = torch.empty(shape.value_heads, shape.d_k)
        scales = dict(norm_epsilon=NORM_EPSILON, q_scale=shape.d_k**-0.5)
        cache.compute_alone(request, number, place.layer, state, **scales, **made, **run.rows[name])
        return ashlar.LinearTensors(place.layer, state, tail, **made)

    def _write(
        self, layer: int, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], table: npt.NDArray[np.int32]
    ) -> None:
        """Writes the keys and values of consecutive parts."""
        keys, values = (torch.cat([part.cpu() for part in each]) for each in zip(*parts))
        self._pages.write(layer, keys, values, table)


def _entries(steps: Sequence[Step]) -> list[int]:
    """Returns the entries of a page table to which the positions of these steps belong, ascending."""
    return sorted({each for step in steps for each in range(step.begin // PAGE_TOKENS, -(-step.end // PAGE_TOKENS))})
