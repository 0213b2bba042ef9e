// SPDX-License-Identifier: Apache-2.0
// Offerer: offers objects of this node to others, within bounds, and counts what they answer.
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
    OfferCounts outcomes;  // of objects; kFailed: no answer, too
    uint64_t bytes = 0;    // of what was taken
  };
  // One outcome each, or the error of the call.
  using Answered = std::function<void(const absl::StatusOr<std::vector<TakeOutcome>>&)>;

  // All must outlive it. `names`: the tenants' names, by number.
  Offerer(EventLoop& loop, PeerAsker& asker, std::vector<std::string> names)
      : loop_(loop), asker_(asker), names_(std::move(names)) {}

  // A node's connection carries PeerClient::kCalls at a time. Offers wait for objects, and so they take a part of them:
  // look-ups, renewals and closes have the rest.
  static constexpr size_t kMostOffers = 16;
  // Returns whether fewer offers than that wait for this node's answer. Ask before each Offer.
  bool MayOffer(const Member& to) const {
    const auto found = under_way_.find(to.incarnation);
    return found == under_way_.end() || found->second < kMostOffers;
  }
  // Returns whether this node's configuration shares the tenant with that node.
  bool Shares(const Member& to, storage::TenantId tenant) const { return asker_.Shares(to, names_.at(tenant)); }
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
  std::map<uint64_t, size_t> under_way_;  // offers, by the member's incarnation
  std::map<OfferKind, Stats> stats_;
};

}  // namespace ashlar::daemon
