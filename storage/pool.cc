#include "storage/pool.h"

#include <utility>

#include "proto/limits.h"

namespace ashlar::storage {

Pool::Reference::Reference(Pool& pool, Entry& entry) : pool_(&pool), entry_(&entry) {
  ++entry.references;
}

Pool::Reference::Reference(Reference&& other) noexcept
    : pool_(other.pool_), entry_(std::exchange(other.entry_, nullptr)) {}

Pool::Reference& Pool::Reference::operator=(Reference&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(entry_, other.entry_);
  return *this;
}

Pool::Reference::~Reference() {
  if (entry_ != nullptr) pool_->Unreference(*entry_);
}

Pool::Reference Pool::Reference::Share() const {
  if (entry_ == nullptr) return {};
  return Reference(*pool_, *entry_);
}

Pool::Pool(Tier& tier, EvictionPolicy& policy, size_t ghosts_per_tenant, const Clock& clock, Observer& observer)
    : tier_(tier), policy_(policy), clock_(clock), observer_(observer), ghosts_(ghosts_per_tenant) {}

Pool::~Pool() {
  for (auto& [id, entry] : entries_) tier_.Free(std::move(entry->slot));
}

Pool::Result Pool::Find(TenantId tenant, const Key& key) {
  Entry* entry = table_.Find(tenant, key);
  if (entry == nullptr) {
    const Ghost* ghost = ghosts_.Find(tenant, key);
    return {ghost == nullptr ? MissReason::kNeverSeen : ghost->reason, {}};
  }
  if (!entry->ready) return {MissReason::kBeingPublished, {}};
  ++entry->uses;
  entry->last_used_at = clock_.Now();
  if (entry->references == 0) idle_extents_[tenant] -= entry->slot.Extents();
  policy_.Touch(entry->id);
  return {MissReason::kNone, Reference(*this, *entry)};
}

Pool::Room Pool::Reserve(TenantId tenant, const ObjectHeader& plan) {
  if (const Entry* entry = table_.Find(tenant, plan.key)) {
    if (!entry->ready) return {ReserveOutcome::kBeingPublished, {}};
    policy_.Touch(entry->id);
    return {ReserveOutcome::kAlreadyPresent, {}};
  }
  std::optional<Slot> slot = MakeRoom(tenant, plan.Extents());
  if (!slot) return {ReserveOutcome::kNoSpace, {}};
  const ObjectId id = next_id_++;
  auto entry = std::make_unique<Entry>(Entry{.id = id, .tenant = tenant, .header = plan, .slot = *std::move(slot)});
  Entry& object = *entries_.emplace(id, std::move(entry)).first->second;
  table_.Insert(object);
  return {ReserveOutcome::kGranted, Reference(*this, object)};
}

std::optional<Slot> Pool::MakeRoom(TenantId tenant, uint64_t extents) {
  const auto free_extents = [&] {
    const TierUsage usage = tier_.Usage(tenant);
    return (usage.capacity_bytes - usage.used_bytes) / limits::kExtentBytes;
  };
  // Nothing is given up in vain: either all of it will fit, or nobody goes.
  if (extents > free_extents() + idle_extents_[tenant]) return std::nullopt;
  while (true) {
    absl::StatusOr<Slot> slot = tier_.Allocate(tenant, extents);
    if (slot.ok()) return *std::move(slot);
    if (!absl::IsResourceExhausted(slot.status())) return std::nullopt;
    const uint64_t free = free_extents();
    // Within budget but refused: the machine has no memory for another arena, so what there is must be freed.
    if (extents <= free) observer_.NoMemory(tenant, slot.status().message());
    const uint64_t missing = extents > free ? extents - free : 1;
    const auto idle = [&](ObjectId id) { return entries_.at(id)->references == 0; };
    const std::vector<ObjectId> victims = policy_.Victims(tenant, missing, idle);
    if (victims.empty()) return std::nullopt;
    for (const ObjectId id : victims) {
      Entry& victim = *entries_.at(id);
      idle_extents_[tenant] -= victim.slot.Extents();
      Unlink(victim, MissReason::kEvicted, PolicyKind::kLru);
      Free(victim);
    }
  }
}

void Pool::Publish(const Reference& object, ObjectHeader header) {
  Entry& entry = *object.entry_;
  entry.header = std::move(header);
  if (Slot spare = entry.slot.CutBehind(entry.header.Extents()); !spare.runs.empty()) tier_.Free(std::move(spare));
  entry.ready = true;
  entry.published_at = entry.last_used_at = clock_.Now();
  ghosts_.Forget(entry.tenant, entry.header.key);
  policy_.Track(entry.tenant, entry.id, entry.slot.Extents());
  ++objects_;
  object_bytes_ += entry.header.bytes;
  observer_.Published(entry.tenant, entry.header.kind, entry.header.bytes);
}

void Pool::Drop(const Reference& object, MissReason why) {
  if (object->gone == MissReason::kNone) Unlink(*object.entry_, why);
}

void Pool::Unlink(Entry& entry, MissReason why, PolicyKind policy) {
  table_.Remove(entry);
  entry.gone = why;
  Ghost ghost{
      .reason = why, .policy = policy, .uses = entry.uses, .bytes = entry.header.bytes, .gone_at = clock_.Now()};
  if (entry.ready) {
    policy_.Forget(entry.id);
    --objects_;
    object_bytes_ -= entry.header.bytes;
    ghost.tier = tier_.kind();
    ghost.lived = ghost.gone_at - entry.published_at;
    ghost.idle = ghost.gone_at - entry.last_used_at;
  }
  ghosts_.Remember(entry.tenant, entry.header.key, ghost);
  observer_.Evicted(entry.tenant, entry.header.kind, ghost);
}

void Pool::Unreference(Entry& entry) {
  if (--entry.references > 0) return;
  if (!entry.ready && entry.gone == MissReason::kNone) Unlink(entry, MissReason::kAbandoned);
  if (entry.gone != MissReason::kNone) return Free(entry);
  policy_.Touch(entry.id);
  idle_extents_[entry.tenant] += entry.slot.Extents();
}

void Pool::Free(Entry& entry) {
  tier_.Free(std::move(entry.slot));
  entries_.erase(ObjectId{entry.id});
}

}  // namespace ashlar::storage
