// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/queue.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "kernels/cuda/launch.h"

namespace ashlar::kernels::cuda {

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "kernels: cuda: %s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

CudaQueue::CudaQueue() {
  Check(cudaGetDevice(&device_), "cudaGetDevice");
  int bytes = 0;
  Check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_), "multiprocessors");
  Check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_), "shared memory");
  shared_bytes_ = static_cast<size_t>(bytes);
  Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  void* memory = nullptr;
  Check(cudaHostAlloc(&memory, kRingBytes, cudaHostAllocDefault), "argument ring");
  ring_ = static_cast<std::byte*>(memory);
  Check(cudaMalloc(&memory, kRingBytes), "argument ring");
  device_ring_ = static_cast<std::byte*>(memory);
  for (Pending& pending : pending_) {
    Check(cudaEventCreateWithFlags(&pending.event, cudaEventDisableTiming), "cudaEventCreate");
  }
}

CudaQueue::~CudaQueue() {
  Check(cudaStreamSynchronize(stream_), "queue");
  for (Pending& pending : pending_) Check(cudaEventDestroy(pending.event), "cudaEventDestroy");
  Check(cudaFree(workspace_), "workspace");
  Check(cudaFree(device_ring_), "argument ring");
  Check(cudaFreeHost(ring_), "argument ring");
  Check(cudaStreamDestroy(stream_), "cudaStreamDestroy");
}

uint64_t CudaQueue::Completed() const {
  const uint64_t last = submitted_.load(std::memory_order_acquire);
  uint64_t done = completed_.load(std::memory_order_acquire);
  while (done < last) {
    const cudaError_t state = cudaEventQuery(pending_[(done + 1) % kMaxPending].event);
    if (state == cudaErrorNotReady) break;
    Check(state, "a kernel failed");
    ++done;
  }
  uint64_t known = completed_.load(std::memory_order_relaxed);
  while (known < done && !completed_.compare_exchange_weak(known, done, std::memory_order_release)) {
  }
  return std::max(known, done);
}

void CudaQueue::WaitFor(uint64_t sequence) {
  // A later call's event may occupy the same place by then: waiting for it only waits longer.
  if (Completed() >= sequence) return;
  Check(cudaEventSynchronize(pending_[sequence % kMaxPending].event), "a kernel failed");
}

void CudaQueue::Begin(size_t bytes) {
  if (bytes > kRingBytes) {
    std::fprintf(stderr, "kernels: cuda: a call's pointer and page tables take %zu bytes, at most %zu fit\n", bytes,
                 kRingBytes);
    std::abort();
  }
  begin_ = limit_;
  // A call's arguments are copied at once, so they must not wrap around.
  if (begin_ % kRingBytes + bytes > kRingBytes) begin_ += kRingBytes - begin_ % kRingBytes;
  end_ = begin_;
  limit_ = begin_ + bytes;
  const uint64_t next = submitted_.load(std::memory_order_relaxed) + 1;
  uint64_t oldest = Completed() + 1;
  if (oldest > 1) freed_ = std::max(freed_, pending_[(oldest - 1) % kMaxPending].ring_end);
  for (; oldest < next && (limit_ - freed_ > kRingBytes || next - oldest >= kMaxPending); ++oldest) {
    WaitFor(oldest);
    freed_ = pending_[oldest % kMaxPending].ring_end;
  }
}

Staged<std::byte> CudaQueue::StageBytes(size_t bytes) {
  const size_t offset = end_ % kRingBytes;
  end_ += StagedBytes<std::byte>(bytes);
  if (end_ > limit_) {
    std::fprintf(stderr, "kernels: cuda: more arguments than were announced\n");
    std::abort();
  }
  return {ring_ + offset, device_ring_ + offset};
}

void CudaQueue::Upload() {
  if (end_ == begin_) return;
  const size_t offset = begin_ % kRingBytes;
  Check(cudaMemcpyAsync(device_ring_ + offset, ring_ + offset, end_ - begin_, cudaMemcpyHostToDevice, stream_),
        "arguments");
}

Event CudaQueue::End() {
  const uint64_t sequence = submitted_.load(std::memory_order_relaxed) + 1;
  Pending& pending = pending_[sequence % kMaxPending];
  pending.ring_end = limit_;
  Check(cudaEventRecord(pending.event, stream_), "cudaEventRecord");
  submitted_.store(sequence, std::memory_order_release);
  return Event(this, sequence);
}

bool CudaQueue::Reserve(size_t bytes) {
  if (bytes <= workspace_bytes_) return true;
  Check(cudaStreamSynchronize(stream_), "workspace");  // older kernels may still use it
  Check(cudaFree(std::exchange(workspace_, nullptr)), "workspace");
  workspace_bytes_ = 0;
  if (cudaMalloc(&workspace_, bytes) != cudaSuccess) {
    cudaGetLastError();  // otherwise the next launch would report it
    workspace_ = nullptr;
    return false;
  }
  workspace_bytes_ = bytes;
  return true;
}

void* CudaQueue::Workspace(size_t bytes) {
  if (!Reserve(bytes)) Check(cudaErrorMemoryAllocation, "workspace");
  return workspace_;
}

}  // namespace ashlar::kernels::cuda
