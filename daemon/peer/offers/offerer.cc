// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/offers/offerer.h"

#include <utility>

namespace ashlar::daemon {
namespace {

PeerOffered WireOf(const storage::Offering& offering) {
  return {.key = offering.key,
          .shards = offering.shards,
          .ns = offering.ns,
          .kind = offering.kind,
          .own = offering.pool.kind == storage::PoolKind::kPrivate,
          .bytes = offering.bytes,
          .uses = offering.uses,
          .idle = offering.idle,
          .saves_a_byte = offering.saves_a_byte,
          .group = offering.group};
}

}  // namespace

void Offerer::Offer(const std::shared_ptr<const Member>& to, const std::vector<storage::Offering>& offerings,
                    OfferKind kind, uint32_t patience_ms, Answered answered) {
  const storage::TenantId tenant = offerings.front().pool.tenant;
  PeerOffer offer{.objects = {}, .kind = kind, .patience_ms = patience_ms};
  std::vector<uint64_t> bytes;
  for (const storage::Offering& offering : offerings) {
    offer.objects.push_back(WireOf(offering));
    bytes.push_back(offering.bytes * offering.shards);
  }
  ++under_way_[to->incarnation];
  using Reply = absl::StatusOr<std::vector<TakeOutcome>>;
  const auto count = [this, to, kind, bytes = std::move(bytes), answered = std::move(answered)](const Reply& reply) {
    if (const auto offers = under_way_.find(to->incarnation); --offers->second == 0) under_way_.erase(offers);
    Stats& stats = stats_[kind];
    for (size_t i = 0; i < bytes.size(); ++i) {
      const TakeOutcome outcome = reply.ok() ? (*reply)[i] : TakeOutcome::kFailed;
      ++stats.outcomes[outcome];
      if (outcome == TakeOutcome::kAccepted) stats.bytes += bytes[i];
    }
    answered(reply);
  };
  asker_.Offer(*to, names_.at(tenant), std::move(offer), [this, tenant, count](Reply reply) {
    const auto shared = std::make_shared<const Reply>(std::move(reply));
    loop_.PostCompletion(tenant, [count, shared] { count(*shared); });
  });
}

}  // namespace ashlar::daemon
