// SPDX-License-Identifier: Apache-2.0
// RemoteObjects: the objects that other nodes keep for this one, as storage reads them. It fetches their bytes, renews
// their leases, asks a second holder where the first one is slow, and goes on at another where one fails.
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
    double patience = 8;  // times what it should take, where that is longer, but no longer than this
    storage::Nanos most_patience = 20'000'000'000;
    // A piece that takes so many times what it should, and at least so long, is fetched from a second holder as well.
    double hedge = 3;  // 0: never
    storage::Nanos least_hedge = 100'000'000;
  };
  struct Stats {
    uint64_t copies = 0;             // open now
    uint64_t reading = 0;            // pieces
    uint64_t pieces = 0, bytes = 0;  // that came, ever
    uint64_t failed_pieces = 0;      // that no holder delivered
    uint64_t moved = 0;              // copies that went on at another holder
    uint64_t hedged = 0;             // pieces that a second holder was asked for
    uint64_t hedges_won = 0;         // of those, whose bytes came from it first
  };

  // All must outlive it.
  RemoteObjects(EventLoop& loop, const storage::Clock& clock, Transport& transport, Opener& opener, PeerRates& rates,
                const Options& options)
      : loop_(loop), clock_(clock), transport_(transport), opener_(opener), rates_(rates), options_(options) {}

  // Takes an opened object; `others` may have it, too, and are asked in their order.
  storage::RemoteCopyId Add(storage::TenantId tenant, OpenedObject object,
                            std::vector<std::shared_ptr<const Member>> others);
  bool Reaches(const kernels::Gpu&) const override { return transport_.Reaches(MemoryType::kCuda); }
  bool Read(storage::RemoteCopyId copy, uint64_t first, std::vector<std::byte*> targets, const kernels::Gpu* gpu,
            std::function<void(absl::Status)> done) override;
  void Release(storage::RemoteCopyId copy) override;
  void Damaged(storage::RemoteCopyId copy) override;
  void SetRecompute(storage::RemoteCopyId copy, storage::Nanos recompute) override;

  // Measures what has come, gives up copies that computing is faster than, and asks second holders for what is late.
  // Call it many times a second.
  void Flush();
  // Renews leases. Call it about once a second.
  void Tick(PeerAsker& asker);
  // The member has sent wrong bytes of this object lately: others are asked first.
  bool Distrusts(const Member& member, const Key& key) const { return damaged_.Contains(member, key, clock_.Now()); }
  // A member that has gone: what is read there is read elsewhere without waiting for deadlines.
  void Gone(const Member& member);
  // From now on nothing can be read; what is under way ends soon.
  void Stop();
  const Stats& stats() const { return stats_; }
  struct Held {
    uint64_t copies = 0, bytes = 0;
  };
  // Copies that are open now, by the node that keeps the object for this one.
  std::map<std::string, Held> HeldByNode() const;

 private:
  struct Piece {
    uint64_t first = 0;
    std::vector<std::byte*> targets;
    const kernels::Gpu* gpu = nullptr;  // whose memory they are; null: the processor's
    std::function<void(absl::Status)> done;
    std::optional<uint64_t> holder;  // the incarnation of the member whose pieces it counts among
  };
  struct Request {
    std::shared_ptr<const Member> from;  // null: none was made
    uint64_t number = 0;                 // the transport's
    storage::Nanos began = 0;
    uint64_t bytes = 0;
    std::shared_ptr<std::atomic<uint64_t>> came;  // of them
    uint64_t counted = 0;                         // of these, by PeerRates::Moved
    bool running = false;
  };
  // A piece under way: from its holder, and from a second one where that is slow. Both write the same bytes to the same
  // extents, on the transport's one thread; the piece is done when neither writes any more.
  struct Race {
    Piece piece;
    uint64_t holder = 0;  // as the copy counted it when the race began
    std::array<Request, 2> requests;
    int won = -1;  // which of them
    absl::Status failed;
  };
  struct Copy {
    storage::TenantId tenant = 0;
    OpenedObject object;
    std::vector<std::shared_ptr<const Member>> others;
    DamagedCopies::Members senders;           // of the pieces that have come
    std::optional<OpenedObject> second;       // at another holder, for what the first one is late with
    bool asking = false;                      // a second holder is asked
    uint64_t holder = 0;                      // counts holders: an error of an earlier one says nothing of this one
    bool moving = false;                      // another holder is asked, since the first one failed
    bool lost = false;                        // no holder is left
    bool slow = false;                        // given up: computing is faster
    std::optional<storage::Nanos> recompute;  // SetRecompute; 0: it is never given up
    uint64_t left = 0;                        // bytes of the object that have not come
    std::vector<Piece> waiting;
    std::map<uint64_t, std::shared_ptr<Race>> races;  // by first extent
  };
  using Due = std::tuple<storage::Nanos, storage::RemoteCopyId, uint64_t>;  // when, and which piece

  void CountAt(Piece& piece, std::optional<uint64_t> holder);
  void Fetch(storage::RemoteCopyId id, Copy& copy, Piece piece);
  void Start(storage::RemoteCopyId id, Copy& copy, const std::shared_ptr<Race>& race, size_t which);
  void Count(Request& request);
  void GiveUpIfSlow(Copy& copy);
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
  std::map<uint64_t, size_t> reading_;  // pieces of each holder, by its incarnation; never 0
  std::set<Due> late_;                  // when pieces under way will be late
  DamagedCopies damaged_;
  storage::RemoteCopyId drawn_ = 0;
  bool stopped_ = false;
  Stats stats_;
};

}  // namespace ashlar::daemon
