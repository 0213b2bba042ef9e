# SPDX-License-Identifier: Apache-2.0
"""Host memory between the daemon and the engine's caches. The caches stay where the engine allocates them, on any
device.

A page holds one block of every attention layer. For a load, the daemon lands in pages and torch copies them into the
engine's blocks. For a save, torch copies blocks into pages and the daemon reads the pages.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import ashlar
from ashlar.vllm.host_memory import pieces, pin, unpin
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.memory import SharedMemory, index_of, kernel_blocks, raw, unsupported_shape
from ashlar.vllm.model import Described
from ashlar.vllm.order import CpuOrder, DeviceOrder, Order

_ALIGNMENT = 64  # bytes; alignment of a layer's pages
_KEPT = 4  # number of saved texts whose pages are kept until a load or save needs them


@dataclasses.dataclass
class _Text:
    name: Hashable  # rows are equal if names and tokens are equal
    tokens: npt.NDArray[np.int32]
    pages: list[int]

    def common(self, name: Hashable, tokens: npt.NDArray[np.int32]) -> int:
        """Returns the number of first tokens that both texts share."""
        if name != self.name:
            return 0
        most = min(len(tokens), len(self.tokens))
        different = np.flatnonzero(tokens[:most] != self.tokens[:most])
        return int(different[0]) if len(different) > 0 else most


def _blocks_of(name: str, layer: Any, described: Described, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a layer's cache, by blocks. Attention: [blocks, kernel blocks, tokens, heads, numbers]. Opaque
    layers: the dimensions of a block in the order of their strides, which is the order of a dense block's bytes."""
    ranks = described.model.tensor_parallel_size
    if isinstance(layer, ashlar.Attention):
        expected = (layer.kv_heads // ranks, layer.key_dim + layer.value_dim)
        fits = tensor.dim() == 4 and (tensor.shape[1], tensor.shape[3]) == expected and tensor.shape[2] > 0
        parts = described.block // tensor.shape[2] if fits and described.block % tensor.shape[2] == 0 else None
    else:
        parts = kernel_blocks(tensor, layer.token_bytes // ranks * described.block)
    if parts is None or len(tensor) % parts != 0:
        raise unsupported_shape(name, tensor)
    blocks = raw(tensor).unflatten(0, (-1, parts))
    if isinstance(layer, ashlar.Attention):
        return blocks.permute(0, 1, 3, 2, 4)
    return blocks.permute(0, *sorted(range(1, blocks.dim()), key=lambda dim: -blocks.stride(dim)))


class Staging:
    """The memory, its pages and the copies. `take` and `give` are thread-safe."""

    def __init__(self, described: Described, caches: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Raises Unsupported."""
        self.order: Order = CpuOrder() if device.type == "cpu" else DeviceOrder(device)
        self.places: list[ashlar.PagePlace] = []
        self._device, self._block = device, described.block
        self._groups: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # blocks and pages of each group's layers
        views = {
            layer: _blocks_of(name, described.model.layers[layer], described, caches[name])
            for layer, name in described.attention
        }
        self.pages = min([described.staged_pages, *(len(view) for view in views.values())])
        if views and self.pages < 1:
            raise Unsupported(
                f"staging_bytes: {described.staged} is less than one block of the engine's caches; expected at least "
                f"{described.page_bytes}"
            )
        sizes = {layer: view[0].numel() * view.element_size() for layer, view in views.items()}
        begins, size = {}, 0
        for layer, bytes_of_page in sizes.items():
            begins[layer], size = size, size + -(-bytes_of_page * self.pages // _ALIGNMENT) * _ALIGNMENT
        self._memory = SharedMemory(size) if views else None
        self._pinned = self._memory is not None and pin(self._memory.bytes, device)
        pages = {}
        for layer, view in views.items():
            assert self._memory is not None
            whole = self._memory.bytes[begins[layer] : begins[layer] + sizes[layer] * self.pages]
            pages[layer] = whole.view(view.dtype).view(self.pages, *view.shape[1:])
            self.places.append(self._place(layer, described, begins[layer], sizes[layer]))
        for group in described.attention_groups.values():
            self._groups.append([(views[layer], pages[layer]) for layer in group])
        self._free = np.ones(self.pages, bool)  # guarded by _changed
        self._kept: list[_Text] = []  # guarded by _changed; the last one is the most recent
        self._changed = threading.Condition()

    def _place(self, layer: int, described: Described, begin: int, size: int) -> ashlar.PagePlace:
        shape, token = described.model.layers[layer], size // self._block
        if not isinstance(shape, ashlar.Attention):
            return ashlar.PagePlace(layer, begin, 0, size, token, 0, 0)
        head = token // (shape.kv_heads // described.model.tensor_parallel_size)
        values = begin + head * shape.key_dim // (shape.key_dim + shape.value_dim)
        return ashlar.PagePlace(layer, begin, values, size, token, head, head)

    def options(self) -> dict[str, Any]:
        """Returns the arguments of ashlar.Cache for this memory."""
        if self._memory is None:
            return {"memory_kind": ashlar.MemoryKind.NONE}
        return {**self._memory.options(), "pages": self.pages, "places": self.places}

    def close(self) -> None:
        """Call it when no copy is in progress."""
        if self._memory is None:
            return
        if self._pinned:
            unpin(self._memory.bytes)
        self._memory.close()

    # ---- pages

    def take(self, count: int, seconds: float = 0.0) -> list[int] | None:
        """Returns free pages, consecutive ones if possible. None: too few became free within `seconds`."""
        with self._changed:
            return self._take(count, seconds)

    def _take(self, count: int, seconds: float) -> list[int] | None:
        def enough() -> bool:
            return int(self._free.sum()) + sum(len(text.pages) for text in self._kept) >= count

        if count > self.pages or not self._changed.wait_for(enough, seconds):
            return None
        while self._free.sum() < count:
            self._free[self._kept.pop(0).pages] = True
        free = np.flatnonzero(self._free)
        spans = free[count - 1 :] - free[: len(free) - count + 1] if count > 0 else free
        first = int(spans.argmin()) if count > 0 else 0
        taken: list[int] = free[first : first + count].tolist()
        self._free[taken] = False
        return taken

    def take_for_save(
        self, name: Hashable, tokens: npt.NDArray[np.int32], seconds: float
    ) -> tuple[list[int], int] | None:
        """Returns pages for a text, and the number of first pages that hold its rows already: those of a kept text.

        None: as for `take`.
        """
        with self._changed:
            text = max(self._kept, key=lambda each: each.common(name, tokens), default=None)
            known = 0 if text is None else text.common(name, tokens) // self._block
            held: list[int] = []
            if text is not None and known > 0:
                self._kept.remove(text)
                held = text.pages[:known]
                self._free[text.pages[known:]] = True
            more = self._take(-(-len(tokens) // self._block) - known, seconds)
            if more is None:
                self._free[held] = True
                self._changed.notify_all()
                return None
            return held + more, known

    def keep(self, name: Hashable, tokens: npt.NDArray[np.int32], pages: list[int]) -> None:
        """Keeps the pages of a saved text: its rows stay until the pages are needed."""
        with self._changed:
            self._kept.append(_Text(name, tokens, pages))
            if len(self._kept) > _KEPT:
                self._free[self._kept.pop(0).pages] = True
            self._changed.notify_all()

    def give(self, pages: Sequence[int]) -> None:
        with self._changed:
            self._free[list(pages)] = True
            self._changed.notify_all()

    # ---- copies; call them in the context `order.copies`

    def scatter(self, pages: Sequence[int], tables: Sequence[Sequence[int]], within: int) -> None:
        """Copies pages into the engine's blocks. `tables`: blocks by group. `within`: tokens of the last page, the rest
        of which becomes zero; 0: all of them."""
        indices = [index_of(table, self._device) for table in tables]
        for group, index in zip(self._groups, indices, strict=True):
            for blocks, held in group:
                if within:
                    held[pages[-1]].view(self._block, -1)[within:] = 0
                for first, last, begin in pieces(held, pages):
                    rows = held[begin : begin + last - first].to(self._device, non_blocking=True)
                    blocks.index_copy_(0, index[first:last], rows)

    def gather(self, tables: Sequence[Sequence[int]], pages: Sequence[int]) -> None:
        """Copies the engine's blocks into pages. `tables`: blocks by group."""
        indices = [index_of(table, self._device) for table in tables]
        for group, index in zip(self._groups, indices, strict=True):
            for blocks, held in group:
                for first, last, begin in pieces(held, pages):
                    rows = blocks.index_select(0, index[first:last])
                    held[begin : begin + last - first].copy_(rows, non_blocking=True)
