// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/write_queue.h"

#include <utility>

namespace ashlar::daemon {

void WriteQueue::Erase(const EntryId& id) {
  const auto found = announcements_.find(id);
  if (found == announcements_.end()) return;
  ranks_.erase(found->second.rank);
  announcements_.erase(found);
}

bool WriteQueue::Announce(const DirectoryWrite& write) {
  if (announcements_.size() == capacity_ && !announcements_.contains(write.id)) {
    ++dropped_announcements_;
    // Dropping an announcement is safe; a queued withdrawal must be sent.
    if (capacity_ == 0 || std::prev(ranks_.end())->worth >= write.worth) return false;
    const EntryId least = std::prev(ranks_.end())->id;
    Erase(least);
    displaced_.insert(least);
  }
  Erase(write.id);
  withdrawals_.erase(write.id);
  displaced_.erase(write.id);
  const auto rank = ranks_.insert({write.worth, sequence_++, write.id}).first;
  announcements_.emplace(write.id, Waiting{*write.holding, rank});
  return true;
}

bool WriteQueue::Withdraw(const EntryId& id) {
  Erase(id);
  displaced_.erase(id);
  if (withdrawals_.contains(id)) return true;
  if (withdrawals_.size() == capacity_) {
    ++dropped_withdrawals_;
    return false;
  }
  // Announcements that replace withdrawals leave empty places.
  if (in_order_.size() >= 2 * capacity_ + 1) {
    std::erase_if(in_order_, [&](const auto& place) {
      const auto found = withdrawals_.find(place.first);
      return found == withdrawals_.end() || found->second != place.second;
    });
  }
  withdrawals_.emplace(id, sequence_);
  in_order_.emplace_back(id, sequence_++);
  return true;
}

std::vector<DirectoryWrite> WriteQueue::Take(size_t most) {
  std::vector<DirectoryWrite> writes;
  while (writes.size() < most && !in_order_.empty()) {
    const auto [id, place] = in_order_.front();
    in_order_.pop_front();
    const auto found = withdrawals_.find(id);
    if (found == withdrawals_.end() || found->second != place) continue;
    withdrawals_.erase(found);
    writes.push_back({id, std::nullopt, 0});
  }
  while (writes.size() < most && !ranks_.empty()) {
    const Rank rank = *ranks_.begin();
    writes.push_back({rank.id, announcements_.at(rank.id).holding, rank.worth});
    Erase(rank.id);
  }
  return writes;
}

void WriteQueue::Return(const std::vector<DirectoryWrite>& writes) {
  for (const DirectoryWrite& write : writes) {
    if (announcements_.contains(write.id) || withdrawals_.contains(write.id)) continue;
    if (write.holding.has_value()) {
      if (!Announce(write)) displaced_.insert(write.id);
    } else {
      Withdraw(write.id);
    }
  }
}

}  // namespace ashlar::daemon
