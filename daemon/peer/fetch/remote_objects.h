// SPDX-License-Identifier: Apache-2.0
// RemoteObjects: lets storage read objects that other nodes hold. It fetches bytes, renews leases, requests late pieces
// from a second holder, and fails over to another holder.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "daemon/peer/channels/peer_rates.h"
#include "daemon/peer/fetch/damaged_copies.h"
#include "daemon/peer/fetch/opener.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/runtime/event_loop.h"
#include "storage/tier/remote_source.h"

namespace ashlar::daemon {

// The metadata thread only.
class RemoteObjects final : public storage::RemoteSource {
 public:
  struct Options {
    // A piece that takes longer is fetched from another holder, or is lost (PeerRates::Patience).
    storage::Nanos least_patience = 1'000'000'000;
    double patience = 8;  // multiple of the expected time, between least_patience and most_patience
    storage::Nanos most_patience = 20'000'000'000;
    // A piece that takes this multiple of the expected time, and at least least_hedge, is also requested from a second
    // holder.
    double hedge = 3;  // 0: never
    storage::Nanos least_hedge = 100'000'000;
  };
  struct Stats {
    uint64_t copies = 0;             // open copies
    uint64_t reading = 0;            // pieces in flight
    uint64_t pieces = 0, bytes = 0;  // received since the start
    uint64_t failed_pieces = 0;      // pieces that no holder delivered
    uint64_t moved = 0;              // copies that failed over to another holder
    uint64_t hedged = 0;             // pieces requested from a second holder
    uint64_t hedges_won = 0;         // hedged pieces that the second holder delivered first
  };

  // All must outlive the object.
  RemoteObjects(EventLoop& loop, const storage::Clock& clock, Transport& transport, Opener& opener, PeerRates& rates,
                const Options& options)
      : loop_(loop), clock_(clock), transport_(transport), opener_(opener), rates_(rates), options_(options) {}

  // Adds an opened object. `others` may hold it too, and are asked in this order.
  storage::RemoteCopyId Add(storage::TenantId tenant, OpenedObject object,
                            std::vector<std::shared_ptr<const Member>> others);
  bool Reaches(const kernels::Gpu&) const override { return transport_.Reaches(MemoryType::kCuda); }
  bool Read(storage::RemoteCopyId copy, uint64_t first, std::vector<std::byte*> targets, const kernels::Gpu* gpu,
            std::function<void(absl::Status)> done) override;
  void Release(storage::RemoteCopyId copy) override;
  void Damaged(storage::RemoteCopyId copy) override;
  void SetRecompute(storage::RemoteCopyId copy, storage::Nanos recompute) override;

  // Measures progress, abandons copies that are slower than computing, and requests late pieces from second holders.
  // Call it many times per second.
  void Flush();
  // Renews leases. Call it about once per second.
  void Tick(PeerAsker& asker);
  // Returns whether the member recently sent wrong bytes of this object; other holders are then asked first.
  bool Distrusts(const Member& member, const Key& key) const { return damaged_.Contains(member, key, clock_.Now()); }
  // A member has left: its pieces are read elsewhere without waiting for deadlines.
  void Gone(const Member& member);
  // No reads are possible from now on; reads in flight end soon.
  void Stop();
  const Stats& stats() const { return stats_; }
  struct Held {
    uint64_t copies = 0, bytes = 0;
  };
  // Open copies by the node that holds the object.
  std::map<std::string, Held> HeldByNode() const;

 private:
  struct Piece {
    uint64_t first = 0;
    std::vector<std::byte*> targets;
    const kernels::Gpu* gpu = nullptr;  // GPU of the targets; null for host memory
    std::function<void(absl::Status)> done;
    std::optional<uint64_t> holder;  // incarnation of the member under which the piece is counted
  };
  struct Request {
    std::shared_ptr<const Member> from;  // null without a request
    uint64_t number = 0;                 // number of the transport request
    storage::Nanos began = 0;
    uint64_t bytes = 0;
    std::shared_ptr<std::atomic<uint64_t>> received_bytes;  // bytes received
    uint64_t counted = 0;                                   // bytes reported to PeerRates::Moved
    bool running = false;
  };
  // A piece in flight from its holder, and from a second one if that is slow. Both write the same bytes to the same
  // extents on the transport's one thread. The piece is done when neither writes any more.
  struct Race {
    Piece piece;
    uint64_t holder_generation = 0;  // the copy's generation when the race began
    std::array<Request, 2> requests;
    int won = -1;  // index of the winner; −1 without one
    absl::Status failed;
  };
  struct Copy {
    storage::TenantId tenant = 0;
    OpenedObject object;
    std::vector<std::shared_ptr<const Member>> others;
    DamagedCopies::Members senders;           // senders of the received pieces
    std::optional<OpenedObject> second;       // the object at a second holder, for late pieces
    bool asking = false;                      // a second holder is being asked
    uint64_t holder_generation = 0;           // counter of holders; errors of an earlier holder are ignored
    bool moving = false;                      // another holder is being asked after a failure
    bool lost = false;                        // no holder is left
    bool slow = false;                        // abandoned, because computing is faster
    std::optional<storage::Nanos> recompute;  // set by SetRecompute; 0: never abandoned
    uint64_t left = 0;                        // missing bytes of the object
    std::vector<Piece> waiting;
    std::map<uint64_t, std::shared_ptr<Race>> races;  // key: first extent
  };
  using Due = std::tuple<storage::Nanos, storage::RemoteCopyId, uint64_t>;  // when, copy, piece

  void CountAt(Piece& piece, std::optional<uint64_t> holder);
  void Fetch(storage::RemoteCopyId id, Copy& copy, Piece piece);
  void Start(storage::RemoteCopyId id, Copy& copy, const std::shared_ptr<Race>& race, size_t which);
  void Count(Request& request);
  void AbandonIfSlow(Copy& copy);
  void Hedge();
  void Ended(storage::RemoteCopyId id, const std::shared_ptr<Race>& race, size_t which, const absl::Status& status);
  void Came(Copy& copy, const std::shared_ptr<Race>& race);
  void AskSecond(storage::RemoteCopyId id, Copy& copy);
  void SecondOpened(storage::RemoteCopyId id, Opener::Opened opened);
  void TakeSecond(Copy& copy);
  void DropSecond(Copy& copy, const Member& member);
  void Move(storage::RemoteCopyId id, Copy& copy, const absl::Status& why);
  void Moved(storage::RemoteCopyId id, Opener::Opened opened);
  void GoOn(storage::RemoteCopyId id, Copy& copy);
  void Lose(Copy& copy, const absl::Status& why);
  void Renewed(storage::RemoteCopyId id, const PeerLease& lease, storage::Nanos until);

  EventLoop& loop_;
  const storage::Clock& clock_;
  Transport& transport_;
  Opener& opener_;
  PeerRates& rates_;
  const Options options_;
  std::map<storage::RemoteCopyId, Copy> copies_;
  std::map<uint64_t, size_t> reading_;  // pieces per holder incarnation; no zero entries
  std::set<Due> late_;                  // when pieces in flight become late
  DamagedCopies damaged_;
  storage::RemoteCopyId drawn_ = 0;
  bool stopped_ = false;
  Stats stats_;
};

}  // namespace ashlar::daemon
