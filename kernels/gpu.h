// SPDX-License-Identifier: Apache-2.0
// Gpu: a GPU whose memory a process shares with others: its back end, arenas in its memory, and the part of the
// processor's memory that it reaches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/kernels.h"

namespace ashlar::kernels {

// The registration of some of the processor's memory with a GPU. All of the GPU's work there must have ended before
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

  // Makes it the GPU of the calling thread: before the thread makes a queue, and once before it submits to one.
  virtual void Enter() const = 0;
  // The kernels of this GPU; they have memory().
  virtual const Kernels& kernels() const = 0;
  virtual const GpuId& id() const = 0;
  // Takes memory of the GPU ahead for what calls keep there between their kernels: a call on this queue of kernels()
  // that keeps at most `bytes` allocates nothing afterwards. False: the GPU has not so much left.
  virtual bool Reserve(Queue& queue, size_t bytes) const = 0;

  // All zero: the driver may give memory that another arena of this process has left. Null with the reason. `bytes` > 0
  // is rounded up to what a GPU allocates at once: ArenaMemory::bytes() says.
  virtual std::unique_ptr<ArenaMemory> MakeArena(uint64_t bytes, ArenaError* error) const = 0;
  // Maps an arena that another process, or an engine's allocator (cuMemCreate, exportable as a descriptor), has made,
  // for reading and writing; `bytes` are all of it. The descriptor stays the caller's.
  virtual std::unique_ptr<ArenaMemory> ImportArena(int descriptor, uint64_t bytes, ArenaError* error) const = 0;
  // Copies between this GPU's memory and any of the processor's; done when they return. Any thread.
  void CopyToDevice(void* device, const void* host, size_t bytes) const {
    Enter();
    kernels().memory()->CopyToDevice(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) const {
    Enter();
    kernels().memory()->CopyToHost(host, device, bytes);
  }
  // Lets kernels read and write [data, data + bytes) of the processor's memory at the same addresses. Its pages are
  // taken, and stay where they are.
  virtual std::unique_ptr<HostRegistration> Register(void* data, uint64_t bytes, ArenaError* error) const = 0;
};

// The GPU of that number among those that CUDA shows to this process; it lives as long as the process. Null with the
// reason in `why`: this build has no back end for GPUs, or the machine none that it could use.
const Gpu* FindGpu(int number, std::string* why);

}  // namespace ashlar::kernels
