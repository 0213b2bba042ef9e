// SPDX-License-Identifier: Apache-2.0
// Composing chains of dense, low-rank and vanished transitions on the tensor cores (MATH: "On the GPU").
#pragma once

#include "kernels/cuda/chain.h"

namespace ashlar::kernels::cuda {

// Returns whether RunCompose supports these arguments: a delta-rule family, tuples all of one dtype, d_k ≤ 128, d_k and
// d_v multiples of 8, matrices that begin at multiples of 16 bytes. The general kernel (chain.h) does the rest.
bool ComposeFits(const ComposeArgs& args);

// The chain's steps are interiors of dtype `dtype`.
void RunCompose(const Chain& chain, DType dtype, CudaQueue& queue);

}  // namespace ashlar::kernels::cuda
