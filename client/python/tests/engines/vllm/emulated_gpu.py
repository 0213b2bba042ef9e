# SPDX-License-Identifier: Apache-2.0
"""A GPU's driver and streams, emulated for the connector: the driver's allocations are memfds, like those of the
emulated daemon (kernels/cuda/emulator), mapped into CPU memory, so that the engine's own kernels run on them."""

import contextlib
import ctypes
import mmap
import os
import pathlib
import types

import torch

from ashlar.vllm.order import Copies, CpuTimer

GRAIN = 2 << 20
ASHLARD = str(pathlib.Path(os.environ.get("ASHLARD", "ashlard")).with_name("ashlard_emulated"))
GPU = b"emulated GPU" + bytes(4)
CALLS = (
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetUuid",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NAMES = (
    "CUdevice_attribute",
    "CUmemAllocationType",
    "CUmemAllocationHandleType",
    "CUmemLocationType",
    "CUmemAccess_flags",
    "CUmemAllocationGranularity_flags",
)


class _Names:
    """An enumeration whose values are its names."""

    def __getattr__(self, name):
        return name


class Driver:
    """Emulates `cuda.bindings.driver`. `fails`: the call to refuse; `lacks`: an attribute that the device lacks."""

    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, fails=None, lacks=""):
        self.fails, self.lacks, self.calls = fails, lacks, []
        self.handles, self.ranges, self.mapped = {}, {}, {}
        for name in _NAMES:
            setattr(self, name, _Names())
        self.CUmemAllocationProp = lambda: types.SimpleNamespace(location=types.SimpleNamespace())
        self.CUmemAccessDesc = lambda: types.SimpleNamespace(location=types.SimpleNamespace())

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def call(*arguments):
            self.calls.append(name)
            if name == self.fails:
                return (types.SimpleNamespace(name="CUDA_ERROR_OF_A_TEST"),)
            answer = found(*arguments)
            return (0,) if answer is None else (0, answer)

        return call

    @property
    def alive(self):
        return len(self.handles) + len(self.ranges) + len(self.mapped)

    def cuInit(self, flags):
        assert flags == 0

    def cuDeviceGet(self, number):
        return number

    def cuDeviceGetAttribute(self, attribute, device):
        return 0 if self.lacks and self.lacks in attribute else 1

    def cuDeviceGetUuid(self, device):
        return types.SimpleNamespace(bytes=GPU)

    def cuMemGetAllocationGranularity(self, properties, flags):
        assert properties.type == "CU_MEM_ALLOCATION_TYPE_PINNED"
        assert properties.location.type == "CU_MEM_LOCATION_TYPE_DEVICE" and properties.location.id == 0
        return GRAIN

    def cuMemCreate(self, size, properties, flags):
        assert size % GRAIN == 0 and properties.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        memfd = os.memfd_create("emulated-device-0", os.MFD_CLOEXEC)
        for at in range(0, size, GRAIN):
            os.pwrite(memfd, b"\xa5" * GRAIN, at)  # a driver's memory may contain older data
        self.handles[len(self.calls)] = memfd
        return len(self.calls)

    def cuMemRelease(self, handle):
        os.close(self.handles.pop(handle))

    def cuMemAddressReserve(self, size, alignment, address, flags):
        found = _libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.ranges[found] = size
        return found

    def cuMemAddressFree(self, address, size):
        assert self.ranges.pop(address) == size and address not in self.mapped
        _libc.munmap(address, size)

    def cuMemMap(self, address, size, offset, handle, flags):
        assert self.ranges[address] == size and handle in self.handles
        self.mapped[address] = self.handles[handle]

    def cuMemUnmap(self, address, size):
        del self.mapped[address]
        _libc.mmap(address, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, 0)

    def cuMemSetAccess(self, address, size, accesses, count):
        assert count == len(accesses) == 1 and accesses[0].flags == "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"
        both, shared_fixed = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10
        assert _libc.mmap(address, size, both, shared_fixed, self.mapped[address], 0) == address

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        descriptor = os.dup(self.handles[handle])
        os.set_inheritable(descriptor, True)  # the driver may do so
        return descriptor


def tensor_of(mapped, device):
    """Replaces torch's reading of the interface, which asks a GPU for the memory."""
    interface = mapped.__cuda_array_interface__
    (address, read_only), (size,) = interface["data"], interface["shape"]
    assert interface["typestr"] == "|i1" and not read_only
    buffer = (ctypes.c_int8 * size).from_address(address)
    buffer.mapped = mapped  # torch keeps the buffer alive, and the buffer keeps this
    return torch.frombuffer(buffer, dtype=torch.int8)


class Order:
    """Records events, and delays the end of the engine's work like a GPU's streams."""

    def __init__(self, queries=3):
        self.seen, self._queries, self._marks, self.copying = [], queries, 0, False

    def note(self, what, *more):
        self.seen.append((what, *more))

    def timer(self):
        return CpuTimer()

    def mark(self):
        self._marks += 1
        self.note("mark", self._marks)
        return Mark(self, self._marks, self._queries)

    @contextlib.contextmanager
    def copies(self, wait=True):
        self.copying = True
        self.note("copies")
        yield Copies()
        self.note("copied")
        self.copying = False


class Mark:
    def __init__(self, order, number, queries):
        self._order, self._number, self._left = order, number, queries

    def query(self):
        self._left -= 1
        if self._left == 0:
            self._order.note("ended", self._number)
        return self._left <= 0

    def synchronize(self):
        self._left = 0
        self._order.note("ended", self._number)


def emulate(monkeypatch, driver, order=None):
    """Allocates vLLM's caches from `driver`, while the engine computes on the CPU."""
    import ashlar.vllm.cuda as cuda
    import ashlar.vllm.memory as memory

    monkeypatch.setattr(cuda, "load_driver", lambda: driver)
    monkeypatch.setattr(cuda, "tensor_of", tensor_of)
    if order is not None:
        monkeypatch.setattr(cuda, "DeviceOrder", lambda device: order)
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    make = lambda size, device: cuda.CudaMemory(size, torch.device("cuda", 0))
    monkeypatch.setitem(memory._MEMORIES, "cpu", make)
