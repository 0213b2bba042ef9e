// SPDX-License-Identifier: Apache-2.0
// Composing chains of scalar, diagonal and elementwise transitions: every number of a state decays by itself, so the
// state streams through registers and each tuple is read once.
#pragma once

#include "kernels/cuda/chain.h"

namespace ashlar::kernels::cuda {

// Returns whether RunDecay supports these arguments: a family whose transitions are not matrices, end states of one
// dtype that begin at multiples of 16 bytes, d_k and d_v multiples of 8, and no rotation. The general kernel handles
// other arguments.
bool DecayFits(const ComposeArgs& args);

// The chain's steps are interiors whose end states are of `dtype`.
void RunDecay(const Chain& chain, DType dtype, CudaQueue& queue);

}  // namespace ashlar::kernels::cuda
