// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/object_table.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "storage/policy/compute_cost.h"

namespace ashlar::storage {
ObjectTable::ObjectTable(ObjectTableOptions options, const Tiers& tiers, Executor& copying, const Clock& clock,
                         Observer& observer)
    : clock_(clock),
      observer_(observer),
      admission_(options.admission, options.admission_keys),
      ghosts_(options.ghosts_per_tenant),
      residences_(std::move(options.residence), index_),
      lifetimes_(clock),
      levels_(tiers, options.eviction == EvictionMode::kPrice ? &reuse_ : nullptr, promotion_, observer),
      placement_(levels_, copying, admission_, promotion_, clock, observer, index_, *this, options.copy_transitions),
      ranks_(levels_) {}

Entry& ObjectTable::Add(const TenantPool& pool, ObjectHeader header, double flops) {
  auto entry = std::make_unique<Entry>();
  entry->table = this;
  if (levels_.size() >= kUsualLevels) entry->copies.resize(levels_.size() + 1);
  entry->pool = pool;
  entry->header = std::move(header);
  entry->reuse.kind = entry->KindOfReuse();
  entry->reuse.saves_a_byte = SavedFlopsPerByte(entry->header, flops);
  return index_.Add(std::move(entry));
}

void ObjectTable::Appear(Entry& entry) {
  entry.ready = true;
  entry.published_at = clock_.Now();
  const Ghost* const ghost = ghosts_.Find(entry.pool.tenant, entry.header.key);
  const bool evicted = ghost != nullptr && ghost->reason == MissReason::kEvicted;
  reuse_.Came(entry.pool.tenant, entry.reuse, evicted ? &ghost->reuse : nullptr);
  ghosts_.Erase(entry.pool.tenant, entry.header.key);
  lifetimes_.Used(entry);
  // The end of a shard ends its bundle, so a pin of one shard also pins shards that are published later.
  if (entry.header.shard.size > 1) {
    for (const Entry* other : index_.keys().Bundle(entry.pool.tenant, entry.header.key, entry.header.shard.size)) {
      if (other->pinned) Pin(entry, other->pinned_until);
    }
  }
  ++objects_;
  object_bytes_ += entry.header.bytes;
}

void ObjectTable::Drop(const ObjectReference& object, MissReason why, PolicyKind policy) {
  if (why == MissReason::kChecksumFailed) placement_.copies().Distrust(object.entry());
  if (object->gone == MissReason::kNone) End(object.entry(), why, policy, levels_.Nearest(*object));
}

void ObjectTable::Pin(Entry& entry, Nanos until) {
  lifetimes_.Pin(entry, until);
  placement_.Changed(entry);
}

// The whole bundle ends, so none of its shards may be in use.
bool ObjectTable::MayEnd(const Entry& entry) const {
  const auto unused = [](const Entry* other) { return other->references == 0 && !other->pinned; };
  if (entry.header.shard.size == 1) return unused(&entry);
  return std::ranges::all_of(index_.keys().Bundle(entry.pool.tenant, entry.header.key, entry.header.shard.size),
                             unused);
}

void ObjectTable::EvictKey(TenantId tenant, const Key& key) {
  std::vector<ObjectId> ids;
  for (Entry* entry : index_.keys().All(tenant, key)) {
    if (!entry->ready) continue;
    entry->doomed = true;
    ids.push_back(entry->id);
  }
  for (const ObjectId id : ids) {
    Entry* const entry = index_.Live(id);
    if (entry == nullptr || !MayEnd(*entry)) continue;
    End(*entry, MissReason::kEvicted, PolicyKind::kPrice, levels_.Nearest(*entry));
  }
}

void ObjectTable::Erase(ObjectId id) {
  Entry* const found = index_.Live(id);
  if (found == nullptr) return;
  const TenantId tenant = found->pool.tenant;
  const Key key = found->header.key;
  for (Entry* shard : index_.keys().All(tenant, key)) shard->erased = true;
  if (found->ready) End(*found, MissReason::kEvicted, PolicyKind::kOperator, levels_.Nearest(*found));
  ghosts_.Erase(tenant, key);
}

void ObjectTable::End(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) {
  // All shards are gone before a callback runs, which may end other entries.
  std::vector<ObjectId> bundle = {entry.id};
  if (entry.header.shard.size > 1 && entry.ready) {
    for (Entry* other : index_.keys().Bundle(entry.pool.tenant, entry.header.key, entry.header.shard.size)) {
      if (other == &entry || !other->ready) continue;
      bundle.push_back(other->id);
      EndOne(*other, why, policy, tier);
    }
  }
  EndOne(entry, why, policy, tier);
  for (const ObjectId id : bundle) {
    if (Entry* const gone = index_.EntryOf(id)) placement_.Discard(*gone);
  }
}

void ObjectTable::EndOne(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) {
  index_.keys().Remove(entry);
  entry.gone = why;
  lifetimes_.End(entry);
  Ghost ghost{.reason = why,
              .policy = policy,
              .uses = entry.uses,
              .bytes = entry.header.bytes,
              .gone_at = clock_.Now(),
              .space = Ghost::SpaceOf(entry.header.ns)};
  if (entry.ready) {
    --objects_;
    object_bytes_ -= entry.header.bytes;
    ghost.tier = tier;
    ghost.lived = ghost.gone_at - entry.published_at;
    ghost.idle = ghost.gone_at - entry.last_used_at;
    ghost.reuse = entry.reuse;
    if (why == MissReason::kEvicted) reuse_.GivenUp(entry.pool.tenant, entry.reuse);
  }
  // This node never used the other node's object, so it has lost nothing.
  if (why == MissReason::kNeverSeen) return;
  if (!entry.erased) ghosts_.Remember(entry.pool.tenant, entry.header.key, ghost);
  observer_.Evicted(entry.pool.tenant, entry.header.kind, ghost);
}

// `last`: it was the last reference to its copy.
void ObjectTable::Unreference(Entry& entry, bool last) {
  if (--entry.references > 0 || closed_) {
    if (last && !closed_) placement_.Changed(entry);
    return;
  }
  if (!entry.ready && entry.gone == MissReason::kNone) {
    const MissReason why = IsSpaceOnly(entry.header) ? MissReason::kNeverSeen : MissReason::kAbandoned;
    return End(entry, why, PolicyKind::kNone, TierKind::kNone);
  }
  if (entry.doomed && entry.gone == MissReason::kNone && MayEnd(entry)) {
    return End(entry, MissReason::kEvicted, PolicyKind::kPrice, levels_.Nearest(entry));
  }
  if (entry.gone == MissReason::kNone) levels_.Touch(entry);
  placement_.Changed(entry);
}

}  // namespace ashlar::storage
