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

constexpr uint64_t kPieceExtents = 4;  // 1 MiB: long enough for a disk, short enough to follow closely
constexpr int kNeededPerIdle = 7;      // pieces
// Of a turn, in extents: no piece is less. Whoever was refused begins anew, and has nothing left from before that would
// put him before others again.
constexpr int64_t kQuantum = 1;

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
        tenant(to.slot->tenant),
        extents(extents),
        available(available),
        place(place),
        events(std::move(events)),
        whole((extents + kPieceExtents - 1) / kPieceExtents) {
    if (from.memory != nullptr) source = ObjectBytes(*from.memory, *from.slot).extents();
    if (to.memory != nullptr) target = ObjectBytes(*to.memory, *to.slot).extents();
  }

  uint64_t Ready() const { return std::min(available, extents); }
  // The next piece can be had whole, or is the last one and can be had.
  bool CanStart() const {
    return ended.ok() && started < extents && Ready() >= std::min(started + kPieceExtents, extents);
  }
  bool UsesDisk() const { return from.memory == nullptr || to.memory == nullptr; }

  const End from, to;
  const TenantId tenant;
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

Filler::Filler(Executor& executor, SsdTier* disk, size_t max_pieces)
    : executor_(executor),
      disk_(disk),
      max_pieces_(max_pieces),
      needed_{.turns = Turns(kQuantum)},
      idle_{.turns = Turns(kQuantum)} {}

void Filler::Enqueue(const std::shared_ptr<Fill>& fill) {
  Line& line = LineOf(fill->place);
  line.fills[fill->tenant].emplace(fill->place, fill);
  line.turns.Activate(fill->tenant);
}

bool Filler::Dequeue(const Fill& fill) {
  Line& line = LineOf(fill.place);
  const auto own = line.fills.find(fill.tenant);
  if (own == line.fills.end() || own->second.erase(fill.place) == 0) return false;
  if (!own->second.empty()) return true;
  line.fills.erase(own);
  line.turns.Deactivate(fill.tenant);
  return true;
}

std::shared_ptr<Filler::Fill> Filler::Start(End from, End to, uint64_t extents, uint64_t available, Nanos needed_at,
                                            Events events) {
  const Place place(needed_at, begun_++);
  auto fill = std::make_shared<Fill>(from, to, extents, available, place, std::move(events));
  Enqueue(fill);
  return fill;
}

void Filler::Hasten(const std::shared_ptr<Fill>& fill, Nanos needed_at) {
  if (needed_at >= fill->place.first) return;
  const bool waits = Dequeue(*fill);  // otherwise all of it is in flight
  fill->place.first = needed_at;
  if (waits) Enqueue(fill);
}

void Filler::Offer(Fill& fill, uint64_t available) {
  fill.available = std::max(fill.available, available);
  if (Line& line = LineOf(fill.place); line.fills.contains(fill.tenant)) line.turns.Activate(fill.tenant);
}

bool Filler::Cancel(Fill& fill) {
  if (fill.ended.ok()) fill.ended = absl::CancelledError("fill: not wanted any more");
  Dequeue(fill);
  if (fill.in_flight > 0) return false;
  fill.events = {};
  return true;
}

void Filler::Pump() {
  again_ = true;
  if (pumping_) return;  // a piece ended as soon as it was begun
  pumping_ = true;
  while (std::exchange(again_, false)) PumpInTurn();
  pumping_ = false;
}

void Filler::PumpInTurn() {
  std::vector<Turn> aside;  // who must not, or cannot, begin more now
  while (pieces_ < max_pieces_) {
    const std::optional<Turn> turn = NextTurn(aside);
    if (!turn.has_value()) break;
    const Started started = StartPieceOf(*turn);
    if (started == Started::kPiece) continue;
    turn->line->turns.Deactivate(turn->tenant);  // until there is more of its source
    if (started == Started::kRefused) aside.push_back(*turn);
  }
  for (const Turn& turn : aside) {
    if (turn.line->fills.contains(turn.tenant)) turn.line->turns.Activate(turn.tenant);
  }
}

// Idle ones only of tenants that need nothing themselves, unless nobody does.
std::optional<Filler::Turn> Filler::NextTurn(std::vector<Turn>& aside) {
  const std::optional<TenantId> needed = needed_.turns.Next();
  if (needed.has_value() && needed_in_a_row_ < kNeededPerIdle) return Turn{&needed_, *needed};
  while (const std::optional<TenantId> idle = idle_.turns.Next()) {
    if (!needed.has_value() || !needed_.fills.contains(*idle)) return Turn{&idle_, *idle};
    idle_.turns.Deactivate(*idle);
    aside.push_back({&idle_, *idle});
  }
  needed_in_a_row_ = 0;
  return needed.has_value() ? std::optional(Turn{&needed_, *needed}) : std::nullopt;
}

Filler::Started Filler::StartPieceOf(const Turn& turn) {
  bool refused[2] = {};  // by the executor, by the disk: what waits for one does not hold up the other's
  for (const auto& [place, fill] : turn.line->fills.at(turn.tenant)) {
    bool& full = refused[fill->UsesDisk()];
    if (full || !fill->CanStart()) continue;
    const std::shared_ptr<Fill> next = fill;  // the map is another one once a piece has ended
    const uint64_t before = next->started;
    full = !StartPiece(next);
    if (full) continue;
    turn.line->turns.Charge(turn.tenant, static_cast<int64_t>(std::min(kPieceExtents, next->extents - before)));
    needed_in_a_row_ = turn.line == &needed_ ? needed_in_a_row_ + 1 : 0;
    if (next->started == next->extents) Dequeue(*next);
    return Started::kPiece;
  }
  return refused[0] || refused[1] ? Started::kRefused : Started::kNothing;
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
      fill->tenant,
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
    if (executor_.Run(fill->tenant, copy, [this, fill, first] { PieceDone(fill, first, absl::OkStatus()); })) return;
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
  if (fill->ended.ok() && !status.ok()) {
    fill->ended = status;
    Dequeue(*fill);
  }
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
