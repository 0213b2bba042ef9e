// SPDX-License-Identifier: Apache-2.0
// RankLevels: on which GPU each rank of a tensor-parallel engine works.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>

#include "storage/objects/entry.h"
#include "storage/objects/levels.h"

namespace ashlar::storage {

// A rank's level is the last one at which an engine of that rank requested or reserved a shard. Ranks without such a
// request, and objects that are not shards, have the common level.
class RankLevels {
 public:
  explicit RankLevels(const Levels& levels) : levels_(levels) {}

  size_t LevelOf(const Entry& entry) const {
    if (levels_.sibling_count() == 1) return levels_.common();
    const auto found = ranks_.find({entry.pool.tenant, entry.header.ns, entry.header.shard.rank});
    return found == ranks_.end() ? levels_.common() : found->second;
  }

  void Record(TenantId tenant, const NamespaceId& ns, const TensorShard& shard, size_t level) {
    if (levels_.sibling_count() == 1 || shard.size == 1) return;
    if (ranks_.size() >= kMaxRanks) ranks_.clear();  // namespaces come and go
    ranks_[{tenant, ns, shard.rank}] = level;
  }

 private:
  static constexpr size_t kMaxRanks = 1 << 16;

  const Levels& levels_;
  std::map<std::tuple<TenantId, NamespaceId, uint32_t>, size_t> ranks_;
};

}  // namespace ashlar::storage
