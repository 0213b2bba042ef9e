// SPDX-License-Identifier: Apache-2.0
// TensorShard: the tensor-parallel shard of a model that one engine process computes. The shards of one key form a
// *bundle*: they hit, are leased and are evicted together. The shard is not part of the namespace, so that all shards
// of a bundle share the key.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "proto/layout.h"

namespace ashlar {

struct TensorShard {
  uint32_t rank = 0;  // less than `size`
  uint32_t size = 1;  // 1 for the whole model
  bool operator==(const TensorShard&) const = default;
};

// Returns the layout of a shard's cached state for the valid layout `whole`: heads [rank / size, (rank + 1) / size) of
// every layer. If an attention layer has fewer key-value heads than shards, each shard has one head, which several
// shards share; the same holds for the key heads of a linear layer. All shards have the latent of an mla layer. Seams,
// pages and layers stay. INVALID_ARGUMENT names the layer's field if its heads or convolution channels are not
// divisible.
absl::StatusOr<Layout> ShardLayout(Layout whole, const TensorShard& shard);

}  // namespace ashlar
