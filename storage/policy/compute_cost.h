// SPDX-License-Identifier: Apache-2.0
// ComputeCost: the FLOPs to compute tokens, declared by an engine or estimated from shapes.
#pragma once

#include <cstdint>

#include "proto/layout.h"
#include "proto/object.h"
#include "proto/shard.h"

namespace ashlar::storage {

struct ComputeCost {
  double flops_per_token = 0;
  double flops_per_square = 0;  // causal attention over n tokens takes n² of these

  double Flops(uint64_t tokens) const {  // FLOPs of a prefill from position 0
    const auto count = static_cast<double>(tokens);
    return count * (flops_per_token + count * flops_per_square);
  }
  double Flops(uint64_t begin, uint64_t end) const { return Flops(end) - Flops(begin); }
};

// Returns the declared cost. If flops_per_token is 0, estimates both numbers for the whole model from the number of
// layers and their heads. The model width is taken as that of the queries of its attention layers (four query heads per
// key head) or, without attention, that of the values of its linear layers; with opaque layers alone it is assumed to
// be 4,096. A layer of width w has 12 w² weights with two FLOPs each; a linear layer's recurrence takes six per state
// element, and attention adds 2 w n² for n tokens. All prices use the same estimate, so objects of one model are
// compared fairly. It is within a factor of about three of published dense and sparse models, and up to ten for models
// with few key heads. `layout` is that of `shard`.
ComputeCost CostOf(const ComputeCost& declared, const Layout& layout, const TensorShard& shard);

// Estimates in the same way the FLOPs of this shard that a hit on the object saves. For objects of an unknown engine:
// recovered from the disk, or held by another node.
double EstimateSavedFlops(const ObjectHeader& header);
// Returns the saved FLOPs per byte of the object. `flops` 0: they are estimated.
float SavedFlopsPerByte(const ObjectHeader& header, double flops);

}  // namespace ashlar::storage
