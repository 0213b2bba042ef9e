// SPDX-License-Identifier: Apache-2.0
#include "storage/lookup/explainer.h"

#include <algorithm>

namespace ashlar::storage {

// Describes the objects of a key on this node: the bundle that contains `shard`, or else the first bundle.
Presence Explainer::Describe(const std::vector<Entry*>& here, const TensorShard& shard) const {
  const auto of_size = [&](const Entry* entry) { return entry->header.shard.size == shard.size; };
  const uint32_t size = std::ranges::any_of(here, of_size) ? shard.size : here.front()->header.shard.size;
  const Nanos now = clock_.Now();
  Presence present{.shards = 0, .of_shards = size};
  for (const Entry* entry : here) {
    if (entry->header.shard.size != size) continue;
    present.tier = std::max(present.tier, table_.levels().Nearest(*entry));
    present.bytes += entry->header.bytes;
    if (!entry->ready) continue;
    const bool first = present.shards++ == 0;
    const std::vector<TierKind> tiers = table_.levels().TiersOf(entry);
    if (first) present.tiers = tiers;
    std::erase_if(present.tiers, [&](TierKind tier) { return std::ranges::count(tiers, tier) == 0; });
    present.uses = std::max(present.uses, entry->uses);
    present.references = std::max(present.references, entry->references);
    present.age = std::max(present.age, now - entry->published_at);
    const Nanos idle = now - entry->last_used_at;
    present.idle = first ? idle : std::min(present.idle, idle);
  }
  return present;
}

Explanation Explainer::Explain(TenantId tenant, const Query& query) const {
  if (!query.storable) return {.reason = MissReason::kTooShort};
  if (const std::vector<Entry*> here = table_.index().keys().All(tenant, query.key); !here.empty()) {
    const Presence present = Describe(here, query.shard);
    const bool whole = present.shards == present.of_shards;
    return {.reason = whole ? MissReason::kNone : MissReason::kBeingPublished, .present = present};
  }
  if (const Ghost* ghost = table_.ghosts().Find(tenant, query.key)) return {.reason = ghost->reason, .ghost = *ghost};
  const NamespaceId* elsewhere = query.text == TextDigest{} ? nullptr : texts_.Elsewhere(tenant, query.text, query.ns);
  if (elsewhere == nullptr) return {.reason = MissReason::kNeverSeen};
  return {.reason = MissReason::kNamespaceDiffers, .elsewhere = *elsewhere};
}

MissReason Explainer::Missed(SessionId session, TenantId tenant, const Query& query, MissReason reason) {
  Miss miss{.at = clock_.Now(), .session = session, .query = query, .why = Explain(tenant, query)};
  // An object that is split into another number of shards is not a hit.
  const bool other = miss.why.present && miss.why.present->of_shards != query.shard.size;
  if (reason != MissReason::kNeverSeen || other) miss.why.reason = reason;
  misses_.Add(tenant, miss);
  return miss.why.reason;
}

}  // namespace ashlar::storage
