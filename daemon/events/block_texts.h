// SPDX-License-Identifier: Apache-2.0
// BlockTexts: the tokens of prefixes' blocks, which the cache itself does not keep, for those who are told of blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/key.h"
#include "proto/prefix.h"
#include "storage/ids.h"

namespace ashlar::daemon {

struct BlockText {
  std::optional<Key> before;  // the block before it; none: it begins the text
  std::vector<int32_t> tokens;
};

// The latest blocks of texts that engines committed, within a bound. Thread-safe.
class BlockTexts {
 public:
  explicit BlockTexts(size_t most_tokens = size_t{8} << 20) : most_tokens_(most_tokens) {}

  // `keys`: of a text of this tenant's model. Blocks that several tenants committed are known for each.
  void Note(storage::TenantId tenant, const NamespaceId& ns, const PrefixKeys& keys);
  std::optional<BlockText> Find(storage::TenantId tenant, const Key& block) const;
  // Drops the tenant's texts; with `ns`, those of this namespace alone.
  void Erase(storage::TenantId tenant, const std::optional<NamespaceId>& ns);
  // Rises with every Erase, after its texts have gone: callers that keep what they found then drop it.
  uint64_t erasures() const { return erasures_; }

 private:
  struct Known {
    storage::TenantId tenant = 0;
    NamespaceId ns;
    Key key;
    BlockText text;
  };
  const size_t most_tokens_;
  mutable std::mutex mutex_;
  std::list<Known> order_;  // guarded by mutex_, as below; the latest last
  absl::flat_hash_map<std::pair<storage::TenantId, Key>, std::list<Known>::iterator> known_;
  size_t tokens_ = 0;
  std::atomic<uint64_t> erasures_{0};
};

}  // namespace ashlar::daemon
