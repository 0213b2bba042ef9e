#include "storage/transfer/gpu_lane.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::storage {

absl::StatusOr<std::unique_ptr<GpuLane>> GpuLane::Make(const kernels::Gpu& gpu, int queues) {
  constexpr size_t kBytes = GpuCalls::kChecksums * sizeof(uint64_t), kPage = 4096;
  std::unique_ptr<GpuLane> lane(new GpuLane(gpu));
  gpu.Enter();
  for (int i = 0; i < queues; ++i) {
    Seat& seat = lane->idle_.emplace_back();
    seat.checksums.reset(static_cast<uint64_t*>(std::aligned_alloc(kPage, kBytes)));
    kernels::ArenaError error;
    if (seat.checksums != nullptr) seat.registration = gpu.Register(seat.checksums.get(), kBytes, &error);
    if (seat.registration == nullptr) return absl::FailedPreconditionError(absl::StrCat("gpu: ", error.message));
    seat.queue = gpu.kernels().MakeQueue(nullptr);
  }
  return lane;
}

GpuCalls::GpuCalls(GpuLane& lane) : lane_(lane) {
  {
    std::unique_lock lock(lane.mutex_);
    lane.left_.wait(lock, [&] { return !lane.idle_.empty(); });
    seat_ = std::move(lane.idle_.back());
    lane.idle_.pop_back();
  }
  lane.gpu().Enter();
}

GpuCalls::~GpuCalls() {
  Finish();
  {
    std::lock_guard lock(lane_.mutex_);
    lane_.idle_.push_back(std::move(seat_));
  }
  lane_.left_.notify_one();
}

void GpuCalls::Submit(const Checksums& checksums, Submission submit, std::function<void()> done) {
  const size_t count = checksums.count, scales = checksums.scales != nullptr ? count : 0;
  if (count + scales > kChecksums - used_) Finish();
  Checksums reached{.count = count, .units = seat_.checksums.get() + used_};
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

}  // namespace ashlar::storage
