"""A prompt that is being set (ashlar/engine.h), and what is said of it: its plan, and the tensors of computed runs."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ashlar import _ashlar
from ashlar._ashlar import Verdict


Array = Any  # with __dlpack__
Pages = npt.NDArray[np.int32]


class StepKind(enum.Enum):
    COMPUTE = 1  # run tokens [begin, end) through the model
    CHECKPOINT = 2  # taken from the cache: states replace the running ones
    INTERIOR = 3  # taken from the cache: composed onto the running states


_STEP_KINDS = (StepKind.COMPUTE, StepKind.COMPUTE, StepKind.CHECKPOINT, StepKind.INTERIOR)  # by number


class Step(NamedTuple):
    kind: StepKind
    begin: int
    end: int
    capture: bool  # the daemon asks for the states behind this step
    segment: int | None  # taken from the cache; None: a prefix beyond segments, or computed


class Segment(NamedTuple):
    start: int
    tokens: int
    bytes: int
    miss: str | None  # why it has to be computed; None: hit
    tier: str | None  # of the hit
    used: bool  # the plan takes it from the cache


class Plan(NamedTuple):
    """Steps lie one behind the other and cover the prompt."""

    steps: tuple[Step, ...]
    segments: tuple[Segment, ...]
    prefix_tokens: int
    cached_tokens: int
    own: bool
    exact: bool
    prefix_tier: str | None  # the farthest that any of the prefix lies in

    def computed(self) -> list[tuple[int, int]]:
        """The positions to run through the model."""
        return [(step.begin, step.end) for step in self.steps if step.kind is StepKind.COMPUTE]


@dataclasses.dataclass(frozen=True)
class Run:
    """Tokens worth computing alone, from a zero state at position 0, for `Request.publish`."""

    tokens: Pages
    segment: int
    capture_begin: int
    capture_end: int
    transition: bool


@dataclasses.dataclass(frozen=True)
class LinearTensors:
    """One linear layer's state, the convolution's last inputs, and for a run with a transition that (float32).

    State and tail may lie in an engine's blocks: each head, and each row of the tail, dense and equally far apart.
    """

    layer: int
    state: Array
    conv_tail: Array | None = None
    transition: Array | None = None
    decay: Array | None = None
    exponents: Array | None = None


@dataclasses.dataclass(frozen=True)
class ComputedRun:
    """A run of `Request.missing`, computed: its number there, its tensors, and the pages of its keys and values."""

    missing: int
    linear: Sequence[LinearTensors]
    page_table: Sequence[int] | npt.ArrayLike | None = None
    first_position: int = 0


def pages_of(table: Sequence[int] | npt.ArrayLike | None) -> Pages | None:
    return None if table is None else np.ascontiguousarray(table, dtype=np.int32)


def needed_pages(table: Sequence[int] | npt.ArrayLike) -> Pages:
    return np.ascontiguousarray(table, dtype=np.int32)


class Request:
    """A prompt being set. Belongs to one thread at a time; `with` ends it, as does the last reference to it."""

    def __init__(self, handle: _ashlar.Request) -> None:
        self._handle = handle

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.end()
        return False

    def end(self) -> None:
        """Cancels what is under way and gives back the lease. Pages in doubt come by `Cache.take_quiet_pages`."""
        self._handle.end()

    @property
    def plan(self) -> Plan:
        steps, segments, *rest = self._handle.plan()
        return Plan(
            tuple([Step(_STEP_KINDS[step[0]], *step[1:]) for step in steps]), tuple(map(Segment._make, segments)), *rest
        )

    @property
    def missing(self) -> list[Run]:
        """Runs to compute and publish, of a request begun with `fill`. Then call `look_again`."""
        return [Run(**{**run, "tokens": np.array(run["tokens"], np.int32)}) for run in self._handle.missing()]

    def publish(
        self,
        missing: int,
        linear: Sequence[LinearTensors],
        page_table: Sequence[int] | npt.ArrayLike | None = None,
        first_position: int = 0,
    ) -> str:
        """Hands over a computed run. Returns the outcome: "published", or why the cache does not keep it."""
        return self._handle.publish(missing, list(linear), pages_of(page_table), first_position)

    def publish_many(self, runs: Sequence[ComputedRun]) -> list[str]:
        """Hands over small runs by one call to the daemon, each in pages of its own. Returns an outcome for each."""
        return self._handle.publish_many(
            [(run.missing, list(run.linear), pages_of(run.page_table), run.first_position) for run in runs]
        )

    def abandon(self, missing: int) -> None:
        self._handle.abandon(missing)

    @property
    def elsewhere(self) -> int:
        """How many segments other engines compute for this prompt, of a request begun with `cold_parallel`."""
        return self._handle.elsewhere()

    def wait_cold(self, timeout_ms: int) -> Verdict:
        """Waits for segments that other engines compute; needed where `elsewhere` is not 0.

        RESTART: `missing` lists more at its end, whose engines have failed; compute them, and call it again. PENDING:
        not all have come in time. OK: nothing is left to wait for. Then `look_again`, which takes what is there.
        """
        return self._handle.wait_cold(timeout_ms)

    def look_again(self, page_table: Sequence[int] | npt.ArrayLike) -> Verdict:
        return self._handle.look_again(needed_pages(page_table))

    def wait_plan(self) -> Verdict:
        return self._handle.wait_plan()

    def poll_plan(self) -> Verdict:
        return self._handle.poll_plan()

    def wait_layer(self, layer: int) -> Verdict:
        """Waits for a layer's cached keys, values and tuples. RESTART: they will not come; call `finish`."""
        return self._handle.wait_layer(layer)

    def poll_layer(self, layer: int) -> Verdict:
        return self._handle.poll_layer(layer)

    def advance(
        self,
        layer: int,
        begin: int,
        end: int,
        state: Array,
        *,
        q: Array | None = None,
        k: Array | None = None,
        v: Array | None = None,
        g: Array | None = None,
        beta: Array | None = None,
        out: Array | None = None,
        exponents: Array | None = None,
        copies: Sequence[tuple[int, Array]] = (),
        norm_epsilon: float = 0.0,
        q_scale: float = 1.0,
    ) -> Verdict:
        """Advances a linear layer over positions [begin, end): cached steps are composed, rows run between them.

        Rows are float32, [tokens of the computed positions, ...]. `state` goes in as it is behind `begin` and comes out
        as it is behind `end`. `copies`: (position, array) pairs that get the states behind those positions. States may
        lie in an engine's blocks: each head dense, heads equally far apart. With `norm_epsilon` each head's q and k are
        multiplied by 1 / sqrt(sum of squares + norm_epsilon) first; then q by `q_scale`.
        """
        return self._handle.advance(
            layer, begin, end, state, q, k, v, g, beta, out, exponents, list(copies), norm_epsilon, q_scale
        )

    def conv_tail(self, step: int, layer: int) -> bytes | None:
        """The convolution's last inputs behind a step that is taken from the cache."""
        return cast("bytes | None", self._handle.conv_tail(step, layer))

    def finish(self) -> Verdict:
        """The verdict; no token may be emitted before it. RESTART: compute the new plan. OTHER_PAGES: `move` first."""
        return self._handle.finish()

    def poll_finish(self) -> Verdict:
        return self._handle.poll_finish()

    async def finish_async(self) -> Verdict:
        return await asyncio.to_thread(self._handle.finish)

    async def wait_plan_async(self) -> Verdict:
        return await asyncio.to_thread(self._handle.wait_plan)

    async def wait_layer_async(self, layer: int) -> Verdict:
        return await asyncio.to_thread(self._handle.wait_layer, layer)

    async def look_again_async(self, page_table: Sequence[int] | npt.ArrayLike) -> Verdict:
        return await asyncio.to_thread(self._handle.look_again, needed_pages(page_table))

    async def publish_async(
        self,
        missing: int,
        linear: Sequence[LinearTensors],
        page_table: Sequence[int] | npt.ArrayLike | None = None,
        first_position: int = 0,
    ) -> str:
        return await asyncio.to_thread(self.publish, missing, linear, page_table, first_position)

    async def publish_many_async(self, runs: Sequence[ComputedRun]) -> list[str]:
        return await asyncio.to_thread(self.publish_many, runs)

    async def wait_cold_async(self, timeout_ms: int) -> Verdict:
        return await asyncio.to_thread(self._handle.wait_cold, timeout_ms)

    def move(self, page_table: Sequence[int] | npt.ArrayLike) -> Verdict:
        return self._handle.move(needed_pages(page_table))

    def lose(self, segments: Sequence[int]) -> Verdict:
        """Gives up segments that another rank has missed."""
        return self._handle.lose(list(segments))

    @property
    def pages_kept(self) -> bool:
        return self._handle.pages_kept()

    def cancel(self) -> None:
        self._handle.cancel()

    def poll_quiet(self) -> Verdict:
        return self._handle.poll_quiet()

    def release(self) -> None:
        """Gives back the lease while the request stays, for `Cache.commit`."""
        self._handle.release()

    def plan_bytes(self) -> bytes:
        """The plan for another process (`Cache.land`); empty: no hit."""
        return self._handle.plan_bytes()
