// Which object goes when its tenant needs the space.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

using ObjectId = uint64_t;

// Ranks a tenant's objects; the pool decides how many go. An object is tracked from its publication to its end,
// referenced or not.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual void Track(TenantId tenant, ObjectId object, uint64_t extents) = 0;
  // The object was looked up, or its last reference went: it was in use until now.
  virtual void Touch(ObjectId object) = 0;
  virtual void Forget(ObjectId object) = 0;
  // The tenant's objects that should go first, in that order, only those for which `idle` holds: just enough for
  // `extents`, or all there are. They stay tracked until Forget.
  virtual std::vector<ObjectId> Victims(TenantId tenant, uint64_t extents, absl::FunctionRef<bool(ObjectId)> idle) = 0;
};

// Least recently used first. Every call is O(1), Victims amortised per object returned: an object that is met in use
// moves to the recent end, where it belongs and where its release will put it anyway.
class LruPolicy final : public EvictionPolicy {
 public:
  void Track(TenantId tenant, ObjectId object, uint64_t extents) override;
  void Touch(ObjectId object) override;
  void Forget(ObjectId object) override;
  std::vector<ObjectId> Victims(TenantId tenant, uint64_t extents, absl::FunctionRef<bool(ObjectId)> idle) override;

 private:
  struct Node {
    ObjectId object;
    uint64_t extents;
  };
  using Order = std::list<Node>;  // oldest first
  struct Place {
    Order* order;
    Order::iterator node;
  };

  std::map<TenantId, Order> orders_;
  absl::flat_hash_map<ObjectId, Place> places_;
};

}  // namespace ashlar::storage
