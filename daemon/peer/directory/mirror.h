// SPDX-License-Identifier: Apache-2.0
// Mirror: a copy in memory of the entries of followed namespaces in etcd.
//
// One object held by one node takes one slot of 36 bytes and one control byte in a flat hash table that is 7/16 to 7/8
// full: 42 to 85 bytes. The slots of a key are chained by a counter: the first holder is (key, 0), the next one (key,
// 1).
//
// One thread writes, any thread reads. A namespace has 64 tables with a mutex each, so a reader waits for at most one
// write.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/directory/directory_keys.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// Assigns small numbers to members. A number is reused only after all others, so a reader with an older list never
// mistakes one member for another.
class MemberNumbers {
 public:
  // Indexed by number; null for an absent member and for this node.
  using List = std::vector<std::shared_ptr<const Member>>;

  // Returns the number of an incarnation, present or not. Empty if 65,536 incarnations with entries or presence are
  // known.
  std::optional<uint16_t> Intern(uint64_t incarnation);
  // Sets the members whose entries are used; all others are absent.
  void SetPresent(const std::vector<std::shared_ptr<const Member>>& members);
  // Entries of the member were added or removed.
  void Count(uint16_t number, int64_t entries);

  std::shared_ptr<const List> Present() const;  // thread-safe

 private:
  struct Known {
    uint16_t number = 0;
    int64_t entries = 0;
    bool present = false;
  };
  void DropIfUnused(uint64_t incarnation);

  absl::flat_hash_map<uint64_t, Known> known_;  // keyed by incarnation
  std::vector<uint64_t> incarnations_;          // indexed by number
  std::vector<bool> taken_;                     // indexed by number
  uint16_t next_ = 0;
  mutable Mutex mutex_;
  std::shared_ptr<const List> list_ ABSL_GUARDED_BY(mutex_) = std::make_shared<const List>();
};

class Mirror {
 public:
  explicit Mirror(uint64_t most_entries);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // For the writing thread.
  MemberNumbers& members() { return members_; }
  void Open(const ShortDigest& ns);
  void Close(const ShortDigest& ns);
  // Ignored if the namespace is not open.
  void Put(const EntryId& id, uint64_t incarnation, const Holding& holding);
  void Remove(const EntryId& id, uint64_t incarnation);
  // Between BeginRound and EndRound, everything that etcd has of the namespace must be put; EndRound removes the rest.
  // An interrupted round is started again.
  void BeginRound(const ShortDigest& ns);
  void EndRound(const ShortDigest& ns);

  // Any thread; as in Directory.
  std::vector<Located> Locate(const NamespaceId& ns, std::span<const Key> keys) const;
  std::vector<uint64_t> Depths(const NamespaceId& ns, uint64_t end, size_t most) const;
  std::vector<uint64_t> SpanEnds(const NamespaceId& ns, uint64_t begin, uint64_t end, size_t most) const;
  uint64_t entries() const { return entries_.load(std::memory_order_relaxed); }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  uint64_t Bytes() const;

 private:
  class Namespace;
  std::shared_ptr<Namespace> Find(const ShortDigest& ns) const;

  const uint64_t most_entries_;
  MemberNumbers members_;
  std::atomic<uint64_t> entries_{0}, refused_{0};
  mutable Mutex mutex_;
  absl::flat_hash_map<ShortDigest, std::shared_ptr<Namespace>> namespaces_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::daemon
