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

// Entries are numbered in the order in which they are added. One that is gone has left the keys; it is deleted with its
// last copy and reference.
class ObjectIndex {
 public:
  Entry& Add(std::unique_ptr<Entry> entry);
  void Delete(ObjectId id) { entries_.erase(id); }

  Entry* EntryOf(ObjectId id) const;  // null: it was deleted
  Entry* Live(ObjectId id) const;     // null: it is gone
  ObjectId newest() const { return next_id_ - 1; }

  SegmentTable& keys() { return keys_; }
  const SegmentTable& keys() const { return keys_; }
  // Returns the numbers of the objects of a key: the end of one of them may end others.
  std::vector<ObjectId> IdsOf(TenantId tenant, const Key& key) const;

  // Shows the entries after `after` up to `last`, a step of the slice each, in order, until `visit` returns false. They
  // include entries that are not published yet, and those that are gone and still in use. `after` becomes the last one
  // that was shown. Returns false if the slice ended first: call again. `visit` may end objects, the shown one too.
  bool Walk(ObjectId& after, ObjectId last, Slice& slice, absl::FunctionRef<bool(Entry&)> visit) const;
  void ForEach(absl::FunctionRef<void(Entry&)> visit) const;  // `visit` deletes none

 private:
  ObjectId next_id_ = 1;
  absl::btree_map<ObjectId, std::unique_ptr<Entry>> entries_;
  SegmentTable keys_;
};

}  // namespace ashlar::storage
