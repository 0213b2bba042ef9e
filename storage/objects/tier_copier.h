// SPDX-License-Identifier: Apache-2.0
// TierCopier: copies objects between tiers, their extents in order, several pieces at a time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "storage/executor.h"
#include "storage/tier/remote_source.h"
#include "storage/tier/ssd_tier.h"
#include "storage/tier/tier.h"
#include "storage/turns.h"

namespace ashlar::storage {

class TierCopy;  // one object on its way

// The metadata thread only. The pieces in flight are bounded, those by each way apart: a slow node keeps no disk
// waiting, and a slow disk no copy from memory to memory. Nor does a slow node keep other nodes' copies waiting: the
// source bounds the pieces of each node (RemoteSource::Read). Tenants take turns by the bytes that are moved for them.
// Within a tenant the copy that is needed first has priority, and among equals the one that began first. A copy that
// nobody waits for comes after those its tenant needs; it has a small share beside other tenants' needs, so that it
// makes progress. Pieces in flight are not called back.
class TierCopier {
 public:
  // One end of a copy: a slot of a memory tier, or of the disk (memory null), or a copy on another node (`remote` set),
  // which can only be read. The slot outlives the copy.
  struct End {
    const Tier* memory = nullptr;
    const Slot* slot = nullptr;
    RemoteCopyId remote = 0;
  };
  static constexpr Nanos kWhenIdle = std::numeric_limits<Nanos>::max();  // nobody waits for it: behind all others
  struct Events {
    std::function<void(uint64_t loaded)> progress;  // extents that are whole, from the start
    std::function<void(absl::Status)> done;         // once, last; both slots are untouched from then on
  };

  // `disk` and `remote` may be null; all must outlive the copier, and the copier everything in flight. `max_pieces`: in
  // flight between tiers of memory, and as many from and to the disk.
  TierCopier(Executor& executor, SsdTier* disk, RemoteSource* remote = nullptr, size_t max_pieces = 32);

  // Not from disk to disk, nor from a GPU's memory to a GPU's. Of the source, `available` extents can be read now;
  // Offer says when there are more. `needed_at`: on the injected clock. No event comes before this returns.
  std::shared_ptr<TierCopy> Start(End from, End to, uint64_t extents, uint64_t available, Nanos needed_at,
                                  Events events);
  // Returns whether bytes of other nodes come to a tier on a GPU without a stop in the processor's memory.
  bool ReadsStraightTo(const Tier& tier) const {
    return remote_ != nullptr && tier.gpu() != nullptr && remote_->Reaches(*tier.gpu());
  }
  void Offer(TierCopy& copy, uint64_t available);
  // Moves the copy's time of need forward; never back.
  void Hasten(const std::shared_ptr<TierCopy>& copy, Nanos needed_at);
  // Begins no further piece. True: nothing is in flight, and no event will come. Else `done` comes with CANCELLED.
  bool Cancel(TierCopy& copy);
  // Tries again the pieces for which an executor had no room. Call it now and then.
  void Pump();

 private:
  static constexpr size_t kRemotePieces = 64;
  enum Way : uint8_t { kMemory, kDisk, kRemote };
  static constexpr std::array kWays = {kMemory, kDisk, kRemote};

  friend class TierCopy;
  using Place = std::pair<Nanos, uint64_t>;  // needed at, begun as which
  // Tenants' copies that have pieces left to start, each tenant's in the order of need.
  struct Line {
    std::map<TenantId, std::map<Place, std::shared_ptr<TierCopy>>> copies;
    Turns turns;  // active: a tenant that may have a piece to start
  };
  struct Turn {
    Line* line;
    TenantId tenant;
    bool operator==(const Turn&) const = default;
  };
  Line& LineOf(const Place& place) { return place.first == kWhenIdle ? idle_ : needed_; }
  void Enqueue(const std::shared_ptr<TierCopy>& copy);
  bool Dequeue(const TierCopy& copy);  // false: it was in no line
  bool Full(Way way) const { return pieces_[way] >= (way == kRemote ? kRemotePieces : max_pieces_); }
  bool MayStart() const {
    return std::ranges::any_of(kWays, [this](Way way) { return waiting_[way] > 0 && !Full(way); });
  }
  void PumpInTurn();
  std::optional<Turn> NextTurn(std::vector<Turn>& aside);
  enum class Started { kPiece, kNothing, kRefused };
  Started StartPieceOf(const Turn& turn);
  bool StartPiece(const std::shared_ptr<TierCopy>& copy);
  bool Submit(const std::shared_ptr<TierCopy>& copy, uint64_t first, uint64_t count);
  // Reads a piece from the disk, or from another node, into the memory of a GPU (null: the processor's).
  bool Read(const TierCopy& copy, uint64_t first, std::vector<std::byte*> targets, const kernels::Gpu* gpu,
            std::function<void(absl::Status)> done);
  bool ReadToGpu(const std::shared_ptr<TierCopy>& copy, uint64_t first, uint64_t count);
  bool WriteFromGpu(const std::shared_ptr<TierCopy>& copy, uint64_t first, uint64_t count);
  void PieceDone(const std::shared_ptr<TierCopy>& copy, uint64_t first, const absl::Status& status);

  Executor& executor_;
  SsdTier* const disk_;
  RemoteSource* const remote_;
  const size_t max_pieces_;
  std::array<size_t, kWays.size()> pieces_{};   // in flight, by way
  std::array<size_t, kWays.size()> waiting_{};  // copies that are in a line, by way
  uint64_t begun_ = 0;
  uint64_t round_ = 0;  // in each of them a copy is refused once at most
  Line needed_, idle_;
  int needed_in_a_row_ = 0;  // pieces
  bool pumping_ = false, again_ = false;
};

}  // namespace ashlar::storage
