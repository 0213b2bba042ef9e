// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/object_table.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

#include "proto/limits.h"
#include "storage/policy/compute_cost.h"

namespace ashlar::storage {
namespace {

float SavedAByte(const ObjectHeader& header, double flops) {
  const double saved = flops > 0 ? flops : EstimateSavedFlops(header);
  return static_cast<float>(saved / static_cast<double>(header.bytes));
}

// The reservation is for space alone, and never becomes an object (Cache::Reserve).
bool IsRoomAlone(const ObjectHeader& header) {
  return header.tokens == 0;
}

}  // namespace

ReuseKind ObjectTable::KindOf(const Entry& entry) {
  if (entry.pool.kind == PoolKind::kPrivate) return ReuseKind::kOwn;
  switch (entry.header.kind) {
    case ObjectKind::kSegment:
      return ReuseKind::kSegment;
    case ObjectKind::kPrefixBlock:
      return ReuseKind::kBlock;
    default:
      return ReuseKind::kCheckpoint;
  }
}

ObjectTable::Reference::Reference(Entry& entry, size_t level) : entry_(&entry), level_(static_cast<uint8_t>(level)) {
  ++entry.references;
  Placement& placement = entry.table->placement_;
  placement.copies().Apply(entry, level, CopyEvent::kAddUser);
  if (entry.copies[level].state.users() == 1) placement.Changed(entry);
}

ObjectTable::Reference::Reference(Reference&& other) noexcept
    : entry_(std::exchange(other.entry_, nullptr)), level_(other.level_) {}

ObjectTable::Reference& ObjectTable::Reference::operator=(Reference&& other) noexcept {
  std::swap(entry_, other.entry_);
  std::swap(level_, other.level_);
  return *this;
}

ObjectTable::Reference::~Reference() {
  if (entry_ == nullptr) return;
  entry_->table->placement_.copies().Apply(*entry_, level_, CopyEvent::kRemoveUser);
  const bool last = entry_->copies[level_].state.users() == 0;
  entry_->table->Unreference(*entry_, last);
}

ObjectTable::Reference ObjectTable::Reference::Share() const {
  if (entry_ == nullptr) return {};
  return Reference(*entry_, level_);
}

ObjectTable::ObjectTable(ObjectTableOptions options, const Tiers& tiers, Executor& copying, const Clock& clock,
                         Observer& observer)
    : clock_(clock),
      observer_(observer),
      tell_(std::move(options.residence)),
      admission_(options.admission, options.admission_keys),
      ghosts_(options.ghosts_per_tenant),
      lifetimes_(clock),
      levels_(tiers, options.eviction == EvictionMode::kPrice ? &reuse_ : nullptr, observer),
      placement_(levels_, copying, admission_, promotion_, clock, observer, index_, *this, options.copy_transitions),
      ranks_(levels_) {}

void ObjectTable::Lost(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) {
  EndBundle(entry, why, policy, tier);
}

ObjectTable::Result ObjectTable::Find(TenantId tenant, const Query& query, std::vector<Reference>* others,
                                      size_t level) {
  const Key& key = query.key;
  const TensorShard& shard = query.shard;
  Entry* entry = index_.keys().Find(tenant, key, shard);
  if (entry != nullptr && entry->ready && lifetimes_.IsExpired(*entry)) {
    EndBundle(*entry, MissReason::kExpired, PolicyKind::kTtl, levels_.Nearest(*entry));
    entry = nullptr;
  }
  const std::vector<Entry*> bundle =
      shard.size == 1 ? std::vector<Entry*>() : index_.keys().Bundle(tenant, key, shard.size);
  if (entry == nullptr && bundle.empty()) {
    if (query.unreachable) return {.reason = MissReason::kHolderUnreachable};
    const Ghost* ghost = ghosts_.Find(tenant, key);
    return {.reason = ghost == nullptr ? MissReason::kNeverSeen : ghost->reason};
  }
  const bool complete = shard.size == 1 || bundle.size() == shard.size;
  if (entry == nullptr || !entry->ready || !complete || !std::ranges::all_of(bundle, &Entry::ready)) {
    return {.reason = MissReason::kBeingPublished};
  }
  const bool given = level == kWhereItLies;
  if (given) level = levels_.WhereItLies(*entry);
  if (!given) ranks_.Record(tenant, query.ns, shard, level);
  // All are referenced before the first promotion may evict others.
  Result result{.tier = levels_.NearestTo(*entry, level), .object = Reference(*entry, level)};
  std::vector<Reference> rest;
  for (Entry* other : bundle) {
    if (other == entry) continue;
    const size_t its = given ? levels_.WhereItLies(*other) : ranks_.LevelOf(*other);
    rest.push_back(Reference(*other, its));
    result.tier = std::max(result.tier, levels_.NearestTo(*other, its));  // the bundle is there when its last shard is
  }
  const Nanos of_remote = std::max(query.recompute, query.remote_recompute);
  MissReason refused = placement_.Promote(*entry, level, {query.recompute, of_remote}, query.needed_at);
  // The first shard has decided whether the hit pays.
  for (size_t i = 0; i < rest.size() && refused == MissReason::kNone; ++i) {
    refused = placement_.Promote(*rest[i].entry_, rest[i].level(), {}, query.needed_at);
  }
  if (refused != MissReason::kNone) return {.reason = refused};
  Found(*entry, query);
  for (const Reference& other : rest) Found(*other.entry_, query);
  if (others != nullptr) std::ranges::move(rest, std::back_inserter(*others));
  placement_.scheduler().Pump();
  return result;
}

ObjectTable::Reference ObjectTable::Shard(const Reference& object, const TensorShard& shard) {
  if (object->gone != MissReason::kNone) return {};
  Entry* entry = index_.keys().Find(object->pool.tenant, object->header.key, shard);
  if (entry == nullptr || !entry->ready) return {};
  return Reference(*entry, ranks_.LevelOf(*entry));
}

ObjectTable::Result ObjectTable::ShardAt(const Reference& object, const TensorShard& shard, size_t level) {
  ranks_.Record(object->pool.tenant, object->header.ns, shard, level);
  if (object->gone != MissReason::kNone) return {.reason = object->gone};
  Entry* const entry = index_.keys().Find(object->pool.tenant, object->header.key, shard);
  if (entry == nullptr || !entry->ready) return {.reason = MissReason::kEvicted};
  Result result{.tier = levels_.NearestTo(*entry, level), .object = Reference(*entry, level)};
  if (result.object.copy().phase() != CopyPhase::kNone) return result;
  // The lookup's own reference keeps the copy at the level where the rank was expected.
  const MissReason refused = placement_.Promote(*entry, level, {}, clock_.Now());
  if (refused != MissReason::kNone) return {.reason = refused};
  placement_.scheduler().Pump();
  return result;
}

void ObjectTable::Found(Entry& entry, const Query& query) {
  if (++entry.uses == kTold) Resides(entry);
  entry.deferred = query.defer && defers() && entry.uses < kFoundTwice;
  reuse_.Used(entry.pool.tenant, entry.reuse);
  if (query.flops > 0)
    entry.reuse.saves_a_byte = SavedAByte(entry.header, query.flops);  // a recovered object has an estimate
  lifetimes_.Used(entry);
  placement_.Touch(entry);
}

void ObjectTable::Defer(TenantId tenant, const Key& key, const TensorShard& shard) {
  Entry* const entry = index_.keys().Find(tenant, key, shard);
  if (entry == nullptr || entry->ready || !defers()) return;
  const std::vector<Entry*> shards = index_.keys().All(tenant, key);
  entry->deferred = std::ranges::all_of(shards, [&](const Entry* other) { return other == entry || other->deferred; });
}

ObjectTable::Room ObjectTable::Reserve(const TenantPool& pool, const ObjectHeader& plan, Nanos recompute, double flops,
                                       size_t level) {
  ranks_.Record(pool.tenant, plan.ns, plan.shard, level);
  Entry* const there = index_.keys().Find(pool.tenant, plan.key, plan.shard);
  // A copy that only a stalled disk has is replaced, unless an operator has pinned it.
  const bool stalled = there != nullptr && there->ready && !there->pinned && levels_.OnStalledDiskAlone(*there);
  if (there != nullptr && !stalled) {
    if (!there->ready) return {ReserveOutcome::kBeingPublished, {}};
    placement_.Touch(*there);
    there->doomed = false;
    return {ReserveOutcome::kAlreadyPresent, {}};
  }
  // A shard of a bundle that another rank has begun is never declined.
  const bool begun =
      !stalled && plan.shard.size > 1 && !index_.keys().Bundle(pool.tenant, plan.key, plan.shard.size).empty();
  if (!begun && !promotion_[pool.tenant].PaysToKeep(plan.bytes, recompute)) {
    ghosts_.Remember(pool.tenant, plan.key,
                     {.reason = MissReason::kDeclined,
                      .policy = PolicyKind::kBreakEven,
                      .bytes = plan.bytes,
                      .gone_at = clock_.Now(),
                      .space = Ghost::SpaceOf(plan.ns)});
    return {ReserveOutcome::kDeclined, {}};
  }
  if (stalled) EndBundle(*there, MissReason::kTierError, PolicyKind::kNone, TierKind::kSsd);
  Entry& entry = Make(pool, plan, flops);
  if (!placement_.Reserve(entry, level, plan.Extents())) {
    index_.Delete(entry.id);
    if (IsRoomAlone(plan)) return {ReserveOutcome::kNoSpace, {}};
    ghosts_.Remember(pool.tenant, plan.key,
                     {.reason = MissReason::kBudgetRefused,
                      .bytes = plan.bytes,
                      .gone_at = clock_.Now(),
                      .space = Ghost::SpaceOf(plan.ns)});
    return {ReserveOutcome::kNoSpace, {}};
  }
  index_.keys().Insert(entry);
  return {ReserveOutcome::kGranted, Reference(entry, level)};
}

Entry& ObjectTable::Make(const TenantPool& pool, ObjectHeader header, double flops) {
  auto entry = std::make_unique<Entry>();
  entry->table = this;
  if (levels_.size() >= kUsualLevels) entry->copies.resize(levels_.size() + 1);
  entry->pool = pool;
  entry->header = std::move(header);
  entry->reuse.kind = KindOf(*entry);
  entry->reuse.saves_a_byte = SavedAByte(entry->header, flops);
  return index_.Add(std::move(entry));
}

void ObjectTable::Publish(const Reference& object, ObjectHeader header) {
  Entry& entry = *object.entry_;
  entry.header = std::move(header);
  Appear(entry);
  observer_.Published(entry.pool.tenant, entry.header.kind, entry.header.bytes);
  placement_.Written(entry, object.level());
  if (entry.erased) Erase(ObjectId{entry.id});
  placement_.scheduler().Pump();
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

void ObjectTable::Adopt(const TenantPool& pool, ObjectHeader header, Slot slot) {
  // The disk was opened late, and the object was published meanwhile.
  if (index_.keys().Find(pool.tenant, header.key, header.shard) != nullptr) {
    return levels_.ssd()->Erase(pool.tenant, header.key, std::move(slot));
  }
  Entry& entry = Make(pool, std::move(header), 0);
  index_.keys().Insert(entry);
  Appear(entry);
  placement_.copies().AdoptOnDisk(entry, std::move(slot));
}

void ObjectTable::WhenLoaded(const Reference& object, uint64_t bytes, std::function<void()> call) {
  const uint64_t extents = (bytes + limits::kExtentBytes - 1) / limits::kExtentBytes;
  placement_.WhenLoaded(*object.entry_, object.level(), extents, std::move(call));
}

void ObjectTable::Drop(const Reference& object, MissReason why, PolicyKind policy) {
  if (why == MissReason::kChecksumFailed) placement_.copies().Distrust(*object.entry_);
  if (object->gone == MissReason::kNone) EndBundle(*object.entry_, why, policy, levels_.Nearest(*object));
}

bool ObjectTable::AdoptRemote(const TenantPool& pool, ObjectHeader header, RemoteCopyId copy, Nanos cost) {
  if (index_.keys().Find(pool.tenant, header.key, header.shard) != nullptr) return false;
  Entry& entry = Make(pool, std::move(header), 0);
  index_.keys().Insert(entry);
  Appear(entry);
  placement_.copies().AdoptRemote(entry, copy, cost);
  return true;
}

void ObjectTable::SettleRemote(TenantId tenant, const Key& key, const TensorShard& shard) {
  if (Entry* entry = index_.keys().Find(tenant, key, shard)) placement_.Changed(*entry);
}

void ObjectTable::Resides(Entry& entry) {
  if (!tell_) return;
  entry.told = tell_(entry.pool, entry.header,
                     {.nearest = entry.resides,
                      .saved = entry.saved,
                      .uses = entry.uses,
                      .told = entry.told,
                      .was = std::exchange(entry.resided, entry.resides),
                      .level = entry.resides_at,
                      .was_level = std::exchange(entry.resided_at, entry.resides_at)});
}

bool ObjectTable::TellAll(Telling& telling, Slice& slice) {
  if (telling.last == 0) telling.last = index_.newest();  // later objects are reported as they are added
  return index_.Walk(telling.after, telling.last, slice, [&](Entry& entry) {
    if (entry.gone != MissReason::kNone || entry.resides == TierKind::kNone) return true;
    if (telling.lost) entry.told = TierKind::kNone;
    Resides(entry);
    return true;
  });
}

bool ObjectTable::Pin(TenantId tenant, const Key& key, Nanos until) {
  bool any = false;
  for (const ObjectId id : index_.IdsOf(tenant, key)) {
    Entry* const entry = index_.Live(id);
    if (entry == nullptr || !entry->ready) continue;
    any = true;
    Pin(*entry, until);
  }
  return any;
}

void ObjectTable::Pin(Entry& entry, Nanos until) {
  lifetimes_.Pin(entry, until);
  placement_.Changed(entry);
}

bool ObjectTable::Unpin(TenantId tenant, const Key& key) {
  bool any = false;
  for (const ObjectId id : index_.IdsOf(tenant, key)) {
    Entry* const entry = index_.Live(id);
    if (entry == nullptr) continue;
    any |= entry->pinned;
    Unpin(*entry);
  }
  return any;
}

void ObjectTable::Unpin(Entry& entry) {
  if (!entry.pinned) return;
  lifetimes_.Unpin(entry);
  placement_.Changed(entry);
}

bool ObjectTable::Evict(TenantId tenant, const Key& key) {
  std::vector<ObjectId> ids;
  for (const Entry* entry : index_.keys().All(tenant, key)) {
    if (entry->ready) ids.push_back(entry->id);
  }
  for (const ObjectId id : ids) {
    if (Entry* entry = index_.Live(id)) {
      EndBundle(*entry, MissReason::kEvicted, PolicyKind::kOperator, levels_.Nearest(*entry));
    }
  }
  return !ids.empty();
}

// The whole bundle ends, so none of its shards may be in use.
bool ObjectTable::MayEnd(const Entry& entry) const {
  const auto unused = [](const Entry* other) { return other->references == 0 && !other->pinned; };
  if (entry.header.shard.size == 1) return unused(&entry);
  return std::ranges::all_of(index_.keys().Bundle(entry.pool.tenant, entry.header.key, entry.header.shard.size),
                             unused);
}

void ObjectTable::GiveUp(TenantId tenant, const Key& key) {
  std::vector<ObjectId> ids;
  for (Entry* entry : index_.keys().All(tenant, key)) {
    if (!entry->ready) continue;
    entry->doomed = true;
    ids.push_back(entry->id);
  }
  for (const ObjectId id : ids) {
    Entry* const entry = index_.Live(id);
    if (entry == nullptr || !MayEnd(*entry)) continue;
    EndBundle(*entry, MissReason::kEvicted, PolicyKind::kPrice, levels_.Nearest(*entry));
  }
}

void ObjectTable::Erase(ObjectId id) {
  Entry* const found = index_.Live(id);
  if (found == nullptr) return;
  const TenantId tenant = found->pool.tenant;
  const Key key = found->header.key;
  for (Entry* shard : index_.keys().All(tenant, key)) shard->erased = true;
  if (found->ready) EndBundle(*found, MissReason::kEvicted, PolicyKind::kOperator, levels_.Nearest(*found));
  ghosts_.Erase(tenant, key);
}

bool ObjectTable::Shred(ObjectId id) {
  if (!OnDisk(id)) return false;
  index_.EntryOf(id)->erased = true;
  return true;
}

bool ObjectTable::OnDisk(ObjectId id) const {
  const Entry* const entry = index_.EntryOf(id);
  return entry != nullptr && entry->gone != MissReason::kNone && levels_.OnDisk(*entry);
}

void ObjectTable::SetTimeToLive(TenantId tenant, Nanos ttl) {
  std::vector<Entry*> live;
  index_.ForEach([&](Entry& entry) {
    if (entry.pool.tenant == tenant && entry.ready && entry.gone == MissReason::kNone) live.push_back(&entry);
  });
  lifetimes_.SetTimeToLive(tenant, ttl, std::move(live));
}

bool ObjectTable::Tick(Slice& slice) {
  while (const ObjectId ended = lifetimes_.EndedPin()) {
    if (!slice.Take()) return false;
    Unpin(*index_.EntryOf(ended));
  }
  if (expiring_.empty()) expiring_ = lifetimes_.Expired();
  for (; !expiring_.empty(); expiring_.pop_back()) {
    if (!slice.Take()) return false;
    Entry* const entry = index_.Live(expiring_.back());
    if (entry == nullptr || !lifetimes_.IsExpired(*entry)) continue;  // it was used since
    EndBundle(*entry, MissReason::kExpired, PolicyKind::kTtl, levels_.Nearest(*entry));
  }
  placement_.Tick();
  return true;
}

void ObjectTable::EndBundle(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) {
  // All shards are gone before a callback runs, which may end other entries.
  std::vector<ObjectId> bundle = {entry.id};
  if (entry.header.shard.size > 1 && entry.ready) {
    for (Entry* other : index_.keys().Bundle(entry.pool.tenant, entry.header.key, entry.header.shard.size)) {
      if (other == &entry || !other->ready) continue;
      bundle.push_back(other->id);
      End(*other, why, policy, tier);
    }
  }
  End(entry, why, policy, tier);
  for (const ObjectId id : bundle) {
    if (Entry* const gone = index_.EntryOf(id)) placement_.Discard(*gone);
  }
}

void ObjectTable::End(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) {
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
  // The object of another node was not used here. This node has lost nothing.
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
    const MissReason why = IsRoomAlone(entry.header) ? MissReason::kNeverSeen : MissReason::kAbandoned;
    return EndBundle(entry, why, PolicyKind::kNone, TierKind::kNone);
  }
  if (entry.doomed && entry.gone == MissReason::kNone && MayEnd(entry)) {
    return EndBundle(entry, MissReason::kEvicted, PolicyKind::kPrice, levels_.Nearest(entry));
  }
  if (entry.gone == MissReason::kNone) levels_.Touch(entry);
  placement_.Changed(entry);
}

}  // namespace ashlar::storage
