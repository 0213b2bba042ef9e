// SPDX-License-Identifier: Apache-2.0
#include "storage/upkeep/erasure.h"

#include <utility>

namespace ashlar::storage {

Erasure::Erasure(ObjectTable& table, Prefixes& prefixes, Explainer& explainer, SsdTier* disk, TenantId tenant,
                 std::string name, std::optional<NamespaceId> ns)
    : table_(table),
      prefixes_(prefixes),
      explainer_(explainer),
      disk_(disk),
      name_(std::move(name)),
      selection_{.tenant = tenant, .ns = ns},
      last_(table.index().newest()),
      erased_(std::make_shared<std::optional<absl::Status>>()) {}

bool Erasure::IsLeavingDisk(ObjectId id) const {
  const Entry* const entry = table_.index().EntryOf(id);
  return entry != nullptr && entry->gone != MissReason::kNone && table_.levels().OnDisk(*entry);
}

void Erasure::Count(const Entry& entry) {
  if (!entry.ready) return;
  const uint64_t bytes = entry.header.bytes;
  Inventory::Tally& tally = progress_.erased;
  ++tally.objects;
  tally.bytes += bytes;
  tally.leased_objects += entry.references > 0 ? 1 : 0;
  tally.leased_bytes += entry.references > 0 ? bytes : 0;
  for (const TierKind tier : table_.levels().TiersOf(&entry)) {
    const auto place = static_cast<size_t>(tier);
    if (place < tally.tier_bytes.size()) tally.tier_bytes[place] += bytes;
  }
}

bool Erasure::EndObjects(Slice& slice) {
  return table_.index().Walk(after_, last_, slice, [this](Entry& entry) {
    if (entry.gone != MissReason::kNone) {
      // It ended before, while it was being written to the disk, so it may be found there for a moment.
      const bool meant =
          entry.pool.tenant == *selection_.tenant && (!selection_.ns || entry.header.ns == *selection_.ns);
      if (meant && IsLeavingDisk(entry.id)) {
        entry.erased = true;
        leaving_.push_back(entry.id);
      }
      return true;
    }
    if (!Inventory::Has(selection_, entry)) return true;
    std::vector<ObjectId> bundle;  // objects that end together
    for (const Entry* shard : table_.index().keys().All(entry.pool.tenant, entry.header.key)) {
      Count(*shard);
      bundle.push_back(shard->id);
    }
    for (const ObjectId id : bundle) table_.Erase(id);
    for (const ObjectId id : bundle) {
      if (IsLeavingDisk(id)) leaving_.push_back(id);
    }
    return true;
  });
}

bool Erasure::Run(Slice& slice) {
  if (progress_.done) return true;
  if (known_) {
    // Called before the objects are erased: without prefixes, no lookup ends the objects for another reason. Called
    // again afterwards, for lookups made meanwhile.
    prefixes_.Erase(*selection_.tenant, selection_.ns ? &*selection_.ns : nullptr);
    known_ = false;
    if (disk_ != nullptr) {
      const SsdTier::Erased unknown = disk_->EraseUnknown(name_, selection_.ns, *selection_.tenant);
      progress_.erased.objects += unknown.objects;
      progress_.erased.bytes += unknown.bytes;
      progress_.erased.tier_bytes[static_cast<size_t>(TierKind::kSsd)] += unknown.bytes;
    }
  }
  if (!progress_.found_gone) {
    if (!EndObjects(slice)) return false;
    const NamespaceId* const ns = selection_.ns ? &*selection_.ns : nullptr;
    prefixes_.Erase(*selection_.tenant, ns);
    table_.ghosts().EraseAll(*selection_.tenant, ns);
    table_.placement().EraseEvicted(*selection_.tenant);
    explainer_.Erase(*selection_.tenant, ns);
    progress_.found_gone = true;
  }
  // A read or write there may still be in flight for a moment.
  for (; looked_at_ < leaving_.size(); ++looked_at_) {
    if (!slice.Take()) return false;
    while (looked_at_ < leaving_.size() && !IsLeavingDisk(leaving_[looked_at_])) {
      leaving_[looked_at_] = leaving_.back();
      leaving_.pop_back();
    }
  }
  looked_at_ = 0;
  progress_.on_disk = leaving_.size();
  if (!leaving_.empty()) return false;
  progress_.done = disk_ == nullptr || Overwritten();
  return progress_.done;
}

bool Erasure::Overwritten() {
  if (!std::exchange(asked_, true)) {
    disk_->WhenErased(*selection_.tenant, [erased = erased_](const absl::Status& status) { *erased = status; });
  }
  if (!erased_->has_value()) return false;
  progress_.overwritten = *std::exchange(*erased_, std::nullopt);
  asked_ = progress_.overwritten.ok();  // on an error, asks the disk again after it has recovered
  return asked_;
}

}  // namespace ashlar::storage
