// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/tier_copier.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "proto/limits.h"
#include "storage/objects/object_bytes.h"

namespace ashlar::storage {
namespace {

constexpr uint64_t kPieceExtents = 4;  // 1 MiB: long enough for a disk, short enough for frequent progress
constexpr int kNeededPerIdle = 7;      // needed pieces per background piece
// Extents per turn; every piece has at least one. A refused tenant starts with an empty balance, so it gets no
// advantage.
constexpr int64_t kQuantum = 1;

// A host buffer for pieces between a disk and a GPU's memory, because disks access host memory only. There are at most
// as many as pieces in flight.
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
  static constexpr size_t kPage = 4096;  // alignment for disks

  const std::unique_ptr<std::byte, decltype(&std::free)> memory_;
  const uint64_t extents_;
};

const kernels::Gpu* GpuOf(const Tier* memory) {
  return memory == nullptr ? nullptr : memory->gpu();
}

void CopyExtent(const kernels::Gpu* to_gpu, std::byte* to, const kernels::Gpu* from_gpu, const std::byte* from) {
  if (to_gpu != nullptr) return to_gpu->CopyToDevice(to, from, limits::kExtentBytes);
  if (from_gpu != nullptr) return from_gpu->CopyToHost(to, from, limits::kExtentBytes);
  std::memcpy(to, from, limits::kExtentBytes);
}

}  // namespace

class TierCopy {
 public:
  using End = TierCopier::End;
  using Place = TierCopier::Place;
  using Events = TierCopier::Events;

  TierCopy(End its_from, End its_to, uint64_t its_extents, uint64_t its_available, Place its_place, Events its_events)
      : from(its_from),
        to(its_to),
        tenant(its_to.slot->tenant),
        extents(its_extents),
        available(its_available),
        place(its_place),
        events(std::move(its_events)),
        whole((its_extents + kPieceExtents - 1) / kPieceExtents) {
    if (from.memory != nullptr) source = ObjectBytes(*from.memory, *from.slot).extents();
    if (to.memory != nullptr) target = ObjectBytes(*to.memory, *to.slot).extents();
  }

  uint64_t Ready() const { return std::min(available, extents); }
  // Returns whether the whole next piece, or the last one, is available.
  bool CanStart() const {
    return ended.ok() && started < extents && Ready() >= std::min(started + kPieceExtents, extents);
  }
  bool IsRemote() const { return from.remote != 0; }
  bool UsesDisk() const { return !IsRemote() && (from.memory == nullptr || to.memory == nullptr); }
  // Copies that wait for one of these routes do not delay copies by the others: the executor, the disk, other nodes. A
  // copy refused by one node does not delay copies from other nodes (refused_in).
  TierCopier::Way Way() const {
    return IsRemote() ? TierCopier::kRemote : UsesDisk() ? TierCopier::kDisk : TierCopier::kMemory;
  }

  const End from, to;
  const TenantId tenant;
  const uint64_t extents;
  uint64_t available;
  Place place;  // position in the queue
  Events events;
  std::vector<std::byte*> source, target;  // addresses of memory, per extent
  std::vector<bool> whole;                 // per piece
  uint64_t started = 0;                    // extents
  uint64_t loaded = 0;                     // extents
  size_t in_flight = 0;                    // pieces
  uint64_t refused_in = 0;                 // round in which its source had no space for it
  absl::Status ended;                      // not OK: no further piece starts
};

TierCopier::TierCopier(Executor& executor, SsdTier* disk, RemoteSource* remote, size_t max_pieces)
    : executor_(executor),
      disk_(disk),
      remote_(remote),
      max_pieces_(max_pieces),
      needed_{.turns = Turns(kQuantum)},
      idle_{.turns = Turns(kQuantum)} {}

void TierCopier::Enqueue(const std::shared_ptr<TierCopy>& copy) {
  Line& line = LineOf(copy->place);
  ++waiting_[copy->Way()];
  line.copies[copy->tenant].emplace(copy->place, copy);
  line.turns.Activate(copy->tenant);
}

bool TierCopier::Dequeue(const TierCopy& copy) {
  Line& line = LineOf(copy.place);
  const auto own = line.copies.find(copy.tenant);
  if (own == line.copies.end() || own->second.erase(copy.place) == 0) return false;
  --waiting_[copy.Way()];
  if (!own->second.empty()) return true;
  line.copies.erase(own);
  line.turns.Deactivate(copy.tenant);
  return true;
}

std::shared_ptr<TierCopy> TierCopier::Start(End from, End to, uint64_t extents, uint64_t available, Nanos needed_at,
                                            Events events) {
  const Place place(needed_at, begun_++);
  auto copy = std::make_shared<TierCopy>(from, to, extents, available, place, std::move(events));
  Enqueue(copy);
  return copy;
}

void TierCopier::Hasten(const std::shared_ptr<TierCopy>& copy, Nanos needed_at) {
  if (needed_at >= copy->place.first) return;
  const bool waits = Dequeue(*copy);  // if not queued, all of it is in flight
  copy->place.first = needed_at;
  if (waits) Enqueue(copy);
}

void TierCopier::Offer(TierCopy& copy, uint64_t available) {
  copy.available = std::max(copy.available, available);
  if (Line& line = LineOf(copy.place); line.copies.contains(copy.tenant)) line.turns.Activate(copy.tenant);
}

bool TierCopier::Cancel(TierCopy& copy) {
  if (copy.ended.ok()) copy.ended = absl::CancelledError("copy: cancelled; no longer needed");
  Dequeue(copy);
  if (copy.in_flight > 0) return false;
  copy.events = {};
  return true;
}

void TierCopier::Pump() {
  again_ = true;
  if (pumping_) return;  // a piece ended immediately
  pumping_ = true;
  while (std::exchange(again_, false)) PumpInTurn();
  pumping_ = false;
}

void TierCopier::PumpInTurn() {
  std::vector<Turn> aside;  // tenants that may not or cannot start more now
  ++round_;
  while (MayStart()) {
    const std::optional<Turn> turn = NextTurn(aside);
    if (!turn.has_value()) break;
    const Started started = StartPieceOf(*turn);
    if (started == Started::kPiece) continue;
    turn->line->turns.Deactivate(turn->tenant);  // until more of its source is available
    if (started == Started::kRefused) aside.push_back(*turn);
  }
  for (const Turn& turn : aside) {
    if (turn.line->copies.contains(turn.tenant)) turn.line->turns.Activate(turn.tenant);
  }
}

// Background copies start only for tenants without needed copies, unless no tenant needs anything.
std::optional<TierCopier::Turn> TierCopier::NextTurn(std::vector<Turn>& aside) {
  const std::optional<TenantId> needed = needed_.turns.Next();
  if (needed.has_value() && needed_in_a_row_ < kNeededPerIdle) return Turn{&needed_, *needed};
  while (const std::optional<TenantId> idle = idle_.turns.Next()) {
    if (!needed.has_value() || !needed_.copies.contains(*idle)) return Turn{&idle_, *idle};
    idle_.turns.Deactivate(*idle);
    aside.push_back({&idle_, *idle});
  }
  needed_in_a_row_ = 0;
  return needed.has_value() ? std::optional(Turn{&needed_, *needed}) : std::nullopt;
}

TierCopier::Started TierCopier::StartPieceOf(const Turn& turn) {
  std::array<bool, kWays.size()> refused;
  std::ranges::transform(kWays, refused.begin(), [this](Way way) { return Full(way); });
  bool one_refused = false;
  for (const auto& [place, copy] : turn.line->copies.at(turn.tenant)) {
    bool& full = refused[copy->Way()];
    if (full || !copy->CanStart()) continue;
    one_refused |= copy->refused_in == round_;
    if (copy->refused_in == round_) continue;
    const std::shared_ptr<TierCopy> next = copy;  // a piece that ends may change the map
    const uint64_t before = next->started;
    if (!StartPiece(next)) {
      one_refused = true;
      next->refused_in = round_;
      full = !next->IsRemote();
      continue;
    }
    turn.line->turns.Charge(turn.tenant, static_cast<int64_t>(std::min(kPieceExtents, next->extents - before)));
    needed_in_a_row_ = turn.line == &needed_ ? needed_in_a_row_ + 1 : 0;
    if (next->started == next->extents) Dequeue(*next);
    return Started::kPiece;
  }
  return one_refused || std::ranges::count(refused, true) > 0 ? Started::kRefused : Started::kNothing;
}

bool TierCopier::StartPiece(const std::shared_ptr<TierCopy>& copy) {
  const uint64_t first = copy->started, count = std::min(kPieceExtents, copy->extents - first);
  copy->started += count;
  ++copy->in_flight;
  ++pieces_[copy->Way()];
  if (Submit(copy, first, count)) return true;
  copy->started = first;
  --copy->in_flight;
  --pieces_[copy->Way()];
  return false;
}

bool TierCopier::Submit(const std::shared_ptr<TierCopy>& copy, uint64_t first, uint64_t count) {
  const auto done = [this, copy, first](const absl::Status& status) { PieceDone(copy, first, status); };
  const auto part = [&](const std::vector<std::byte*>& all) {
    const auto begin = all.begin() + static_cast<ptrdiff_t>(first);
    return std::vector<std::byte*>(begin, begin + static_cast<ptrdiff_t>(count));
  };
  const kernels::Gpu* const to_gpu = GpuOf(copy->to.memory);
  const bool straight = copy->IsRemote() && ReadsStraightTo(*copy->to.memory);
  if (copy->from.memory == nullptr && to_gpu != nullptr && !straight) return ReadToGpu(copy, first, count);
  if (copy->UsesDisk() && GpuOf(copy->from.memory) != nullptr) return WriteFromGpu(copy, first, count);
  if (copy->from.memory == nullptr) return Read(*copy, first, part(copy->target), to_gpu, done);
  if (copy->to.memory == nullptr) {
    const std::vector<std::byte*> sources = part(copy->source);
    return disk_->Write(*copy->to.slot, first, {sources.begin(), sources.end()}, done);
  }
  return executor_.Run(
      copy->tenant,
      [copy, first, count] {
        const kernels::Gpu *to = GpuOf(copy->to.memory), *from = GpuOf(copy->from.memory);
        for (uint64_t i = first; i < first + count; ++i) CopyExtent(to, copy->target[i], from, copy->source[i]);
      },
      [done] { done(absl::OkStatus()); });
}

bool TierCopier::Read(const TierCopy& copy, uint64_t first, std::vector<std::byte*> targets, const kernels::Gpu* gpu,
                      std::function<void(absl::Status)> done) {
  if (copy.IsRemote()) return remote_->Read(copy.from.remote, first, std::move(targets), gpu, std::move(done));
  return disk_->Read(*copy.from.slot, first, targets, std::move(done));
}

bool TierCopier::ReadToGpu(const std::shared_ptr<TierCopy>& copy, uint64_t first, uint64_t count) {
  const auto bounce = std::make_shared<const Bounce>(count);
  if (!*bounce) return false;
  const auto copy_piece = [copy, first, bounce] {
    const std::vector<std::byte*> extents = bounce->extents();
    for (size_t i = 0; i < extents.size(); ++i) {
      CopyExtent(GpuOf(copy->to.memory), copy->target[first + i], nullptr, extents[i]);
    }
  };
  const auto read = [this, copy, first, copy_piece](const absl::Status& status) {
    if (!status.ok()) return PieceDone(copy, first, status);
    if (executor_.Run(copy->tenant, copy_piece, [this, copy, first] { PieceDone(copy, first, absl::OkStatus()); }))
      return;
    copy_piece();  // instead of reading it again
    PieceDone(copy, first, absl::OkStatus());
  };
  return Read(*copy, first, bounce->extents(), nullptr, read);
}

// Rare: a drain of objects that were never in dram.
bool TierCopier::WriteFromGpu(const std::shared_ptr<TierCopy>& copy, uint64_t first, uint64_t count) {
  const auto bounce = std::make_shared<const Bounce>(count);
  if (!*bounce) return false;
  const std::vector<std::byte*> extents = bounce->extents();
  for (size_t i = 0; i < extents.size(); ++i) {
    CopyExtent(nullptr, extents[i], GpuOf(copy->from.memory), copy->source[first + i]);
  }
  return disk_->Write(*copy->to.slot, first, {extents.begin(), extents.end()},
                      [this, copy, first, bounce](const absl::Status& status) { PieceDone(copy, first, status); });
}

void TierCopier::PieceDone(const std::shared_ptr<TierCopy>& copy, uint64_t first, const absl::Status& status) {
  --pieces_[copy->Way()];
  if (copy->ended.ok() && !status.ok()) {
    copy->ended = status;
    Dequeue(*copy);
  }
  if (copy->ended.ok()) {
    copy->whole[first / kPieceExtents] = true;
    const uint64_t before = copy->loaded;
    while (copy->loaded < copy->extents && copy->whole[copy->loaded / kPieceExtents]) {
      copy->loaded = std::min(copy->loaded + kPieceExtents, copy->extents);
    }
    if (copy->loaded > before) copy->events.progress(copy->loaded);
  }
  --copy->in_flight;  // decremented only now, so that a cancellation in `progress` is reported by `done`
  if (copy->in_flight == 0 && (copy->loaded == copy->extents || !copy->ended.ok())) {
    const Events last = std::exchange(copy->events, {});
    last.done(copy->ended);
  }
  Pump();
}

}  // namespace ashlar::storage
