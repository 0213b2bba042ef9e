# SPDX-License-Identifier: Apache-2.0
"""The engine API (ashlar/engine.h) for Python.

Arrays are objects with DLPack in host memory: NumPy, torch on the CPU, JAX. They are not copied. A blocking call
releases the GIL and keeps its arrays alive until it returns; the caller must not change them meanwhile. Its `async`
form takes the same arguments and waits on a separate thread. The package `ashlar` lists the exceptions of all calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import inspect
import os
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt

from ashlar import _ashlar
from ashlar._ashlar import Verdict, whole
from ashlar.model import Attention, DType, Model, Opaque
from ashlar.request import Array, LinearTensors, Request, SpanRows
from ashlar.started import Started

# NumPy has no bfloat16 and no 8-bit floats. They are passed as integers of the same size.
_NUMPY_TYPES: dict[DType, Any] = {
    DType.F32: np.float32,
    DType.F16: np.float16,
    DType.BF16: np.uint16,
    DType.F8E4M3: np.uint8,
    DType.F8E5M2: np.uint8,
}


def _salt(salt: str | bytes) -> bytes:
    return salt.encode() if isinstance(salt, str) else salt  # the compiled module refuses other types


class MemoryKind(enum.Enum):
    """Where the pages are."""

    NONE = 0  # no pages: a scheduler that looks up but does not land
    HOSTED = 1  # memory that the daemon allocates for this cache
    MEMFD = 2  # the engine's memfd, sealed with F_SEAL_SHRINK
    GPU = 4  # the engine's memory on a GPU that the daemon serves


@dataclasses.dataclass(frozen=True)
class PagePlace:
    """The place of one attention layer's pages in the memory, in bytes.

    Head h of the token in slot s of page p is at offset + p·page_stride + s·token_stride + h·head_stride. The scale
    fields are for layers with `scales`.
    """

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
class LayerGroup:
    """Attention layers that share a page table."""

    layers: Sequence[int]  # indices into Model.layers; each attention layer belongs to one group
    page_tokens: int = 0  # tokens per page; 0: the value of the model
    pages: int = 0  # number of pages; 0: the value of the cache


@dataclasses.dataclass(frozen=True)
class _Options:
    model: Model
    rpc_socket: str | os.PathLike[str]
    session_socket: str | os.PathLike[str]
    name: str
    timeout_ms: int
    memory_kind: MemoryKind
    pages: int
    places: Sequence[PagePlace]
    memory_bytes: int
    memfd: int
    gpu_descriptor: int
    gpu_address: int
    gpu: bytes
    groups: Sequence[LayerGroup]
    common_pages: bool
    share_in_place: bool
    capture_tokens: int
    span_tokens: int
    span_dtype: DType
    epsilon: float
    land_ms: int
    quiet_ms: int
    compose_in_daemon: bool


class Cache:
    """One session with the node's daemon, one open model, and one region of pages. Thread-safe.

    `rpc_socket`, `session_socket`: paths of the daemon's sockets. `name`: shown in the daemon's logs. `timeout_ms`:
    limit of one call to the daemon. `pages`: number of pages; 0 with `MemoryKind.NONE`. `places`: the place of each
    attention layer's pages in memory of `memory_bytes` bytes; empty: the cache places them, in hosted memory only.
    `memfd`: the caller owns it, and keeps it open until the cache is closed.

    `capture_tokens`: the daemon asks for states at multiples of this depth (`Step.capture`), from which later texts
    resume; 0: no prefixes. `epsilon`: largest error ‖T − T̃‖₂ of a transition that is stored in a smaller form; 0:
    none. `land_ms`: time that `wait_layer` and `finish` wait for a landing before the plan changes to computing.
    `quiet_ms`: time that `finish` waits for the daemon to stop writing before it returns OTHER_PAGES.
    `compose_in_daemon`: the daemon composes states instead of this process.

    `groups`: groups of attention layers, each with its own page table. Without groups, one page table serves all
    layers. With groups, calls take a sequence of tables, one per group, instead of a page table. With `common_pages`
    all groups draw page numbers from one pool, and a page belongs to one group at a time.

    `share_in_place` (MEPIC): the daemon allocates page numbers, and requests read one copy of each segment and of each
    block of an exact prefix. Begin requests without pages and call `Request.admit`.

    With `MemoryKind.GPU` the pages are on a GPU that the daemon serves: a CUDA virtual memory allocation (cuMemCreate)
    of exactly `memory_bytes`, mapped at `gpu_address` and exported as the POSIX file descriptor `gpu_descriptor`. The
    caller owns the descriptor and may close it after the cache is open. `gpu`: CUDA's UUID of the GPU, 16 bytes; empty:
    the daemon's only GPU. All other arrays are in host memory. The GPU must have finished its work on pages before they
    are published or committed, or before a hit lands in them.

    `span_tokens` (KVBuffer §6): the caller captures the inputs of the linear layers for up to this many last tokens of
    a text, at most 256, and passes them to `commit(span=…)`. The cache may then keep an earlier checkpoint, and a later
    prompt resumes after any token of the span: `Request.advance` rebuilds the states by the recurrence. `span_dtype`:
    type in which keys and values of spans are stored.
    """

    def __init__(
        self,
        model: Model,
        rpc_socket: str | os.PathLike[str],
        session_socket: str | os.PathLike[str],
        *,
        pages: int = 0,
        name: str = "python",
        timeout_ms: int = 5000,
        memory_kind: MemoryKind = MemoryKind.HOSTED,
        places: Sequence[PagePlace] = (),
        memory_bytes: int = 0,
        memfd: int = -1,
        gpu_descriptor: int = -1,
        gpu_address: int = 0,
        gpu: bytes = b"",
        groups: Sequence[LayerGroup] = (),
        common_pages: bool = False,
        share_in_place: bool = False,
        capture_tokens: int = 0,
        span_tokens: int = 0,
        span_dtype: DType = DType.F32,
        epsilon: float = 1e-6,
        land_ms: int = 5000,
        quiet_ms: int = 10000,
        compose_in_daemon: bool = False,
    ) -> None:
        options = _Options(
            model=model,
            rpc_socket=rpc_socket,
            session_socket=session_socket,
            name=name,
            timeout_ms=timeout_ms,
            memory_kind=memory_kind,
            pages=pages,
            places=places,
            memory_bytes=memory_bytes,
            memfd=memfd,
            gpu_descriptor=gpu_descriptor,
            gpu_address=gpu_address,
            gpu=gpu,
            groups=groups,
            common_pages=common_pages,
            share_in_place=share_in_place,
            capture_tokens=capture_tokens,
            span_tokens=span_tokens,
            span_dtype=span_dtype,
            epsilon=epsilon,
            land_ms=land_ms,
            quiet_ms=quiet_ms,
            compose_in_daemon=compose_in_daemon,
        )
        self._take(_ashlar.open(options), options)

    def _take(self, handle: _ashlar.Cache, options: _Options) -> None:
        self._handle = handle
        if warning := handle.warning():
            warnings.warn(warning, stacklevel=3)
        self.model = options.model
        self.places = [PagePlace(**place) for place in handle.places()]
        self.pages = options.pages
        self._on_gpu = options.memory_kind is MemoryKind.GPU
        self.groups = tuple(options.groups)

    @classmethod
    def start_open(cls, *arguments: Any, **options: Any) -> Started[Self]:
        """Like `Cache(...)`, but does not wait for the daemon. Takes the same arguments."""
        given = inspect.signature(cls).bind(*arguments, **options)
        given.apply_defaults()
        all_options = _Options(**given.arguments)
        handle, job = _ashlar.start_open(all_options)
        return Started(job, functools.partial(cls._opened, handle, job, all_options))

    @classmethod
    def _opened(cls, handle: _ashlar.Cache, job: _ashlar.Job, options: _Options) -> Self:
        job.result(False)
        cache = cls.__new__(cls)
        cache._take(handle, options)
        return cache

    @classmethod
    async def open_async(cls, *arguments: Any, **options: Any) -> Self:
        """Like `Cache(...)`, for asyncio."""
        return await cls.start_open(*arguments, **options).result_async()

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False

    def close(self) -> None:
        """Ends the session after its last request ends. Does nothing in a forked child.

        The last request's end waits until nothing can write to the memory. If the daemon hangs, it waits as long as the
        daemon hangs. Arrays of the memory stay valid while they are referenced, but data written to them is no longer
        shared.
        """
        self._handle.close()

    @property
    def connected(self) -> bool:
        """Whether the session is connected now. The cache reconnects by itself after the daemon restarts."""
        return self._handle.connected()

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All bytes of the memory, in place: [bytes]. The array keeps it mapped. ValueError: the memory is on a GPU."""
        if self._on_gpu:
            raise ValueError("memory_kind: GPU memory has no NumPy view; use pages on the host")
        return self._handle.memory()

    def page_rows(self, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the keys and the values of an attention layer, in place: [pages, page_tokens, heads, dim] each, with
        the heads of this rank.

        NumPy has no bfloat16 and no 8-bit floats: such pages have integers of the same size. The arrays keep the memory
        mapped. ValueError: the layer has no pages, or the memory is on a GPU.
        """
        layer = whole("layer", layer, 0, len(self.model.layers) - 1)
        attention = self.model.layers[layer]
        if not isinstance(attention, Attention):
            raise ValueError(f"layer: {layer} is not an attention layer")
        place, pages, page_tokens = self._pages_of(layer)
        kind, memory = np.dtype(_NUMPY_TYPES[attention.dtype]), self.memory
        heads = max(1, attention.kv_heads // self.model.tensor_parallel_size)  # with fewer heads, ranks share one

        def view(offset: int, head_stride: int, dim: int) -> npt.NDArray[Any]:
            return np.ndarray(
                shape=(pages, page_tokens, heads, dim),
                dtype=kind,
                buffer=memory,
                offset=offset,
                strides=(place.page_stride, place.token_stride, head_stride, kind.itemsize),
            )

        return (
            view(place.key_offset, place.key_head_stride, attention.key_dim),
            view(place.value_offset, place.value_head_stride, attention.value_dim),
        )

    def page_bytes(self, layer: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes of an opaque layer with `token_bytes`, in place: [pages, page_tokens, bytes of a token].

        The array keeps the memory mapped. ValueError: the layer has no such bytes, or the memory is on a GPU.
        """
        layer = whole("layer", layer, 0, len(self.model.layers) - 1)
        opaque = self.model.layers[layer]
        if not isinstance(opaque, Opaque) or opaque.token_bytes == 0:
            raise ValueError(f"layer: {layer} is not an opaque layer with token_bytes")
        place, pages, page_tokens = self._pages_of(layer)
        return np.ndarray(
            shape=(pages, page_tokens, opaque.token_bytes // self.model.tensor_parallel_size),
            dtype=np.uint8,
            buffer=self.memory,
            offset=place.key_offset,
            strides=(place.page_stride, place.token_stride, 1),
        )

    def _pages_of(self, layer: int) -> tuple[PagePlace, int, int]:
        """Returns a layer's place, its number of pages, and the tokens per page."""
        place = next((place for place in self.places if place.layer == layer), None)
        if place is None:
            raise ValueError(f"layer: {layer} has no pages; the cache was opened without memory")
        group = next((group for group in self.groups if layer in group.layers), LayerGroup([layer]))
        return place, group.pages or self.pages, group.page_tokens or self.model.page_tokens

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
        cold_parallel: bool = False,
        store_only: bool = False,
        salt: str | bytes = b"",
        rotary_shifts: Sequence[int] = (),
    ) -> Request:
        """Looks a prompt up and lands the hits in its pages. Waits for the plan.

        `tokens`: [tokens]. `segments`: the lengths of its segments, in tokens, from position 0. `page_table`: [pages],
        the page of each `page_tokens` positions; one such table per group with `groups`; None: nothing lands. The
        request owns these pages until `Request.finish` returns OK or RESTART: until then write only the tokens that the
        plan computes. If it ends earlier, or `finish` returns OTHER_PAGES, `take_quiesced_pages` returns them.

        `needed_in_ms`, without pages: time until the request will need the hits. `fill`: this engine computes the runs
        of `Request.missing`. `cold_parallel`, with `fill`: other engines that offer prefill may compute some of the
        runs. Compute `missing`, then call `Request.wait_cold`. `store_only`, with `fill`: the prompt is not looked up,
        and `missing` lists the runs that the cache lacks (with tensor parallelism: this rank's shards). Publish them
        and end the request. `conversation`: 16 random bytes that name a conversation. `media`: (index of the first
        token, SHA-256 of the content, 32 bytes) of each medium, ascending. `salt`: at most 4,096 bytes; prompts with
        different salts share nothing. `rotary_shifts`: one per segment: the rotary position of its keys minus their
        position in the page table.
        """
        rest = fill, conversation, needed_in_ms, media, cold_parallel, store_only, _salt(salt), rotary_shifts
        return self._handle.begin(Request, tokens, segments, page_table, *rest, True)  # type: ignore[return-value]

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
        cold_parallel: bool = False,
        store_only: bool = False,
        salt: str | bytes = b"",
        rotary_shifts: Sequence[int] = (),
    ) -> Request:
        """Like `begin`, but does not wait. The plan is known when `Request.poll_plan` returns OK."""
        rest = fill, conversation, needed_in_ms, media, cold_parallel, store_only, _salt(salt), rotary_shifts
        return self._handle.begin(Request, tokens, segments, page_table, *rest, False)  # type: ignore[return-value]

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
        self,
        plan: bytes,
        page_table: Sequence[int] | npt.ArrayLike | None,
        *,
        present_tokens: int = 0,
        wait: bool = True,
        rotary_shifts: Sequence[int] = (),
    ) -> Request:
        """Lands the plan of another process (`Request.plan_bytes`) for this process's shard. Pages as for `begin`.

        `wait`: whether to wait until the plan is known. `present_tokens`: the pages already hold the keys and values of
        this many first tokens; a prefix's whole blocks within them are not written.
        """
        return cast(Request, self._handle.land(Request, plan, page_table, present_tokens, rotary_shifts, wait))

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
        exponents: Array | None = None,
        norm_epsilon: float = 0.0,
        q_scale: float = 1.0,
    ) -> None:
        """Computes one linear layer of a missing run, from a zero state, with kernels in this process.

        `missing`: index into `request.missing`. `q` … `beta`, `norm_epsilon`, `q_scale`: as for `Request.advance`, one
        row per token of the run. Writes `state`, `transition` (required if the run has one) and `decay`, all as in
        `LinearTensors`, and `out`, [tokens, value_heads, d_v]; the last two are optional. A float16 state needs
        `exponents`: int32, [value_heads].
        """
        self._handle.compute_alone(
            request, missing, layer, state, q, k, v, g, beta, out, transition, decay, exponents, norm_epsilon, q_scale
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
        salt: str | bytes = b"",
        span: tuple[int, Sequence[SpanRows]] | None = None,
    ) -> list[str]:
        """Offers the states of a computed text, so that later texts can resume from them.

        `tokens`: [tokens], the prompt and the decoded tokens that ran through the model. `checkpoints`: (depth, every
        linear layer's tensors), depths ascending, the last one the text's length. Returns an outcome for each: "kept",
        or why the cache does not keep it. `request`: the request of the text's prompt; None: it was computed without
        one. `page_table`: the text's pages from position 0. `conversation`: required if the plan is not exact.
        `composed`: the text began with composed states although its plan is exact or it has no request.
        `prompt_tokens`: the length of the prompt; None: the length of `tokens`. It is larger if `tokens` is only the
        first part of the prompt. `media`, `salt`: those of the prompt. `span`: (begin, rows of every linear layer) for
        the tokens from `begin`, where a checkpoint ends, to the text's end (`span_tokens` of the cache).
        """
        return self._handle.commit(
            request,
            tokens,
            prompt_tokens,
            checkpoints,
            page_table,
            conversation,
            composed,
            media,
            _salt(salt),
            span,
        )

    async def commit_async(
        self,
        tokens: Sequence[int] | npt.ArrayLike,
        checkpoints: Sequence[tuple[int, Sequence[LinearTensors]]],
        **options: Any,
    ) -> list[str]:
        return await asyncio.to_thread(self.commit, tokens, checkpoints, **options)

    def handoff(
        self,
        tokens: Sequence[int] | npt.ArrayLike,
        node: str,
        *,
        conversation: bytes = b"",
        media: Sequence[tuple[int, bytes]] = (),
        salt: str | bytes = b"",
        wait_ms: int = 1000,
    ) -> str:
        """Sends a committed text to another node, so that its engines resume at the text's end. For a prefill engine.

        `tokens`, `conversation`, `media`, `salt`: those of the text. `node`: the other node's name in the cluster.
        Returns "completed", "timed_out" if the text may still arrive, or the reason why the other engine must compute
        it.
        """
        return self._handle.handoff(tokens, node, conversation, media, _salt(salt), wait_ms)

    async def handoff_async(self, tokens: Sequence[int] | npt.ArrayLike, node: str, **options: Any) -> str:
        return await asyncio.to_thread(self.handoff, tokens, node, **options)

    def serve_prefill(self, wait_ms: int = 1000) -> Request | None:
        """Waits at most `wait_ms` for a segment to compute for other engines of the tenant, on any node.

        The request has one run in `missing` and no prompt. Compute it, publish it, and end the request before the next
        call. On a cache without pages, another process publishes the run; then call `Request.mark_published`. Returns
        None if there is no work or no daemon. Call it from one thread at a time.
        """
        return cast("Request | None", self._handle.serve_prefill(Request, wait_ms))

    def start_serve_prefill(self, wait_ms: int = 1000) -> Started[Request | None]:
        """Like `serve_prefill`, but does not wait."""
        work, job = self._handle.start_serve_prefill(Request, wait_ms)
        return Started(job, lambda: cast(Request, work) if job.result(True) == Verdict.OK else None)

    async def serve_prefill_async(self, wait_ms: int = 1000) -> Request | None:
        return await asyncio.to_thread(self.serve_prefill, wait_ms)

    def stored_segments(self) -> dict[str, int]:
        """Returns what this engine has published: the number of `segments`, their `bytes`, and `own_bytes`, the size if
        every transition were stored in its layer's own form."""
        return self._handle.stored_segments()

    def take_quiesced_pages(self, most: int, timeout_ms: int = 0, group: int = 0) -> list[int]:
        """Returns pages that the cache kept and to which no transfer writes any longer, at most `most`; they are the
        caller's again. Waits up to `timeout_ms` for the first. `group`: the group whose page numbers to return."""
        return self._handle.take_quiesced_pages(most, timeout_ms, group)
