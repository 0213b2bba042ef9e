// SPDX-License-Identifier: Apache-2.0
// Floating-point operations of a chain, and the peak rate of this machine: they show whether full recompute is a fair
// baseline.
#pragma once

#include <cstdint>
#include <span>

#include "examples/refengine/engine.h"
#include "kernels/device.h"

namespace ashlar::refengine {

// The operations of the model's formulas, independent of the implementation: 2mnk per matrix product, half of the score
// matrix for causal attention, the token-by-token form of the recurrence. Exponentials, norms and activations count
// nothing.
struct Flops {
  double matrices = 0;     // all projections, MLP and head
  double attention = 0;    // 4 × head_dim per query head and visible key
  double recurrence = 0;   // 7 d_k d_v per token and value head: Sᵀk, decay, erase and write, Sᵀq
  double composition = 0;  // 2 d_k² d_v per interior and value head
  double total() const { return matrices + attention + recurrence + composition; }
};

// Logits are counted for one token.
Flops ChainFlops(const ModelConfig& config, int64_t start, std::span<const Step> chain);
Flops PrefillFlops(const ModelConfig& config, int64_t tokens);

// FLOP/s of fused multiply-adds from registers, all workers together, measured now (about 0.2 s).
double FmaPeak(kernels::Workers& workers);

}  // namespace ashlar::refengine
