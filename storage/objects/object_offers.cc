// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/object_offers.h"

#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>

#include "proto/limits.h"

namespace ashlar::storage {
namespace {

// Time for which an offered object yields to objects that engines wait for.
constexpr Nanos kOffersYield = 1'000'000'000;

}  // namespace

std::vector<Entry*> ObjectOffers::MemoryOnly() const {
  std::vector<Entry*> memory_only;
  table_.index().ForEach([&](Entry& entry) {
    if (entry.memory_only) memory_only.push_back(&entry);
  });
  const auto heat = [](const Entry* entry) {
    return std::tuple(entry->pinned, entry->uses, entry->last_used_at, entry->id);
  };
  std::ranges::sort(memory_only, std::ranges::greater(), heat);
  return memory_only;
}

void ObjectOffers::StartDrain() {
  EndDrain();
  draining_ = true;
  std::vector<ObjectId> order;
  for (const Entry* entry : MemoryOnly()) order.push_back(entry->id);
  table_.placement().scheduler().Flush(order);
}

void ObjectOffers::EndDrain() {
  table_.placement().scheduler().EndFlush();
  to_transfer_.clear();
  if (!std::exchange(draining_, false)) return;
  std::vector<ObjectId> changed;  // by number, because a copy down may end other entries
  table_.index().ForEach([&](Entry& entry) {
    if (std::exchange(entry.transfer, Entry::Transfer::kNone) != Entry::Transfer::kNone) changed.push_back(entry.id);
  });
  for (const ObjectId id : changed) {
    if (Entry* const entry = table_.index().EntryOf(id)) table_.placement().TransferChanged(*entry);
  }
}

std::optional<Offering> ObjectOffers::NextForTransfer() {
  if (!draining_) return std::nullopt;
  if (to_transfer_.empty()) {
    for (const Entry* entry : MemoryOnly()) {
      if (entry->transfer == Entry::Transfer::kNone) to_transfer_.push_back(entry->id);
    }
    std::ranges::reverse(to_transfer_);
  }
  for (; !to_transfer_.empty(); to_transfer_.pop_back()) {
    const Entry* const entry = table_.index().Live(to_transfer_.back());
    if (entry == nullptr || !entry->memory_only || entry->transfer != Entry::Transfer::kNone ||
        table_.levels().OnDisk(*entry))
      continue;
    const std::optional<Offering> offering = Describe(entry->pool.tenant, entry->header.key);
    if (!offering) continue;
    for (Entry* shard : table_.index().keys().All(entry->pool.tenant, entry->header.key))
      shard->transfer = Entry::Transfer::kOffered;
    return offering;
  }
  return std::nullopt;
}

void ObjectOffers::TransferEnded(TenantId tenant, const Key& key, bool accepted) {
  for (Entry* shard : table_.index().keys().All(tenant, key)) {
    if (shard->transfer != Entry::Transfer::kOffered) continue;
    shard->transfer = accepted ? Entry::Transfer::kAccepted : Entry::Transfer::kDeclined;
    table_.placement().TransferChanged(*shard);
  }
}

void ObjectOffers::SetGroup(TenantId tenant, const Key& key, uint64_t group) {
  for (Entry* shard : table_.index().keys().All(tenant, key)) shard->group = group;
}

std::optional<Offering> ObjectOffers::Describe(TenantId tenant, const Key& key) const {
  const std::vector<Entry*> shards = table_.index().keys().All(tenant, key);
  const bool here = std::ranges::all_of(
      shards, [](const Entry* entry) { return entry->ready && entry->resides != TierKind::kNone && !entry->doomed; });
  if (shards.empty() || !here || shards.size() != shards.front()->header.shard.size) return std::nullopt;
  const Entry& first = *shards.front();
  const uint64_t now = table_.reuse().now(tenant);
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

TakeOutcome ObjectOffers::Judge(const Offering& offered, bool evicting) {
  if (draining_) return TakeOutcome::kDraining;
  const std::vector<Entry*> known = table_.index().keys().All(offered.pool.tenant, offered.key);
  if (!std::ranges::all_of(known, &Entry::ready)) return TakeOutcome::kBeingPublished;
  const auto have = [](const Entry* entry) { return entry->resides != TierKind::kNone; };
  if (known.size() == offered.shards && std::ranges::all_of(known, have)) return TakeOutcome::kAlreadyPresent;
  const auto comes = [&](const Entry* entry) {
    return have(entry) || entry->copies[table_.ranks().LevelOf(*entry)].phase() == CopyPhase::kCopying;
  };
  if (known.size() == offered.shards && std::ranges::all_of(known, comes))
    return TakeOutcome::kAccepted;  // the copy in progress also serves this offer
  Entry coming;
  coming.pool = offered.pool;
  coming.header.kind = offered.kind;
  coming.reuse = ReuseOf(coming, offered);
  const uint64_t extents = (offered.bytes + limits::kExtentBytes - 1) / limits::kExtentBytes;
  return table_.levels()[table_.levels().common()].HasSpaceFor(coming, extents * offered.shards, evicting)
             ? TakeOutcome::kAccepted
             : TakeOutcome::kNoSpace;
}

Reuse ObjectOffers::ReuseOf(const Entry& entry, const Offering& offered) const {
  const uint64_t now = table_.reuse().now(offered.pool.tenant);
  return {.kind = entry.KindOfReuse(),
          .uses = offered.uses,
          .used = now - std::min(now, offered.idle),
          .saves_a_byte = offered.saves_a_byte};
}

void ObjectOffers::Promote(const Offering& offered, std::function<void(bool)> done) {
  Coming coming{.shards = {}, .done = std::move(done)};
  for (uint32_t rank = 0; rank < offered.shards; ++rank) {
    Entry* const entry =
        table_.index().keys().Find(offered.pool.tenant, offered.key, {.rank = rank, .size = offered.shards});
    if (entry == nullptr || !entry->ready) break;
    coming.shards.push_back(ObjectReference(*entry, table_.ranks().LevelOf(*entry)));
  }
  bool comes = coming.shards.size() == offered.shards;
  for (const ObjectReference& shard : coming.shards) {
    Entry& entry = shard.entry();
    if (!comes || entry.gone != MissReason::kNone || entry.resides != TierKind::kNone) continue;
    if (entry.uses == 0) {
      // Its previous holder may not have announced it. It counts as found twice, so that other nodes find it here.
      entry.uses = std::max(Residences::kReportedUses, offered.uses);
      entry.adopted = true;
      entry.reuse = ReuseOf(entry, offered);
    }
    comes = table_.placement().Promote(entry, shard.level(), {}, clock_.Now() + kOffersYield) == MissReason::kNone;
  }
  if (!comes) {
    const std::function<void(bool)> failed = std::move(coming.done);
    coming.shards.clear();
    return failed(false);
  }
  coming_.push_back(std::move(coming));
  table_.placement().scheduler().Pump();
}

void ObjectOffers::ReportArrivals() {
  for (auto at = coming_.begin(); at != coming_.end();) {
    const auto gone = [](const ObjectReference& shard) { return shard->gone != MissReason::kNone; };
    const auto whole = [](const ObjectReference& shard) { return shard->resides != TierKind::kNone; };
    const bool lost = std::ranges::any_of(at->shards, gone);
    if (!lost && !std::ranges::all_of(at->shards, whole)) {
      ++at;
      continue;
    }
    const std::function<void(bool)> done = std::move(at->done);
    at = coming_.erase(at);  // its references end
    done(!lost);
  }
}

}  // namespace ashlar::storage
