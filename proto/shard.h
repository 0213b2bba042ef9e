// The tensor-parallel shard of a model that one process of an engine computes. Shards of one size are one *bundle*: of
// a key they hit, are leased and are evicted as one. A shard is outside the namespace: all of a bundle share keys.
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

// The layout of what a shard caches, from a valid one of the whole model: heads [rank / size, (rank + 1) / size) of
// every layer. Of an attention layer with fewer key-value heads than shards each has one, which several share; all have
// an mla layer's latent, and key heads of a linear layer likewise. Seams, pages and layers are the whole model's.
// INVALID_ARGUMENT naming the layer's field when its heads do not divide so, or its convolution's channels.
absl::StatusOr<Layout> ShardLayout(Layout whole, const TensorShard& shard);

}  // namespace ashlar
