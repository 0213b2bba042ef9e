// SPDX-License-Identifier: Apache-2.0
// ObjectIndex: all objects of the cache, by number and by key. It owns their entries.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/functional/function_ref.h"
#include "storage/objects/entry.h"
#include "storage/objects/segment_table.h"
#include "storage/slice.h"

namespace ashlar::storage {

// Entries are numbered in the order in which they are added. An entry that is gone is no longer found by its key; it is
// deleted with its last copy and reference.
class ObjectIndex {
 public:
  Entry& Add(std::unique_ptr<Entry> entry);
  void Delete(ObjectId id) { entries_.erase(id); }

  Entry* EntryOf(ObjectId id) const;  // null: it was deleted
  Entry* Live(ObjectId id) const;     // null if the entry is gone
  ObjectId newest() const { return next_id_ - 1; }

  SegmentTable& keys() { return keys_; }
  const SegmentTable& keys() const { return keys_; }
  // Returns the numbers of the objects of a key: the end of one of them may end others.
  std::vector<ObjectId> IdsOf(TenantId tenant, const Key& key) const;

  // Visits the entries after `after` up to `last` in order, one step of the slice each, until `visit` returns false.
  // These include entries that are not published yet, and ones that are gone but still in use. Sets `after` to the last
  // visited entry. Returns false if the slice ended first: call again. `visit` may end objects, including the visited
  // one.
  bool Walk(ObjectId& after, ObjectId last, Slice& slice, absl::FunctionRef<bool(Entry&)> visit) const;
  void ForEach(absl::FunctionRef<void(Entry&)> visit) const;  // `visit` must not delete entries

 private:
  ObjectId next_id_ = 1;
  absl::btree_map<ObjectId, std::unique_ptr<Entry>> entries_;
  SegmentTable keys_;
};

}  // namespace ashlar::storage
