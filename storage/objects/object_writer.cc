// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/object_writer.h"

#include <utility>

namespace ashlar::storage {

ObjectWriter::Reserved ObjectWriter::Reserve(const TenantPool& pool, const ObjectHeader& plan, Nanos recompute,
                                             double flops, size_t level) {
  table_.ranks().Record(pool.tenant, plan.ns, plan.shard, level);
  Entry* const there = table_.index().keys().Find(pool.tenant, plan.key, plan.shard);
  // A copy that only a stalled disk has is replaced, unless an operator has pinned it.
  const bool stalled = there != nullptr && there->ready && !there->pinned && table_.levels().OnStalledDiskAlone(*there);
  if (there != nullptr && !stalled) {
    if (!there->ready) return {ReserveOutcome::kBeingPublished, {}};
    table_.placement().Touch(*there);
    there->doomed = false;
    return {ReserveOutcome::kAlreadyPresent, {}};
  }
  // A shard of a bundle that another rank has begun is never declined.
  const bool begun =
      !stalled && plan.shard.size > 1 && !table_.index().keys().Bundle(pool.tenant, plan.key, plan.shard.size).empty();
  if (!begun && !table_.costs()[pool.tenant].PaysToKeep(plan.bytes, recompute)) {
    table_.ghosts().Remember(pool.tenant, plan.key,
                             {.reason = MissReason::kDeclined,
                              .policy = PolicyKind::kBreakEven,
                              .bytes = plan.bytes,
                              .gone_at = clock_.Now(),
                              .space = Ghost::SpaceOf(plan.ns)});
    return {ReserveOutcome::kDeclined, {}};
  }
  if (stalled) table_.End(*there, MissReason::kTierError, PolicyKind::kNone, TierKind::kSsd);
  Entry& entry = table_.Add(pool, plan, flops);
  if (!table_.placement().Reserve(entry, level, plan.Extents())) {
    table_.index().Delete(entry.id);
    if (IsSpaceOnly(plan)) return {ReserveOutcome::kNoSpace, {}};
    table_.ghosts().Remember(pool.tenant, plan.key,
                             {.reason = MissReason::kBudgetRefused,
                              .bytes = plan.bytes,
                              .gone_at = clock_.Now(),
                              .space = Ghost::SpaceOf(plan.ns)});
    return {ReserveOutcome::kNoSpace, {}};
  }
  table_.index().keys().Insert(entry);
  return {ReserveOutcome::kGranted, ObjectReference(entry, level)};
}

void ObjectWriter::Publish(const ObjectReference& object, ObjectHeader header) {
  Entry& entry = object.entry();
  entry.header = std::move(header);
  table_.Appear(entry);
  table_.observer().Published(entry.pool.tenant, entry.header.kind, entry.header.bytes);
  table_.placement().Written(entry, object.level());
  if (entry.erased) table_.Erase(ObjectId{entry.id});
  table_.placement().scheduler().Pump();
}

}  // namespace ashlar::storage
