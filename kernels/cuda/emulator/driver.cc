// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emulator/driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "kernels/mutex.h"

namespace ashlar::kernels::cuda {
namespace emulator {
namespace {

struct Range {
  size_t bytes = 0;
  bool mapped = false;
  int protection = PROT_NONE;  // the device's access
  int device = 0;              // device whose memory is mapped there
};

struct DriverState {
  std::map<CUmemGenericAllocationHandle, int> handles;  // by handle: a memfd
  std::map<CUdeviceptr, Range> ranges;
  CUmemGenericAllocationHandle last_handle = 0;
  std::array<int, kDevices> working = {};  // copies and kernels under way
  std::optional<Fault> fault;
  std::vector<std::string> calls;
  int lacking = 0;
  std::map<uintptr_t, size_t> registered;  // size by address, kept separately
};
struct SharedState {
  Mutex mutex;
  DriverState state ABSL_GUARDED_BY(mutex);
};
SharedState& Self() {
  static SharedState& state = *new SharedState();  // arenas of static life may end after everything else
  return state;
}

void* Pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(address));
}

void Protect(const DriverState& state, CUdeviceptr address, const Range& range) {
  mprotect(Pointer(address), range.bytes, state.working[range.device] > 0 ? range.protection : PROT_NONE);
}

// The memory of a device carries its number, in every process that has a descriptor of it.
std::string MemoryName(int device) {
  return "emulated-device-" + std::to_string(device);
}
int DeviceOf(int memfd) {
  char name[64] = {};
  const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(memfd)).c_str(), name, sizeof name - 1);
  const std::string_view found(name, length < 0 ? 0 : static_cast<size_t>(length));
  for (int device = 0; device < kDevices; ++device) {
    if (found.starts_with("/memfd:" + MemoryName(device))) return device;
  }
  return -1;
}

// Counts a call. Returns its result if it should fail.
std::optional<CUresult> Refusal(DriverState& state, const char* call) {
  state.calls.emplace_back(call);
  if (!state.fault || state.fault->countdown-- > 0) return std::nullopt;
  const CUresult code = state.fault->code;
  state.fault.reset();
  return code;
}

template <typename Work>
CUresult Call(const char* name, Work work) {
  SharedState& self = Self();
  MutexLock lock(self.mutex);
  const std::optional<CUresult> refused = Refusal(self.state, name);
  return refused ? *refused : work(self.state);
}

CUresult Init(unsigned) {
  return Call("cuInit", [](DriverState&) { return CUDA_SUCCESS; });
}

CUresult GetErrorName(CUresult error, const char** name) {
  switch (error) {
    case CUDA_SUCCESS:
      *name = "CUDA_SUCCESS";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_VALUE:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return CUDA_SUCCESS;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_SUPPORTED:
      *name = "CUDA_ERROR_NOT_SUPPORTED";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_INITIALIZED:
      *name = "CUDA_ERROR_NOT_INITIALIZED";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_DEVICE:
      *name = "CUDA_ERROR_INVALID_DEVICE";
      return CUDA_SUCCESS;
  }
  *name = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult DeviceGet(CUdevice* device, int ordinal) {
  return Call("cuDeviceGet", [&](DriverState&) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < kDevices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
  });
}

CUresult DeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return Call("cuDeviceGetUuid_v2", [&](DriverState&) {
    *uuid = {.bytes = "emulated GPU"};
    uuid->bytes[sizeof uuid->bytes - 1] = static_cast<char>(device);
    return CUDA_SUCCESS;
  });
}

CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  return Call("cuDeviceGetAttribute", [&](DriverState& state) {
    *value = state.lacking == attribute ? 0 : 1;
    return CUDA_SUCCESS;
  });
}

bool IsUsual(const CUmemAllocationProp& properties) {
  return properties.type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
         properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE && properties.location.id >= 0 &&
         properties.location.id < kDevices;
}

CUresult GetGranularity(size_t* granularity, const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags) {
  return Call("cuMemGetAllocationGranularity", [&](DriverState&) {
    *granularity = kGranularity;
    return IsUsual(*properties) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

// Fills new memory with garbage: a driver's memory may hold older data.
bool FillWithGarbage(int memfd, size_t bytes) {
  static const std::vector<char> garbage(kGranularity, '\xa5');
  for (size_t at = 0; at < bytes; at += garbage.size()) {
    if (pwrite(memfd, garbage.data(), garbage.size(), static_cast<off_t>(at)) != static_cast<ssize_t>(garbage.size())) {
      return false;
    }
  }
  return true;
}

CUresult Create(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                unsigned long long) {  // NOLINT(google-runtime-int)
  return Call("cuMemCreate", [&](DriverState& state) {
    if (size == 0 || size % kGranularity != 0 || !IsUsual(*properties)) return CUDA_ERROR_INVALID_VALUE;
    if (size > kLargest) return CUDA_ERROR_OUT_OF_MEMORY;
    const int memfd = memfd_create(MemoryName(properties->location.id).c_str(), MFD_CLOEXEC);
    if (memfd < 0 || !FillWithGarbage(memfd, size)) {
      if (memfd >= 0) close(memfd);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = ++state.last_handle;
    state.handles[*handle] = memfd;
    return CUDA_SUCCESS;
  });
}

CUresult Release(CUmemGenericAllocationHandle handle) {
  return Call("cuMemRelease", [&](DriverState& state) {
    const auto found = state.handles.find(handle);
    if (found == state.handles.end()) return CUDA_ERROR_INVALID_VALUE;
    close(found->second);
    state.handles.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult AddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr,
                        unsigned long long) {  // NOLINT(google-runtime-int)
  return Call("cuMemAddressReserve", [&](DriverState& state) {
    if (size == 0 || size % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
    void* found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<uintptr_t>(found);
    state.ranges[*address] = {.bytes = size};
    return CUDA_SUCCESS;
  });
}

// Returns the range of exactly this address and size that is mapped, or not, as requested; otherwise null.
Range* FindRange(DriverState& state, CUdeviceptr address, size_t size, bool mapped) {
  const auto found = state.ranges.find(address);
  const bool fits = found != state.ranges.end() && found->second.bytes == size && found->second.mapped == mapped;
  return fits ? &found->second : nullptr;
}

CUresult AddressFree(CUdeviceptr address, size_t size) {
  return Call("cuMemAddressFree", [&](DriverState& state) {
    if (FindRange(state, address, size, false) == nullptr) return CUDA_ERROR_INVALID_VALUE;
    munmap(Pointer(address), size);
    state.ranges.erase(address);
    return CUDA_SUCCESS;
  });
}

CUresult Map(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {  // NOLINT(google-runtime-int)
  return Call("cuMemMap", [&](DriverState& state) {
    Range* range = FindRange(state, address, size, false);
    const auto memory = state.handles.find(handle);
    struct stat file {};
    if (range == nullptr || memory == state.handles.end() || offset != 0 || fstat(memory->second, &file) != 0 ||
        static_cast<size_t>(file.st_size) < size || DeviceOf(memory->second) < 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (mmap(Pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->second, 0) == MAP_FAILED) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    range->mapped = true;
    range->device = DeviceOf(memory->second);
    return CUDA_SUCCESS;
  });
}

CUresult Unmap(CUdeviceptr address, size_t size) {
  return Call("cuMemUnmap", [&](DriverState& state) {
    Range* range = FindRange(state, address, size, true);
    if (range == nullptr) return CUDA_ERROR_INVALID_VALUE;
    mmap(Pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    *range = {.bytes = size};
    return CUDA_SUCCESS;
  });
}

CUresult SetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t count) {
  return Call("cuMemSetAccess", [&](DriverState& state) {
    Range* range = FindRange(state, address, size, true);
    if (range == nullptr || count != 1) return CUDA_ERROR_INVALID_VALUE;
    if (access->location.id != range->device) return CUDA_ERROR_INVALID_DEVICE;
    range->protection = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    Protect(state, address, *range);
    return CUDA_SUCCESS;
  });
}

CUresult ExportHandle(void* shared, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                      unsigned long long) {  // NOLINT(google-runtime-int)
  return Call("cuMemExportToShareableHandle", [&](DriverState& state) {
    const auto memory = state.handles.find(handle);
    if (memory == state.handles.end()) return CUDA_ERROR_INVALID_VALUE;
    *static_cast<int*>(shared) = dup(memory->second);  // the driver may do so: inherited by started programs
    return CUDA_SUCCESS;
  });
}

CUresult ImportHandle(CUmemGenericAllocationHandle* handle, void* shared, CUmemAllocationHandleType) {
  return Call("cuMemImportFromShareableHandle", [&](DriverState& state) {
    const int memfd = fcntl(static_cast<int>(reinterpret_cast<uintptr_t>(shared)), F_DUPFD_CLOEXEC, 0);
    if (memfd < 0) return CUDA_ERROR_INVALID_VALUE;
    *handle = ++state.last_handle;
    state.handles[*handle] = memfd;
    return CUDA_SUCCESS;
  });
}

void Change(int device, int by) {
  SharedState& self = Self();
  MutexLock lock(self.mutex);
  DriverState& state = self.state;
  int& working = state.working[device];
  const bool before = working > 0;
  working += by;
  if (before == (working > 0)) return;
  for (const auto& [address, range] : state.ranges) {
    if (range.mapped && range.device == device) Protect(state, address, range);
  }
}

thread_local int current_device = 0;

}  // namespace

const Driver& EmulatedDriver() {
  static const Driver driver = {.init = Init,
                                .get_error_name = GetErrorName,
                                .device_get = DeviceGet,
                                .device_get_uuid = DeviceGetUuid,
                                .device_get_attribute = DeviceGetAttribute,
                                .get_granularity = GetGranularity,
                                .create = Create,
                                .release = Release,
                                .address_reserve = AddressReserve,
                                .address_free = AddressFree,
                                .map = Map,
                                .unmap = Unmap,
                                .set_access = SetAccess,
                                .export_handle = ExportHandle,
                                .import_handle = ImportHandle};
  return driver;
}

DriverObjects Alive() {
  SharedState& self = Self();
  MutexLock lock(self.mutex);
  DriverObjects objects{.handles = self.state.handles.size(), .ranges = self.state.ranges.size()};
  for (const auto& [address, range] : self.state.ranges) objects.mappings += range.mapped ? 1 : 0;
  return objects;
}

void SetFault(const Fault* fault) {
  SharedState& self = Self();
  MutexLock lock(self.mutex);
  self.state.fault = fault == nullptr ? std::nullopt : std::optional(*fault);
}

std::vector<std::string> TakeCalls() {
  SharedState& self = Self();
  MutexLock lock(self.mutex);
  return std::exchange(self.state.calls, {});
}

void LackAttribute(int attribute) {
  SharedState& self = Self();
  MutexLock lock(self.mutex);
  self.state.lacking = attribute;
}

bool RegisterHost(void* memory, size_t bytes) {
  SharedState& self = Self();
  MutexLock lock(self.mutex);
  auto& registered = self.state.registered;
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const auto next = registered.lower_bound(begin);
  if (bytes == 0 || (next != registered.end() && next->first < begin + bytes)) return false;
  if (next != registered.begin() && std::prev(next)->first + std::prev(next)->second > begin) return false;
  registered[begin] = bytes;
  return true;
}

bool UnregisterHost(void* memory) {
  SharedState& self = Self();
  MutexLock lock(self.mutex);
  return self.state.registered.erase(reinterpret_cast<uintptr_t>(memory)) > 0;
}

bool Reaches(const void* memory, size_t bytes) {
  SharedState& self = Self();
  MutexLock lock(self.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const auto behind = self.state.registered.upper_bound(begin);
  if (behind == self.state.registered.begin()) return false;
  const auto& [start, length] = *std::prev(behind);
  return begin + bytes <= start + length;
}

int CurrentDevice() {
  return current_device;
}

bool SetCurrentDevice(int device) {
  if (device < 0 || device >= kDevices) return false;
  current_device = device;
  return true;
}

DeviceWork::DeviceWork(int device) : device_(device) {
  Change(device_, 1);
}
DeviceWork::~DeviceWork() {
  Change(device_, -1);
}

}  // namespace emulator

const Driver* SystemDriver() {
  return &emulator::EmulatedDriver();
}

}  // namespace ashlar::kernels::cuda
