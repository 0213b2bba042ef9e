// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/mirror.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kTables = 64;  // per namespace
constexpr size_t kMembers = size_t{1} << 16;
constexpr size_t kBytesOfADepth = 11, kBytesOfASpanEnd = 16;  // in B-trees that are about 3/4 full
// Five bits: a tier's number, or kFirstGpu plus a GPU's number. GPUs with higher numbers are not stored.
constexpr int kFirstGpu = 4, kPlaces = 32;
static_assert(static_cast<int>(TierKind::kSsd) < kFirstGpu);
static_assert(static_cast<int>(ObjectKind::kSegment) == 1 && static_cast<int>(ObjectKind::kSpan) == 4);

struct Slot {
  ShortDigest key{};
  // Except for `ordinal`, the rest is not part of the slot's identity.
  mutable uint32_t bytes_low = 0;
  mutable uint32_t depth = 0;
  mutable uint32_t span_begin = 0;
  mutable uint16_t member = 0;
  uint16_t ordinal = 0;  // among the holders of the key
  mutable uint8_t bytes_high = 0;
  mutable uint8_t kinds = 0;  // (object kind − 1) << 6 | place << 1 | round
  mutable uint8_t rank = 0;
  mutable uint8_t last_rank = 0;

  void CopyHolderFrom(const Slot& other) const {
    bytes_low = other.bytes_low;
    depth = other.depth;
    span_begin = other.span_begin;
    member = other.member;
    bytes_high = other.bytes_high;
    kinds = other.kinds;
    rank = other.rank;
    last_rank = other.last_rank;
  }
  ObjectKind kind() const { return static_cast<ObjectKind>((kinds >> 6) + 1); }
  int place() const { return kinds >> 1 & (kPlaces - 1); }
  TierKind tier() const { return place() < kFirstGpu ? static_cast<TierKind>(place()) : TierKind::kHbm; }
  std::optional<uint8_t> gpu() const {
    return place() < kFirstGpu ? std::nullopt : std::optional(static_cast<uint8_t>(place() - kFirstGpu));
  }
  bool round() const { return kinds & 1; }
  void SetRound(bool round) const { kinds = static_cast<uint8_t>((kinds & ~1) | (round ? 1 : 0)); }
};
static_assert(sizeof(Slot) == 36);

struct Hash {
  size_t operator()(const Slot& slot) const {
    uint64_t word;  // already uniform
    std::memcpy(&word, slot.key.data() + 8, sizeof word);
    return word + slot.ordinal * uint64_t{0x9e3779b97f4a7c15};
  }
};
struct Same {
  bool operator()(const Slot& a, const Slot& b) const { return a.ordinal == b.ordinal && a.key == b.key; }
};
using Slots = absl::flat_hash_set<Slot, Hash, Same>;

int PlaceOf(const Holding& holding) {
  const bool on_gpu = holding.tier == TierKind::kHbm && holding.gpu.has_value();
  return on_gpu && *holding.gpu < kPlaces - kFirstGpu ? kFirstGpu + *holding.gpu : static_cast<int>(holding.tier);
}

Slot MakeSlot(const EntryId& id, uint16_t member, const Holding& holding, bool round) {
  Slot slot;
  slot.key = id.key;
  slot.bytes_low = static_cast<uint32_t>(holding.bytes);
  slot.bytes_high = static_cast<uint8_t>(holding.bytes >> 32);
  slot.depth = holding.depth;
  slot.span_begin = holding.span_begin;
  slot.member = member;
  slot.kinds = static_cast<uint8_t>((static_cast<int>(holding.kind) - 1) << 6 | PlaceOf(holding) << 1 | round);
  slot.rank = id.rank;
  slot.last_rank = id.last_rank;
  return slot;
}

Holding HoldingOf(const Slot& slot) {
  return {.tier = slot.tier(),
          .kind = slot.kind(),
          .shard = {slot.rank, slot.last_rank + 1u},
          .bytes = uint64_t{slot.bytes_high} << 32 | slot.bytes_low,
          .depth = slot.depth,
          .span_begin = slot.span_begin,
          .gpu = slot.gpu()};
}

}  // namespace

std::optional<uint16_t> MemberNumbers::Intern(uint64_t incarnation) {
  if (const auto found = known_.find(incarnation); found != known_.end()) return found->second.number;
  if (known_.size() == kMembers) return std::nullopt;
  if (next_ < taken_.size()) {
    while (taken_[next_]) ++next_;  // there is a free one, possibly before it: 16 bits wrap
  }
  const uint16_t number = next_++;
  if (number == taken_.size()) {
    taken_.push_back(false);
    incarnations_.push_back(0);
  }
  taken_[number] = true;
  incarnations_[number] = incarnation;
  known_[incarnation].number = number;
  return number;
}

void MemberNumbers::DropIfUnused(uint64_t incarnation) {
  const auto found = known_.find(incarnation);
  if (found->second.present || found->second.entries > 0) return;
  taken_[found->second.number] = false;
  known_.erase(found);
}

void MemberNumbers::SetPresent(const std::vector<std::shared_ptr<const Member>>& members) {
  std::vector<uint64_t> before;
  for (auto& [incarnation, known] : known_) {
    if (std::exchange(known.present, false)) before.push_back(incarnation);
  }
  auto list = std::make_shared<List>();
  for (const auto& member : members) {
    const std::optional<uint16_t> number = Intern(member->incarnation);
    if (!number.has_value()) continue;
    known_[member->incarnation].present = true;
    if (list->size() <= *number) list->resize(*number + 1);
    (*list)[*number] = member;
  }
  for (const uint64_t incarnation : before) DropIfUnused(incarnation);
  MutexLock lock(mutex_);
  list_ = std::move(list);
}

void MemberNumbers::Count(uint16_t number, int64_t entries) {
  const uint64_t incarnation = incarnations_[number];
  known_[incarnation].entries += entries;
  DropIfUnused(incarnation);
}

std::shared_ptr<const MemberNumbers::List> MemberNumbers::Present() const {
  MutexLock lock(mutex_);
  return list_;
}

class Mirror::Namespace {
 public:
  bool round() const { return round_; }
  // Starts a round: entries that are not put in it are old. This includes entries of an earlier unfinished round.
  void BeginRound();

  // Adds a holder or updates its entry. `may_add`: there is space for one more. Returns whether it was added; sets
  // `refused` if there was no space.
  bool Put(const Slot& slot, bool may_add, bool* refused);
  // Removes the holder; returns whether it existed.
  bool Remove(const EntryId& id, uint16_t member);
  // Removes entries of another round, or all, and calls `removed` with the member of each.
  template <typename Removed>
  void RemoveOld(bool all, const Removed& removed);

  void Locate(const ShortDigest& key, size_t index, const MemberNumbers::List& members,
              std::vector<Located>* located) const;
  std::vector<uint64_t> Depths(uint64_t end, size_t most) const;
  std::vector<uint64_t> SpanEnds(uint64_t begin, uint64_t end, size_t most) const;
  uint64_t Bytes() const;

 private:
  struct Table {
    mutable Mutex mutex;
    Slots slots ABSL_GUARDED_BY(mutex);
  };
  using Iterator = Slots::iterator;
  Table& TableOf(const ShortDigest& key) { return tables_[key[0] % kTables]; }
  const Table& TableOf(const ShortDigest& key) const { return tables_[key[0] % kTables]; }
  // Finds the slot of a holder and the last slot of the key; end() if there is none. Requires the table's mutex.
  static std::pair<Iterator, Iterator> Chain(Slots& slots, const EntryId& id, uint16_t member);
  void RemoveSlot(Slots& slots, Iterator at, Iterator last);
  void CountDepth(const Slot& slot, int change);

  bool round_ = false, open_ = false;  // writing thread only
  std::array<Table, kTables> tables_;
  mutable Mutex mutex_;
  // Number of entries per depth.
  absl::btree_map<uint32_t, uint32_t> depths_ ABSL_GUARDED_BY(mutex_);  // depths of checkpoints
  absl::btree_map<std::pair<uint32_t, uint32_t>, uint32_t> span_ends_
      ABSL_GUARDED_BY(mutex_);  // by the starts of spans
};

std::pair<Mirror::Namespace::Iterator, Mirror::Namespace::Iterator> Mirror::Namespace::Chain(Slots& slots,
                                                                                             const EntryId& id,
                                                                                             uint16_t member) {
  Iterator found = slots.end(), last = slots.end();
  Slot probe;
  probe.key = id.key;
  for (;; ++probe.ordinal) {
    const Iterator at = slots.find(probe);
    if (at == slots.end()) return {found, last};
    last = at;
    if (at->member == member && at->rank == id.rank && at->last_rank == id.last_rank) found = at;
  }
}

void Mirror::Namespace::CountDepth(const Slot& slot, int change) {
  const auto count = [change](auto& counts, const auto& place) {
    const auto at = counts.try_emplace(place, 0).first;
    at->second += static_cast<uint32_t>(change);
    if (at->second == 0) counts.erase(at);
  };
  const bool span = slot.kind() == ObjectKind::kSpan;
  if (slot.depth == 0 || (!span && slot.kind() != ObjectKind::kCheckpoint)) return;
  MutexLock lock(mutex_);
  if (span) {
    count(span_ends_, std::pair(slot.span_begin, slot.depth));
  } else {
    count(depths_, slot.depth);
  }
}

bool Mirror::Namespace::Put(const Slot& slot, bool may_add, bool* refused) {
  Table& table = TableOf(slot.key);
  MutexLock lock(table.mutex);
  EntryId id;
  id.key = slot.key;
  id.rank = slot.rank;
  id.last_rank = slot.last_rank;
  const auto [found, last] = Chain(table.slots, id, slot.member);
  const bool add = found == table.slots.end();
  *refused = add && (!may_add || (last != table.slots.end() && last->ordinal == UINT16_MAX - 1));
  if (*refused) return false;
  CountDepth(slot, 1);
  if (add) {
    Slot added = slot;
    added.ordinal = last == table.slots.end() ? 0 : last->ordinal + 1;
    table.slots.insert(added);
    return true;
  }
  CountDepth(*found, -1);
  found->CopyHolderFrom(slot);
  return false;
}

void Mirror::Namespace::RemoveSlot(Slots& slots, Iterator at, Iterator last) {
  CountDepth(*at, -1);
  if (at != last) at->CopyHolderFrom(*last);
  slots.erase(last);
}

bool Mirror::Namespace::Remove(const EntryId& id, uint16_t member) {
  Table& table = TableOf(id.key);
  MutexLock lock(table.mutex);
  const auto [found, last] = Chain(table.slots, id, member);
  if (found == table.slots.end()) return false;
  RemoveSlot(table.slots, found, last);
  return true;
}

void Mirror::Namespace::BeginRound() {
  if (!std::exchange(open_, true)) {
    round_ = !round_;
    return;
  }
  for (Table& table : tables_) {
    MutexLock lock(table.mutex);
    for (const Slot& slot : table.slots) slot.SetRound(!round_);
  }
}

template <typename Removed>
void Mirror::Namespace::RemoveOld(bool all, const Removed& removed) {
  open_ = false;
  for (Table& table : tables_) {
    MutexLock lock(table.mutex);
    std::vector<Slot> old;
    for (const Slot& slot : table.slots) {
      if (all || slot.round() != round_) old.push_back(slot);
    }
    // Removed in an order other than the hash table's, so that chains stay intact.
    if (!all) std::ranges::sort(old, {}, [](const Slot& slot) { return std::pair(slot.key, slot.ordinal); });
    for (const Slot& slot : old) {
      EntryId id;
      id.key = slot.key;
      id.rank = slot.rank;
      id.last_rank = slot.last_rank;
      const auto [found, last] = Chain(table.slots, id, slot.member);
      RemoveSlot(table.slots, found, last);
      removed(slot.member);
    }
  }
}

void Mirror::Namespace::Locate(const ShortDigest& key, size_t index, const MemberNumbers::List& members,
                               std::vector<Located>* located) const {
  const Table& table = TableOf(key);
  MutexLock lock(table.mutex);
  size_t count = 0;
  Slot probe;
  probe.key = key;
  for (; count < Directory::kMaxLocated; ++probe.ordinal) {
    const auto at = table.slots.find(probe);
    if (at == table.slots.end()) return;
    if (at->member >= members.size() || members[at->member] == nullptr) continue;
    located->push_back({index, members[at->member], HoldingOf(*at)});
    ++count;
  }
}

std::vector<uint64_t> Mirror::Namespace::Depths(uint64_t end, size_t most) const {
  const auto last = static_cast<uint32_t>(std::min<uint64_t>(end, UINT32_MAX));
  std::vector<uint64_t> result;
  MutexLock lock(mutex_);
  for (auto at = depths_.upper_bound(last); at != depths_.begin() && result.size() < most;) {
    result.push_back((--at)->first);
  }
  return result;
}

std::vector<uint64_t> Mirror::Namespace::SpanEnds(uint64_t begin, uint64_t end, size_t most) const {
  std::vector<uint64_t> result;
  if (begin > UINT32_MAX) return result;
  const auto from = static_cast<uint32_t>(begin), last = static_cast<uint32_t>(std::min<uint64_t>(end, UINT32_MAX));
  MutexLock lock(mutex_);
  for (auto at = span_ends_.upper_bound({from, last}); at != span_ends_.begin() && result.size() < most;) {
    if ((--at)->first.first != from) break;
    result.push_back(at->first.second);
  }
  return result;
}

uint64_t Mirror::Namespace::Bytes() const {
  uint64_t bytes = sizeof *this;
  for (const Table& table : tables_) {
    MutexLock lock(table.mutex);
    bytes += table.slots.capacity() * (sizeof(Slot) + 1);
  }
  MutexLock lock(mutex_);
  return bytes + depths_.size() * kBytesOfADepth + span_ends_.size() * kBytesOfASpanEnd;
}

Mirror::Mirror(uint64_t most_entries) : most_entries_(most_entries) {}
Mirror::~Mirror() = default;

std::shared_ptr<Mirror::Namespace> Mirror::Find(const ShortDigest& ns) const {
  MutexLock lock(mutex_);
  const auto found = namespaces_.find(ns);
  return found == namespaces_.end() ? nullptr : found->second;
}

void Mirror::Open(const ShortDigest& ns) {
  auto fresh = std::make_shared<Namespace>();
  MutexLock lock(mutex_);
  namespaces_.try_emplace(ns, std::move(fresh));
}

void Mirror::Close(const ShortDigest& ns) {
  const std::shared_ptr<Namespace> space = Find(ns);
  if (space == nullptr) return;
  {
    MutexLock lock(mutex_);
    namespaces_.erase(ns);
  }
  space->RemoveOld(true, [&](uint16_t member) {
    members_.Count(member, -1);
    --entries_;
  });
}

void Mirror::Put(const EntryId& id, uint64_t incarnation, const Holding& holding) {
  const std::shared_ptr<Namespace> space = Find(id.ns);
  if (space == nullptr) return;
  const std::optional<uint16_t> member = members_.Intern(incarnation);
  bool refused = !member.has_value();
  if (!refused && space->Put(MakeSlot(id, *member, holding, space->round()), entries() < most_entries_, &refused)) {
    members_.Count(*member, 1);
    ++entries_;
  } else if (member.has_value()) {
    members_.Count(*member, 0);  // erases an unknown member
  }
  if (refused) ++refused_;
}

void Mirror::Remove(const EntryId& id, uint64_t incarnation) {
  const std::shared_ptr<Namespace> space = Find(id.ns);
  if (space == nullptr) return;
  const std::optional<uint16_t> member = members_.Intern(incarnation);
  if (!member.has_value()) return;
  const bool removed = space->Remove(id, *member);
  members_.Count(*member, removed ? -1 : 0);
  if (removed) --entries_;
}

void Mirror::BeginRound(const ShortDigest& ns) {
  if (const auto space = Find(ns)) space->BeginRound();
}

void Mirror::EndRound(const ShortDigest& ns) {
  const auto space = Find(ns);
  if (space == nullptr) return;
  space->RemoveOld(false, [&](uint16_t member) {
    members_.Count(member, -1);
    --entries_;
  });
}

std::vector<Located> Mirror::Locate(const NamespaceId& ns, std::span<const Key> keys) const {
  std::vector<Located> located;
  const std::shared_ptr<Namespace> space = Find(Shorten(ns));
  if (space == nullptr) return located;
  const std::shared_ptr<const MemberNumbers::List> members = members_.Present();
  for (size_t i = 0; i < keys.size(); ++i) space->Locate(Shorten(keys[i]), i, *members, &located);
  return located;
}

std::vector<uint64_t> Mirror::Depths(const NamespaceId& ns, uint64_t end, size_t most) const {
  const std::shared_ptr<Namespace> space = Find(Shorten(ns));
  return space == nullptr ? std::vector<uint64_t>() : space->Depths(end, most);
}

std::vector<uint64_t> Mirror::SpanEnds(const NamespaceId& ns, uint64_t begin, uint64_t end, size_t most) const {
  const std::shared_ptr<Namespace> space = Find(Shorten(ns));
  return space == nullptr ? std::vector<uint64_t>() : space->SpanEnds(begin, end, most);
}

uint64_t Mirror::Bytes() const {
  std::vector<std::shared_ptr<Namespace>> spaces;
  {
    MutexLock lock(mutex_);
    for (const auto& [ns, space] : namespaces_) spaces.push_back(space);
  }
  uint64_t bytes = 0;
  for (const auto& space : spaces) bytes += space->Bytes();
  return bytes;
}

}  // namespace ashlar::daemon
