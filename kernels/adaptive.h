// SPDX-License-Identifier: Apache-2.0
// Adaptive transitions: the smallest form in which a head's transition may be stored.
//
// Decay lets most heads erase a long segment's past altogether, and the transition of a short one differs from its
// decay by few dimensions. So every head is stored as zero, low rank or dense, whichever is smallest with
// ‖T − T̃‖₂ ≤ ε; composition skips and shrinks accordingly. The bound is absolute: what a segment does to a state of
// norm 1 is wrong by at most ε.
//
// Chosen once, when a segment is published; plain loops in fp64 on the workers that the caller lends.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/device.h"
#include "kernels/linear.h"

namespace ashlar::kernels {

// A transition near norm 1 that is stored dense in fp16 is itself wrong by so much: no smaller form can be asked to do
// better.
inline constexpr double kHalfError = 2.8e-4;
inline constexpr double kDefaultEpsilon = 3e-4;

// Bytes of one head's transition in a form: what its part's unit holds. Scalars, diagonals and the diagonal of a low
// rank are fp32 whatever the dtype.
int64_t TransitionBytes(const LinearShape& shape, TransitionForm form, int32_t rank, DType dtype);

// The largest rank that takes fewer bytes than the dense form.
int32_t LargestUsefulRank(const LinearShape& shape, DType dtype);

struct AdaptArgs {
  LinearShape shape;                         // families whose natural form is dense
  const float* const* transition = nullptr;  // [heads] → [d_k, d_k], in the shape's order
  // [heads] → [d_k], the product of the tokens' decays, not its logarithm; null where it is not known. T − diag(decay)
  // has at most `tokens` dimensions.
  const float* const* decay = nullptr;
  int64_t tokens = 0;
  double epsilon = kDefaultEpsilon;  // > 0
  DType dtype = DType::kF16;         // type of the stored form
  // Look for a low rank in long segments too, which only families with a decay per channel (kda) reward. Short ones are
  // always tried.
  bool search = false;
};

struct AdaptedHead {
  TransitionForm form = TransitionForm::kDense;  // kZero, kLowRank or kDense
  int32_t rank = 0;
  // No less than ‖T − T̃‖₂ of what is stored, rounding included. At most ε, but for the dense form: there it is the
  // Frobenius norm of the rounding, several times the spectral one.
  double error = 0;
};

// Chooses every head's form, and writes what is to be stored to target[h], which has room for the dense form's bytes.
// Arguments that make no sense abort with the field's name.
void AdaptTransitions(const AdaptArgs& args, Workers* workers, std::span<AdaptedHead> heads, void* const* target);

// No less than ‖A‖₂ of a matrix [n, n], and at most a twentieth more: ‖A‖₂ ≤ ‖(AᵀA)^m‖_F^{1/2m}, n ≤ kMaxHeadDim.
double SpectralNormBound(std::span<const double> a, int32_t n);

}  // namespace ashlar::kernels
