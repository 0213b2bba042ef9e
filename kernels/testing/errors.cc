// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/errors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace ashlar::kernels::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Logarithms, or Σ dt: infinite if nothing is left.
double LogarithmsError(std::span<const double> a, std::span<const double> b, double tolerance) {
  double worst = a.size() == b.size() ? 0 : kInfinity;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] == b[i]) continue;  // infinities too
    const double error = std::fabs(a[i] - b[i]) / (tolerance * std::fabs(b[i]) + kTransitionFloor);
    worst = std::isfinite(error) ? std::max(worst, error) : kInfinity;
  }
  return worst;
}

}  // namespace

double Tolerance(DType dtype, int64_t chain) {
  if (dtype == DType::kF32) return kTolerance;
  const double u = UnitRoundoff(dtype);
  return 0.5 * u * std::sqrt(static_cast<double>(chain)) + u;
}

double Tolerance(Dtypes dtypes, int64_t chain) {
  return std::max({Tolerance(dtypes.transition, chain), Tolerance(dtypes.state, chain),
                   // The running state is rounded once, at the end.
                   Tolerance(dtypes.running, 0)});
}

double Norm(std::span<const double> a) {
  double sum = 0;
  for (double value : a) sum += value * value;
  return std::sqrt(sum);
}

double AbsoluteError(std::span<const double> a, std::span<const double> b) {
  if (a.size() != b.size()) return kInfinity;
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::isfinite(sum) ? std::sqrt(sum) : kInfinity;
}

double RelativeError(std::span<const double> a, std::span<const double> b) {
  return AbsoluteError(a, b) / std::max(Norm(b), 1e-30);
}

double RelativeError(std::span<const float> a, std::span<const float> b) {
  return RelativeError(std::vector<double>(a.begin(), a.end()), std::vector<double>(b.begin(), b.end()));
}

double RelativeError(const States& a, const States& b) {
  double worst = a.heads() == b.heads() ? 0 : kInfinity;
  for (int32_t h = 0; h < std::min(a.heads(), b.heads()); ++h) {
    worst = std::max(worst, RelativeError(a.Values(h), b.Values(h)));
  }
  return worst;
}

double TransitionError(const Tuple& a, const Tuple& b, double tolerance) {
  // Below its normal range fp16 only has steps of 2^-24.
  const double steps = b.transition_dtype() == DType::kF16 ? b.shape().d_k * 0x1p-24 : 0;
  double worst = 0;
  for (int32_t h = 0; h < b.shape().heads; ++h) {
    const std::vector<double> actual = a.Transition(h), expected = b.Transition(h);
    if (b.form(h) == TransitionForm::kDense) {
      worst =
          std::max(worst, AbsoluteError(actual, expected) / (tolerance * Norm(expected) + kTransitionFloor + steps));
    } else {
      worst = std::max(worst, LogarithmsError(actual, expected, kTolerance));
    }
  }
  return worst;
}

}  // namespace ashlar::kernels::testing
