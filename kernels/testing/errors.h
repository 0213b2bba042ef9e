// SPDX-License-Identifier: Apache-2.0
// The comparison of results and the accepted errors. u is the roundoff of a stored type: 2⁻¹¹ for
// fp16, 2⁻⁸ for bf16.
//
// - Linear layers, states and outputs, relative per head: 1e-5 if everything is fp32; 16-bit tuples: 0.5·u·√n + u for a
//   chain of n; a running 16-bit state adds u.
// - Transitions that are matrices: the same times ‖T‖, plus 1e-6 (fp16: plus d_k·2⁻²⁴). Logarithms x of decays:
//   1e-5·|x| + 1e-6.
// - Decoding from buffers, relative: 1e-5, plus 1.5 u for 16-bit buffers, plus u·(0.5·√n + 1) for 16-bit states that
//   are flushed n times.
// - Attention: 1e-5 between back ends; between two ways of storing keys 2e-5 for fp32 pages, 4 u for others.
// - Rows: copies to the bit; rotations two roundings and 1e-6.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/testing/stored.h"

namespace ashlar::kernels::testing {

// Accepted error of states and outputs, relative Frobenius, per head, where everything is fp32.
inline constexpr double kTolerance = 1e-5;
// The accepted error of numbers that pass through a type of roundoff u in a chain of `chain` interiors: 0.5·u·√chain +
// u; fp32: kTolerance, however long the chain.
double Tolerance(DType dtype, int64_t chain);
// The accepted error of the coarsest of three types.
double Tolerance(Dtypes dtypes, int64_t chain);

// A transition is a contraction whose error matters absolutely: if products of erases have left little of it, digits
// lost in the initial identity do not count relative to the rest.
inline constexpr double kTransitionFloor = 1e-6;

double Norm(std::span<const double> a);
// ‖a − b‖, Frobenius; +∞ if `a` holds a number that is not finite, or the sizes differ.
double AbsoluteError(std::span<const double> a, std::span<const double> b);
// ‖a − b‖ / ‖b‖, Frobenius; +∞ if `a` holds a number that is not finite, or the sizes differ. If both are so small that
// fp32 has lost digits (‖b‖ < 1e-30), the difference counts against 1e-30.
double RelativeError(std::span<const double> a, std::span<const double> b);
double RelativeError(std::span<const float> a, std::span<const float> b);
// The largest error of any head.
double RelativeError(const States& a, const States& b);

// Returns the largest error of any head's transition, as a multiple of the accepted error: 1 is the bound. Matrices:
// the bound is tolerance × ‖T‖ plus the floor. Logarithms x: e^x may err by no more than the floor and the tolerance
// together.
double TransitionError(const Tuple& a, const Tuple& b, double tolerance);

}  // namespace ashlar::kernels::testing
