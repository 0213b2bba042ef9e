// SPDX-License-Identifier: Apache-2.0
#include "client/session/lease_table.h"

#include <chrono>
#include <utility>

namespace ashlar::internal {

bool LeaseTable::Hold(const std::string& lease, Deadline deadline) {
  MutexLock lock(mutex_);
  while (releasing_.contains(lease)) {
    if (!settled_.WaitUntil(mutex_, deadline) && releasing_.contains(lease)) return false;
  }
  unheld_.erase(lease);
  if (++held_[lease].holders == 1) came_.emplace_back(std::chrono::steady_clock::now(), lease);
  return true;
}

void LeaseTable::Drop(const std::string& lease) {
  {
    MutexLock lock(mutex_);
    const auto held = held_.find(lease);
    if (held == held_.end() || --held->second.holders > 0) return;
    held_.erase(held);
    unheld_.insert(lease);
  }
  wake_();
}

void LeaseTable::Used(const std::string& lease) {
  MutexLock lock(mutex_);
  if (const auto held = held_.find(lease); held != held_.end()) held->second.used = true;
}

std::vector<std::string> LeaseTable::TakeUnused(Deadline before, size_t most) {
  MutexLock lock(mutex_);
  std::vector<std::string> leases;
  for (; !came_.empty() && came_.front().first <= before && leases.size() < most; came_.pop_front()) {
    const auto held = held_.find(came_.front().second);
    if (held == held_.end() || std::exchange(held->second.used, true)) continue;
    leases.push_back(held->first);
  }
  return leases;
}

std::vector<std::string> LeaseTable::TakeUnheld(size_t most) {
  MutexLock lock(mutex_);
  std::vector<std::string> leases;
  while (!unheld_.empty() && leases.size() < most) {
    leases.push_back(*unheld_.begin());
    releasing_.insert(unheld_.extract(unheld_.begin()));
  }
  return leases;
}

void LeaseTable::Settle(const std::vector<std::string>& leases, bool released) {
  MutexLock lock(mutex_);
  for (const std::string& lease : leases) {
    releasing_.erase(lease);
    if (!released) unheld_.insert(lease);
  }
  settled_.NotifyAll();
}

}  // namespace ashlar::internal
