# SPDX-License-Identifier: Apache-2.0
"""Requests (ashlar/engine.h): a prompt, its plan, and the tensors of computed runs."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ashlar import _ashlar
from ashlar._ashlar import Verdict
from ashlar.started import Started

Array = Any  # an object with __dlpack__
Pages = npt.NDArray[np.int32]


class StepKind(enum.Enum):
    """What to do in a step of a plan."""

    COMPUTE = 1  # run tokens [begin, end) through the model
    CHECKPOINT = 2  # take [0, end) from the cache and replace the running states by its states
    INTERIOR = 3  # take [begin, end) from the cache and compose it onto the running states


_STEP_KINDS = (StepKind.COMPUTE, StepKind.COMPUTE, StepKind.CHECKPOINT, StepKind.INTERIOR)  # indexed by step number


class Step(NamedTuple):
    """One step of a plan: positions [begin, end) of the prompt."""

    kind: StepKind
    begin: int
    end: int
    capture: bool  # capture the states at `end` for `Cache.commit`
    segment: int | None  # the cached segment; None: computed, or a prefix that is not a segment


class Segment(NamedTuple):
    """One segment of a prompt, as looked up."""

    start: int  # position of its first token in the prompt
    tokens: int
    bytes: int  # size of the cached object
    miss: str | None  # reason of the miss; None: hit
    tier: str | None  # tier of the hit
    used: bool  # whether the plan takes it from the cache


class Plan(_ashlar.Plan):
    """The steps of a prompt, in order. They cover it. A plan is a copy, and does not change with the request."""

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple([Step(_STEP_KINDS[step[0]], *step[1:]) for step in self.raw_steps()])

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(map(Segment._make, self.raw_segments()))

    def computed(self) -> list[tuple[int, int]]:
        """Returns the positions to run through the model: [begin, end) of each computed step."""
        return [(step.begin, step.end) for step in self.steps if step.kind is StepKind.COMPUTE]

    def _fields(self) -> tuple[Any, ...]:
        prefix = self.prefix_tokens, self.prefix_span_tokens, self.shared_prefix_tokens, self.prefix_tier
        return (self.steps, self.segments, self.cached_tokens, self.own, self.exact, *prefix)

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        prefix = "prefix_tokens prefix_span_tokens shared_prefix_tokens prefix_tier"
        names = f"steps segments cached_tokens own exact {prefix}".split()
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in zip(names, self._fields(), strict=True))})"


@dataclasses.dataclass(frozen=True)
class Run:
    """A segment to compute separately, from a zero state at position 0, for `Request.publish`."""

    tokens: Pages  # the tokens to run: [tokens]
    segment: int  # index of the segment in the prompt
    # The tuple to publish covers tokens [capture_begin, capture_end) of the run.
    capture_begin: int
    capture_end: int
    transition: bool  # whether to publish the transition; the state is then zero at capture_begin


@dataclasses.dataclass(frozen=True)
class LinearTensors:
    """The tensors of one linear layer, in host memory. The caller may change them after the call that takes them.

    Each head of the state, and each row of the tail, is dense; heads and rows are at equal distances. So they may be
    views of an engine's blocks. An opaque layer has only `state`: `state_bytes` bytes, dense.
    """

    layer: int  # index into Model.layers
    state: Array  # [value_heads, d_k, d_v], or [value_heads, d_v, d_k] by Linear.order; in Linear.state_dtype
    conv_tail: Array | None = None  # inputs of the last conv_kernel − 1 tokens, by conv_order; in conv_dtype, or bytes
    # Only for a run with a transition: float32, dense. DeltaNet, GDN, KDA: [value_heads, d_k, d_k] in the state's
    # order. RetNet, Lightning, Mamba-2: logarithms, [value_heads]. GLA: logarithms, [value_heads, d_k]. Mamba-1: sums
    # of dt, [value_heads, d_v].
    transition: Array | None = None
    # Product of the tokens' decays, [value_heads, d_k], float32; with it, dense transitions may be stored smaller.
    decay: Array | None = None
    exponents: Array | None = None  # [value_heads], int32; only for float16 states


@dataclasses.dataclass(frozen=True)
class SpanRows:
    """The inputs of one linear layer for the tokens of a span, float32, one dense row per token (KVBuffer §6).

    Shapes: `k` [tokens, key_heads · d_k], `v` [tokens, value_heads · d_v], `g` and `beta` as in `Request.advance`,
    `conv_inputs` [tokens, conv_channels]. None: the family, or the layer, has no such inputs.
    """

    layer: int  # index into Model.layers
    k: Array
    v: Array
    g: Array | None = None
    beta: Array | None = None
    conv_inputs: Array | None = None


@dataclasses.dataclass(frozen=True)
class ComputedRun:
    """A computed run, for `Request.publish_many`."""

    missing: int  # index into Request.missing
    linear: Sequence[LinearTensors]  # every linear layer
    page_table: Sequence[int] | npt.ArrayLike | None = None  # pages of its keys and values
    first_position: int = 0  # slot of the run's token 0, counted from the start of the page table


class PageShortage(NamedTuple):
    """The pages that `Request.admit` needs and lacks. Every page is free, reclaimable or held."""

    needed: int  # in addition to the pages that the request's segments already have
    free: int
    reclaimable: int  # pages of segments that no request references
    held: int  # pages of running requests, or of segments that this request would share


class SharedSegment(NamedTuple):
    """One segment of an admitted request: token i is at slot `first_slot` + i of `pages`.

    Tokens [first_token, end_token) are in shared pages; the others are the request's own. Rotated keys are rotated to
    their slot.
    """

    first_slot: int
    first_token: int
    end_token: int
    pages: list[int]  # -1: a page that is not shared


class Request(_ashlar.Request):
    """A prompt, from `Cache.begin`. Use it from one thread at a time. It ends with its `with` block or its last
    reference.

    Calls return a Verdict. OK: done. PENDING: not yet; call again. RESTART: the plan has changed; compute it again from
    its first step. OTHER_PAGES: like RESTART, but `move` to other pages, or call `admit`, first. RuntimeError: a call at
    the wrong time.
    """

    plan_type = Plan

    if TYPE_CHECKING:  # the object of the compiled module, whose type is not declared

        @property
        def plan(self) -> Plan: ...

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.end()
        return False

    @property
    def missing(self) -> list[Run]:
        """The runs to compute if the request was begun with `fill`. Publish or abandon each, then call `look_again`."""
        return [Run(**{**run, "tokens": np.array(run["tokens"], np.int32)}) for run in self.raw_missing()]

    def publish(
        self,
        missing: int,
        linear: Sequence[LinearTensors],
        page_table: Sequence[int] | npt.ArrayLike | None = None,
        first_position: int = 0,
    ) -> str:
        """Publishes a computed run. Returns "published", or why the cache does not keep it.

        `missing`: index into `Request.missing`. `linear`: the tensors of every linear layer. `page_table`: pages of the
        run's keys and values, whose token 0 is at slot `first_position` of the table. The caller may change tensors and
        pages after the call.
        """
        return self.raw_publish(missing, linear, page_table, first_position)

    def publish_many(self, runs: Sequence[ComputedRun]) -> list[str]:
        """Publishes several small runs with one call to the daemon. Each run is in separate pages. Returns the outcome
        of each, as `publish`. If the call raises, nothing was published."""
        return self.raw_publish_many(runs)

    def admit(self, own_pages: int) -> PageShortage | None:
        """Obtains the shared pages of the prompt's segments and prefix, and `own_pages` pages for all other tokens.

        For a cache with `share_in_place`; call it before `wait_layer`, and again after `look_again`, RESTART and
        OTHER_PAGES. The prefix's tokens after `Plan.shared_prefix_tokens` land on the first own pages. Further calls
        raise the number of own pages to `own_pages`. Returns None, or the shortage; in that case nothing has changed.
        The pages return to the daemon when the request ends. ConnectionError: the daemon did not answer or is busy.
        RuntimeError: requests from before a reconnect still run; end them.
        """
        shortage: Any = self.raw_admit(own_pages)
        return None if shortage is None else PageShortage(*shortage)

    @property
    def shared_segments(self) -> list[SharedSegment]:
        """The places of an admitted request's segments, one per segment of the prompt; empty before `admit`.

        Segments that neither the plan reads nor the engine fills have no pages.
        """
        return [SharedSegment(*segment) for segment in self.raw_shared_segments()]

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
        """Advances a linear layer over positions [begin, end): composes cached steps, and computes the rows between
        them.

        Rows are float32, one per computed token, at any distance: `q`, `k` [tokens, key_heads, d_k]; `v` and `out`
        [tokens, value_heads, d_v]; `g` the log decays, [tokens, value_heads] (GDN) or [tokens, value_heads, d_k] (GLA,
        KDA); `beta` [tokens, value_heads] (DeltaNet, GDN, KDA; dt of Mamba-2) or [tokens, value_heads, d_v] (dt of
        Mamba-1). `out` is written. It requires `q`.

        `state`: as in `LinearTensors`, but float32, bfloat16, or float16 with `exponents`, int32, [value_heads]. It is
        read as the state before position `begin`, and written as that before `end`. `copies`: (position, array) pairs,
        ascending; each array receives the state at its position. With `norm_epsilon`, each head's q and k are first
        multiplied by 1 / sqrt(sum of squares + norm_epsilon), then q by `q_scale`.

        [begin, end) must contain each cached step entirely or not at all. RESTART: a hit failed to land; states and
        `out` are then undefined. Abandon the plan and call `finish`.
        """
        return self.raw_advance(
            layer, begin, end, state, q, k, v, g, beta, out, exponents, copies, norm_epsilon, q_scale
        )

    async def finish_async(self) -> Verdict:
        return await asyncio.to_thread(self.finish)

    async def wait_plan_async(self) -> Verdict:
        return await asyncio.to_thread(self.wait_plan)

    async def wait_layer_async(self, layer: int) -> Verdict:
        return await asyncio.to_thread(self.wait_layer, layer)

    async def look_again_async(self, page_table: Sequence[int] | npt.ArrayLike) -> Verdict:
        return await asyncio.to_thread(self.look_again, page_table)

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

    def start_wait_cold(self, timeout_ms: int) -> Started[Verdict]:
        """Like `wait_cold`, but does not wait. Until it is over, other calls on the request return PENDING; `end` stops
        it."""
        job = self.raw_start_wait_cold(timeout_ms)
        return Started(job, lambda: cast(Verdict, job.result(False)))

    async def wait_cold_async(self, timeout_ms: int) -> Verdict:
        return await asyncio.to_thread(self.wait_cold, timeout_ms)
