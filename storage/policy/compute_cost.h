// SPDX-License-Identifier: Apache-2.0
// ComputeCost: the FLOPs of computing tokens, as an engine declares them, or estimated from shapes.
#pragma once

#include <cstdint>

#include "proto/layout.h"
#include "proto/object.h"
#include "proto/shard.h"

namespace ashlar::storage {

struct ComputeCost {
  double flops_per_token = 0;
  double flops_per_square = 0;  // causal attention over n tokens takes n² of these

  double Flops(uint64_t tokens) const {  // of a prefill from position 0
    const auto count = static_cast<double>(tokens);
    return count * (flops_per_token + count * flops_per_square);
  }
  double Flops(uint64_t begin, uint64_t end) const { return Flops(end) - Flops(begin); }
};

// Returns the declared cost. If flops_per_token is 0, returns an estimate of both numbers, for the whole model: the
// layout tells the number of layers and their heads. A model is taken to be as wide as its attention layers have query
// numbers (four query heads a key head), or, without attention, as its linear layers have value numbers. A layer of
// width w has 12 w² weights and takes two FLOPs for each; a linear layer's recurrence takes six for each number of its
// state, and attention adds 2 w n² for n tokens. Every price uses this estimate, so that objects of one model are
// compared fairly; it is within a factor of about three of published dense and sparse models, and up to ten for models
// with few key heads. `layout` is that of `shard`.
ComputeCost CostOf(const ComputeCost& declared, const Layout& layout, const TensorShard& shard);

// Estimates in the same way the FLOPs that a hit on this object saves, its shard's part of them: for objects whose
// engine is unknown, because a restart found them on the disk or another node has them.
double EstimateSavedFlops(const ObjectHeader& header);

}  // namespace ashlar::storage
