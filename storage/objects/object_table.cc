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

// Returns whether the entry only reserved room (Cache::Reserve).
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
  if (++entry.copies[level].users == 1) entry.table->placement_.Changed(entry);
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
  const bool last = --entry_->copies[level_].users == 0;
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
      placement_(tiers, copying, admission_, promotion_, options.eviction == EvictionMode::kPrice ? &reuse_ : nullptr,
                 clock, observer,
                 {.find =
                      [this](ObjectId id) {
                        const auto found = entries_.find(id);
                        return found == entries_.end() ? nullptr : found->second.get();
                      },
                  .lost = [this](Entry& entry, MissReason why, PolicyKind policy,
                                 TierKind tier) { Unlink(entry, why, policy, tier); },
                  .vacated = [this](Entry& entry) { entries_.erase(ObjectId{entry.id}); },
                  .resides = [this](Entry& entry) { Reside(entry); }}) {}

ObjectTable::~ObjectTable() {
  coming_.clear();  // cleared first, while its objects exist
}

ObjectTable::Result ObjectTable::Find(TenantId tenant, const Query& query, std::vector<Reference>* others,
                                      size_t level) {
  const Key& key = query.key;
  const TensorShard& shard = query.shard;
  Entry* entry = segments_.Find(tenant, key, shard);
  if (entry != nullptr && entry->ready && Expired(*entry)) {
    Unlink(*entry, MissReason::kExpired, PolicyKind::kTtl, placement_.Nearest(*entry));
    entry = nullptr;
  }
  const std::vector<Entry*> bundle =
      shard.size == 1 ? std::vector<Entry*>() : segments_.Bundle(tenant, key, shard.size);
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
  if (given) level = placement_.WhereItLies(*entry);
  if (!given) Remember(tenant, query.ns, shard, level);
  // All shards are referenced before the first one makes room.
  Result result{.tier = placement_.NearestTo(*entry, level), .object = Reference(*entry, level)};
  std::vector<Reference> rest;
  for (Entry* other : bundle) {
    if (other == entry) continue;
    const size_t its = given ? placement_.WhereItLies(*other) : LevelOf(*other);
    rest.push_back(Reference(*other, its));
    result.tier = std::max(result.tier, placement_.NearestTo(*other, its));  // all are whole when the slowest one is
  }
  const Nanos of_remote = std::max(query.recompute, query.remote_recompute);
  MissReason refused = placement_.Promote(*entry, level, {query.recompute, of_remote}, query.needed_at);
  // The first shard has already decided whether the hit is worth it.
  for (size_t i = 0; i < rest.size() && refused == MissReason::kNone; ++i) {
    refused = placement_.Promote(*rest[i].entry_, rest[i].level(), {}, query.needed_at);
  }
  if (refused != MissReason::kNone) return {.reason = refused};
  Found(*entry, query);
  for (const Reference& other : rest) Found(*other.entry_, query);
  if (others != nullptr) std::ranges::move(rest, std::back_inserter(*others));
  placement_.Pump();
  return result;
}

void ObjectTable::Found(Entry& entry, const Query& query) {
  if (++entry.uses == kTold) Reside(entry);
  entry.deferred = query.defer && defers() && entry.uses < kFoundTwice;
  reuse_.Used(entry.pool.tenant, entry.reuse);
  if (query.flops > 0)
    entry.reuse.saves_a_byte = SavedAByte(entry.header, query.flops);  // a recovered object has only an estimate
  Use(entry);
  placement_.Touch(entry);
}

void ObjectTable::Defer(TenantId tenant, const Key& key, const TensorShard& shard) {
  Entry* const entry = segments_.Find(tenant, key, shard);
  if (entry == nullptr || entry->ready || !defers()) return;
  const std::vector<Entry*> shards = segments_.All(tenant, key);
  entry->deferred = std::ranges::all_of(shards, [&](const Entry* other) { return other == entry || other->deferred; });
}

ObjectTable::Room ObjectTable::Reserve(const TenantPool& pool, const ObjectHeader& plan, Nanos recompute, double flops,
                                       size_t level) {
  Remember(pool.tenant, plan.ns, plan.shard, level);
  Entry* const there = segments_.Find(pool.tenant, plan.key, plan.shard);
  // Replaces a copy that only a stalled disk has, unless it is pinned.
  const bool stalled = there != nullptr && there->ready && !there->pinned && placement_.OnStalledDisk(*there);
  if (there != nullptr && !stalled) {
    if (!there->ready) return {ReserveOutcome::kBeingPublished, {}};
    placement_.Touch(*there);
    there->doomed = false;
    return {ReserveOutcome::kAlreadyPresent, {}};
  }
  // The shard is wanted if another shard of its bundle exists.
  const bool begun =
      !stalled && plan.shard.size > 1 && !segments_.Bundle(pool.tenant, plan.key, plan.shard.size).empty();
  if (!begun && !promotion_[pool.tenant].PaysToKeep(plan.bytes, recompute)) {
    ghosts_.Remember(pool.tenant, plan.key,
                     {.reason = MissReason::kDeclined,
                      .policy = PolicyKind::kBreakEven,
                      .bytes = plan.bytes,
                      .gone_at = clock_.Now(),
                      .space = Ghost::SpaceOf(plan.ns)});
    return {ReserveOutcome::kDeclined, {}};
  }
  if (stalled) Unlink(*there, MissReason::kTierError, PolicyKind::kNone, TierKind::kSsd);
  Entry& entry = Make(pool, plan, flops);
  if (!placement_.Reserve(entry, level, plan.Extents())) {
    entries_.erase(ObjectId{entry.id});
    if (IsRoomAlone(plan)) return {ReserveOutcome::kNoSpace, {}};
    ghosts_.Remember(pool.tenant, plan.key,
                     {.reason = MissReason::kBudgetRefused,
                      .bytes = plan.bytes,
                      .gone_at = clock_.Now(),
                      .space = Ghost::SpaceOf(plan.ns)});
    return {ReserveOutcome::kNoSpace, {}};
  }
  segments_.Insert(entry);
  return {ReserveOutcome::kGranted, Reference(entry, level)};
}

Entry& ObjectTable::Make(const TenantPool& pool, ObjectHeader header, double flops) {
  const ObjectId id = next_id_++;
  auto entry = std::make_unique<Entry>();
  entry->id = id;
  entry->table = this;
  if (placement_.levels() >= kUsualLevels) entry->copies.resize(placement_.levels() + 1);
  entry->pool = pool;
  entry->header = std::move(header);
  entry->reuse.kind = KindOf(*entry);
  entry->reuse.saves_a_byte = SavedAByte(entry->header, flops);
  return *entries_.emplace(id, std::move(entry)).first->second;
}

void ObjectTable::Publish(const Reference& object, ObjectHeader header) {
  Entry& entry = *object.entry_;
  entry.header = std::move(header);
  Appear(entry);
  observer_.Published(entry.pool.tenant, entry.header.kind, entry.header.bytes);
  placement_.Written(entry, object.level());
  if (entry.erased) Erase(ObjectId{entry.id});
  placement_.Pump();
}

void ObjectTable::Appear(Entry& entry) {
  entry.ready = true;
  entry.published_at = clock_.Now();
  const Ghost* const ghost = ghosts_.Find(entry.pool.tenant, entry.header.key);
  const bool evicted = ghost != nullptr && ghost->reason == MissReason::kEvicted;
  reuse_.Came(entry.pool.tenant, entry.reuse, evicted ? &ghost->reuse : nullptr);
  ghosts_.Erase(entry.pool.tenant, entry.header.key);
  Use(entry);
  // A shard that ends also ends its bundle, so a pin of one shard also holds for later shards.
  if (entry.header.shard.size > 1) {
    for (const Entry* other : segments_.Bundle(entry.pool.tenant, entry.header.key, entry.header.shard.size)) {
      if (other->pinned) Pin(entry, other->pinned_until);
    }
  }
  ++objects_;
  object_bytes_ += entry.header.bytes;
}

void ObjectTable::Adopt(const TenantPool& pool, ObjectHeader header, Slot slot) {
  // The disk was opened late, and an equal object was published meanwhile.
  if (segments_.Find(pool.tenant, header.key, header.shard) != nullptr) {
    return placement_.Forgo(pool, header.key, std::move(slot));
  }
  Entry& entry = Make(pool, std::move(header), 0);
  segments_.Insert(entry);
  Appear(entry);
  placement_.Adopt(entry, std::move(slot));
}

void ObjectTable::Use(Entry& entry) {
  entry.last_used_at = clock_.Now();
  if (!ttls_.contains(entry.pool.tenant)) return;
  std::list<ObjectId>& order = by_use_[entry.pool.tenant];
  if (entry.by_use) {
    order.splice(order.end(), order, *entry.by_use);
  } else {
    entry.by_use = order.insert(order.end(), entry.id);
  }
}

bool ObjectTable::Expired(const Entry& entry) const {
  const auto ttl = ttls_.find(entry.pool.tenant);
  return ttl != ttls_.end() && ttl->second > 0 && entry.references == 0 && !entry.pinned &&
         clock_.Now() - entry.last_used_at >= ttl->second;
}

void ObjectTable::WhenLoaded(const Reference& object, uint64_t bytes, std::function<void()> call) {
  const uint64_t extents = (bytes + limits::kExtentBytes - 1) / limits::kExtentBytes;
  placement_.WhenLoaded(*object.entry_, object.level(), extents, std::move(call));
}

void ObjectTable::Drop(const Reference& object, MissReason why, PolicyKind policy) {
  if (why == MissReason::kChecksumFailed) placement_.Distrust(*object.entry_);
  if (object->gone == MissReason::kNone) Unlink(*object.entry_, why, policy, placement_.Nearest(*object));
}

std::vector<TierKind> ObjectTable::Where(const Entry* entry) const {
  std::vector<TierKind> tiers;
  for (size_t i = 0; entry != nullptr && entry->ready && i < placement_.levels(); ++i) {
    if (entry->copies[i].whole()) tiers.push_back(placement_.kind(i));
  }
  return tiers;
}

// IDs, because changing one object may end another.
std::vector<ObjectId> ObjectTable::IdsOf(TenantId tenant, const Key& key) const {
  std::vector<ObjectId> ids;
  for (const Entry* entry : segments_.All(tenant, key)) ids.push_back(entry->id);
  return ids;
}

bool ObjectTable::Pin(TenantId tenant, const Key& key, Nanos until) {
  bool any = false;
  for (const ObjectId id : IdsOf(tenant, key)) {
    Entry* const entry = Living(id);
    if (entry == nullptr || !entry->ready) continue;
    any = true;
    Pin(*entry, until);
  }
  return any;
}

void ObjectTable::Pin(Entry& entry, Nanos until) {
  Unpin(entry);
  entry.pinned = true;
  entry.pinned_until = until;
  if (until > 0) pins_.emplace(until, entry.id);
  placement_.Changed(entry);
}

bool ObjectTable::Unpin(TenantId tenant, const Key& key) {
  bool any = false;
  for (const ObjectId id : IdsOf(tenant, key)) {
    Entry* const entry = Living(id);
    if (entry == nullptr) continue;
    any |= entry->pinned;
    Unpin(*entry);
  }
  return any;
}

void ObjectTable::Unpin(Entry& entry) {
  if (!entry.pinned) return;
  entry.pinned = false;
  pins_.erase({entry.pinned_until, entry.id});
  placement_.Changed(entry);
}

bool ObjectTable::Evict(TenantId tenant, const Key& key) {
  std::vector<ObjectId> ids;
  for (const Entry* entry : segments_.All(tenant, key)) {
    if (entry->ready) ids.push_back(entry->id);
  }
  for (const ObjectId id : ids) {
    if (Entry* entry = Living(id)) {
      Unlink(*entry, MissReason::kEvicted, PolicyKind::kOperator, placement_.Nearest(*entry));
    }
  }
  return !ids.empty();
}

// Its bundle ends too, so no shard of it may be in use.
bool ObjectTable::GoesNow(const Entry& entry) const {
  const auto unused = [](const Entry* other) { return other->references == 0 && !other->pinned; };
  if (entry.header.shard.size == 1) return unused(&entry);
  return std::ranges::all_of(segments_.Bundle(entry.pool.tenant, entry.header.key, entry.header.shard.size), unused);
}

void ObjectTable::GiveUp(TenantId tenant, const Key& key) {
  std::vector<ObjectId> ids;
  for (Entry* entry : segments_.All(tenant, key)) {
    if (!entry->ready) continue;
    entry->doomed = true;
    ids.push_back(entry->id);
  }
  for (const ObjectId id : ids) {
    Entry* const entry = Living(id);
    if (entry == nullptr || !GoesNow(*entry)) continue;
    Unlink(*entry, MissReason::kEvicted, PolicyKind::kPrice, placement_.Nearest(*entry));
  }
}

bool ObjectTable::Tick(Slice& slice) {
  const Nanos now = clock_.Now();
  while (!pins_.empty() && pins_.begin()->first <= now) {
    if (!slice.Take()) return false;
    Unpin(*entries_.at(pins_.begin()->second));
  }
  if (expiring_.empty()) FindExpired(now);
  for (; !expiring_.empty(); expiring_.pop_back()) {
    if (!slice.Take()) return false;
    Entry* const entry = Living(expiring_.back());
    if (entry == nullptr || !Expired(*entry)) continue;  // used again meanwhile
    Unlink(*entry, MissReason::kExpired, PolicyKind::kTtl, placement_.Nearest(*entry));
  }
  placement_.Tick();
  return true;
}

// expiring_ is popped from its back, so the first to expire is last. A call finds at most kMostAtOnce objects per
// tenant; the next call finds the others.
void ObjectTable::FindExpired(Nanos now) {
  constexpr size_t kMostAtOnce = 4096;
  for (const auto& [tenant, order] : by_use_) {
    const Nanos ttl = ttls_.at(tenant);
    size_t found = 0;
    for (const ObjectId id : order) {
      const Entry& entry = *entries_.at(id);
      if (ttl == 0 || now - entry.last_used_at < ttl || found == kMostAtOnce) break;
      if (!Expired(entry)) continue;
      expiring_.push_back(id);
      ++found;
    }
  }
  std::ranges::reverse(expiring_);
}

Entry* ObjectTable::Living(ObjectId id) {
  const auto found = entries_.find(id);
  return found == entries_.end() || found->second->gone != MissReason::kNone ? nullptr : found->second.get();
}

void ObjectTable::Unlink(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) {
  // All shards are unlinked before any is reported, because a report may end others.
  std::vector<ObjectId> bundle = {entry.id};
  if (entry.header.shard.size > 1 && entry.ready) {
    for (Entry* other : segments_.Bundle(entry.pool.tenant, entry.header.key, entry.header.shard.size)) {
      if (other == &entry || !other->ready) continue;
      bundle.push_back(other->id);
      Erase(*other, why, policy, tier);
    }
  }
  Erase(entry, why, policy, tier);
  for (const ObjectId id : bundle) {
    if (const auto gone = entries_.find(id); gone != entries_.end()) placement_.Discard(*gone->second);
  }
}

void ObjectTable::Erase(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) {
  segments_.Remove(entry);
  entry.gone = why;
  if (entry.pinned) pins_.erase({entry.pinned_until, entry.id});
  if (entry.by_use) by_use_.at(entry.pool.tenant).erase(*std::exchange(entry.by_use, std::nullopt));
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
  // An unused object of another node: nothing of this node has ended.
  if (why == MissReason::kNeverSeen) return;
  if (!entry.erased) ghosts_.Remember(entry.pool.tenant, entry.header.key, ghost);
  observer_.Evicted(entry.pool.tenant, entry.header.kind, ghost);
}

// `last`: this was the last user of the copy.
void ObjectTable::Unreference(Entry& entry, bool last) {
  if (--entry.references > 0 || closed_) {
    if (last && !closed_) placement_.Changed(entry);
    return;
  }
  if (!entry.ready && entry.gone == MissReason::kNone) {
    const MissReason why = IsRoomAlone(entry.header) ? MissReason::kNeverSeen : MissReason::kAbandoned;
    return Unlink(entry, why, PolicyKind::kNone, TierKind::kNone);
  }
  if (entry.doomed && entry.gone == MissReason::kNone && GoesNow(entry)) {
    return Unlink(entry, MissReason::kEvicted, PolicyKind::kPrice, placement_.Nearest(entry));
  }
  if (entry.gone == MissReason::kNone) placement_.Touched(entry);
  placement_.Changed(entry);
}

}  // namespace ashlar::storage
