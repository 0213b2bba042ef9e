// SPDX-License-Identifier: Apache-2.0
// SharedMemory: a region or an arena that this process shares with the daemon, as it is mapped here.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>

#include "client/session/descriptor.h"
#include "kernels/gpu.h"

namespace ashlar::internal {

// Mapped as long as this lives.
struct SharedMemory {
  explicit SharedMemory(Mapping its_mapping)
      : data(its_mapping.data()), size(its_mapping.size()), mapping(std::move(its_mapping)) {}
  // GPU memory that the engine has mapped itself. `its_gpu` may be all zero: the daemon's only GPU.
  SharedMemory(std::byte* its_data, size_t its_size, const kernels::GpuId& its_gpu)
      : data(its_data), size(its_size), kind(kernels::MemoryKind::kDevice), lies_on(its_gpu) {}
  SharedMemory(const kernels::Gpu& its_gpu, std::unique_ptr<kernels::ArenaMemory> its_arena)
      : data(its_arena->data()),
        size(its_arena->bytes()),
        kind(kernels::MemoryKind::kDevice),
        gpu(&its_gpu),
        lies_on(its_gpu.id()),
        arena(std::move(its_arena)) {}

  // Copies from memory that this process has mapped itself.
  void CopyToHost(void* here, const std::byte* there, size_t bytes) const {
    if (gpu != nullptr) return gpu->CopyToHost(here, there, bytes);
    std::memcpy(here, there, bytes);
  }

  std::byte* data;
  size_t size;
  kernels::MemoryKind kind = kernels::MemoryKind::kHost;
  const kernels::Gpu* gpu = nullptr;  // set for GPU memory that is mapped in this process
  kernels::GpuId lies_on = {};        // the GPU that the engine names; all zero: none
  Mapping mapping;
  std::unique_ptr<kernels::ArenaMemory> arena;
};

}  // namespace ashlar::internal
