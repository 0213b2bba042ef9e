// SPDX-License-Identifier: Apache-2.0
// BlockTexts: the tokens of recently committed prefix blocks and reserved segments. The cache does not keep them;
// events include them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/mutex.h"
#include "proto/key.h"
#include "proto/prefix.h"
#include "storage/ids.h"

namespace ashlar::daemon {

struct BlockText {
  std::optional<Key> before;  // key of the previous block; absent for the first block of a text
  std::vector<int32_t> tokens;
};

// The latest blocks of texts that engines committed, bounded in number. Thread-safe.
class BlockTexts {
 public:
  explicit BlockTexts(size_t most_tokens = size_t{8} << 20) : most_tokens_(most_tokens) {}

  // `keys` are those of a text of this tenant's model. A block that several tenants commit is recorded for each.
  void Note(storage::TenantId tenant, const NamespaceId& ns, const PrefixKeys& keys);
  // Segments are noted and published only after KeepSegments, which is called before any other thread uses the object.
  void KeepSegments() { keeps_segments_ = true; }
  bool keeps_segments() const { return keeps_segments_; }
  void NoteSegment(storage::TenantId tenant, const NamespaceId& ns, const Key& key, std::vector<int32_t> tokens);
  std::optional<BlockText> Find(storage::TenantId tenant, const Key& block) const;
  // Drops the tenant's texts; with `ns`, only those of this namespace.
  void Erase(storage::TenantId tenant, const std::optional<NamespaceId>& ns);
  // Increases with every Erase, after its texts are gone. A caller that keeps results must drop them when it changes.
  uint64_t erasures() const { return erasures_; }

 private:
  struct Known {
    storage::TenantId tenant = 0;
    NamespaceId ns;
    Key key;
    BlockText text;
  };
  void Add(Known known) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Trim() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t most_tokens_;
  bool keeps_segments_ = false;
  mutable Mutex mutex_;
  std::list<Known> order_ ABSL_GUARDED_BY(mutex_);  // oldest first
  absl::flat_hash_map<std::pair<storage::TenantId, Key>, std::list<Known>::iterator> known_ ABSL_GUARDED_BY(mutex_);
  size_t tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> erasures_{0};
};

}  // namespace ashlar::daemon
