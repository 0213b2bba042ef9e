"""The engine API (ashlar/engine.h) for Python.

Arrays are anything with DLPack: NumPy, torch on the processor, JAX. None is copied; a call that waits releases the GIL
and keeps its arrays alive until it returns. A call that waits has an `async` form, which waits on a thread of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ashlar import _ashlar
from ashlar._ashlar import Verdict
from ashlar.model import Attention, DType, Model

Array = Any  # with __dlpack__
Pages = npt.NDArray[np.int32]

# NumPy has no bfloat16 and no 8-bit floats: those are seen as integers of their size.
_NUMPY_TYPES: dict[DType, Any] = {
    DType.F32: np.float32,
    DType.F16: np.float16,
    DType.BF16: np.uint16,
    DType.F8E4M3: np.uint8,
    DType.F8E5M2: np.uint8,
}


class MemoryKind(enum.Enum):
    """Where the engine's pages are: nowhere (a scheduler), in memory that the daemon makes, or in the engine's memfd."""

    NONE = 0
    HOSTED = 1
    MEMFD = 2


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
class PagePlace:
    """Bytes: head h of the token in slot s of page p lies at offset + p·page_stride + s·token_stride + h·head_stride."""

    layer: int
    key_offset: int
    value_offset: int
    page_stride: int
    token_stride: int
    key_head_stride: int
    value_head_stride: int
    key_scale_offset: int = 0
    value_scale_offset: int = 0
    scale_page_stride: int = 0
    scale_token_stride: int = 0
    scale_head_stride: int = 0


@dataclasses.dataclass(frozen=True)
class _Options:
    model: Model
    rpc_socket: str
    session_socket: str
    name: str
    timeout_ms: int
    memory_kind: int
    pages: int
    places: Sequence[PagePlace]
    memory_bytes: int
    memfd: int
    capture_tokens: int
    epsilon: float
    land_ms: int
    quiet_ms: int
    compose_in_daemon: bool


def _pages(table: Sequence[int] | npt.ArrayLike | None) -> Pages | None:
    return None if table is None else np.ascontiguousarray(table, dtype=np.int32)


def _needed(table: Sequence[int] | npt.ArrayLike) -> Pages:
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
        return self._handle.publish(missing, list(linear), _pages(page_table), first_position)

    def abandon(self, missing: int) -> None:
        self._handle.abandon(missing)

    def look_again(self, page_table: Sequence[int] | npt.ArrayLike) -> Verdict:
        return self._handle.look_again(_needed(page_table))

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
        return await asyncio.to_thread(self._handle.look_again, _needed(page_table))

    async def publish_async(
        self,
        missing: int,
        linear: Sequence[LinearTensors],
        page_table: Sequence[int] | npt.ArrayLike | None = None,
        first_position: int = 0,
    ) -> str:
        return await asyncio.to_thread(self.publish, missing, linear, page_table, first_position)

    def move(self, page_table: Sequence[int] | npt.ArrayLike) -> Verdict:
        return self._handle.move(_needed(page_table))

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


class Cache:
    """One session with the node's daemon, one opened model, one memory of pages. Thread-safe."""

    def __init__(
        self,
        model: Model,
        rpc_socket: str,
        session_socket: str,
        *,
        pages: int = 0,
        name: str = "python",
        timeout_ms: int = 5000,
        memory_kind: MemoryKind = MemoryKind.HOSTED,
        places: Sequence[PagePlace] = (),
        memory_bytes: int = 0,
        memfd: int = -1,
        capture_tokens: int = 0,
        epsilon: float = 1e-6,
        land_ms: int = 5000,
        quiet_ms: int = 10000,
        compose_in_daemon: bool = False,
    ) -> None:
        self.model = model
        self._handle = _ashlar.open(
            _Options(
                model=model,
                rpc_socket=rpc_socket,
                session_socket=session_socket,
                name=name,
                timeout_ms=timeout_ms,
                memory_kind=memory_kind.value,
                pages=pages,
                places=places,
                memory_bytes=memory_bytes,
                memfd=memfd,
                capture_tokens=capture_tokens,
                epsilon=epsilon,
                land_ms=land_ms,
                quiet_ms=quiet_ms,
                compose_in_daemon=compose_in_daemon,
            )
        )
        if doubt := self._handle.warning():
            warnings.warn(doubt, stacklevel=2)
        self.places = [PagePlace(**place) for place in self._handle.places()]
        self.pages = pages

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False

    def close(self) -> None:
        """Ends the session once the last request has ended, too. Arrays of the memory must not be used any more."""
        self._handle.close()

    @property
    def connected(self) -> bool:
        return self._handle.connected()

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All of the memory, in place. The array keeps the handle alive."""
        return self._handle.memory()

    def page_rows(self, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys and values of an attention layer, in place: [pages, page_tokens, heads, dim] each."""
        attention = self.model.layers[layer]
        if not isinstance(attention, Attention):
            raise ValueError(f"layer: {layer} is no attention layer")
        place = next(place for place in self.places if place.layer == layer)
        kind, heads = np.dtype(_NUMPY_TYPES[attention.dtype]), attention.kv_heads
        memory = self.memory

        def view(offset: int, head_stride: int, dim: int) -> npt.NDArray[Any]:
            return np.ndarray(
                shape=(self.pages, self.model.page_tokens, heads, dim),
                dtype=kind,
                buffer=memory,
                offset=offset,
                strides=(place.page_stride, place.token_stride, head_stride, kind.itemsize),
            )

        return (
            view(place.key_offset, place.key_head_stride, attention.key_dim),
            view(place.value_offset, place.value_head_stride, attention.value_dim),
        )

    def _begin(
        self,
        wait: bool,
        tokens: Sequence[int] | npt.ArrayLike,
        segments: Sequence[int],
        page_table: Sequence[int] | npt.ArrayLike | None,
        fill: bool,
        conversation: bytes,
        needed_in_ms: int,
        media: Sequence[tuple[int, bytes]],
    ) -> Request:
        handle = self._handle.begin(
            _needed(tokens), list(segments), _pages(page_table), fill, conversation, needed_in_ms, list(media), wait
        )
        return Request(handle)

    def begin(
        self,
        tokens: Sequence[int] | npt.ArrayLike,
        segments: Sequence[int] = (),
        page_table: Sequence[int] | npt.ArrayLike | None = None,
        *,
        fill: bool = False,
        conversation: bytes = b"",
        needed_in_ms: int = 0,
        media: Sequence[tuple[int, bytes]] = (),
    ) -> Request:
        """Looks a prompt up and lands the hits. `segments`: the lengths of its segments, from position 0 on."""
        return self._begin(True, tokens, segments, page_table, fill, conversation, needed_in_ms, media)

    def start_begin(
        self,
        tokens: Sequence[int] | npt.ArrayLike,
        segments: Sequence[int] = (),
        page_table: Sequence[int] | npt.ArrayLike | None = None,
        *,
        fill: bool = False,
        conversation: bytes = b"",
        needed_in_ms: int = 0,
        media: Sequence[tuple[int, bytes]] = (),
    ) -> Request:
        """`begin` without waiting: the plan is known once `Request.poll_plan` says OK."""
        return self._begin(False, tokens, segments, page_table, fill, conversation, needed_in_ms, media)

    async def begin_async(
        self,
        tokens: Sequence[int] | npt.ArrayLike,
        segments: Sequence[int] = (),
        page_table: Sequence[int] | npt.ArrayLike | None = None,
        **options: Any,
    ) -> Request:
        request = self.start_begin(tokens, segments, page_table, **options)
        await request.wait_plan_async()
        return request

    def land(
        self, plan: bytes, page_table: Sequence[int] | npt.ArrayLike, *, present_tokens: int = 0, wait: bool = True
    ) -> Request:
        """Lands a plan that another process began (`Request.plan_bytes`), for this process's shard.

        `present_tokens`: the keys and values of so many first tokens stand in the pages already; a prefix's whole blocks
        among them are not written.
        """
        return Request(self._handle.land(plan, _needed(page_table), present_tokens, wait))

    def compute_alone(
        self,
        request: Request,
        missing: int,
        layer: int,
        state: Array,
        *,
        q: Array | None = None,
        k: Array | None = None,
        v: Array | None = None,
        g: Array | None = None,
        beta: Array | None = None,
        out: Array | None = None,
        transition: Array | None = None,
        decay: Array | None = None,
        norm_epsilon: float = 0.0,
        q_scale: float = 1.0,
    ) -> None:
        """One linear layer of a missing run, from a zero state, by kernels of this process.

        Fills state, transition, and the product of the decays where it is asked for: [value_heads, d_k].
        """
        self._handle.compute_alone(
            request._handle, missing, layer, state, q, k, v, g, beta, out, transition, decay, norm_epsilon, q_scale
        )

    def commit(
        self,
        tokens: Sequence[int] | npt.ArrayLike,
        checkpoints: Sequence[tuple[int, Sequence[LinearTensors]]],
        *,
        request: Request | None = None,
        prompt_tokens: int | None = None,
        page_table: Sequence[int] | npt.ArrayLike | None = None,
        conversation: bytes = b"",
        composed: bool = False,
        media: Sequence[tuple[int, bytes]] = (),
    ) -> list[str]:
        """Offers the states of a text that was run through the model, for later texts to resume from.

        `checkpoints`: (depth, every linear layer's tensors), depths ascending, the last one the text's length. Returns
        an outcome for each: "kept", or why the cache does not keep it.
        """
        text = _needed(tokens)
        return self._handle.commit(
            None if request is None else request._handle,
            text,
            len(text) if prompt_tokens is None else prompt_tokens,
            [(depth, list(linear)) for depth, linear in checkpoints],
            _pages(page_table),
            conversation,
            composed,
            list(media),
        )

    async def commit_async(
        self,
        tokens: Sequence[int] | npt.ArrayLike,
        checkpoints: Sequence[tuple[int, Sequence[LinearTensors]]],
        **options: Any,
    ) -> list[str]:
        return await asyncio.to_thread(self.commit, tokens, checkpoints, **options)

    def stored(self) -> dict[str, int]:
        """The sizes of the segments that this engine has published."""
        return self._handle.stored()

    def take_quiet_pages(self, most: int, timeout_ms: int = 0) -> list[int]:
        """Pages that requests left in doubt, and that nothing writes to any more."""
        return self._handle.take_quiet_pages(most, timeout_ms)
