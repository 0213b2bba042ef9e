// SPDX-License-Identifier: Apache-2.0
// GpuLane: work on a GPU, for jobs that move bytes to and from its memory. Many calls are under way at once, and their
// checksums come back in memory that both sides reach.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/gpu.h"

namespace ashlar::storage {

// The queues of one GPU. Thread-safe. A queue is expensive, so there are a few, made at the start; each is one job's at
// a time.
class GpuLane {
 public:
  // Makes as many queues as jobs run at once. FAILED_PRECONDITION if the GPU cannot reach the processor's memory.
  static absl::StatusOr<std::unique_ptr<GpuLane>> Make(const kernels::Gpu& gpu, int queues);

  const kernels::Gpu& gpu() const { return gpu_; }

 private:
  friend class GpuCalls;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  // Some of the processor's memory that the GPU reaches.
  template <typename T>
  struct Reached {
    std::unique_ptr<T[], Free> numbers;
    size_t count = 0;
    std::unique_ptr<kernels::HostRegistration> registration;

    // As many; the error says why not, and what was there before is gone.
    bool Make(const kernels::Gpu& gpu, size_t count, kernels::ArenaError* error);
  };
  struct Seat {
    Reached<uint64_t> checksums;            // kChecksums
    Reached<float> numbers;                 // of one call; grow to the most
    std::unique_ptr<kernels::Queue> queue;  // goes first
  };

  explicit GpuLane(const kernels::Gpu& gpu) : gpu_(gpu) {}

  const kernels::Gpu& gpu_;
  std::mutex mutex_;
  std::condition_variable left_;
  std::vector<Seat> idle_;  // guarded by mutex_
};

// The calls of one job, made on one thread.
class GpuCalls {
 public:
  // The most checksums of all calls under way. One call makes far fewer.
  static constexpr size_t kChecksums = size_t{1} << 16;

  // Waits for a queue. `lane` must outlive the calls.
  explicit GpuCalls(GpuLane& lane);
  ~GpuCalls();  // waits for all calls
  GpuCalls(const GpuCalls&) = delete;
  GpuCalls& operator=(const GpuCalls&) = delete;

  const kernels::Kernels& kernels() const { return lane_.gpu().kernels(); }

  // The memory for the checksums of one call: of `count` units, and of their scales unless that is null.
  struct Checksums {
    size_t count = 0;
    uint64_t* units = nullptr;
    uint64_t* scales = nullptr;
  };
  // `submit` makes one call of the kernels, which leaves its checksums where `reached` says. They are in `checksums`,
  // and `done` is called, once the call is complete: on this thread, in the order of submission, by the time Finish
  // returns.
  using Submission = absl::FunctionRef<kernels::Event(kernels::Queue& queue, const Checksums& reached)>;
  void Submit(const Checksums& checksums, Submission submit, std::function<void()> done);
  void Finish();

  // For calls that the caller makes and awaits by itself, between those that it submits.
  kernels::Queue& queue() { return *seat_.queue; }
  // Takes what such calls need: `scratch_bytes` of the GPU's memory (Gpu::Reserve), and room to stage `numbers`. False:
  // there is not so much left.
  bool Reserve(uint64_t scratch_bytes, size_t numbers);
  // Returns a copy that the GPU reaches, for one call; null of none. Of as many as were reserved at most.
  const float* Stage(std::span<const float> numbers);

 private:
  struct Call {
    kernels::Event event;
    Checksums reached, checksums;
    std::function<void()> done;
  };

  GpuLane& lane_;
  GpuLane::Seat seat_;
  size_t used_ = 0;  // checksums
  std::deque<Call> calls_;
};

}  // namespace ashlar::storage
