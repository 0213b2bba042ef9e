// SPDX-License-Identifier: Apache-2.0
// Mirror: the entries of followed namespaces, as etcd has them, in this node's memory.
//
// One object held by one node takes one slot of 36 bytes and one of control in a flat hash table that is 7/16 to 7/8
// full: 42 to 85 bytes. The slots of a key are chained by their number: the first holder's is (key, 0), the next one's
// (key, 1).
//
// One thread writes. Any thread reads; it waits for a slot's writer at most, because a namespace is cut into 64 tables
// with a mutex each.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/directory/directory_keys.h"

namespace ashlar::daemon {

// Members by small numbers. A number is used again only after all others, so a reader that has an older list never
// takes one member for another.
class MemberNumbers {
 public:
  // Indexed by number; null: absent, or this node itself.
  using List = std::vector<std::shared_ptr<const Member>>;

  // The number of an incarnation, whether it is a member or not. None: 65,536 are known, which have entries or are
  // present.
  std::optional<uint16_t> Intern(uint64_t incarnation);
  // Those whose entries are believed; all others are absent.
  void SetPresent(const std::vector<std::shared_ptr<const Member>>& members);
  // An entry of the member came, or went.
  void Count(uint16_t number, int64_t entries);

  std::shared_ptr<const List> Present() const;  // thread-safe

 private:
  struct Known {
    uint16_t number = 0;
    int64_t entries = 0;
    bool present = false;
  };
  void DropIfUnused(uint64_t incarnation);

  absl::flat_hash_map<uint64_t, Known> known_;  // by incarnation
  std::vector<uint64_t> incarnations_;          // by number
  std::vector<bool> taken_;                     // by number
  uint16_t next_ = 0;
  mutable std::mutex mutex_;  // of list_
  std::shared_ptr<const List> list_ = std::make_shared<const List>();
};

class Mirror {
 public:
  explicit Mirror(uint64_t most_entries);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // By the one thread that writes.
  MemberNumbers& members() { return members_; }
  void Open(const ShortDigest& ns);
  void Close(const ShortDigest& ns);
  // Of a namespace that is open; of others nothing happens.
  void Put(const EntryId& id, uint64_t incarnation, const Holding& holding);
  void Remove(const EntryId& id, uint64_t incarnation);
  // Between the two, all that etcd has of the namespace is put; the end removes what was not. A round that was broken
  // off is begun again.
  void BeginRound(const ShortDigest& ns);
  void EndRound(const ShortDigest& ns);

  // By any thread; as in Directory.
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
  mutable std::mutex mutex_;  // of namespaces_
  absl::flat_hash_map<ShortDigest, std::shared_ptr<Namespace>> namespaces_;
};

}  // namespace ashlar::daemon
