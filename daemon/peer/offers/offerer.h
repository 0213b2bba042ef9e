// Offerer: offers objects of this node to others, within bounds, and counts what they answer.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "daemon/peer/channels/peer_asker.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/offers/offer_taker.h"
#include "daemon/runtime/event_loop.h"
#include "storage/objects/offers.h"

namespace ashlar::daemon {

// The metadata thread only.
class Offerer {
 public:
  struct Stats {
    OfferCounts outcomes;  // of objects; kFailed: no answer, too
    uint64_t bytes = 0;    // of what was taken
  };
  // One outcome each, or the error of the call.
  using Answered = std::function<void(const absl::StatusOr<std::vector<TakeOutcome>>&)>;

  // All must outlive it. `names`: the tenants' names, by number.
  Offerer(EventLoop& loop, PeerAsker& asker, std::vector<std::string> names)
      : loop_(loop), asker_(asker), names_(std::move(names)) {}

  // Offers objects of one tenant; their shards together at most limits::kMaxPeerKeysPerCall.
  void Offer(const std::shared_ptr<const Member>& to, const std::vector<storage::Offering>& offerings, OfferKind why,
             uint32_t patience_ms, Answered answered);
  Stats stats(OfferKind why) const {
    const auto found = stats_.find(why);
    return found == stats_.end() ? Stats() : found->second;
  }

 private:
  EventLoop& loop_;
  PeerAsker& asker_;
  const std::vector<std::string> names_;
  std::map<OfferKind, Stats> stats_;
};

}  // namespace ashlar::daemon
