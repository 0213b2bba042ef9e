#include "storage/policy/eviction.h"

namespace ashlar::storage {

void LruPolicy::Track(TenantId tenant, ObjectId object, uint64_t extents) {
  Order& order = orders_[tenant];
  places_[object] = {&order, order.insert(order.end(), {object, extents})};
}

void LruPolicy::Touch(ObjectId object) {
  const Place& place = places_.at(object);
  place.order->splice(place.order->end(), *place.order, place.node);
}

void LruPolicy::Forget(ObjectId object) {
  const auto found = places_.find(object);
  found->second.order->erase(found->second.node);
  places_.erase(found);
}

std::vector<ObjectId> LruPolicy::Victims(TenantId tenant, uint64_t extents, absl::FunctionRef<bool(ObjectId)> idle) {
  std::vector<ObjectId> victims;
  Order& order = orders_[tenant];
  uint64_t found = 0;
  auto node = order.begin();
  for (size_t left = order.size(); left > 0 && found < extents; --left) {
    const auto current = node++;
    if (idle(current->object)) {
      victims.push_back(current->object);
      found += current->extents;
    } else {
      order.splice(order.end(), order, current);
    }
  }
  return victims;
}

}  // namespace ashlar::storage
