// SPDX-License-Identifier: Apache-2.0
// TierCopier: copies objects between tiers, extents in order, several pieces at a time.
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

class TierCopy;  // one copy in progress

// Metadata thread only. The number of pieces in flight is bounded per route, so a slow node does not delay a disk, and
// a slow disk does not delay copies between memory tiers. A slow node does not delay other nodes' copies: the source
// bounds the pieces of each node (RemoteSource::Read). Tenants take turns by bytes moved. Within a tenant, the copy
// with the earliest need goes first, then the one that started first. Within a tenant, background copies run
// after the needed ones. Next to other tenants' needed copies they get a small share, so they progress. Pieces in
// flight are not cancelled.
class TierCopier {
 public:
  // One end of a copy: a slot of a memory tier, a slot of the disk (`memory` is null), or a copy on another node
  // (`remote` is set; read-only). The slot outlives the copy.
  struct End {
    const Tier* memory = nullptr;
    const Slot* slot = nullptr;
    RemoteCopyId remote = 0;
  };
  static constexpr Nanos kWhenIdle = std::numeric_limits<Nanos>::max();  // background copy: after all others
  struct Events {
    std::function<void(uint64_t loaded)> progress;  // `loaded`: whole extents from the start
    std::function<void(absl::Status)> done;         // called once, last; afterwards neither slot is accessed
  };

  // `disk` and `remote` may be null. All arguments must outlive the copier, and the copier must outlive all pieces in
  // flight. `max_pieces`: pieces in flight between memory tiers, and the same number from and to the disk.
  TierCopier(Executor& executor, SsdTier* disk, RemoteSource* remote = nullptr, size_t max_pieces = 32);

  // Not from disk to disk or between two GPUs. `available`: extents of the source that can be read now; Offer reports
  // more. `needed_at` is on the injected clock. No event comes before this returns.
  std::shared_ptr<TierCopy> Start(End from, End to, uint64_t extents, uint64_t available, Nanos needed_at,
                                  Events events);
  // Returns whether other nodes' bytes reach a tier on a GPU without a copy through host memory.
  bool ReadsStraightTo(const Tier& tier) const {
    return remote_ != nullptr && tier.gpu() != nullptr && remote_->Reaches(*tier.gpu());
  }
  void Offer(TierCopy& copy, uint64_t available);
  // Sets an earlier time of need; a later one has no effect.
  void Hasten(const std::shared_ptr<TierCopy>& copy, Nanos needed_at);
  // Starts no further piece. Returns true if nothing is in flight; then no event follows. Otherwise `done` is called
  // with CANCELLED.
  bool Cancel(TierCopy& copy);
  // Retries pieces for which an executor had no space. Call it regularly.
  void Pump();

 private:
  static constexpr size_t kRemotePieces = 64;
  enum Way : uint8_t { kMemory, kDisk, kRemote };
  static constexpr std::array kWays = {kMemory, kDisk, kRemote};

  friend class TierCopy;
  using Place = std::pair<Nanos, uint64_t>;  // time of need, then number of the copy
  // A tenant's copies with pieces left to start, in the order of need.
  struct Line {
    std::map<TenantId, std::map<Place, std::shared_ptr<TierCopy>>> copies;
    Turns turns;  // active: tenants that may have a piece to start
  };
  struct Turn {
    Line* line;
    TenantId tenant;
    bool operator==(const Turn&) const = default;
  };
  Line& LineOf(const Place& place) { return place.first == kWhenIdle ? idle_ : needed_; }
  void Enqueue(const std::shared_ptr<TierCopy>& copy);
  bool Dequeue(const TierCopy& copy);  // false if it was not queued
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
  // Reads a piece from the disk or from another node into the memory of a GPU (null: host memory).
  bool Read(const TierCopy& copy, uint64_t first, std::vector<std::byte*> targets, const kernels::Gpu* gpu,
            std::function<void(absl::Status)> done);
  bool ReadToGpu(const std::shared_ptr<TierCopy>& copy, uint64_t first, uint64_t count);
  bool WriteFromGpu(const std::shared_ptr<TierCopy>& copy, uint64_t first, uint64_t count);
  void PieceDone(const std::shared_ptr<TierCopy>& copy, uint64_t first, const absl::Status& status);

  Executor& executor_;
  SsdTier* const disk_;
  RemoteSource* const remote_;
  const size_t max_pieces_;
  std::array<size_t, kWays.size()> pieces_{};   // pieces in flight, per route
  std::array<size_t, kWays.size()> waiting_{};  // queued copies, per route
  uint64_t begun_ = 0;
  uint64_t round_ = 0;  // a copy is refused at most once per round
  Line needed_, idle_;
  int needed_in_a_row_ = 0;  // consecutive pieces of needed copies
  bool pumping_ = false, again_ = false;
};

}  // namespace ashlar::storage
