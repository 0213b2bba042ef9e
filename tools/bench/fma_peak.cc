// SPDX-License-Identifier: Apache-2.0
// The peak rate of the CPU's multiply-add units, for its widest vectors.
#include <chrono>
#include <numeric>
#include <vector>

#include "kernels/host/simd/targets.h"
#include "tools/bench/bench.h"
#include "tools/bench/kernel_cases.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/bench/fma_peak.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::bench {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Enough independent sums to hide the latency of a multiply-add on two units, few enough for 16 registers.
constexpr size_t kSums = 12;

// Runs `rounds` rounds of multiply-adds and returns their number of operations; `sink` keeps the result alive.
double MultiplyAdd(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, 0.999f), term = hn::Set(d, 0.001f);
  hn::Vec<decltype(d)> sums[kSums];
  for (size_t i = 0; i < kSums; ++i) sums[i] = hn::Set(d, static_cast<float>(i));
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < kSums; ++i) sums[i] = hn::MulAdd(sums[i], factor, term);
  }
  for (size_t i = 1; i < kSums; ++i) sums[0] = hn::Add(sums[0], sums[i]);
  *sink = hn::GetLane(sums[0]);
  return 2.0 * kSums * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ashlar::bench {

HWY_EXPORT(MultiplyAdd);

double MeasureFmaPeak(double span, kernels::Workers& workers) {
  constexpr int64_t kRounds = 20'000;
  std::vector<double> operations(static_cast<size_t>(workers.Size()));
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  kernels::ParallelFor(workers, workers.Size(), [&](int64_t thread) {
    double& sum = operations[static_cast<size_t>(thread)];
    float sink = 0;
    while (elapsed() < span) sum += HWY_DYNAMIC_DISPATCH(MultiplyAdd)(kRounds, &sink);
    if (sink == 0) sum = 0;  // the sums tend to one; testing this keeps the compiler from removing them
  });
  return std::accumulate(operations.begin(), operations.end(), 0.0) / elapsed();
}

}  // namespace ashlar::bench
#endif
