// SPDX-License-Identifier: Apache-2.0
// LeaseTable: the leases that this session holds, counted. Several matches may share one lease, and the last of them
// releases it.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "client/session/deadline.h"
#include "kernels/mutex.h"

namespace ashlar::internal {

// Thread-safe.
class LeaseTable {
 public:
  // Calls `wake`, without a lock, whenever there is something to release.
  explicit LeaseTable(std::function<void()> wake) : wake_(std::move(wake)) {}

  // Adds a holder of a lease that the daemon has granted or is about to be asked for. Waits while a release of the same
  // lease is in flight, which would otherwise end the new hold. Returns false if that takes longer than the deadline.
  bool Hold(const std::string& lease, Deadline deadline);
  void Drop(const std::string& lease);

  // The daemon ends a lease that was never used (leases.unused_seconds). Used: the daemon has been asked to land from
  // the lease. TakeUnused: takes up to `most` leases that have been held since before `before` and were not used, each
  // once. The caller tells the daemon that they are wanted.
  void Used(const std::string& lease);
  std::vector<std::string> TakeUnused(Deadline before, size_t most);

  // Takes up to `most` leases that are no longer held. The caller releases them and reports whether that worked; if
  // not, they are taken again later.
  std::vector<std::string> TakeUnheld(size_t most);
  void Settle(const std::vector<std::string>& leases, bool released);

 private:
  const std::function<void()> wake_;
  Mutex mutex_;
  CondVar settled_;
  struct Held {
    size_t holders = 0;
    bool used = false;
  };
  std::unordered_map<std::string, Held> held_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::pair<Deadline, std::string>> came_
      ABSL_GUARDED_BY(mutex_);  // sorted; may contain leases that are released or used
  std::set<std::string> unheld_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> releasing_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::internal
