#include "storage/filler.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "proto/limits.h"
#include "storage/object_bytes.h"

namespace ashlar::storage {
namespace {

constexpr uint64_t kPieceExtents = 4;  // 1 MiB: long enough for a disk, short enough to follow closely

// Disks read and write the processor's memory: on the way to a GPU's a piece goes through one of these, of which there
// are no more than pieces in flight.
class Bounce {
 public:
  explicit Bounce(uint64_t extents)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(kPage, extents * limits::kExtentBytes)), std::free),
        extents_(extents) {}

  explicit operator bool() const { return memory_ != nullptr; }
  std::vector<std::byte*> extents() const {
    std::vector<std::byte*> all;
    for (uint64_t i = 0; i < extents_; ++i) all.push_back(memory_.get() + i * limits::kExtentBytes);
    return all;
  }

 private:
  static constexpr size_t kPage = 4096;  // as disks want it

  const std::unique_ptr<std::byte, decltype(&std::free)> memory_;
  const uint64_t extents_;
};

const kernels::Gpu* GpuOf(const Tier* memory) {
  return memory == nullptr ? nullptr : memory->gpu();
}

void CopyExtent(const kernels::Gpu* to_gpu, std::byte* to, const kernels::Gpu* from_gpu, const std::byte* from) {
  if (to_gpu != nullptr) return to_gpu->CopyIn(to, from, limits::kExtentBytes);
  if (from_gpu != nullptr) return from_gpu->CopyOut(to, from, limits::kExtentBytes);
  std::memcpy(to, from, limits::kExtentBytes);
}

}  // namespace

class Filler::Fill {
 public:
  Fill(End from, End to, uint64_t extents, uint64_t available, Place place, Events events)
      : from(from),
        to(to),
        extents(extents),
        available(available),
        place(place),
        events(std::move(events)),
        whole((extents + kPieceExtents - 1) / kPieceExtents) {
    if (from.memory != nullptr) source = ObjectBytes(*from.memory, *from.slot).extents();
    if (to.memory != nullptr) target = ObjectBytes(*to.memory, *to.slot).extents();
  }

  TenantId tenant() const { return to.slot->tenant; }
  uint64_t Ready() const { return std::min(available, extents); }
  // The next piece can be had whole, or is the last one and can be had.
  bool CanStart() const {
    return ended.ok() && started < extents && Ready() >= std::min(started + kPieceExtents, extents);
  }
  bool UsesDisk() const { return from.memory == nullptr || to.memory == nullptr; }

  const End from, to;
  const uint64_t extents;
  uint64_t available;
  Place place;  // in the queue
  Events events;
  std::vector<std::byte*> source, target;  // of memory, by extent
  std::vector<bool> whole;                 // by piece
  uint64_t started = 0;                    // extents
  uint64_t loaded = 0;                     // extents
  size_t in_flight = 0;                    // pieces
  absl::Status ended;                      // not OK: no further piece begins
};

std::shared_ptr<Filler::Fill> Filler::Start(End from, End to, uint64_t extents, uint64_t available, Nanos needed_at,
                                            Events events) {
  const Place place(needed_at, begun_++);
  auto fill = std::make_shared<Fill>(from, to, extents, available, place, std::move(events));
  queue_.emplace(place, fill);
  return fill;
}

void Filler::Hasten(Fill& fill, Nanos needed_at) {
  if (needed_at >= fill.place.first) return;
  auto node = queue_.extract(fill.place);
  fill.place.first = needed_at;
  if (node.empty()) return;  // all of it is in flight
  node.key() = fill.place;
  queue_.insert(std::move(node));
}

void Filler::Offer(Fill& fill, uint64_t available) {
  fill.available = std::max(fill.available, available);
}

bool Filler::Cancel(Fill& fill) {
  if (fill.ended.ok()) fill.ended = absl::CancelledError("fill: not wanted any more");
  if (fill.in_flight > 0) return false;
  fill.events = {};
  queue_.erase(fill.place);
  return true;
}

void Filler::Pump() {
  again_ = true;
  if (pumping_) return;  // a piece ended as soon as it was begun
  pumping_ = true;
  while (std::exchange(again_, false)) PumpInOrder();
  pumping_ = false;
}

void Filler::PumpInOrder() {
  bool refused[2] = {};  // by the executor, by the disk: what waits for one does not hold up the other's
  for (auto next = queue_.begin(); next != queue_.end();) {
    const std::shared_ptr<Fill> fill = next->second;
    bool& full = refused[fill->UsesDisk()];
    while (!full && fill->CanStart()) {
      if (pieces_ == max_pieces_) return;
      full = !StartPiece(fill);
      if (again_) return;  // a piece ended as soon as it was begun, and the queue is another one now
    }
    const bool through = !fill->ended.ok() || fill->started == fill->extents;
    next = through ? queue_.erase(next) : std::next(next);
  }
}

bool Filler::StartPiece(const std::shared_ptr<Fill>& fill) {
  const uint64_t first = fill->started, count = std::min(kPieceExtents, fill->extents - first);
  fill->started += count;
  ++fill->in_flight;
  ++pieces_;
  if (Submit(fill, first, count)) return true;
  fill->started = first;
  --fill->in_flight;
  --pieces_;
  return false;
}

bool Filler::Submit(const std::shared_ptr<Fill>& fill, uint64_t first, uint64_t count) {
  const auto done = [this, fill, first](const absl::Status& status) { PieceDone(fill, first, status); };
  const auto part = [&](const std::vector<std::byte*>& all) {
    const auto begin = all.begin() + static_cast<ptrdiff_t>(first);
    return std::vector<std::byte*>(begin, begin + static_cast<ptrdiff_t>(count));
  };
  if (fill->UsesDisk() && GpuOf(fill->to.memory) != nullptr) return ReadToGpu(fill, first, count);
  if (fill->UsesDisk() && GpuOf(fill->from.memory) != nullptr) return WriteFromGpu(fill, first, count);
  if (fill->from.memory == nullptr) return disk_->Read(*fill->from.slot, first, part(fill->target), done);
  if (fill->to.memory == nullptr) {
    const std::vector<std::byte*> sources = part(fill->source);
    return disk_->Write(*fill->to.slot, first, {sources.begin(), sources.end()}, done);
  }
  return executor_.Run(
      fill->tenant(),
      [fill, first, count] {
        const kernels::Gpu *to = GpuOf(fill->to.memory), *from = GpuOf(fill->from.memory);
        for (uint64_t i = first; i < first + count; ++i) CopyExtent(to, fill->target[i], from, fill->source[i]);
      },
      [done] { done(absl::OkStatus()); });
}

bool Filler::ReadToGpu(const std::shared_ptr<Fill>& fill, uint64_t first, uint64_t count) {
  const auto bounce = std::make_shared<const Bounce>(count);
  if (!*bounce) return false;
  const auto copy = [fill, first, bounce] {
    const std::vector<std::byte*> extents = bounce->extents();
    for (size_t i = 0; i < extents.size(); ++i) {
      CopyExtent(GpuOf(fill->to.memory), fill->target[first + i], nullptr, extents[i]);
    }
  };
  const auto read = [this, fill, first, copy](const absl::Status& status) {
    if (!status.ok()) return PieceDone(fill, first, status);
    if (executor_.Run(fill->tenant(), copy, [this, fill, first] { PieceDone(fill, first, absl::OkStatus()); })) return;
    copy();  // rather than read it again
    PieceDone(fill, first, absl::OkStatus());
  };
  return disk_->Read(*fill->from.slot, first, bounce->extents(), read);
}

// Rare: a daemon that drains what dram never had.
bool Filler::WriteFromGpu(const std::shared_ptr<Fill>& fill, uint64_t first, uint64_t count) {
  const auto bounce = std::make_shared<const Bounce>(count);
  if (!*bounce) return false;
  const std::vector<std::byte*> extents = bounce->extents();
  for (size_t i = 0; i < extents.size(); ++i) {
    CopyExtent(nullptr, extents[i], GpuOf(fill->from.memory), fill->source[first + i]);
  }
  return disk_->Write(*fill->to.slot, first, {extents.begin(), extents.end()},
                      [this, fill, first, bounce](const absl::Status& status) { PieceDone(fill, first, status); });
}

void Filler::PieceDone(const std::shared_ptr<Fill>& fill, uint64_t first, const absl::Status& status) {
  --pieces_;
  if (fill->ended.ok() && !status.ok()) fill->ended = status;
  if (fill->ended.ok()) {
    fill->whole[first / kPieceExtents] = true;
    const uint64_t before = fill->loaded;
    while (fill->loaded < fill->extents && fill->whole[fill->loaded / kPieceExtents]) {
      fill->loaded = std::min(fill->loaded + kPieceExtents, fill->extents);
    }
    if (fill->loaded > before) fill->events.progress(fill->loaded);
  }
  --fill->in_flight;  // only now: whoever cancels in `progress` is told so by `done`
  if (fill->in_flight == 0 && (fill->loaded == fill->extents || !fill->ended.ok())) {
    const Events last = std::exchange(fill->events, {});
    last.done(fill->ended);
  }
  Pump();
}

}  // namespace ashlar::storage
