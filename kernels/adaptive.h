// SPDX-License-Identifier: Apache-2.0
// Adaptive transitions: the smallest form in which a head's transition may be stored.
//
// By decay, most heads forget everything before a long segment, and the transition of a short one differs from its
// decay by few dimensions. So every head is stored as zero, low rank or dense, whichever is smallest with ‖T − T̃‖₂ ≤
// ε; composition skips and shrinks accordingly. The bound is absolute: a segment's effect on a state of norm 1 has an
// error of at most ε.
//
// Chosen once, when a segment is published, by plain loops in fp64 on the caller's workers.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/device.h"
#include "kernels/linear.h"

namespace ashlar::kernels {

// A transition near norm 1 that is stored dense in fp16 has itself an error of this size, so no smaller form needs to
// be better.
inline constexpr double kHalfError = 2.8e-4;
inline constexpr double kDefaultEpsilon = 3e-4;

// Bytes of one head's transition in a form, the size of its part's unit. Scalars, diagonals and the diagonal of a low
// rank are fp32 whatever the dtype.
int64_t TransitionBytes(const LinearShape& shape, TransitionForm form, int32_t rank, DType dtype);

// The largest rank that takes fewer bytes than the dense form.
int32_t LargestUsefulRank(const LinearShape& shape, DType dtype);

struct AdaptArgs {
  LinearShape shape;                         // families whose natural form is dense
  const float* const* transition = nullptr;  // [heads] → [d_k, d_k], in the shape's order
  // [heads] → [d_k], the product of the tokens' decays, not its logarithm; null if it is not known. T − diag(decay) has
  // at most `tokens` dimensions.
  const float* const* decay = nullptr;
  int64_t tokens = 0;
  double epsilon = kDefaultEpsilon;  // > 0
  DType dtype = DType::kF16;         // type of the stored form
  // Search for a low rank in long segments too, which pays only for families with a decay per channel (kda). Short ones
  // are always tried.
  bool search = false;
};

struct AdaptedHead {
  TransitionForm form = TransitionForm::kDense;  // kZero, kLowRank or kDense
  int32_t rank = 0;
  // An upper bound of ‖T − T̃‖₂ of the stored form, including rounding. At most ε, except for the dense form: there it
  // is the Frobenius norm of the rounding, several times the spectral norm.
  double error = 0;
};

// Chooses every head's form, and writes the stored form to target[h], which has space for the dense form. Invalid
// arguments abort with the field's name.
void AdaptTransitions(const AdaptArgs& args, Workers* workers, std::span<AdaptedHead> heads, void* const* target);

// An upper bound of ‖A‖₂ of a matrix [n, n], at most a twentieth too large: ‖A‖₂ ≤ ‖(AᵀA)^m‖_F^{1/2m}, n ≤ kMaxHeadDim.
double SpectralNormBound(std::span<const double> a, int32_t n);

}  // namespace ashlar::kernels
