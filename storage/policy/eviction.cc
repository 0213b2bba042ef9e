#include "storage/policy/eviction.h"

#include <algorithm>

namespace ashlar::storage {

void LruPolicy::Track(const Group& group, ObjectId object, uint64_t extents) {
  Order& order = orders_[group];
  places_[object] = {&order, order.insert(order.end(), {object, extents, ++uses_})};
}

void LruPolicy::Touch(ObjectId object) {
  const Place& place = places_.at(object);
  MoveToRecentEnd(*place.order, place.node);
}

void LruPolicy::MoveToRecentEnd(Order& order, Order::iterator node) {
  node->used = ++uses_;
  order.splice(order.end(), order, node);
}

void LruPolicy::Forget(ObjectId object) {
  const auto found = places_.find(object);
  found->second.order->erase(found->second.node);
  places_.erase(found);
}

std::vector<ObjectId> LruPolicy::Victims(std::span<const Allowance> groups, uint64_t extents,
                                         absl::FunctionRef<bool(ObjectId)> idle) {
  std::vector<Cursor> cursors;
  for (const auto& [group, allowed] : groups) {
    Order& order = orders_[group];
    cursors.push_back({&order, order.begin(), order.size(), allowed});
  }
  std::vector<ObjectId> victims;
  uint64_t found = 0;
  while (found < extents) {
    Cursor* oldest = nullptr;
    for (Cursor& cursor : cursors) {
      if (cursor.left > 0 && (oldest == nullptr || cursor.node->used < oldest->node->used)) oldest = &cursor;
    }
    if (oldest == nullptr) break;
    const auto current = oldest->node++;
    --oldest->left;
    if (!idle(current->object)) {
      MoveToRecentEnd(*oldest->order, current);
    } else if (current->extents > oldest->allowed) {
      oldest->left = 0;  // what a group may keep, it keeps its most recent of
    } else {
      victims.push_back(current->object);
      found += current->extents;
      oldest->allowed -= current->extents;
    }
  }
  if (found < extents) victims.clear();
  return victims;
}

}  // namespace ashlar::storage
