// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "examples/refengine/flops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "examples/refengine/fma_peak.cc"
// Highway wants this order.
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace ashlar::refengine::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Enough independent chains to fill two FMA units of four or five cycles latency. Returns the operations done.
double MultiplyAddsT(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, 0.999f), b = hn::Set(d, 0.001f);
  // Begin with different numbers, because equal chains would be computed once.
  const auto start = [&](int chain) HWY_ATTR { return hn::Set(d, sink[0] + static_cast<float>(chain)); };
  auto v0 = start(0), v1 = start(1), v2 = start(2), v3 = start(3), v4 = start(4), v5 = start(5);
  auto v6 = start(6), v7 = start(7), v8 = start(8), v9 = start(9), v10 = start(10), v11 = start(11);
  for (int64_t i = 0; i < rounds; ++i) {
    v0 = hn::MulAdd(v0, a, b), v1 = hn::MulAdd(v1, a, b), v2 = hn::MulAdd(v2, a, b), v3 = hn::MulAdd(v3, a, b);
    v4 = hn::MulAdd(v4, a, b), v5 = hn::MulAdd(v5, a, b), v6 = hn::MulAdd(v6, a, b), v7 = hn::MulAdd(v7, a, b);
    v8 = hn::MulAdd(v8, a, b), v9 = hn::MulAdd(v9, a, b), v10 = hn::MulAdd(v10, a, b), v11 = hn::MulAdd(v11, a, b);
  }
  const auto low = hn::Add(hn::Add(hn::Add(v0, v1), hn::Add(v2, v3)), hn::Add(v4, v5));
  const auto high = hn::Add(hn::Add(hn::Add(v6, v7), hn::Add(v8, v9)), hn::Add(v10, v11));
  *sink = hn::GetLane(hn::SumOfLanes(d, hn::Add(low, high)));
  return 12.0 * 2.0 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

}  // namespace ashlar::refengine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ashlar::refengine {

HWY_EXPORT(MultiplyAddsT);

// Each worker's best time counts, so that other processes on the machine cannot make the peak look low, and results
// relative to it look good.
double FmaPeak(kernels::Workers& workers) {
  constexpr int kMoments = 100;
  constexpr int64_t kRounds = 500'000;  // about a millisecond: shorter than a scheduler's slice
  std::vector<double> best(workers.Size());
  kernels::ParallelFor(workers, workers.Size(), [&](int64_t worker) {
    float sink = 0;
    for (int moment = 0; moment < kMoments; ++moment) {
      const auto begin = std::chrono::steady_clock::now();
      const double operations = HWY_DYNAMIC_DISPATCH(MultiplyAddsT)(kRounds, &sink);
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      best[worker] = std::max(best[worker], operations / seconds);
    }
  });
  return std::accumulate(best.begin(), best.end(), 0.0);
}

}  // namespace ashlar::refengine
#endif
