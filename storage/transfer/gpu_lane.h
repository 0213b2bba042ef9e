// SPDX-License-Identifier: Apache-2.0
// GpuLane: a GPU's queues for jobs that move bytes from and to its memory. Many calls are in flight at once; their
// checksums are returned in memory that both host and GPU can access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/gpu.h"
#include "kernels/mutex.h"

namespace ashlar::storage {

// The queues of one GPU. Thread-safe. Queues are expensive, so a few are created at startup; each is used by one job at
// a time.
class GpuLane {
 public:
  // Creates as many queues as jobs run at once. FAILED_PRECONDITION if the GPU cannot access host memory.
  static absl::StatusOr<std::unique_ptr<GpuLane>> Make(const kernels::Gpu& gpu, int queues);

  const kernels::Gpu& gpu() const { return gpu_; }

 private:
  friend class GpuCalls;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  // Host memory that the GPU can access.
  template <typename T>
  struct Reached {
    std::unique_ptr<T[], Free> numbers;
    size_t count = 0;
    std::unique_ptr<kernels::HostRegistration> registration;

    // Allocates `count` elements; the old contents are lost. Returns false with the error.
    bool Make(const kernels::Gpu& gpu, size_t count, kernels::ArenaError* error);
  };
  struct Seat {
    Reached<uint64_t> checksums;            // kChecksums elements
    Reached<float> numbers;                 // holds the numbers of one call; grows as needed
    std::unique_ptr<kernels::Queue> queue;  // destroyed first
  };

  explicit GpuLane(const kernels::Gpu& gpu) : gpu_(gpu) {}

  const kernels::Gpu& gpu_;
  Mutex mutex_;
  CondVar left_;
  std::vector<Seat> idle_ ABSL_GUARDED_BY(mutex_);
};

// The calls of one job, made on one thread.
class GpuCalls {
 public:
  // Most checksums of all calls in flight. One call needs far fewer.
  static constexpr size_t kChecksums = size_t{1} << 16;

  // Waits for a queue. `lane` must outlive the calls.
  explicit GpuCalls(GpuLane& lane);
  ~GpuCalls();  // waits for all calls
  GpuCalls(const GpuCalls&) = delete;
  GpuCalls& operator=(const GpuCalls&) = delete;

  const kernels::Kernels& kernels() const { return lane_.gpu().kernels(); }

  // Memory for the checksums of one call: for `count` units, and for their scales unless null.
  struct Checksums {
    size_t count = 0;
    uint64_t* units = nullptr;
    uint64_t* scales = nullptr;
  };
  // `submit` makes one kernel call, which writes its checksums to `reached`. When the call is complete, they are in
  // `checksums` and `done` is called: on this thread, in the order of submission, at the latest in Finish.
  using Submission = absl::FunctionRef<kernels::Event(kernels::Queue& queue, const Checksums& reached)>;
  void Submit(const Checksums& checksums, Submission submit, std::function<void()> done);
  void Finish();

  // For calls that the caller submits and waits for itself, between submitted ones.
  kernels::Queue& queue() { return *seat_.queue; }
  // Reserves resources for such calls: `scratch_bytes` of GPU memory (Gpu::Reserve), and staging space for `numbers`.
  // Returns false if there is not enough.
  bool Reserve(uint64_t scratch_bytes, size_t numbers);
  // Returns a copy that the GPU can access, for one call; null if empty. At most as many as were reserved.
  const float* Stage(std::span<const float> numbers);

 private:
  struct Call {
    kernels::Event event;
    Checksums reached, checksums;
    std::function<void()> done;
  };

  GpuLane& lane_;
  GpuLane::Seat seat_;
  size_t used_ = 0;  // used checksums
  std::deque<Call> calls_;
};

}  // namespace ashlar::storage
