# SPDX-License-Identifier: Apache-2.0
"""The engine's key and value caches on a GPU, in an allocation that the daemon can map.

torch's own allocations cannot be exported as the descriptors that the daemon takes. Allocations of CUDA's virtual
memory management can, through `cuda.bindings`, on which torch for CUDA depends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import weakref
from typing import Any

import torch

import ashlar
from ashlar.vllm.order import DeviceOrder


def load_driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _answer(driver: Any, name: str, *arguments: Any) -> Any:
    """Returns the results of a driver call, without its code. OSError: the driver refused the call."""
    code, *answer = getattr(driver, name)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise OSError(f"{name}: {getattr(code, 'name', code)}")
    return answer[0] if answer else None


def _check_ability(driver: Any, device: Any) -> None:
    attributes = driver.CUdevice_attribute
    for attribute, what in (
        (attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"),
        (attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "sharing by file descriptors"),
    ):
        if not _answer(driver, "cuDeviceGetAttribute", attribute, device):
            raise OSError(f"the GPU has no {what}")


class _Mapped:
    """An allocation as mapped in this process. torch keeps it as long as any of its tensors."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|i1",
            "strides": None,
            "version": 3,
        }


def tensor_of(mapped: _Mapped, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(mapped, device=device)


class _Range:
    """A range of addresses on one GPU, and the memory that is mapped there and exported as a descriptor. OSError: the
    driver refused."""

    def __init__(self, driver: Any, number: int, size: int) -> None:
        self._driver = driver
        self._properties, self._access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties.requestedHandleTypes = kind
        for each in (self._properties, self._access):
            each.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            each.location.id = number
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        grain = int(_answer(driver, "cuMemGetAllocationGranularity", self._properties, flags))
        self.size = -(-size // grain) * grain
        self.address = int(_answer(driver, "cuMemAddressReserve", self.size, 0, 0, 0))
        self.descriptor = -1
        self.mapped = False

    def map(self) -> None:
        """Maps new memory, and exports it as a descriptor."""
        handle = _answer(self._driver, "cuMemCreate", self.size, self._properties, 0)
        try:
            _answer(self._driver, "cuMemMap", self.address, self.size, 0, handle, 0)
            self.mapped = True
            _answer(self._driver, "cuMemSetAccess", self.address, self.size, [self._access], 1)
            kind = self._properties.requestedHandleTypes
            self.descriptor = int(_answer(self._driver, "cuMemExportToShareableHandle", handle, kind, 0))
            os.set_inheritable(self.descriptor, False)  # programs that the engine starts do not inherit it
        except BaseException:
            with contextlib.suppress(OSError):
                self.unmap()
            raise
        finally:
            self._driver.cuMemRelease(handle)  # mapping and descriptor keep the memory

    def close(self) -> None:
        """Closes the descriptor. The mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def unmap(self) -> None:
        """Releases the memory and keeps the addresses. OSError: the memory was not released."""
        if self.mapped:
            _answer(self._driver, "cuMemUnmap", self.address, self.size)
            self.mapped = False
        self.close()

    def free(self) -> None:
        with contextlib.suppress(OSError):
            self.unmap()
        self.close()
        self._driver.cuMemAddressFree(self.address, self.size)


def _free(memory: _Range, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # waits for the engine's last work there
    memory.free()


class CudaMemory:
    """An allocation on one GPU, exported as a descriptor, and a tensor over its bytes. OSError: the driver refused."""

    on_gpu = True

    def __init__(self, size: int, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        here = torch.device("cuda", index)
        driver = load_driver()
        torch.cuda.empty_cache()  # memory in torch's cache is not free for the driver
        _answer(driver, "cuInit", 0)
        number = _answer(driver, "cuDeviceGet", index)
        _check_ability(driver, number)
        uuid = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self.gpu = bytes(_answer(driver, uuid, number).bytes)
        self.order = DeviceOrder(here)
        self._device, self._range = here, _Range(driver, int(number), size)
        try:
            self._range.map()
            mapped = _Mapped(self.address, size)
            self.bytes = tensor_of(mapped, here)
            self.bytes.zero_()
        except BaseException:
            self._range.free()
            raise
        # Not at process exit: the driver has then been unloaded, and frees all memory itself.
        weakref.finalize(mapped, _free, self._range, here).atexit = False

    @property
    def address(self) -> int:
        return self._range.address

    @property
    def size(self) -> int:
        return self._range.size

    @property
    def descriptor(self) -> int:
        return self._range.descriptor

    def release(self) -> None:
        """Releases the memory. Tensors keep their addresses and must not be used until `restore`. OSError: it was not
        released."""
        torch.cuda.synchronize(self._device)
        self._range.unmap()

    def restore(self) -> None:
        """Maps new memory at the same addresses, filled with zeros. OSError: the driver refused."""
        if not self._range.mapped:
            self._range.map()
            self.bytes.zero_()

    def options(self) -> dict[str, Any]:
        """Options of ashlar.Cache."""
        return {
            "memory_kind": ashlar.MemoryKind.GPU,
            "gpu_descriptor": self.descriptor,
            "gpu_address": self.address,
            "gpu": self.gpu,
            "memory_bytes": self.size,
        }

    def close(self) -> None:
        """Closes the descriptor. The daemon's mapping and the engine's tensors stay valid."""
        self._range.close()
