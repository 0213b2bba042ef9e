// SPDX-License-Identifier: Apache-2.0
// Transfers between nodes without a waiting engine: objects handed over in a drain, and objects taken from others.
#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>

#include "proto/limits.h"
#include "storage/objects/object_table.h"

namespace ashlar::storage {
namespace {

// Transfers of offered objects yield to those that engines wait for.
constexpr Nanos kOffersLetPass = 1'000'000'000;

}  // namespace

std::vector<Entry*> ObjectTable::Alone() const {
  std::vector<Entry*> alone;
  for (const auto& [id, entry] : entries_) {
    if (entry->unsaved) alone.push_back(entry.get());
  }
  const auto heat = [](const Entry* entry) {
    return std::tuple(entry->pinned, entry->uses, entry->last_used_at, entry->id);
  };
  std::ranges::sort(alone, std::ranges::greater(), heat);
  return alone;
}

void ObjectTable::Flush() {
  EndFlush();
  flushing_ = true;
  std::vector<ObjectId> order;
  for (const Entry* entry : Alone()) order.push_back(entry->id);
  placement_.Flush(order);
}

void ObjectTable::EndFlush() {
  placement_.EndFlush();
  to_hand_.clear();
  if (!std::exchange(flushing_, false)) return;
  for (const auto& [id, entry] : entries_) {
    if (std::exchange(entry->hand, Entry::Hand::kNone) != Entry::Hand::kNone) placement_.HandChanged(*entry);
  }
}

std::optional<Offering> ObjectTable::NextToHand() {
  if (!flushing_) return std::nullopt;
  if (to_hand_.empty()) {
    for (const Entry* entry : Alone()) {
      if (entry->hand == Entry::Hand::kNone) to_hand_.push_back(entry->id);
    }
    std::ranges::reverse(to_hand_);
  }
  for (; !to_hand_.empty(); to_hand_.pop_back()) {
    const Entry* const entry = Living(to_hand_.back());
    if (entry == nullptr || !entry->unsaved || entry->hand != Entry::Hand::kNone || placement_.Saving(*entry)) continue;
    const std::optional<Offering> offering = Describe(entry->pool.tenant, entry->header.key);
    if (!offering) continue;
    for (Entry* shard : segments_.All(entry->pool.tenant, entry->header.key)) shard->hand = Entry::Hand::kOffered;
    return offering;
  }
  return std::nullopt;
}

void ObjectTable::Handed(TenantId tenant, const Key& key, bool taken) {
  for (Entry* shard : segments_.All(tenant, key)) {
    if (shard->hand != Entry::Hand::kOffered) continue;
    shard->hand = taken ? Entry::Hand::kTaken : Entry::Hand::kDeclined;
    placement_.HandChanged(*shard);
  }
}

void ObjectTable::SetGroup(TenantId tenant, const Key& key, uint64_t group) {
  for (Entry* shard : segments_.All(tenant, key)) shard->group = group;
}

std::optional<Offering> ObjectTable::Describe(TenantId tenant, const Key& key) const {
  const std::vector<Entry*> shards = segments_.All(tenant, key);
  const bool here = std::ranges::all_of(
      shards, [](const Entry* entry) { return entry->ready && entry->resides != TierKind::kNone && !entry->doomed; });
  if (shards.empty() || !here || shards.size() != shards.front()->header.shard.size) return std::nullopt;
  const Entry& first = *shards.front();
  const uint64_t now = reuse_.now(tenant);
  Offering offering{.pool = first.pool,
                    .ns = first.header.ns,
                    .key = key,
                    .kind = first.header.kind,
                    .shards = first.header.shard.size,
                    .uses = first.uses,
                    .idle = now - std::min(now, first.reuse.used),
                    .saves_a_byte = first.reuse.saves_a_byte,
                    .group = first.group};
  for (const Entry* shard : shards) offering.bytes = std::max(offering.bytes, shard->header.bytes);
  return offering;
}

TakeOutcome ObjectTable::Judge(const Offering& offered, bool evicting) {
  if (flushing_) return TakeOutcome::kDraining;
  const std::vector<Entry*> known = segments_.All(offered.pool.tenant, offered.key);
  if (!std::ranges::all_of(known, &Entry::ready)) return TakeOutcome::kBeingPublished;
  const auto have = [](const Entry* entry) { return entry->resides != TierKind::kNone; };
  if (known.size() == offered.shards && std::ranges::all_of(known, have)) return TakeOutcome::kAlreadyPresent;
  const auto comes = [&](const Entry* entry) {
    return have(entry) || entry->copies[LevelOf(*entry)].state == Copy::State::kCopying;
  };
  if (known.size() == offered.shards && std::ranges::all_of(known, comes))
    return TakeOutcome::kAccepted;  // joins the transfer in flight
  Entry coming;
  coming.pool = offered.pool;
  coming.header.kind = offered.kind;
  coming.reuse = ReuseOf(coming, offered);
  const uint64_t extents = (offered.bytes + limits::kExtentBytes - 1) / limits::kExtentBytes;
  return placement_.HasRoomFor(coming, extents * offered.shards, evicting) ? TakeOutcome::kAccepted
                                                                           : TakeOutcome::kNoSpace;
}

Reuse ObjectTable::ReuseOf(const Entry& entry, const Offering& offered) const {
  const uint64_t now = reuse_.now(offered.pool.tenant);
  return {.kind = KindOf(entry),
          .uses = offered.uses,
          .used = now - std::min(now, offered.idle),
          .saves_a_byte = offered.saves_a_byte};
}

void ObjectTable::Promote(const Offering& offered, std::function<void(bool)> done) {
  Coming coming{.shards = {}, .done = std::move(done)};
  for (uint32_t rank = 0; rank < offered.shards; ++rank) {
    Entry* const entry = segments_.Find(offered.pool.tenant, offered.key, {.rank = rank, .size = offered.shards});
    if (entry == nullptr || !entry->ready) break;
    coming.shards.push_back(Reference(*entry, LevelOf(*entry)));
  }
  bool comes = coming.shards.size() == offered.shards;
  for (const Reference& shard : coming.shards) {
    Entry& entry = *shard.entry_;
    if (!comes || entry.gone != MissReason::kNone || entry.resides != TierKind::kNone) continue;
    if (entry.uses == 0) {
      // Its former holder may not have announced it. It counts as found twice, so that this node announces it.
      entry.uses = std::max(kTold, offered.uses);
      entry.taken = true;
      entry.reuse = ReuseOf(entry, offered);
    }
    comes = placement_.Promote(entry, shard.level(), {}, clock_.Now() + kOffersLetPass) == MissReason::kNone;
  }
  if (!comes) {
    const std::function<void(bool)> failed = std::move(coming.done);
    coming.shards.clear();
    return failed(false);
  }
  coming_.push_back(std::move(coming));
  placement_.Pump();
}

void ObjectTable::SettleTaken() {
  for (auto at = coming_.begin(); at != coming_.end();) {
    const auto gone = [](const Reference& shard) { return shard->gone != MissReason::kNone; };
    const auto whole = [](const Reference& shard) { return shard->resides != TierKind::kNone; };
    const bool lost = std::ranges::any_of(at->shards, gone);
    if (!lost && !std::ranges::all_of(at->shards, whole)) {
      ++at;
      continue;
    }
    const std::function<void(bool)> done = std::move(at->done);
    at = coming_.erase(at);  // ends its references
    done(!lost);
  }
}

}  // namespace ashlar::storage
