// SPDX-License-Identifier: Apache-2.0
// WriteQueue: a bounded queue of writes to etcd. A later write of an object replaces a queued one. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/directory/directory_keys.h"

namespace ashlar::daemon {

struct DirectoryWrite {
  EntryId id;
  std::optional<Holding> holding;  // empty for a withdrawal
  double worth = 0;                // worth of an announcement
};

class WriteQueue {
 public:
  // `capacity` bounds announcements, and withdrawals separately.
  explicit WriteQueue(size_t capacity) : capacity_(capacity) {}

  // A full queue drops the least valuable announcement, the newest of equals. Returns false if that is this one.
  bool Announce(const DirectoryWrite& write);
  // Returns whether a queued announcement of the object was dropped, and no later write of it came.
  bool WasDisplaced(const EntryId& id) const { return displaced_.contains(id); }
  // Returns false if the queue is full of withdrawals.
  bool Withdraw(const EntryId& id);

  // Returns withdrawals in order, then announcements by descending worth, the oldest of equals first.
  std::vector<DirectoryWrite> Take(size_t most);
  // Returns failed writes to the queue, unless there is a later write of the object.
  void Return(const std::vector<DirectoryWrite>& writes);

  size_t announcements() const { return announcements_.size(); }
  size_t withdrawals() const { return withdrawals_.size(); }
  size_t size() const { return announcements() + withdrawals(); }
  size_t RemainingCapacity() const { return capacity_ - announcements(); }
  uint64_t dropped_announcements() const { return dropped_announcements_; }
  uint64_t dropped_withdrawals() const { return dropped_withdrawals_; }

 private:
  struct Rank {
    double worth;
    uint64_t sequence;
    EntryId id;
    bool operator<(const Rank& other) const {  // the first one is sent first
      return std::tuple(-worth, sequence) < std::tuple(-other.worth, other.sequence);
    }
  };
  struct Waiting {
    Holding holding;
    std::set<Rank>::iterator rank;
  };
  void Erase(const EntryId& id);  // removes a queued announcement

  const size_t capacity_;
  uint64_t sequence_ = 0;
  uint64_t dropped_announcements_ = 0, dropped_withdrawals_ = 0;
  absl::flat_hash_map<EntryId, Waiting> announcements_;
  std::set<Rank> ranks_;
  absl::flat_hash_set<EntryId> displaced_;  // bounded by the node's objects: an entry is removed with the withdrawal
  absl::flat_hash_map<EntryId, uint64_t> withdrawals_;  // and their position in in_order_
  std::deque<std::pair<EntryId, uint64_t>> in_order_;   // entries that are not in withdrawals_ are void
};

}  // namespace ashlar::daemon
