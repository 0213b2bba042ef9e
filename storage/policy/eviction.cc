#include "storage/policy/eviction.h"

namespace ashlar::storage {
namespace {

void Unlink(Rank& copy) {
  copy.older->younger = copy.younger;
  copy.younger->older = copy.older;
}

}  // namespace

Rank& LruPolicy::Order(const Group& group) {
  const auto [found, fresh] = orders_.try_emplace(group);
  Rank& order = found->second;
  if (fresh) order.older = order.younger = &order;
  return order;
}

void LruPolicy::Track(const Group& group, Rank& copy) {
  copy.order = &Order(group);
  copy.older = copy.younger = &copy;  // in a ring of its own
  MoveToRecentEnd(copy);
}

void LruPolicy::Touch(Rank& copy) {
  MoveToRecentEnd(copy);
}

void LruPolicy::MoveToRecentEnd(Rank& copy) {
  copy.used = ++uses_;
  Unlink(copy);
  copy.younger = copy.order;
  copy.older = copy.order->older;
  copy.older->younger = &copy;
  copy.order->older = &copy;
}

void LruPolicy::Forget(Rank& copy) {
  Unlink(copy);
  copy.order = nullptr;
}

std::vector<Entry*> LruPolicy::Victims(std::span<const Allowance> groups, uint64_t extents) {
  std::vector<Cursor> cursors;
  for (const auto& [group, allowed] : groups) {
    Rank& order = Order(group);
    cursors.push_back({&order, order.younger, allowed});
  }
  const uint64_t before = uses_;  // what was used since has been met before
  std::vector<Entry*> victims;
  uint64_t found = 0;
  while (found < extents) {
    Cursor* oldest = nullptr;
    for (Cursor& cursor : cursors) {
      const bool ended = cursor.next == cursor.order || cursor.next->used > before;
      if (!ended && (oldest == nullptr || cursor.next->used < oldest->next->used)) oldest = &cursor;
    }
    if (oldest == nullptr) break;
    Rank& current = *oldest->next;
    oldest->next = current.younger;
    if (!current.idle) {
      MoveToRecentEnd(current);
    } else if (current.extents > oldest->allowed) {
      oldest->next = oldest->order;  // what a group may keep, it keeps its most recent of
    } else {
      victims.push_back(current.entry);
      found += current.extents;
      oldest->allowed -= current.extents;
    }
  }
  if (found < extents) victims.clear();
  return victims;
}

}  // namespace ashlar::storage
