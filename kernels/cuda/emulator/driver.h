// SPDX-License-Identifier: Apache-2.0
// A driver emulated on the CPU: a device's memory is a memfd that only the emulated runtime can touch, inside a copy or
// a kernel. A thread that uses a device address otherwise gets a signal, as it would get an illegal access from a GPU.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/cuda/driver.h"

namespace ashlar::kernels::cuda::emulator {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr size_t kLargest = size_t{1} << 30;  // allocation
// Devices that cannot access each other's memory.
constexpr int kDevices = 2;

const Driver& EmulatedDriver();

// The driver's objects that have been made and not yet released.
struct DriverObjects {
  size_t handles = 0, ranges = 0, mappings = 0;
  bool operator==(const DriverObjects&) const = default;
};
DriverObjects Alive();

// From now on, the call `countdown` calls after the next one returns `code` once (0: the next one). Null ends that.
struct Fault {
  int countdown = 0;
  CUresult code = CUDA_ERROR_NOT_SUPPORTED;
};
void SetFault(const Fault* fault);
// Names of the calls since the last call of this function, in order; cuGetErrorName does not count.
std::vector<std::string> TakeCalls();
// Makes the device lack an attribute; 0: it lacks none.
void LackAttribute(int attribute);

// Records host memory that is registered with the runtime. Returns false if part of it is already registered, or (for
// UnregisterHost) if it is not registered.
bool RegisterHost(void* memory, size_t bytes);
bool UnregisterHost(void* memory);
// Returns whether a GPU could access all of `memory`.
bool Reaches(const void* memory, size_t bytes);

// The device of the calling thread, 0 at first.
int CurrentDevice();
bool SetCurrentDevice(int device);

// While one lives, on any thread, mappings have the access that its device was given.
class DeviceWork {
 public:
  DeviceWork() : DeviceWork(CurrentDevice()) {}
  explicit DeviceWork(int device);
  ~DeviceWork();
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

 private:
  const int device_;
};

}  // namespace ashlar::kernels::cuda::emulator
