// SPDX-License-Identifier: Apache-2.0
// OpenLayouts: the layouts of opened models. Sessions, ranks of one kind and exact prefixes share equal layouts,
// because their tables may take 32 MiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "daemon/session/budget.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/shard.h"

namespace ashlar::daemon {

// kHeapOverhead: the bytes that a block of heap takes beside its own. kLeastHeapBytes: the bytes of a small object
// altogether, with its handle and place.
inline constexpr uint64_t kHeapOverhead = 16, kLeastHeapBytes = 256;

// Heap that a layout takes, its tables above all.
uint64_t MemoryOf(const Layout& layout);

// Thread-safe.
class OpenLayouts {
 public:
  // Returns the layout of a shard of a namespace's models (a namespace is made of tenant, identity and layout). Null:
  // nobody has it.
  std::shared_ptr<const Layout> Find(const NamespaceId& ns, const TensorShard& shard) const;
  // Shares a layout, and its charge, for as long as anybody has it. If two come at once, returns the one that is there
  // already.
  std::shared_ptr<const Layout> Share(const NamespaceId& ns, const TensorShard& shard, Layout layout,
                                      Budget::Charge charge);
  size_t size() const;  // that somebody has, and some that nobody has any more

 private:
  using Key = std::tuple<NamespaceId, uint32_t, uint32_t>;
  static Key KeyOf(const NamespaceId& ns, const TensorShard& shard) { return {ns, shard.rank, shard.size}; }

  mutable std::mutex mutex_;
  std::map<Key, std::weak_ptr<const Layout>> layouts_;  // guarded by mutex_
};

}  // namespace ashlar::daemon
