// SPDX-License-Identifier: Apache-2.0
// CudaQueue: the queue of the cuda back end. It has a stream, and keeps calls' arguments until their work is done.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "kernels/device.h"

namespace ashlar::kernels::cuda {

// An array of one call's arguments: written here, read there.
template <typename T>
struct Staged {
  T* host = nullptr;
  T* device = nullptr;
};

// Arguments that the device reads (pointer tables, page tables) pass through a ring of kRingBytes: pinned memory on the
// host, a copy on the device. A call waits for older work only if more than kRingBytes of arguments, or kMaxPending
// calls, are in flight.
class CudaQueue final : public Queue {
 public:
  static constexpr size_t kRingBytes = size_t{16} << 20;
  static constexpr uint64_t kMaxPending = 1024;

  CudaQueue();
  ~CudaQueue() override;
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  uint64_t Completed() const override;
  void WaitFor(uint64_t sequence) override;

  // The steps of one call, in this order: Begin with space for everything it stages, Stage, Upload, kernels on
  // stream(), End.
  void Begin(size_t bytes);
  template <typename T>
  Staged<T> Stage(size_t count) {
    const Staged<std::byte> bytes = StageBytes(count * sizeof(T));
    return {reinterpret_cast<T*>(bytes.host), reinterpret_cast<T*>(bytes.device)};
  }
  template <typename T>
  const T* Stage(const T* values, size_t count) {
    const Staged<T> staged = Stage<T>(count);
    if (count > 0) std::memcpy(staged.host, values, count * sizeof(T));
    return staged.device;
  }
  template <typename T>
  static constexpr size_t StagedBytes(size_t count) {
    return (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }
  void Upload();
  Event End();

  cudaStream_t stream() const { return stream_; }
  int multiprocessors() const { return multiprocessors_; }
  size_t shared_bytes() const { return shared_bytes_; }  // limit per block

  // Device memory for numbers between kernels of one call, valid until End. Grows to the largest call seen.
  void* Workspace(size_t bytes);
  bool Reserve(size_t bytes);  // like Gpu::Reserve

 private:
  static constexpr size_t kAlignment = 256;

  Staged<std::byte> StageBytes(size_t bytes);

  int device_ = 0, multiprocessors_ = 0;
  size_t shared_bytes_ = 0;
  cudaStream_t stream_ = nullptr;
  std::byte *ring_ = nullptr, *device_ring_ = nullptr;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;

  // Offsets into an endless ring; the actual place is the offset modulo kRingBytes.
  size_t begin_ = 0, end_ = 0, limit_ = 0;
  struct Pending {
    cudaEvent_t event = nullptr;
    size_t ring_end = 0;
  };
  std::array<Pending, kMaxPending> pending_;  // call s is at index s % kMaxPending
  std::atomic<uint64_t> submitted_ = 0;
  mutable std::atomic<uint64_t> completed_ = 0;
  size_t freed_ = 0;  // the ring is free before this offset
};

}  // namespace ashlar::kernels::cuda
