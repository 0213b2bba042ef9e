// SPDX-License-Identifier: Apache-2.0
// StoredPrefixes: which objects of prefixes this node has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "proto/key.h"
#include "proto/prefix.h"
#include "proto/shard.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/prefix/prefix_text.h"

namespace ashlar::storage {

// Returns whether the disk has an object, or is being given it.
bool IsOnDisk(const ObjectTable& table, TenantId tenant, const Key& key, const TensorShard& shard);

class StoredPrefixes {
 public:
  enum class There : uint8_t { kGone, kComing, kWhole };

  StoredPrefixes(ObjectTable& table, const Clock& clock) : table_(table), clock_(clock) {}
  StoredPrefixes(const StoredPrefixes&) = delete;
  StoredPrefixes& operator=(const StoredPrefixes&) = delete;

  There Find(TenantId tenant, const Key& key, const TensorShard& shard) const;
  // Number of leading blocks that are here; all if the model has no blocks.
  size_t WholeBlocks(TenantId tenant, const PrefixModel& model, const PrefixKeys& keys) const;
  // Returns whether all objects that a depth needs are here. `whole` counts the leading blocks; pass it from one depth
  // to the next, ascending.
  There FindState(TenantId tenant, const PrefixModel& model, const PrefixKeys& keys, uint64_t depth,
                  size_t& whole) const;
  There FindSpan(TenantId tenant, const PrefixModel& model, const Key& key) const;

  // A commit copies a checkpoint with its blocks, or a span: until EndCopy they are coming. EndCopy returns true if no
  // other commit is copying them.
  void BeginCopy(const Key& key) { copying_[key] += 1; }
  bool EndCopy(const Key& key);

 private:
  static constexpr Nanos kRanks = 60'000'000'000;  // time for other ranks to commit what one of them has

  ObjectTable& table_;
  const Clock& clock_;
  absl::flat_hash_map<Key, size_t> copying_;  // number of commits
};

}  // namespace ashlar::storage
