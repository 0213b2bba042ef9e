// SPDX-License-Identifier: Apache-2.0
// An arena in a GPU's memory, by the driver's virtual memory management: other processes map it by a descriptor.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/driver.h"
#include "kernels/device.h"

namespace ashlar::kernels::cuda {

// Physical memory of one device, and a range of addresses that only that device can access. Unlike a sealed memfd,
// whose later mappings are read-only, imported memory may be mapped writable: any holder of the descriptor can write.
class DeviceArena final : public ArenaMemory {
 public:
  // `device` is its number among the ones that CUDA shows to this process. `bytes` > 0 is rounded up to the device's
  // allocation unit (2 MiB on known devices); see bytes(). On failure returns null with the reason, and leaks nothing.
  // `driver` must outlive the arena.
  static std::unique_ptr<DeviceArena> Make(const Driver& driver, int device, uint64_t bytes, ArenaError* error);

  enum class Access : uint8_t { kRead, kReadWrite };
  // Maps an arena of another process; `bytes` is its bytes(). The caller keeps the descriptor and may close it.
  static std::unique_ptr<DeviceArena> Import(const Driver& driver, int device, int descriptor, uint64_t bytes,
                                             Access access, ArenaError* error);

  // All work on it must have ended.
  ~DeviceArena() override;
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  MemoryKind kind() const override { return MemoryKind::kDevice; }
  std::byte* data() const override;
  uint64_t bytes() const override { return bytes_; }
  int descriptor() const override { return descriptor_; }  // −1 for an imported arena

 private:
  explicit DeviceArena(const Driver& driver) : driver_(driver) {}
  CUresult Map(CUmemGenericAllocationHandle memory, const CUmemLocation& where, uint64_t bytes, CUmemAccess_flags flags,
               const char** call);
  CUresult Export(CUmemGenericAllocationHandle memory);

  const Driver& driver_;
  CUdeviceptr address_ = 0;  // 0: no range is reserved
  uint64_t bytes_ = 0;
  bool mapped_ = false;
  int descriptor_ = -1;
};

}  // namespace ashlar::kernels::cuda
