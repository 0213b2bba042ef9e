// Which copies go when a tier needs the space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "storage/ids.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

using ObjectId = uint64_t;

// Whose bytes compete with whose: those of one pool of one tenant.
struct Group {
  TenantId tenant = 0;
  PoolKind pool = PoolKind::kPublic;
  auto operator<=>(const Group&) const = default;
};

// Ranks the copies in one tier; the level decides how many go. A copy is tracked while it is whole, in use or not.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual void Track(const Group& group, ObjectId object, uint64_t extents) = 0;
  // The object was looked up, or its last reference went: it was in use until now.
  virtual void Touch(ObjectId object) = 0;
  virtual void Forget(ObjectId object) = 0;

  struct Allowance {
    Group group;
    uint64_t extents = 0;  // that this group may lose at most
  };
  // The groups' objects that should go first, in that order, only those for which `idle` holds: just enough for
  // `extents`, or none where all of them are not enough. They stay tracked until Forget.
  virtual std::vector<ObjectId> Victims(std::span<const Allowance> groups, uint64_t extents,
                                        absl::FunctionRef<bool(ObjectId)> idle) = 0;
};

// Least recently used first, over all groups together. Every call is O(1), Victims amortised per object returned: an
// object that is met in use moves to the recent end, where it belongs and where its release will put it anyway.
class LruPolicy final : public EvictionPolicy {
 public:
  void Track(const Group& group, ObjectId object, uint64_t extents) override;
  void Touch(ObjectId object) override;
  void Forget(ObjectId object) override;
  std::vector<ObjectId> Victims(std::span<const Allowance> groups, uint64_t extents,
                                absl::FunctionRef<bool(ObjectId)> idle) override;

 private:
  struct Node {
    ObjectId object;
    uint64_t extents;
    uint64_t used;  // when, in uses: compares objects of different groups
  };
  using Order = std::list<Node>;  // oldest first
  struct Place {
    Order* order;
    Order::iterator node;
  };
  struct Cursor {
    Order* order;
    Order::iterator node;
    size_t left;
    uint64_t allowed;
  };

  void MoveToRecentEnd(Order& order, Order::iterator node);

  uint64_t uses_ = 0;
  std::map<Group, Order> orders_;
  absl::flat_hash_map<ObjectId, Place> places_;
};

}  // namespace ashlar::storage
