// SPDX-License-Identifier: Apache-2.0
// TensorShard: the tensor-parallel shard of a model that one process of an engine computes. Shards of one size are one
// *bundle*: the shards of a key hit, are leased and are evicted as one. A shard is outside the namespace: all shards of
// a bundle share keys.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "proto/layout.h"

namespace ashlar {

struct TensorShard {
  uint32_t rank = 0;  // below `size`
  uint32_t size = 1;  // 1: the whole model
  bool operator==(const TensorShard&) const = default;
};

// Returns the layout of a shard's cached state, from a valid one of the whole model: heads [rank / size, (rank + 1) /
// size) of every layer. If an attention layer has fewer key-value heads than shards, each shard has one head, which
// several shards share; the same holds for key heads of a linear layer. All shards have an mla layer's latent. Seams,
// pages and layers are the whole model's. INVALID_ARGUMENT naming the layer's field if its heads, or its convolution's
// channels, do not divide so.
absl::StatusOr<Layout> ShardLayout(Layout whole, const TensorShard& shard);

}  // namespace ashlar
