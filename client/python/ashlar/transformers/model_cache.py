# SPDX-License-Identifier: Apache-2.0
"""Sessions with the daemon for one model of Transformers, and the pages in which its keys and values land."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from ashlar.cache import Cache, MemoryKind, PagePlace
from ashlar.model import Attention, DType, Model
from ashlar.transformers.model import Shape, numpy_view
from ashlar.transformers.weights import Weights

TORCH = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}
_LINE = 64  # bytes: tokens begin on cache lines
_Result = TypeVar("_Result")


class Fault(Exception):
    """A failure of the cache. The prompt is computed without it."""


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Converts exceptions of cache calls into Fault: no request fails because of the cache."""
    try:
        yield
    except (ConnectionError, PermissionError, MemoryError, RuntimeError, ValueError) as error:
        raise Fault(f"{type(error).__name__}: {error}") from error


def calling(call: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Calls a function of the cache. Fault: it failed."""
    with faults():
        return call(*args, **kwargs)


class _Pages(Cache):
    """A cache whose pages have the shape of a model's keys and values."""

    def _find_rows(self, shape: Shape) -> None:
        self.shape = shape
        self.rows = {}  # keys and values of each attention layer: [pages, page_tokens, heads, dim]
        for place in shape.attention:
            attention = self.model.layers[place.index]
            assert isinstance(attention, Attention)
            dtype = TORCH[attention.dtype]
            self.rows[place.index] = tuple(numpy_view(rows, dtype) for rows in self.page_rows(place.index))

    def slots(self, table: np.ndarray[Any, Any], begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the page, and the slot in it, of each position in [begin, end)."""
        positions = np.arange(begin, end)
        pages = table[positions // self.model.page_tokens].astype(np.int64)
        return torch.from_numpy(pages), torch.from_numpy(positions % self.model.page_tokens)


class SharedPages(_Pages):
    """Pages that the daemon allocates, and in which requests read one copy of each segment."""

    def __init__(
        self, model: Model, shape: Shape, rpc_socket: Any, session_socket: Any, *, pages: int, **options: Any
    ) -> None:
        places, size = _places(model, pages)
        super().__init__(
            model, rpc_socket, session_socket, pages=pages, places=places, memory_bytes=size, share_in_place=True,
            **options,
        )  # fmt: skip
        self._find_rows(shape)


class ModelCache(_Pages):
    """A cache opened for one model of Transformers (`ashlar.cache_for`)."""

    def __init__(
        self, model: Model, shape: Shape, weights: Weights, rpc_socket: Any, session_socket: Any, *, pages: int,
        shared_pages: int = 0, capture_tokens: int, **options: Any,
    ) -> None:  # fmt: skip
        # Memory of this process, not the daemon's: it outlives a daemon and is registered again with the next one.
        places, size = _places(model, pages)
        self._memfd = os.memfd_create("ashlar-transformers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memfd, size)
        fcntl.fcntl(self._memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.shared: SharedPages | None = None
        try:
            super().__init__(
                model, rpc_socket, session_socket, pages=pages, memory_kind=MemoryKind.MEMFD, places=places,
                memory_bytes=size, memfd=self._memfd, capture_tokens=capture_tokens, **options,
            )  # fmt: skip
        except BaseException:
            os.close(self._memfd)
            raise
        self._open_shared = functools.partial(
            SharedPages, model, shape, rpc_socket, session_socket, pages=shared_pages, **options
        )
        if shared_pages > 0:
            try:
                self.shared = self._open_shared()
            except BaseException:
                self.close()
                raise
        self._find_rows(shape)
        self.weights = weights
        self.capture_tokens = capture_tokens
        self.free = list(range(self.pages))

    def renew_shared(self) -> None:
        """Opens other shared pages. Prompts that read the current ones keep them. Fault: no daemon answers."""
        before, self.shared = self.shared, calling(self._open_shared)
        if before is not None:
            before.close()

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()
        super().close()
        if self._memfd >= 0:
            os.close(self._memfd)
            self._memfd = -1

    def take(self, tokens: int) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        """Returns pages for this number of tokens, [pages], or None if too few are free. Append them to `free`
        afterwards."""
        count = -(-tokens // self.model.page_tokens)
        if len(self.free) < self.pages:
            self.free += calling(self.take_quiesced_pages, self.pages)
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, np.int32)


def _places(model: Model, pages: int) -> tuple[list[PagePlace], int]:
    """Places the keys and values of a token side by side, and the attention layers' pages one after another. Returns
    the places and the size in bytes."""
    places, size = [], 0
    for index, layer in enumerate(model.layers):
        if isinstance(layer, Attention):
            width = TORCH[layer.dtype].itemsize
            keys, values = layer.key_dim * width, layer.value_dim * width
            token = -(-layer.kv_heads * (keys + values) // _LINE) * _LINE
            page = token * model.page_tokens
            places.append(PagePlace(index, size, size + layer.kv_heads * keys, page, token, keys, values))
            size += -(-page * pages // mmap.PAGESIZE) * mmap.PAGESIZE
    return places, max(size, mmap.PAGESIZE)
