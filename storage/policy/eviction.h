// SPDX-License-Identifier: Apache-2.0
// Eviction policies: which copies are evicted when a tier needs space.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/outcome.h"
#include "storage/ids.h"
#include "storage/policy/promotion.h"
#include "storage/policy/reuse_models.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

using ObjectId = uint64_t;

// A pool of a tenant; its objects compete with each other.
struct TenantPool {
  TenantId tenant = 0;
  PoolKind kind = PoolKind::kPublic;
  auto operator<=>(const TenantPool&) const = default;
};

// A cached object as policies see it. Entry (objects/entry.h) is one.
struct RankedObject {
  ObjectId id = 0;
  TenantPool pool;
  Reuse reuse;  // its record of uses
};

// The position of a copy in its level's eviction order. It is part of the copy, so that touching an object needs no
// lookup: with a million objects, each lookup would cost two cache misses.
struct Rank {
  // Set by the level.
  RankedObject* object = nullptr;  // the object of this copy
  uint32_t extents = 0;
  bool idle = false;                 // may be evicted
  bool dirty = false;                // its eviction would lose an object that admission has not declined to write
  TierKind lower = TierKind::kNone;  // nearest lower tier that has the object; set by EvictionPolicy::SetLower

  // Set by the policy.
  Rank* order = nullptr;  // null: not tracked
  Rank* older = nullptr;
  Rank* younger = nullptr;
  uint64_t used = 0;  // last use, in uses; compares copies of different pools
  uint64_t at = 0;    // last use, in requests of its tenant

  bool tracked() const { return order != nullptr; }
};

enum class EvictionMode : uint8_t { kPrice, kLru };

// Ranks the copies in one tier; the level decides how many are evicted. A copy is tracked while it is complete, in use
// or not, and its Rank must not move meanwhile.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual PolicyKind kind() const = 0;
  virtual void Track(const TenantPool& pool, Rank& copy) = 0;
  // The object was looked up, or its last reference was released.
  virtual void Touch(Rank& copy) = 0;
  virtual void Erase(Rank& copy) = 0;
  // A lower tier has the object, or (kNone) none has it any more. The copy may be tracked or not.
  virtual void SetLower(Rank& copy, TierKind lower) { copy.lower = lower; }

  struct Allowance {
    TenantPool pool;
    uint64_t extents = 0;  // most extents that this pool may lose
  };
  // kEvict: dirty copies come last, unless there are many before the first clean one. kInspect: all in order of rank,
  // and as many as there are.
  enum class Purpose : uint8_t { kEvict, kInspect };
  // Returns the pools' idle copies to evict first, in order: just enough for `extents`, or none if all of them are not
  // enough. They stay tracked until Erase.
  virtual std::vector<RankedObject*> Victims(std::span<const Allowance> pools, uint64_t extents,
                                             Purpose purpose = Purpose::kEvict) = 0;
  // Returns whether a new object is worth more than each of `than`. The default is false.
  virtual bool IsDearer(const RankedObject& /*coming*/, std::span<RankedObject* const> /*than*/) const { return false; }

 protected:
  // Collects the victims of one search, offered in the order of rank.
  class Search {
   public:
    Search(std::span<const Allowance> pools, uint64_t extents, Purpose purpose);

    bool ended() const { return found_ >= extents_; }
    // Returns false if the copy is larger than what its pool may still lose: a pool keeps its copies of highest rank.
    bool Offer(const Rank& copy, size_t pool);
    std::vector<RankedObject*> Take();

   private:
    bool Add(const Rank& copy, size_t pool);
    void AddDirty();  // adds the skipped copies that are needed, and skips none afterwards

    const uint64_t extents_;
    const Purpose purpose_;
    bool skips_dirty_;
    std::vector<uint64_t> allowed_;  // indexed by pool
    std::vector<std::pair<const Rank*, size_t>> dirty_;
    std::vector<RankedObject*> victims_;
    uint64_t found_ = 0;
  };
};

// Evicts the least recently used copy of all pools. Every call is O(1), Victims amortised per returned or skipped copy:
// a copy found in use moves to the recent end, where its release would put it anyway.
class LruPolicy final : public EvictionPolicy {
 public:
  PolicyKind kind() const override { return PolicyKind::kLru; }
  void Track(const TenantPool& pool, Rank& copy) override;
  void Touch(Rank& copy) override;
  void Erase(Rank& copy) override;
  std::vector<RankedObject*> Victims(std::span<const Allowance> pools, uint64_t extents, Purpose purpose) override;

 private:
  struct Cursor {
    Rank* order;
    Rank* next;
    size_t pool;
  };

  Rank& Order(const TenantPool& pool);
  void MoveToRecentEnd(Rank& copy);

  uint64_t uses_ = 0;
  // Rings with a sentinel: after it the oldest copy, before it the youngest.
  std::map<TenantPool, Rank> orders_;
};

// Evicts the cheapest copy. The price is the saved FLOPs per byte times the expected uses per request (reuse_models.h).
// If a lower tier has the object, its copy there is loaded instead of computing, so the saved FLOPs are at most those
// that the engine would compute during the load (PromotionCost::FlopsPerByte).
// Copies of one class with a worth within half an octave form a ring, ordered by last use. The oldest copy of a ring is
// taken as its cheapest, which is exact unless the likelihood of use rises with age. Track, Touch, Erase and SetLower
// are O(1), Victims is O(rings) per returned or skipped copy; a few dozen rings are not empty.
class PricePolicy final : public EvictionPolicy {
 public:
  PricePolicy(const ReuseModels& models, const PromotionCosts& costs) : models_(models), costs_(costs) {}

  PolicyKind kind() const override { return PolicyKind::kPrice; }
  void Track(const TenantPool& pool, Rank& copy) override;
  void Touch(Rank& copy) override;
  void Erase(Rank& copy) override;
  void SetLower(Rank& copy, TierKind lower) override;
  std::vector<RankedObject*> Victims(std::span<const Allowance> pools, uint64_t extents, Purpose purpose) override;
  bool IsDearer(const RankedObject& coming, std::span<RankedObject* const> than) const override;

 private:
  // FLOPs per byte. A declared worth is clamped to this range, which bounds the number of rings.
  static constexpr double kLeastWorth = 1.0 / 16, kMostWorth = 1 << 28;
  // SetLower searches at most this far for the copy's place in its new ring; otherwise it counts as used more recently.
  static constexpr int kMostSteps = 64;

  // Copies of one pool, class and worth.
  struct Ring {
    Rank place;  // sentinel: after it the oldest copy, before it the youngest
    ReuseModel::Class model;
    float worth = 0;
  };
  struct Shelf {
    absl::flat_hash_map<uint32_t, size_t> by_class;
    std::vector<std::unique_ptr<Ring>> rings;
  };
  struct Cursor {
    Ring* ring;
    Rank* next;
    size_t pool;
    double price;
  };

  Rank& RingOf(const TenantPool& pool, const Rank& copy);
  double WorthOf(const Rank& copy) const;
  double PriceOf(const RankedObject& object) const;
  void Append(Rank& copy, Rank& place);
  // Moves the cursor to the oldest evictable copy from before the call.
  void Advance(Cursor& cursor, TenantId tenant, uint64_t before);

  const ReuseModels& models_;
  const PromotionCosts& costs_;
  uint64_t uses_ = 0;
  std::map<TenantPool, Shelf> shelves_;
};

}  // namespace ashlar::storage
