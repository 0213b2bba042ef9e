// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device_arena.h"

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace ashlar::kernels::cuda {
namespace {

constexpr CUmemAllocationHandleType kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// Reports the reason for everything that returns null.
std::nullptr_t Refuse(const Driver& driver, const char* call, CUresult code, uint64_t bytes, ArenaError* error) {
  const char* name = nullptr;
  const bool known = driver.get_error_name(code, &name) == CUDA_SUCCESS && name != nullptr;
  error->out_of_memory = code == CUDA_ERROR_OUT_OF_MEMORY;
  error->message = std::string(call) + ": " + (known ? name : "error " + std::to_string(code));
  if (bytes > 0) error->message += " (" + std::to_string(bytes) + " bytes)";
  return nullptr;
}

// A reference to physical memory. Mappings keep the memory without it.
struct Handle {
  explicit Handle(const Driver& its_driver) : driver(its_driver) {}
  ~Handle() {
    if (owned) driver.release(value);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const Driver& driver;
  CUmemGenericAllocationHandle value = 0;
  bool owned = false;
};

// Returns the device once it is known to support everything required.
bool Find(const Driver& driver, int number, CUdevice* device, ArenaError* error) {
  const auto succeeds = [&](const char* call, CUresult code) {
    if (code != CUDA_SUCCESS) Refuse(driver, call, code, 0, error);
    return code == CUDA_SUCCESS;
  };
  if (!succeeds("cuInit", driver.init(0)) || !succeeds("cuDeviceGet", driver.device_get(device, number))) return false;
  for (const auto& [attribute, what] :
       {std::pair(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"),
        std::pair(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "sharing by file descriptors")}) {
    int able = 0;
    if (!succeeds("cuDeviceGetAttribute", driver.device_get_attribute(&able, attribute, *device))) return false;
    if (able == 0) {
      *error = {.message = "device " + std::to_string(number) + " has no " + what};
      return false;
    }
  }
  return true;
}

}  // namespace

std::unique_ptr<DeviceArena> DeviceArena::Make(const Driver& driver, int device, uint64_t bytes, ArenaError* error) {
  CUdevice where = 0;
  if (!Find(driver, device, &where, error)) return nullptr;
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kDescriptor;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = where};
  int rdma = 0;
  if (driver.device_get_attribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, where) ==
      CUDA_SUCCESS) {
    properties.allocFlags.gpuDirectRDMACapable =
        rdma != 0;  // otherwise a network card could not be registered with it later
  }
  size_t granularity = 0;
  CUresult code = driver.get_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (code != CUDA_SUCCESS) return Refuse(driver, "cuMemGetAllocationGranularity", code, bytes, error);
  const uint64_t whole = (bytes + granularity - 1) / granularity * granularity;

  Handle memory(driver);
  code = driver.create(&memory.value, whole, &properties, 0);
  if (code != CUDA_SUCCESS) return Refuse(driver, "cuMemCreate", code, whole, error);
  memory.owned = true;
  std::unique_ptr<DeviceArena> arena(new DeviceArena(driver));
  const char* call = nullptr;
  code = arena->Map(memory.value, properties.location, whole, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &call);
  if (code != CUDA_SUCCESS) return Refuse(driver, call, code, whole, error);
  code = arena->Export(memory.value);
  if (code != CUDA_SUCCESS) return Refuse(driver, "cuMemExportToShareableHandle", code, whole, error);
  return arena;
}

std::unique_ptr<DeviceArena> DeviceArena::Import(const Driver& driver, int device, int descriptor, uint64_t bytes,
                                                 Access access, ArenaError* error) {
  CUdevice where = 0;
  if (!Find(driver, device, &where, error)) return nullptr;
  Handle memory(driver);
  // The driver takes the number itself where it expects a pointer.
  void* number = reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor));
  CUresult code = driver.import_handle(&memory.value, number, kDescriptor);
  if (code != CUDA_SUCCESS) return Refuse(driver, "cuMemImportFromShareableHandle", code, bytes, error);
  memory.owned = true;
  std::unique_ptr<DeviceArena> arena(new DeviceArena(driver));
  const char* call = nullptr;
  const auto flags = access == Access::kRead ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  code = arena->Map(memory.value, {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = where}, bytes, flags, &call);
  if (code != CUDA_SUCCESS) return Refuse(driver, call, code, bytes, error);
  return arena;
}

CUresult DeviceArena::Map(CUmemGenericAllocationHandle memory, const CUmemLocation& where, uint64_t bytes,
                          CUmemAccess_flags flags, const char** call) {
  *call = "cuMemAddressReserve";
  CUresult code = driver_.address_reserve(&address_, bytes, 0, 0, 0);
  if (code != CUDA_SUCCESS) {
    address_ = 0;
    return code;
  }
  bytes_ = bytes;
  *call = "cuMemMap";
  code = driver_.map(address_, bytes, 0, memory, 0);
  if (code != CUDA_SUCCESS) return code;
  mapped_ = true;
  *call = "cuMemSetAccess";
  const CUmemAccessDesc access = {.location = where, .flags = flags};
  return driver_.set_access(address_, bytes, &access, 1);
}

CUresult DeviceArena::Export(CUmemGenericAllocationHandle memory) {
  int descriptor = -1;
  const CUresult code = driver_.export_handle(&descriptor, memory, kDescriptor, 0);
  if (code != CUDA_SUCCESS) return code;
  descriptor_ = descriptor;
  // Child processes must not inherit the descriptor; only processes to which it is sent may use it.
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return CUDA_SUCCESS;
}

DeviceArena::~DeviceArena() {
  if (descriptor_ >= 0) close(descriptor_);
  if (mapped_) driver_.unmap(address_, bytes_);
  if (address_ != 0) driver_.address_free(address_, bytes_);
}

std::byte* DeviceArena::data() const {
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address_));
}

}  // namespace ashlar::kernels::cuda
