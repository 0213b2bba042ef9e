// SPDX-License-Identifier: Apache-2.0
// An arena in a GPU's memory, by the driver's virtual memory management: other processes map it by a descriptor.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/driver.h"
#include "kernels/device.h"

namespace ashlar::kernels::cuda {

// Physical memory of one device, and a range of addresses where that device alone may reach it. Unlike a sealed memfd,
// whose later mappings are read-only, what is imported may be mapped writable: whoever has the descriptor can write.
class DeviceArena final : public ArenaMemory {
 public:
  // `device` is its number among those that CUDA shows to this process. `bytes` > 0 is rounded up to what the device
  // allocates at once (2 MiB on those known): bytes() says. Null with the reason; then nothing stays behind.
  // `driver` must outlive the arena.
  static std::unique_ptr<DeviceArena> Make(const Driver& driver, int device, uint64_t bytes, ArenaError* error);

  enum class Access : uint8_t { kRead, kReadWrite };
  // Maps an arena that another process made; `bytes` is its bytes(). The descriptor stays the caller's, and may be
  // closed.
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
