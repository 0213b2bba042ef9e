// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/gpu_lane.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::storage {

template <typename T>
bool GpuLane::Reached<T>::Make(const kernels::Gpu& gpu, size_t wanted, kernels::ArenaError* error) {
  constexpr size_t kPage = 4096;
  const size_t bytes = (wanted * sizeof(T) + kPage - 1) / kPage * kPage;
  registration = nullptr;
  count = 0;
  numbers.reset(static_cast<T*>(std::aligned_alloc(kPage, bytes)));
  if (numbers != nullptr) registration = gpu.Register(numbers.get(), bytes, error);
  if (registration == nullptr) return false;
  count = wanted;
  return true;
}

absl::StatusOr<std::unique_ptr<GpuLane>> GpuLane::Make(const kernels::Gpu& gpu, int queues) {
  std::unique_ptr<GpuLane> lane(new GpuLane(gpu));
  gpu.Enter();
  MutexLock lock(lane->mutex_);
  for (int i = 0; i < queues; ++i) {
    Seat& seat = lane->idle_.emplace_back();
    kernels::ArenaError error;
    if (!seat.checksums.Make(gpu, GpuCalls::kChecksums, &error)) {
      return absl::FailedPreconditionError(absl::StrCat("gpu: ", error.message));
    }
    seat.queue = gpu.kernels().MakeQueue(nullptr);
  }
  return lane;
}

GpuCalls::GpuCalls(GpuLane& lane) : lane_(lane) {
  {
    MutexLock lock(lane.mutex_);
    while (lane.idle_.empty()) lane.left_.Wait(lane.mutex_);
    seat_ = std::move(lane.idle_.back());
    lane.idle_.pop_back();
  }
  lane.gpu().Enter();
}

GpuCalls::~GpuCalls() {
  Finish();
  {
    MutexLock lock(lane_.mutex_);
    lane_.idle_.push_back(std::move(seat_));
  }
  lane_.left_.NotifyOne();
}

void GpuCalls::Submit(const Checksums& checksums, Submission submit, std::function<void()> done) {
  const size_t count = checksums.count, scales = checksums.scales != nullptr ? count : 0;
  if (count + scales > kChecksums - used_) Finish();
  Checksums reached{.count = count, .units = seat_.checksums.numbers.get() + used_};
  if (scales > 0) reached.scales = reached.units + count;
  used_ += count + scales;
  calls_.push_back({submit(*seat_.queue, reached), reached, checksums, std::move(done)});
}

void GpuCalls::Finish() {
  for (; !calls_.empty(); calls_.pop_front()) {
    const Call& call = calls_.front();
    call.event.Wait();
    std::copy_n(call.reached.units, call.reached.count, call.checksums.units);
    if (call.reached.scales != nullptr) std::copy_n(call.reached.scales, call.reached.count, call.checksums.scales);
    call.done();
  }
  used_ = 0;
}

bool GpuCalls::Reserve(uint64_t scratch_bytes, size_t numbers) {
  kernels::ArenaError error;
  const bool staged = numbers <= seat_.numbers.count || seat_.numbers.Make(lane_.gpu(), numbers, &error);
  return staged && lane_.gpu().Reserve(*seat_.queue, scratch_bytes);
}

const float* GpuCalls::Stage(std::span<const float> numbers) {
  if (numbers.empty()) return nullptr;
  std::ranges::copy(numbers, seat_.numbers.numbers.get());
  return seat_.numbers.numbers.get();
}

}  // namespace ashlar::storage
