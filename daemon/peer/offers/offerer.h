// SPDX-License-Identifier: Apache-2.0
// Offerer: offers objects of this node to other nodes within limits, and counts the outcomes.
#pragma once

#include <cstddef>
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
    OfferCounts outcomes;  // kFailed includes calls without a reply
    uint64_t bytes = 0;    // bytes taken
  };
  // One outcome per object, or the error of the call.
  using Answered = std::function<void(const absl::StatusOr<std::vector<TakeOutcome>>&)>;

  // All must outlive the object. `names` are the tenant names by number.
  Offerer(EventLoop& loop, PeerAsker& asker, std::vector<std::string> names)
      : loop_(loop), asker_(asker), names_(std::move(names)) {}

  // A connection carries PeerClient::kCalls at a time. Offers wait for transfers, so they use only a part of them; the
  // rest is for lookups, renewals and closes.
  static constexpr size_t kMostOffers = 16;
  // Returns whether another offer to the node is allowed. Check before each Offer.
  bool MayOffer(const Member& to) const {
    const auto found = under_way_.find(to.incarnation);
    return found == under_way_.end() || found->second < kMostOffers;
  }
  // Returns whether this node's configuration shares the tenant with that node.
  bool Shares(const Member& to, storage::TenantId tenant) const { return asker_.Shares(to, names_.at(tenant)); }
  // Offers objects of one tenant, with at most limits::kMaxPeerKeysPerCall shards in total.
  void Offer(const std::shared_ptr<const Member>& to, const std::vector<storage::Offering>& offerings, OfferKind kind,
             uint32_t patience_ms, Answered answered);
  Stats stats(OfferKind kind) const {
    const auto found = stats_.find(kind);
    return found == stats_.end() ? Stats() : found->second;
  }

 private:
  EventLoop& loop_;
  PeerAsker& asker_;
  const std::vector<std::string> names_;
  std::map<uint64_t, size_t> under_way_;  // offers in flight; key: incarnation of the member
  std::map<OfferKind, Stats> stats_;
};

}  // namespace ashlar::daemon
