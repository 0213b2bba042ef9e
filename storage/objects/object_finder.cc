// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/object_finder.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "storage/policy/compute_cost.h"

namespace ashlar::storage {

FoundObject ObjectFinder::Find(TenantId tenant, const Query& query, std::vector<ObjectReference>* others,
                               size_t level) {
  const Key& key = query.key;
  const TensorShard& shard = query.shard;
  Entry* entry = table_.index().keys().Find(tenant, key, shard);
  if (entry != nullptr && entry->ready && table_.lifetimes().IsExpired(*entry)) {
    table_.End(*entry, MissReason::kExpired, PolicyKind::kTtl, table_.levels().Nearest(*entry));
    entry = nullptr;
  }
  const std::vector<Entry*> bundle =
      shard.size == 1 ? std::vector<Entry*>() : table_.index().keys().Bundle(tenant, key, shard.size);
  if (entry == nullptr && bundle.empty()) {
    if (query.unreachable) return {.reason = MissReason::kHolderUnreachable};
    table_.placement().RecordDemand(tenant, key);
    const Ghost* ghost = table_.ghosts().Find(tenant, key);
    return {.reason = ghost == nullptr ? MissReason::kNeverSeen : ghost->reason};
  }
  const bool complete = shard.size == 1 || bundle.size() == shard.size;
  if (entry == nullptr || !entry->ready || !complete || !std::ranges::all_of(bundle, &Entry::ready)) {
    return {.reason = MissReason::kBeingPublished};
  }
  const bool given = level == kWhereItLies;
  if (given) level = table_.levels().LevelToSendFrom(*entry);
  if (!given) table_.ranks().Record(tenant, query.ns, shard, level);
  // All are referenced before the first promotion may evict others.
  FoundObject result{.tier = table_.levels().NearestTo(*entry, level), .object = ObjectReference(*entry, level)};
  std::vector<ObjectReference> rest;
  for (Entry* other : bundle) {
    if (other == entry) continue;
    const size_t its = given ? table_.levels().LevelToSendFrom(*other) : table_.ranks().LevelOf(*other);
    rest.push_back(ObjectReference(*other, its));
    result.tier = std::max(result.tier, table_.levels().NearestTo(*other, its));  // complete when its last shard is
  }
  table_.costs()[tenant].Computed(query.flops, query.recompute);
  const Nanos of_remote = std::max(query.recompute, query.remote_recompute);
  MissReason refused = table_.placement().Promote(*entry, level, {query.recompute, of_remote}, query.needed_at);
  // The first shard decides whether the hit pays.
  for (size_t i = 0; i < rest.size() && refused == MissReason::kNone; ++i) {
    refused = table_.placement().Promote(rest[i].entry(), rest[i].level(), {}, query.needed_at);
  }
  if (refused != MissReason::kNone) return {.reason = refused};
  Use(*entry, query);
  for (const ObjectReference& other : rest) Use(other.entry(), query);
  if (others != nullptr) std::ranges::move(rest, std::back_inserter(*others));
  table_.placement().scheduler().Pump();
  return result;
}

PromotionCost::Load ObjectFinder::LoadOf(TenantId tenant, const Query& query, size_t level) const {
  PromotionCost::Load load;
  const Entry* const entry = table_.index().keys().Find(tenant, query.key, query.shard);
  if (entry == nullptr) return load;
  const TierKind from = entry->copies[level].whole() ? TierKind::kNone : table_.levels().NearestTo(*entry, level);
  load.bytes[static_cast<size_t>(from)] = entry->header.bytes;
  if (from == TierKind::kRemote) load.remote = entry->remote_cost;
  return load;
}

bool ObjectFinder::AnyTarget(TenantId tenant, const Query& query, size_t level,
                             absl::FunctionRef<bool(Tier& tier, uint64_t extents)> waits) {
  Levels& levels = table_.levels();
  const Entry* const entry = table_.index().keys().Find(tenant, query.key, query.shard);
  if (entry == nullptr || !entry->ready || level == kWhereItLies) return false;
  // The other shards of its bundle come along, mostly to the same level. The tiers in between get copies, too.
  const uint64_t extents = entry->header.Extents() * query.shard.size;
  for (size_t at = level; at < levels.memory() && entry->copies[at].phase() == CopyPhase::kNone;
       at = levels.Below(at)) {
    if (waits(levels[at].tier(), extents)) return true;
  }
  return false;
}

ObjectReference ObjectFinder::Shard(const ObjectReference& object, const TensorShard& shard) {
  if (object->gone != MissReason::kNone) return {};
  Entry* entry = table_.index().keys().Find(object->pool.tenant, object->header.key, shard);
  if (entry == nullptr || !entry->ready) return {};
  return ObjectReference(*entry, table_.ranks().LevelOf(*entry));
}

FoundObject ObjectFinder::ShardAt(const ObjectReference& object, const TensorShard& shard, size_t level) {
  table_.ranks().Record(object->pool.tenant, object->header.ns, shard, level);
  if (object->gone != MissReason::kNone) return {.reason = object->gone};
  Entry* const entry = table_.index().keys().Find(object->pool.tenant, object->header.key, shard);
  if (entry == nullptr || !entry->ready) return {.reason = MissReason::kEvicted};
  FoundObject result{.tier = table_.levels().NearestTo(*entry, level), .object = ObjectReference(*entry, level)};
  const CopyPhase phase = result.object.copy().phase();
  if (phase != CopyPhase::kNone && phase != CopyPhase::kBroken) return result;
  // The lookup's own reference keeps the copy at the level where the rank was expected.
  const MissReason refused = table_.placement().Promote(*entry, level, {}, clock_.Now());
  if (refused != MissReason::kNone) return {.reason = refused};
  table_.placement().scheduler().Pump();
  return result;
}

void ObjectFinder::Use(Entry& entry, const Query& query) {
  if (++entry.uses == Residences::kReportedUses) table_.residences().Report(entry);
  entry.deferred = query.defer && table_.placement().defers() && entry.uses < kFoundTwice;
  table_.reuse().Used(entry.pool.tenant, entry.reuse);
  table_.placement().RecordDemand(entry.pool.tenant, entry.header.key);
  if (query.flops > 0)
    entry.reuse.saves_a_byte = SavedFlopsPerByte(entry.header, query.flops);  // a recovered object has an estimate
  table_.lifetimes().Used(entry);
  table_.placement().Touch(entry);
}

}  // namespace ashlar::storage
