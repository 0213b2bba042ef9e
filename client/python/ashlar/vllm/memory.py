# SPDX-License-Identifier: Apache-2.0
"""The engine's key and value caches: in memory that the daemon maps, or on any device, from which they are copied.

The daemon maps a memfd, or an exported allocation on a GPU (cuda.py); other memory is copied through pages
(staging.py). For mapped memory vLLM asks a connector for the context in which it allocates its caches
(`get_mem_pool_context`). vLLM allocates all of them by one call of `torch.zeros`, which returns a view of such memory
in this context. Blocks then land in place and are read in place, whatever their strides.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import ashlar
from ashlar.vllm.cuda import CudaMemory
from ashlar.vllm.host_memory import Lease
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.model import Described, LinearPlace, WindowPlace
from ashlar.vllm.order import CpuOrder, Order
from ashlar.vllm.rows import RowOrder

_LEAST = 1 << 16  # bytes; smaller tensors are not caches
_CPU = torch.device("cpu")
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view as integers: index operations do not support all types of caches."""
    return tensor.view(_RAW[tensor.element_size()])


def index_of(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(blocks), dtype=torch.long).to(device)


def bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class SharedMemory:
    """A memfd that cannot shrink, with all pages allocated, and a tensor over its bytes."""

    on_gpu = False
    order: Order = CpuOrder()

    def __init__(self, size: int, device: torch.device = _CPU) -> None:
        self.descriptor = os.memfd_create("vllm-kv-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.descriptor, 0, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.int8)
        except OSError:
            os.close(self.descriptor)
            raise
        self.size = size

    def close(self) -> None:
        """Closes the descriptor. The daemon's mapping and the engine's tensors stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def options(self) -> dict[str, Any]:
        """Options of ashlar.Cache."""
        return {
            "memory_kind": ashlar.MemoryKind.MEMFD,
            "memfd": self.descriptor,
            "memory_bytes": self.size,
        }


Memory = SharedMemory | CudaMemory
_MEMORIES: dict[str, type[Memory]] = {"cpu": SharedMemory, "cuda": CudaMemory}  # by type of torch device


def _offset(memory: Memory, tensor: torch.Tensor) -> int | None:
    """Returns the offset of a tensor in the memory; None if it is elsewhere."""
    if tensor.untyped_storage().data_ptr() != memory.bytes.data_ptr():
        return None
    return int(tensor.storage_offset() * tensor.element_size())


class _Allocation(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.made: Memory | None = None
        self.error: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = args[0] if len(args) == 1 and isinstance(args[0], int) else 0
        if func is torch.zeros and size >= _LEAST and kwargs.get("dtype") is torch.int8 and self.made is None:
            device = torch.device(kwargs.get("device", "cpu"))
            try:
                if device.type in _MEMORIES:
                    self.made = _MEMORIES[device.type](size, device)
                    return self.made.bytes
            except Exception as error:  # after any error the engine gets ordinary memory, and runs without the cache
                self.error = error
        return func(*args, **kwargs)


class Allocator:
    """The engine allocates inside `context()`; `memory` is the result, None if the context was not used."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.error: Exception | None = None

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with _Allocation() as mode:
            yield
        self.memory, self.error = mode.made, mode.error


def _split(tensor: torch.Tensor, block: int) -> int | None:
    """Returns the number of kernel blocks in one of the engine's blocks; None if they have no common strides."""
    tokens = tensor.shape[2]
    if tokens == 0 or block % tokens != 0 or tensor.shape[0] * tokens % block != 0:
        return None
    # A kernel block's tokens begin where those of the previous one end.
    adjacent = tensor.stride(0) == tokens * tensor.stride(2)
    return block // tokens if tokens == block or adjacent else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill one range of memory, in any order of dimensions."""
    end = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda each: each[1]):
        if size > 1 and stride != end:
            return False
        end *= size
    return True


def kernel_blocks(tensor: torch.Tensor, block_bytes: int) -> int | None:
    """Returns the number of kernel blocks in one of the engine's blocks, by their bytes; None if they do not fit."""
    size = tensor[0].numel() * tensor.element_size() if tensor.dim() > 1 and len(tensor) > 0 else 0
    if size == 0 or block_bytes % size != 0 or len(tensor) % (block_bytes // size) != 0:
        return None
    return block_bytes // size


def unsupported_shape(name: str, tensor: torch.Tensor, remedy: str = "") -> Unsupported:
    return Unsupported(f"{name}: unsupported shape {tuple(tensor.shape)} with strides {tensor.stride()}{remedy}")


def _place_of_heads(
    layer: int, name: str, shape: ashlar.Attention, described: Described, tensor: torch.Tensor, offset: int
) -> ashlar.PagePlace:
    """Uses the strides of the registered tensor: [blocks, heads, tokens, 2 d], in any order of bytes."""
    heads, element = shape.kv_heads // described.model.tensor_parallel_size, tensor.element_size()
    expected = (heads, shape.key_dim + shape.value_dim)
    fits = tensor.dim() == 4 and (tensor.shape[1], tensor.shape[3]) == expected and tensor.stride(3) == 1
    parts = _split(tensor, described.block) if fits else None
    if parts is None:
        raise unsupported_shape(name, tensor)
    page, head, token = (tensor.stride(i) * element for i in range(3))
    return ashlar.PagePlace(
        layer=layer,
        key_offset=offset,
        value_offset=offset + shape.key_dim * element,
        page_stride=page * parts,
        token_stride=token,
        key_head_stride=head,
        value_head_stride=head,
    )


def _place_of_bytes(
    layer: int, name: str, shape: ashlar.Opaque, described: Described, tensor: torch.Tensor, offset: int
) -> ashlar.PagePlace:
    """Blocks land whole, so the order of bytes in a block does not matter. A block must be contiguous."""
    token = shape.token_bytes // described.model.tensor_parallel_size
    parts = kernel_blocks(tensor, token * described.block)
    if parts is None or not _is_dense(tensor[:parts]):
        raise unsupported_shape(name, tensor, ", whose blocks are not in one piece; set VLLM_KV_CACHE_LAYOUT to LBNHC")
    page = tensor.stride(0) * tensor.element_size() * parts
    return ashlar.PagePlace(
        layer=layer,
        key_offset=offset,
        value_offset=0,
        page_stride=page,
        token_stride=token,
        key_head_stride=0,
        value_head_stride=0,
    )


def pages(described: Described, caches: Mapping[str, torch.Tensor]) -> int:
    """Returns the number of blocks, which is the same for all layers with pages."""
    found = []
    for layer, name in described.attention:
        shape, tensor = described.model.layers[layer], caches[name]
        if isinstance(shape, ashlar.Opaque):
            size = shape.token_bytes // described.model.tensor_parallel_size * described.block
            found.append(len(tensor) // (kernel_blocks(tensor, size) or 1))
        else:
            found.append(int(tensor.shape[0]) * int(tensor.shape[2]) // described.block)
    return min(found, default=0)


def places(described: Described, caches: Mapping[str, torch.Tensor], memory: Memory) -> list[ashlar.PagePlace]:
    """Returns the places of pages, for the layers that have all blocks of a text."""
    found = []
    for layer, name in described.attention:
        shape, tensor = described.model.layers[layer], caches[name]
        offset = _offset(memory, tensor)
        if offset is None:
            raise unsupported_shape(name, tensor)
        if isinstance(shape, ashlar.Attention):
            found.append(_place_of_heads(layer, name, shape, described, tensor, offset))
        else:
            assert isinstance(shape, ashlar.Opaque)
            found.append(_place_of_bytes(layer, name, shape, described, tensor, offset))
    return found


class States:
    """One layer's states in the engine's blocks: in place, or copied if the blocks are not in CPU memory. `opaque`: as
    bytes.

    `memory`: the memory that must contain them; None: any.
    """

    def __init__(self, place: LinearPlace, opaque: bool, tensor: torch.Tensor, memory: Memory | None) -> None:
        self.layer, self.group, self._opaque = place.layer, place.group, opaque
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(place.shapes, place.dtypes)]
        rows = tensor.flatten(1) if tensor.dim() > 2 else tensor
        dense = rows.stride(1) == 1 and rows.element_size() == 1 and rows.shape[1] >= sum(sizes)
        if not dense or (memory is not None and _offset(memory, tensor) is None):
            raise Unsupported(f"{place.name}: unsupported shape {tuple(tensor.shape)} of {tensor.dtype}")
        self._rows, self._sizes, self._place = rows, sizes, place
        self._is_far = tensor.device.type != "cpu" or (memory is not None and memory.on_gpu)

    def _part(self, block: int, part: int) -> torch.Tensor:
        """Returns one of the block's tensors, with inputs of drafts."""
        begin = sum(self._sizes[:part])
        data = self._rows[block, begin : begin + self._sizes[part]]
        return data.view(self._place.dtypes[part]).view(self._place.shapes[part])

    @property
    def has_tail(self) -> bool:
        return len(self._sizes) > 1

    def tail(self, block: int, accepted: int = 0) -> torch.Tensor:
        """Returns the last inputs of the convolution, after a number of accepted drafts."""
        place, part = self._place, self._part(block, 0)
        if place.inputs is None or not place.drafts:
            return part
        return part.narrow(place.inputs, accepted, place.kept[0][place.inputs])

    def state(self, block: int) -> torch.Tensor:
        return self._part(block, len(self._sizes) - 1)

    def _whole(self, block: int) -> torch.Tensor:
        return self._rows[block, : sum(self._sizes)]

    def _pieces(self, block: int, later: int, accepted: int) -> list[torch.Tensor]:
        """Returns the tensors of one state, in the order of the block."""
        tail = [] if self._place.inputs is None else [self.tail(block, accepted)]
        return tail + [self.state(later)] if self.has_tail or not tail else tail

    def parts(self, block: int, later: int | None = None, accepted: int = 0) -> list[torch.Tensor]:
        """Returns the state in a block, and its tail if it has one, in place. If the blocks hold states of drafts and
        the layer is opaque, returns a copy.

        `later`: the block with the state after `accepted` drafts, by default the same.
        """
        later = block if later is None else later
        if self._opaque and not self._place.drafts:
            return [self._whole(block)]
        if self._opaque:
            pieces = self._pieces(block, later, accepted)
            return [torch.cat([each.contiguous().view(-1).view(torch.int8) for each in pieces])]
        return [self.state(later), self.tail(block, accepted)] if self.has_tail else [self.state(later)]

    def tensors(self, parts: Sequence[torch.Tensor]) -> ashlar.LinearTensors:
        """Returns `parts`, or copies of them."""
        return ashlar.LinearTensors(self.layer, *(self._near(part) for part in parts))

    def _near(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the part if it is in one piece in CPU memory, otherwise a copy there."""
        return torch.empty(part.shape, dtype=part.dtype).copy_(part) if self._is_far else part.contiguous()

    def load(self, block: int, request: ashlar.Request, tokens: int, memory: Lease) -> bool:
        """Copies the state after a landed prefix, and its tail if it has one, into a block. Returns False if they
        cannot be read.

        `memory`: for copies that may end later than this call."""
        if self._opaque and self._place.drafts:
            return self._load_pieces(block, request, tokens)
        state = self._whole(block) if self._opaque else self.state(block)
        near = memory.take(state.shape, state.dtype).zero_() if self._is_far else state
        if request.advance(self.layer, 0, tokens, near) != ashlar.Verdict.OK:
            return False
        if self._is_far:
            state.copy_(near, non_blocking=True)
        if self._opaque or not self.has_tail:
            return True
        tail = request.conv_tail(0, self.layer)
        if tail is None:
            return False
        self.fill_tail(block, memory.copy(bytes_of(tail)))
        return True

    def _load_pieces(self, block: int, request: ashlar.Request, tokens: int) -> bool:
        pieces = self._pieces(block, block, 0)
        sizes = [each.numel() * each.element_size() for each in pieces]
        near = torch.zeros(sum(sizes), dtype=torch.int8)
        if request.advance(self.layer, 0, tokens, near) != ashlar.Verdict.OK:
            return False
        for piece, held in zip(pieces, near.split(sizes)):
            piece.copy_(held.clone().view(piece.dtype).view(piece.shape))
        return True

    def fill_tail(self, block: int, data: torch.Tensor) -> None:
        """`data`: the tail's bytes, in CPU memory that a device copies later."""
        tail = self.tail(block)
        tail.copy_(data.view(tail.dtype).view(tail.shape), non_blocking=True)


class Keys:
    """One attention layer's blocks, if a block's rows are not its tokens."""

    def __init__(self, tensor: torch.Tensor, order: RowOrder) -> None:
        self._blocks, self._order = tensor, order

    def unpack(self, block: int, into: int, tokens: int) -> None:
        """Writes the rows of a block's first tokens into another block, where the cache reads them."""
        self._blocks[into, :, :tokens] = self._order.read(self._blocks[block], tokens)

    def pack(self, block: int, tokens: int) -> None:
        """Moves the landed rows of a block's first tokens to their places, and writes zeros after them."""
        rows = torch.zeros_like(self._blocks[block])
        rows[:, :tokens] = self._blocks[block, :, :tokens]
        self._blocks[block] = self._order.pack(rows)


class Window:
    """One layer's window in the engine's blocks. The blocks need not be adjacent, so a window is copied on its way to
    and from the cache."""

    def __init__(self, place: WindowPlace, block: int, tensor: torch.Tensor, order: RowOrder) -> None:
        self.place = place
        self._blocks, self._order = raw(tensor), order
        self._block, self._span = block, place.blocks * block
        self.bytes = place.blocks * place.block_bytes

    @staticmethod
    def fits(place: WindowPlace, block: int, tensor: torch.Tensor) -> bool:
        return tuple(tensor.shape[1:]) == (place.heads, block, place.row)

    def empty(self) -> torch.Tensor:
        """Returns memory for the last tokens of a text: [heads, tokens, row]."""
        return torch.zeros(self.place.heads, self._span, self.place.row, dtype=self._blocks.dtype)

    def state(self, held: torch.Tensor) -> torch.Tensor:
        """Returns the same bytes in the form of the cache."""
        return held.view(-1).view(torch.uint8)

    def _rows(self, blocks: Sequence[int], tokens: int) -> tuple[int, int]:
        """Returns the rows, begin and end, of the window's tokens in a text's last blocks."""
        end = (len(blocks) - 1) * self._block + (tokens - 1) % self._block + 1
        return max(0, end - self._span), end

    def tensors(self, blocks: Sequence[int], tokens: int) -> ashlar.LinearTensors:
        """Returns a copy of a text's last tokens, from its last blocks. If there are fewer than the window has, zeros
        precede them."""
        begin, end = self._rows(blocks, tokens)
        held = self.empty()
        stored = self._blocks.index_select(0, index_of(blocks, self._blocks.device))
        rows = self._order.read(stored, self._block).transpose(0, 1).flatten(1, 2)
        held[:, self._span - (end - begin) :] = rows[:, begin:end]
        return ashlar.LinearTensors(self.place.layer, self.state(held))

    def fill(self, blocks: Sequence[int], held: torch.Tensor, tokens: int) -> None:
        """Writes the last of `held` into a text's last blocks, with zeros around them."""
        if not blocks:
            return
        begin, end = self._rows(blocks, tokens)
        rows = torch.zeros(self.place.heads, len(blocks) * self._block, self.place.row, dtype=held.dtype)
        rows[:, begin:end] = held[:, self._span - (end - begin) :]
        parts = rows.unflatten(1, (len(blocks), self._block)).transpose(0, 1)
        device = self._blocks.device
        self._blocks.index_copy_(0, index_of(blocks, device), self._order.pack(parts).to(device))


class BlockWindow:
    """The window of a layer whose blocks have an unknown order: blocks are copied whole, and only at block ends."""

    def __init__(self, place: WindowPlace, tensor: torch.Tensor) -> None:
        parts = kernel_blocks(tensor, place.block_bytes)
        if parts is None or tensor.stride(-1) != 1:
            raise unsupported_shape(place.name, tensor)
        self.place = place
        self._blocks = tensor.view(torch.uint8).unflatten(0, (-1, parts))
        self.bytes = place.blocks * place.block_bytes

    def empty(self) -> torch.Tensor:
        """Returns memory for blocks: [blocks, ...], bytes, dense, in the order of the engine's dimensions."""
        return torch.zeros(self.place.blocks, *self._blocks.shape[1:], dtype=torch.uint8)

    def state(self, held: torch.Tensor) -> torch.Tensor:
        return held

    def tensors(self, blocks: Sequence[int], _: int) -> ashlar.LinearTensors:
        """Returns a copy of blocks, oldest first. If there are fewer than the window has, zeros precede them."""
        held = self.empty()
        if blocks:
            held[self.place.blocks - len(blocks) :] = self._blocks.index_select(
                0, index_of(blocks, self._blocks.device)
            )
        return ashlar.LinearTensors(self.place.layer, held)

    def fill(self, blocks: Sequence[int], held: torch.Tensor, _: int) -> None:
        """Writes the last of `held` into the engine's blocks."""
        if blocks:
            device = self._blocks.device
            self._blocks.index_copy_(0, index_of(blocks, device), held[self.place.blocks - len(blocks) :].to(device))
