# SPDX-License-Identifier: Apache-2.0
"""Assembles prompts from segments in a worker: publishes missing segments, lands hits, and composes them into the engine's
blocks.

The engine treats such a prompt as one whose first tokens are loaded from elsewhere. A thread talks to the daemon. Runs of
the model belong to the engine's thread, which makes one of them between two steps. Only that thread writes the engine's
blocks, and only during the load, so an abandoned load leaves no block unresolved.

Hits land in pages of this process first, because only the engine's writer knows the layout of the engine's blocks.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

import ashlar
from ashlar.request import StepKind
from ashlar.vllm.forward import Core, EngineModel
from ashlar.vllm.memory import States
from ashlar.vllm.messages import Compose
from ashlar.vllm.model import Described, LinearPlace
from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.segments import KEY_TYPES, NORM_EPSILON, PAGE_TOKENS, segments_model
from ashlar.vllm.state import State

logger = init_logger("vllm.ashlar")

_TRIES = 4  # plans; each takes less from the cache
_Result = TypeVar("_Result")


class LoadAbandoned(Exception):
    """The load failed or was abandoned; the engine computes the prompt."""


class Pages:
    """Memory of this process in which segments land, and from which they are published."""

    def __init__(self, model: ashlar.Model, tokens: int) -> None:
        self.count = -(-tokens // PAGE_TOKENS)
        self.places: list[ashlar.PagePlace] = []
        size = 0
        for index, layer in enumerate(model.layers):
            if isinstance(layer, ashlar.Attention):
                width = KEY_TYPES[layer.dtype].itemsize
                keys, values = layer.key_dim * width, layer.value_dim * width
                token = layer.kv_heads * (keys + values)
                place = ashlar.PagePlace(
                    index, size, size + layer.kv_heads * keys, token * PAGE_TOKENS, token, keys, values
                )
                self.places.append(place)
                size += -(-token * PAGE_TOKENS * self.count // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size = size
        self.descriptor = os.memfd_create("vllm-segments", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.free = list(range(self.count))

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclasses.dataclass
class Composed:
    """The result of a load."""

    request: str
    seconds: float
    done: bool
    cached: int = 0  # tokens that were taken from the cache
    published: int = 0
    tier: str = "dram"


@dataclasses.dataclass(eq=False)
class _Work:
    compose: Compose
    since: float
    jobs: queue.Queue[Callable[[], None]] = dataclasses.field(default_factory=queue.Queue)
    deadline: float = 0.0  # of its next progress, from when the thread begins it
    result: Composed | None = None  # set by the thread alone, once
    abandoned: bool = False


class Composer:
    """`start` and `poll` belong to the engine's thread."""

    def __init__(
        self,
        engine: EngineModel,
        described: Described,
        options: Options,
        states: list[States],
        most_tokens: int,
        publishes: bool,
    ) -> None:
        """`most_tokens`: of one run of the model. `publishes`: what is missing is computed alone and kept. Raises
        Unsupported."""
        self._engine, self._described, self._options = engine, described, options
        self._states = {place.name: (place, held) for place, held in zip(described.linear, states, strict=True)}
        self._most, self._publishes = most_tokens, publishes
        self.model = segments_model(described, engine.rope(), options)
        self._pages = Pages(self.model, options.segment_tokens)
        self._rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._paused_until = 0.0
        self._under_way: list[_Work] = []
        self._serving: _Work | None = None  # by the thread; the others wait for their turn
        self._generation = ""
        self._asked: queue.Queue[_Work | None] = queue.Queue()
        self._opening = Opening(self._open, described.identity.weights, options, "segments", State("segments"))
        self._thread = threading.Thread(target=self._serve, name="ashlar-compose", daemon=True)
        self._thread.start()

    def _open(self) -> ashlar.Cache:
        options, pages = self._options, self._pages
        return ashlar.Cache(
            self._described.named(self.model), options.rpc_socket, options.session_socket, name="vllm-segments", timeout_ms=options.call_ms,
            memory_kind=ashlar.MemoryKind.MEMFD, memfd=pages.descriptor, memory_bytes=pages.size, pages=pages.count,
            places=pages.places, capture_tokens=64, land_ms=options.land_ms, quiet_ms=options.quiet_ms,
        )  # fmt: skip

    def close(self) -> None:
        self._asked.put(None)
        for work in self._under_way:
            work.abandoned = True
        self._thread.join(timeout=3)
        self._opening.close()
        self._pages.close()

    # ---- the engine's thread

    def start(self, compose: Compose) -> None:
        work = _Work(compose, time.monotonic())
        self._under_way.append(work)
        self._asked.put(work)

    def begin_generation(self, generation: str) -> None:
        """Abandons the loads of another generation: the model's next run may use other weights, which their salt does not name."""
        if generation != self._generation:
            self._generation = generation
            self.abandon_all()

    def abandon_all(self) -> None:
        for work in self._under_way:
            work.abandoned = True

    def abandon(self, requests: Collection[str]) -> set[str]:
        """Abandons the loads of requests that have ended, and returns those requests."""
        ended = [work for work in self._under_way if work.compose.request in requests]
        for work in ended:
            work.abandoned = True
            self._under_way.remove(work)
        return {work.compose.request for work in ended}

    def poll(self) -> list[Composed]:
        """Runs the model once if a load waits for it. Returns the loads that have ended."""
        serving = self._serving
        if serving is not None:
            self._advance(serving)
        now, ended = time.monotonic(), []
        for work in list(self._under_way):
            result = work.result
            if work.abandoned and (result is None or result.done):  # also if it had ended before
                result = Composed(work.compose.request, now - work.since, False)
            if result is not None:
                self._under_way.remove(work)
                ended.append(result)
        return ended

    def _advance(self, serving: _Work) -> None:
        if not serving.abandoned and not serving.jobs.empty():
            serving.jobs.get_nowait()()
            serving.deadline = self._next_deadline()
        elif (now := time.monotonic()) > serving.deadline:
            logger.warning("Ashlar: assembling segments made no progress for %d ms", self._options.compose_ms)
            if not serving.abandoned:
                serving.abandoned, serving.deadline = True, self._next_deadline()
                self._paused_until = now + self._options.call_ms / 1000
                return
            for work in self._under_way:  # the thread hangs in the abandoned load
                work.abandoned = True

    def _next_deadline(self) -> float:
        return time.monotonic() + self._options.compose_ms / 1000

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    # ---- the other thread

    def _serve(self) -> None:
        while (work := self._asked.get()) is not None:
            if work.abandoned:
                continue
            work.deadline = self._next_deadline()
            self._serving = work
            result = Composed(work.compose.request, 0.0, False)
            try:
                self._assemble(work, result)
                result.done = True
            except LoadAbandoned as reason:
                if not work.abandoned:
                    logger.warning("Ashlar: a prompt is computed without its cached segments: %s", reason)
            except Exception as error:  # the engine computes the request instead
                logger.warning(
                    "Ashlar: a prompt is computed without its cached segments: %s: %s", type(error).__name__, error
                )
            result.seconds = time.monotonic() - work.since
            work.result = result
            self._serving = None

    def _between_steps(self, work: _Work, call: Callable[[], _Result]) -> _Result:
        """Has the engine's thread make the call, and returns its result."""
        ended = threading.Event()
        found: list[_Result] = []
        failed: list[BaseException] = []

        def job() -> None:
            try:
                found.append(call())
            except Exception as error:
                failed.append(error)
            ended.set()

        work.jobs.put(job)
        while not ended.wait(0.05):
            if work.abandoned:
                raise LoadAbandoned("abandoned")
        if failed:
            raise failed[0]
        return found[0]

    def _assemble(self, work: _Work, result: Composed) -> None:
        cache, compose = self._opening.cache, work.compose
        if cache is None or time.monotonic() < self._paused_until:
            raise LoadAbandoned("the cache is not open")
        if max(compose.lengths) > self._most:
            raise LoadAbandoned(
                f"a segment has {max(compose.lengths)} tokens; one step of the engine takes at most {self._most}"
            )
        table = self._take(cache, len(compose.tokens))
        request: ashlar.Request | None = None
        try:
            request = cache.start_begin(compose.tokens, compose.lengths, table, fill=self._publishes, salt=compose.salt)
            if request.wait_plan() != ashlar.Verdict.OK:
                raise LoadAbandoned("the lookup failed")
            result.published = self._fill(work, cache, request, table)
            for _ in range(_TRIES):
                if self._compose(work, cache, request, table):
                    result.cached = request.plan.cached_tokens
                    tiers = {segment.tier for segment in request.plan.segments if segment.used and segment.tier}
                    result.tier = "ssd" if "ssd" in tiers else next(iter(tiers), "dram")
                    return
            raise LoadAbandoned("the landing failed")
        finally:
            kept = True
            if request is not None:
                request.cancel()
                kept = request.poll_quiet() == ashlar.Verdict.OK
                request.end()
            if kept:
                self._pages.free += table.tolist()

    def _take(self, cache: ashlar.Cache, tokens: int) -> npt.NDArray[np.int32]:
        """Returns free pages for this many tokens."""
        pages, count = self._pages, -(-tokens // PAGE_TOKENS)
        if len(pages.free) < pages.count:
            pages.free += cache.take_quiesced_pages(pages.count)
        if count > len(pages.free):
            raise LoadAbandoned(f"{tokens} tokens; segment_tokens leaves {len(pages.free) * PAGE_TOKENS}")
        taken, pages.free = pages.free[:count], pages.free[count:]
        return np.array(taken, np.int32)

    def _page_rows(self, cache: ashlar.Cache, name: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if name not in self._rows:
            attention = self.model.layers[layer]
            assert isinstance(attention, ashlar.Attention)
            keys, values = (torch.from_numpy(each).view(KEY_TYPES[attention.dtype]) for each in cache.page_rows(layer))
            self._rows[name] = keys, values
        return self._rows[name]

    # ---- publishing

    def _fill(self, work: _Work, cache: ashlar.Cache, request: ashlar.Request, table: npt.NDArray[np.int32]) -> int:
        """Computes alone what is missing, and publishes it."""
        missing, published = request.missing, 0
        for number, run in enumerate(missing):
            rows, tails, ends, keys = self._between_steps(work, functools.partial(self._alone, work.compose, run))
            for layer, name in self._described.attention:
                self._write(self._page_rows(cache, name, layer), keys[name], table)
            linear = []
            for name, (place, _) in self._states.items():
                shape = self.model.layers[place.layer]
                assert isinstance(shape, ashlar.Linear)
                state, transition = ends[name], None
                if run.transition:
                    state = torch.empty_like(state)
                    transition = torch.empty(shape.value_heads, shape.d_k, shape.d_k)
                    cache.compute_alone(
                        request, number, place.layer, state, transition=transition, norm_epsilon=NORM_EPSILON,
                        q_scale=shape.d_k**-0.5, **rows[name],
                    )  # fmt: skip
                linear.append(ashlar.LinearTensors(place.layer, state, tails[name], transition))
            published += request.publish(number, linear, table) == "published"
        if missing and request.look_again(table) != ashlar.Verdict.OK:
            raise LoadAbandoned("the second lookup failed")
        return published

    def _alone(self, compose: Compose, run: ashlar.Run) -> tuple[dict[str, Any], ...]:
        """Runs a segment alone, in the request's own blocks: rows, tails, end states and keys by layer."""
        rows: dict[str, Any] = {}
        tails: dict[str, Any] = {}
        ends: dict[str, Any] = {}
        keys: dict[str, Any] = {}
        count = len(run.tokens)

        def at_linear(core: Core) -> None:
            place, states = self._states[core.name]
            block, layer = self._state_block(compose, place), self.model.layers[place.layer]
            assert isinstance(layer, ashlar.Linear)
            rows[core.name] = core.run_seen(0, count, block, fresh=True)
            tail = core.inputs_before(run.capture_end, layer.conv_kernel - 1)
            tails[core.name] = tail.T.contiguous() if layer.conv_order is ashlar.TailOrder.CHANNEL_FIRST else tail
            ends[core.name] = self._state(states, block, place).clone()

        def at_keys(name: str, key: torch.Tensor, value: torch.Tensor) -> None:
            keys[name] = key.clone(), value.clone()

        pages = compose.blocks[self._described.attention_group]
        self._engine.run(run.tokens, [(0, count)], pages, at_linear, at_keys)
        return rows, tails, ends, keys

    def _write(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        given: tuple[torch.Tensor, torch.Tensor],
        table: npt.NDArray[np.int32],
    ) -> None:
        where = np.arange(len(given[0]))
        pages, slots = (
            torch.from_numpy(table[where // PAGE_TOKENS].astype(np.int64)),
            torch.from_numpy(where % PAGE_TOKENS),
        )
        for there, values in zip(rows, given, strict=True):
            there[pages, slots] = values.view(len(values), *there.shape[2:])

    # ---- composing

    def _state_block(self, compose: Compose, place: LinearPlace) -> int:
        """Of the state behind the last token that is loaded: the engine goes on from there."""
        block = compose.blocks[place.group][(compose.tokens_loaded - 1) // self._described.block]
        if block == 0:
            raise LoadAbandoned("the engine allocated no block for a state")
        return block

    def _state(self, states: States, block: int, place: LinearPlace) -> torch.Tensor:
        shape = self.model.layers[place.layer]
        assert isinstance(shape, ashlar.Linear)
        return states.state(block).view(shape.value_heads, shape.d_k, shape.d_v)

    def _compose(self, work: _Work, cache: ashlar.Cache, request: ashlar.Request, table: npt.NDArray[np.int32]) -> bool:
        """Follows the request's plan. False: it has changed, as something did not land."""
        plan = request.plan
        computed = sum(end - begin for begin, end in plan.computed())
        if plan.cached_tokens == 0 or computed > self._most:
            raise LoadAbandoned(
                f"{plan.cached_tokens} tokens are cached and {computed} computed; the step does not match the plan"
            )
        for layer in range(len(self.model.layers)):
            if request.wait_layer(layer) != ashlar.Verdict.OK:
                return self._moved(request)
        landed = {name: self._page_rows(cache, name, layer) for layer, name in self._described.attention}
        if not self._between_steps(work, lambda: self._into_blocks(work.compose, request, plan, landed, table)):
            return self._moved(request)
        return request.finish() == ashlar.Verdict.OK or self._moved(request)

    def _moved(self, request: ashlar.Request) -> bool:
        if request.finish() == ashlar.Verdict.OTHER_PAGES:
            raise LoadAbandoned("pages are unresolved after a failed landing")
        return False

    def _into_blocks(
        self,
        compose: Compose,
        request: ashlar.Request,
        plan: ashlar.Plan,
        landed: dict[str, tuple[torch.Tensor, torch.Tensor]],
        table: npt.NDArray[np.int32],
    ) -> bool:
        """Keys and values of all cached steps; then the seams, through all layers in one batch of the engine's model."""
        pages, most = compose.blocks[self._described.attention_group], compose.tokens_loaded
        steps = [(number, step) for number, step in enumerate(plan.steps) if step.begin < most]
        for _, step in steps:
            if step.kind is not StepKind.COMPUTE:
                where = np.arange(step.begin, step.end)
                at = torch.from_numpy(table[where // PAGE_TOKENS].astype(np.int64))
                slots = torch.from_numpy(where % PAGE_TOKENS)
                for name, (keys, values) in landed.items():
                    self._engine.put_keys(
                        name, keys[at, slots], values[at, slots], self._engine.slots(pages, step.begin, step.end)
                    )
        whole = True

        def at_linear(core: Core | None, name: str) -> None:
            nonlocal whole
            place, states = self._states[name]
            block = self._state_block(compose, place)
            state, row = self._state(states, block, place), 0
            for number, step in steps:
                if step.kind is StepKind.COMPUTE:
                    count = min(step.end, most) - step.begin
                    assert core is not None
                    core.run(row, row + count, block, fresh=step.begin == 0)
                    row += count
                    continue
                if step.begin == 0:
                    state.zero_()
                whole = whole and self._take_step(request, number, step, place, state)
                tail = request.conv_tail(number, place.layer) if whole else None
                if tail is None:
                    whole = False
                    return
                states.fill_tail(block, tail)

        runs = [(step.begin, min(step.end, most)) for _, step in steps if step.kind is StepKind.COMPUTE]
        if runs:
            self._engine.run(compose.tokens, runs, pages, lambda core: at_linear(core, core.name))
        else:
            for name in self._states:
                at_linear(None, name)
        return whole

    def _take_step(
        self, request: ashlar.Request, number: int, step: ashlar.Step, place: LinearPlace, state: torch.Tensor
    ) -> bool:
        return request.advance(place.layer, step.begin, step.end, state) == ashlar.Verdict.OK
