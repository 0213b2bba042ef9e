// SPDX-License-Identifier: Apache-2.0
// Gpu: a GPU whose memory a process shares with others: its back end, arenas in its memory, and the part of
// host memory that it can access.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/kernels.h"

namespace ashlar::kernels {

// The registration of host memory with a GPU. All of the GPU's work there must have ended before
// this is destroyed.
class HostRegistration {
 public:
  virtual ~HostRegistration() = default;
};

// Names a GPU to all processes of a machine, by whatever number each of them sees it: CUDA's UUID.
using GpuId = std::array<std::byte, 16>;

// All methods are thread-safe.
class Gpu {
 public:
  virtual ~Gpu() = default;

  // Makes it the GPU of the calling thread. Call it before the thread creates a queue, and once before it submits to
  // one.
  virtual void Enter() const = 0;
  // The kernels of this GPU; they have memory().
  virtual const Kernels& kernels() const = 0;
  virtual const GpuId& id() const = 0;
  // Reserves GPU memory for data that calls keep between their kernels: a call on this queue of kernels() that keeps at
  // most `bytes` allocates nothing afterwards. Returns false if the GPU has not enough memory.
  virtual bool Reserve(Queue& queue, size_t bytes) const = 0;

  // Zeroed, because the driver may return memory that another arena of this process used. Null with the reason on
  // failure. `bytes` > 0 is rounded up to the GPU's allocation unit; see ArenaMemory::bytes().
  virtual std::unique_ptr<ArenaMemory> MakeArena(uint64_t bytes, ArenaError* error) const = 0;
  // Maps an arena that another process, or an engine's allocator (cuMemCreate, exportable as a descriptor), has
  // created, for reading and writing; `bytes` is its whole size. The caller keeps the descriptor.
  virtual std::unique_ptr<ArenaMemory> ImportArena(int descriptor, uint64_t bytes, ArenaError* error) const = 0;
  // Copy between this GPU's memory and any host memory; done when they return. Any thread.
  void CopyToDevice(void* device, const void* host, size_t bytes) const {
    Enter();
    kernels().memory()->CopyToDevice(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) const {
    Enter();
    kernels().memory()->CopyToHost(host, device, bytes);
  }
  // Lets kernels read and write [data, data + bytes) of CPU memory at the same addresses. Allocates and pins its pages.
  virtual std::unique_ptr<HostRegistration> Register(void* data, uint64_t bytes, ArenaError* error) const = 0;
};

// The GPU with that number among the ones that CUDA shows to this process; it lives as long as the process. Null with
// the reason in `why`: this build has no back end for GPUs, or the machine has no usable GPU.
const Gpu* FindGpu(int number, std::string* why);

}  // namespace ashlar::kernels
