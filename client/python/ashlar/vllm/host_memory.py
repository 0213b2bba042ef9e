# SPDX-License-Identifier: Apache-2.0
"""CPU memory from which tensors are copied to the engine's device without waiting.

CUDA and ROCm copy asynchronously from registered (pinned) memory only. Memory must not change before such a copy has
ended, so it is used again only after a mark in the engine's work (order.py).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

import torch
from vllm.logger import init_logger

from ashlar.vllm.order import Mark

logger = init_logger("vllm.ashlar")

_PIECE = 32 << 20  # bytes of device memory that one copy uses
_UNIT = 1 << 12  # bytes; all sizes are multiples
_CAPACITY = 4 << 30  # bytes


def pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Registers memory for copies to and from the device. Returns whether `unpin` must be called."""
    if device.type != "cuda":
        return False
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0))
    if code != 0:
        with contextlib.suppress(RuntimeError):  # the next kernel launch reports the error again
            torch.zeros(1, device=device)
        logger.warning("Ashlar: host memory is not pinned, so copies are slower: cudaHostRegister: error %d", code)
    return code == 0


def unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def pieces(held: torch.Tensor, pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first, end, page): entries [first, end) of `pages` are consecutive pages from `page` on. `held`: the
    tensor of all pages, [pages, …]."""
    most = max(1, _PIECE // (held[0].numel() * held.element_size()))
    first = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1 or end - first == most:
            yield first, end, pages[first]
            first = end


def whole_size(size: int) -> int:
    """Returns the bytes that `Lease.take` takes from a pool for a tensor of `size` bytes."""
    return -(-size // _UNIT) * _UNIT


class HostMemory:
    """A pool of host memory. Thread-safe. If the device is the CPU, it allocates ordinary memory and keeps none."""

    def __init__(self, device: torch.device, capacity: int = _CAPACITY) -> None:
        """`capacity`: bytes of leased and unused memory together above which unused memory is freed. Leases may take
        more."""
        self._device, self._capacity = device, capacity
        self._free: dict[int, list[torch.Tensor]] = {}  # by size in bytes; guarded by _lock
        self._allocated = 0  # bytes, also of leased memory; guarded by _lock
        self._left: list[tuple[Mark, list[torch.Tensor]]] = []  # guarded by _lock
        self._pinned: set[int] = set()  # addresses
        self._lock = threading.Lock()

    def lease(self) -> Lease:
        return Lease(self)

    def close(self) -> None:
        """Waits for the copies of memory that was given back. The memory of other leases stays pinned."""
        with self._lock:
            self._collect(wait=True)
            self._shrink(0)

    def take(self, size: int) -> torch.Tensor:
        """Returns uninitialized memory of at least `size` bytes."""
        if self._device.type == "cpu":
            return self._allocate(size)
        whole = whole_size(size)
        with self._lock:
            self._collect()
            if self._free.get(whole):
                return self._free[whole].pop()
            self._shrink(self._capacity - whole)
            self._allocated += whole
        memory = self._allocate(whole)
        if pin(memory, self._device):
            with self._lock:
                self._pinned.add(memory.data_ptr())
        return memory

    @staticmethod
    def _allocate(size: int) -> torch.Tensor:
        with torch.inference_mode(False):  # threads outside this mode may write to the memory later
            return torch.empty(size, dtype=torch.uint8)

    def give(self, taken: list[torch.Tensor], mark: Mark | None) -> None:
        """Returns memory to the pool once the work before the mark has ended; None: it has ended."""
        if self._device.type == "cpu":
            return
        with self._lock:
            if mark is None:
                self._keep(taken)
            else:
                self._left.append((mark, taken))

    def _collect(self, wait: bool = False) -> None:
        left, self._left = self._left, []
        for mark, taken in left:
            if wait:
                mark.synchronize()
            if wait or mark.query():
                self._keep(taken)
            else:
                self._left.append((mark, taken))

    def _keep(self, taken: list[torch.Tensor]) -> None:
        for memory in taken:
            self._free.setdefault(len(memory), []).append(memory)
        self._shrink(self._capacity)

    def _shrink(self, most: int) -> None:
        """Frees unused memory until at most this number of bytes is allocated."""
        for size, unused in self._free.items():
            while unused and self._allocated > most:
                self._unpin(unused.pop())
                self._allocated -= size

    def _unpin(self, memory: torch.Tensor) -> None:
        if memory.data_ptr() in self._pinned:
            self._pinned.remove(memory.data_ptr())
            unpin(memory)


class Lease:
    """Memory that one owner has taken from a pool, until `give`."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._taken: list[torch.Tensor] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns an uninitialized tensor."""
        size = math.prod(shape) * dtype.itemsize
        self._taken.append(self._memory.take(size))
        return self._taken[-1][:size].view(dtype).view(*shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.take(tensor.shape, tensor.dtype).copy_(tensor)

    def give(self, mark: Mark | None) -> None:
        """Returns all memory to the pool. `mark`: a mark after the last copy from it; None: the copies have ended."""
        taken, self._taken = self._taken, []
        self._memory.give(taken, mark)
