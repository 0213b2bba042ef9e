// SPDX-License-Identifier: Apache-2.0
// Eviction policies: which copies leave when a tier needs space.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/outcome.h"
#include "storage/ids.h"
#include "storage/policy/reuse_models.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

using ObjectId = uint64_t;

// One pool of one tenant: its bytes compete with each other.
struct TenantPool {
  TenantId tenant = 0;
  PoolKind kind = PoolKind::kPublic;
  auto operator<=>(const TenantPool&) const = default;
};

// A cached object as policies know it. Entry (objects/entry.h) is one.
struct RankedObject {
  ObjectId id = 0;
  TenantPool pool;
  Reuse reuse;  // its worth
};

// A copy's place in its level's order. It is part of the copy, so that whoever has an object looks nothing up in order
// to touch it: with a million objects each look-up is two places in memory that no cache has.
struct Rank {
  // The level's.
  RankedObject* object = nullptr;  // the object of this copy
  uint32_t extents = 0;
  bool idle = false;  // may be given up

  // The policy's.
  Rank* order = nullptr;  // null: not tracked
  Rank* older = nullptr;
  Rank* younger = nullptr;
  uint64_t used = 0;  // when, in uses: compares copies of different pools
  uint64_t at = 0;    // when, in its tenant's requests

  bool tracked() const { return order != nullptr; }
};

enum class EvictionMode : uint8_t { kPrice, kLru };

// Ranks the copies in one tier; the level decides how many leave. A copy is tracked while it is whole, in use or not,
// and its Rank must not move meanwhile.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual PolicyKind kind() const = 0;
  virtual void Track(const TenantPool& pool, Rank& copy) = 0;
  // The object was looked up, or its last reference went: it was in use until now.
  virtual void Touch(Rank& copy) = 0;
  virtual void Erase(Rank& copy) = 0;

  struct Allowance {
    TenantPool pool;
    uint64_t extents = 0;  // that this pool may lose at most
  };
  // Returns the pools' idle copies that should leave first, in that order: just enough for `extents`, or none if all of
  // them are not enough. They stay tracked until Erase.
  virtual std::vector<RankedObject*> Victims(std::span<const Allowance> pools, uint64_t extents) = 0;
  // Returns whether an object that would come is worth more than each of these. By default none is known to be.
  virtual bool IsDearer(const RankedObject& /*coming*/, std::span<RankedObject* const> /*than*/) const { return false; }
};

// Least recently used first, over all pools together. Every call is O(1), Victims amortised per copy returned: one
// that is met in use moves to the recent end, where it belongs and where its release will put it anyway.
class LruPolicy final : public EvictionPolicy {
 public:
  PolicyKind kind() const override { return PolicyKind::kLru; }
  void Track(const TenantPool& pool, Rank& copy) override;
  void Touch(Rank& copy) override;
  void Erase(Rank& copy) override;
  std::vector<RankedObject*> Victims(std::span<const Allowance> pools, uint64_t extents) override;

 private:
  struct Cursor {
    Rank* order;
    Rank* next;
    uint64_t allowed;
  };

  Rank& Order(const TenantPool& pool);
  void MoveToRecentEnd(Rank& copy);

  uint64_t uses_ = 0;
  // Rings, each through a place of no copy: behind it the oldest, before it the youngest.
  std::map<TenantPool, Rank> orders_;
};

// The cheapest first: what having it saves, a byte, times the uses that are to be expected a request of keeping it
// (reuse_models.h). Objects that the model does not tell apart, and whose worth is of one half octave, stand in one
// ring by their last use; of each ring the oldest is taken for the cheapest, as it is unless likelihood rises with age.
// Track, Touch and Erase are O(1), Victims O(rings) a copy returned: some dozens of them are not empty.
class PricePolicy final : public EvictionPolicy {
 public:
  explicit PricePolicy(const ReuseModels& models) : models_(models) {}

  PolicyKind kind() const override { return PolicyKind::kPrice; }
  void Track(const TenantPool& pool, Rank& copy) override;
  void Touch(Rank& copy) override;
  void Erase(Rank& copy) override;
  std::vector<RankedObject*> Victims(std::span<const Allowance> pools, uint64_t extents) override;
  bool IsDearer(const RankedObject& coming, std::span<RankedObject* const> than) const override;

 private:
  // FLOPs a byte. A declared worth outside this range is clamped to it, which bounds the number of rings.
  static constexpr double kLeastWorth = 1.0 / 16, kMostWorth = 1 << 28;

  // Copies of one pool, class and worth.
  struct Ring {
    Rank place;  // of no copy: behind it the oldest, before it the youngest
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

  Rank& RingOf(const TenantPool& pool, const RankedObject& object);
  double PriceOf(const RankedObject& object) const;
  void Append(Rank& copy, Rank& place);
  // Moves the cursor to the oldest copy of before the call that may be given up.
  void Advance(Cursor& cursor, TenantId tenant, uint64_t before);

  const ReuseModels& models_;
  uint64_t uses_ = 0;
  std::map<TenantPool, Shelf> shelves_;
};

}  // namespace ashlar::storage
