// SPDX-License-Identifier: Apache-2.0
// OpenLayouts: the layouts of opened models. Sessions, ranks and exact prefixes share equal layouts, because their
// tables may take 32 MiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "daemon/session/budget.h"
#include "kernels/mutex.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/shard.h"

namespace ashlar::daemon {

// kHeapOverhead: heap bytes per allocation in addition to its own. kLeastHeapBytes: total heap bytes of a small object
// with its handle and map entry.
inline constexpr uint64_t kHeapOverhead = 16, kLeastHeapBytes = 256;

// Returns the heap bytes of a layout, mostly its tables.
uint64_t MemoryOf(const Layout& layout);

// Thread-safe.
class OpenLayouts {
 public:
  // Returns the layout for a shard of a namespace (tenant, identity and layout); null if it is not in use.
  std::shared_ptr<const Layout> Find(const NamespaceId& ns, const TensorShard& shard) const;
  // Shares a layout and its charge while they are in use. If an equal one already exists, returns that.
  std::shared_ptr<const Layout> Share(const NamespaceId& ns, const TensorShard& shard, Layout layout,
                                      Budget::Charge charge);
  size_t size() const;  // layouts in use, and some no longer in use

 private:
  using Key = std::tuple<NamespaceId, uint32_t, uint32_t>;
  static Key KeyOf(const NamespaceId& ns, const TensorShard& shard) { return {ns, shard.rank, shard.size}; }

  mutable Mutex mutex_;
  std::map<Key, std::weak_ptr<const Layout>> layouts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::daemon
