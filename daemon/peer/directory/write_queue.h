// SPDX-License-Identifier: Apache-2.0
// WriteQueue: what one node is to say to etcd, bounded. The latest word on an object replaces an earlier one that
// waits. Not thread-safe.
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
  std::optional<Holding> holding;  // none: a withdrawal
  double worth = 0;                // of an announcement
};

class WriteQueue {
 public:
  // Of announcements, and as many withdrawals.
  explicit WriteQueue(size_t capacity) : capacity_(capacity) {}

  // A full queue gives up what is worth least, the newest of equals; false where that is this one.
  bool Announce(const DirectoryWrite& write);
  // An announcement of it was taken and given up, and there was no later word on it.
  bool GaveUp(const EntryId& id) const { return given_up_.contains(id); }
  // False: full of other withdrawals.
  bool Withdraw(const EntryId& id);

  // Withdrawals in their order, then announcements, what is worth most first and the oldest of equals.
  std::vector<DirectoryWrite> Take(size_t most);
  // Puts those back that were taken in vain, unless there is a later word on the object.
  void Return(const std::vector<DirectoryWrite>& writes);

  size_t announcements() const { return announcements_.size(); }
  size_t withdrawals() const { return withdrawals_.size(); }
  size_t size() const { return announcements() + withdrawals(); }
  size_t Room() const { return capacity_ - announcements(); }
  uint64_t dropped_announcements() const { return dropped_announcements_; }
  uint64_t dropped_withdrawals() const { return dropped_withdrawals_; }

 private:
  struct Rank {
    double worth;
    uint64_t sequence;
    EntryId id;
    bool operator<(const Rank& other) const {  // the first is sent first
      return std::tuple(-worth, sequence) < std::tuple(-other.worth, other.sequence);
    }
  };
  struct Waiting {
    Holding holding;
    std::set<Rank>::iterator rank;
  };
  void Erase(const EntryId& id);  // an announcement that waits

  const size_t capacity_;
  uint64_t sequence_ = 0;
  uint64_t dropped_announcements_ = 0, dropped_withdrawals_ = 0;
  absl::flat_hash_map<EntryId, Waiting> announcements_;
  std::set<Rank> ranks_;
  absl::flat_hash_set<EntryId> given_up_;  // bounded by the node's objects: each is there until it is withdrawn
  absl::flat_hash_map<EntryId, uint64_t> withdrawals_;  // and their place in the order
  std::deque<std::pair<EntryId, uint64_t>> in_order_;   // those that withdrawals_ does not have are void
};

}  // namespace ashlar::daemon
