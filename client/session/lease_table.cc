#include "client/session/lease_table.h"

namespace ashlar::internal {

bool LeaseTable::Hold(const std::string& lease, Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (!settled_.wait_until(lock, deadline, [&] { return !releasing_.contains(lease); })) return false;
  unheld_.erase(lease);
  ++holders_[lease];
  return true;
}

void LeaseTable::Drop(const std::string& lease) {
  {
    std::lock_guard lock(mutex_);
    const auto holder = holders_.find(lease);
    if (holder == holders_.end() || --holder->second > 0) return;
    holders_.erase(holder);
    unheld_.insert(lease);
  }
  wake_();
}

std::vector<std::string> LeaseTable::TakeUnheld(size_t most) {
  std::lock_guard lock(mutex_);
  std::vector<std::string> leases;
  while (!unheld_.empty() && leases.size() < most) {
    leases.push_back(*unheld_.begin());
    releasing_.insert(unheld_.extract(unheld_.begin()));
  }
  return leases;
}

void LeaseTable::Settle(const std::vector<std::string>& leases, bool released) {
  std::lock_guard lock(mutex_);
  for (const std::string& lease : leases) {
    releasing_.erase(lease);
    if (!released) unheld_.insert(lease);
  }
  settled_.notify_all();
}

}  // namespace ashlar::internal
