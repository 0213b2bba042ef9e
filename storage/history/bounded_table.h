// SPDX-License-Identifier: Apache-2.0
// BoundedTable: a hash table of bounded size that drops its oldest entries first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"

namespace ashlar::storage {

// Every call is O(1). Entries are linked by age, and their slots are reused.
template <typename Key, typename Value>
class BoundedTable {
  using Place = uint32_t;  // index of a node; kNowhere for none
  static constexpr Place kNowhere = ~Place{0};

  struct Node {
    Key key;
    Value value;
    Place older = kNowhere;  // a free node's next free one
    Place younger = kNowhere;
  };

 public:
  // Nodes are reserved once. flat_hash_set doubles at 25/32 of its maximum load 7/8: 3 slots per entry (worst case just
  // after doubling) × 1.5 (old table during growth); a slot is an index and a control byte. The last 1 rounds up.
  static constexpr size_t kBytesPerEntry = sizeof(Node) + (sizeof(Place) + 1) * 9 / 2 + 1;

  explicit BoundedTable(size_t max_entries)
      : max_entries_(max_entries), index_(max_entries, Hash{{&nodes_}}, Equal{{&nodes_}}) {
    nodes_.reserve(max_entries);  // address space only; pages are allocated with the entries
  }
  BoundedTable(const BoundedTable&) = delete;
  BoundedTable& operator=(const BoundedTable&) = delete;

  // Inserts or replaces the entry, which becomes the youngest.
  void Put(const Key& key, const Value& value) {
    if (max_entries_ == 0) return;
    Erase(key);
    const Place place = TakeNode();
    nodes_[place] = {.key = key, .value = value, .older = youngest_};
    (youngest_ == kNowhere ? oldest_ : nodes_[youngest_].younger) = place;
    youngest_ = place;
    index_.insert(place);
  }

  // Null if there is none. Valid until the next change.
  const Value* Find(const Key& key) const {
    const auto found = index_.find(key);
    return found == index_.end() ? nullptr : &nodes_[*found].value;
  }

  // Unknown keys are ignored.
  void Erase(const Key& key) {
    const auto found = index_.find(key);
    if (found == index_.end()) return;
    const Place place = *found;
    index_.erase(found);
    Unlink(place);
    nodes_[place].older = free_;
    free_ = place;
  }

  // Erases the entries for which `gone(key, value)` returns true; it may change the values of others. Erased entries
  // are overwritten. O(n).
  template <typename Gone>
  void EraseIf(Gone gone) {
    for (Place place = oldest_; place != kNowhere;) {
      Node& node = nodes_[place];
      const Place next = node.younger;
      if (gone(std::as_const(node.key), node.value)) {
        Erase(Key(node.key));
        node.key = Key();
        node.value = Value();
      }
      place = next;
    }
  }

  size_t size() const { return index_.size(); }

 private:
  // The index holds indices of nodes and compares their keys, so that a key is stored once.
  struct KeyOf {
    const std::vector<Node>* nodes;
    const Key& operator()(Place place) const { return (*nodes)[place].key; }
    const Key& operator()(const Key& key) const { return key; }
  };
  struct Hash : KeyOf {
    using is_transparent = void;
    size_t operator()(const auto& of) const { return absl::Hash<Key>()(KeyOf::operator()(of)); }
  };
  struct Equal : KeyOf {
    using is_transparent = void;
    bool operator()(const auto& a, const auto& b) const { return KeyOf::operator()(a) == KeyOf::operator()(b); }
  };

  Place TakeNode() {
    if (index_.size() == max_entries_) Erase(Key(nodes_[oldest_].key));
    if (free_ == kNowhere) {
      nodes_.emplace_back();
      return static_cast<Place>(nodes_.size() - 1);
    }
    const Place place = free_;
    free_ = nodes_[place].older;
    return place;
  }

  void Unlink(Place place) {
    const Node& node = nodes_[place];
    (node.older == kNowhere ? oldest_ : nodes_[node.older].younger) = node.younger;
    (node.younger == kNowhere ? youngest_ : nodes_[node.younger].older) = node.older;
  }

  const size_t max_entries_;
  std::vector<Node> nodes_;
  absl::flat_hash_set<Place, Hash, Equal> index_;
  Place oldest_ = kNowhere;
  Place youngest_ = kNowhere;
  Place free_ = kNowhere;
};

}  // namespace ashlar::storage
