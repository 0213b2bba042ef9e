// SPDX-License-Identifier: Apache-2.0
#include "client/engine/adapt_transitions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/adaptive.h"
#include "kernels/kernels.h"
#include "proto/tuple_parts.h"

namespace ashlar {
namespace {

constexpr uint32_t kHeads = 6, kDk = 32;
constexpr double kEpsilon = 1e-3;

// Head 0 vanishes. Heads 1 and 2 have rank 1 and 3, heads 3 and 4 have rank 2 and are adjacent, head 5 is dense. All
// have Frobenius norm 0.3, except the first.
std::vector<float> Transitions(std::mt19937& random) {
  constexpr uint32_t kRanks[kHeads] = {0, 1, 3, 2, 2, kDk};
  std::normal_distribution<float> normal;
  std::vector<float> all(kHeads * kDk * kDk);
  for (uint32_t head = 0; head < kHeads; ++head) {
    float* const t = all.data() + head * kDk * kDk;
    for (uint32_t r = 0; r < kRanks[head]; ++r) {
      std::vector<float> a(kDk), b(kDk);
      for (uint32_t i = 0; i < kDk; ++i) a[i] = normal(random), b[i] = normal(random);
      for (uint32_t i = 0; i < kDk * kDk; ++i) t[i] += a[i / kDk] * b[i % kDk];
    }
    float norm = 0;
    for (uint32_t i = 0; i < kDk * kDk; ++i) norm = std::hypot(norm, t[i]);
    for (uint32_t i = 0; i < kDk * kDk; ++i) t[i] = head == 0 ? 1e-6f : 0.3f * t[i] / norm;
  }
  return all;
}

Layout OneLayer(DType state, Family family = Family::kKda) {
  return {.page_tokens = 16,
          .layers = {LinearLayer{
              .family = family, .key_heads = 2, .value_heads = kHeads, .d_k = kDk, .d_v = 8, .state_dtype = state}}};
}

// Returns the transitions that the runs store, dense and in fp32.
std::vector<float> Restored(const std::vector<PublishParts::Run>& runs, DType state) {
  std::vector<float> all(kHeads * kDk * kDk);
  const DType dtype = TransitionType(state);
  const TupleShape shape{.heads = kHeads, .d_k = kDk};
  for (const auto& [run, units] : runs) {
    for (uint32_t i = 0; i < run.heads && run.form != TransitionForm::kZero; ++i) {
      const std::byte* unit = units + i * TransitionBytes(shape, state, run.form, run.rank);
      float* const t = all.data() + (run.first_head + i) * kDk * kDk;
      const auto number = [&](uint64_t at) { return kernels::ReadElement(dtype, unit, static_cast<int64_t>(at)); };
      if (run.form == TransitionForm::kDense) {
        for (uint32_t j = 0; j < kDk * kDk; ++j) t[j] = number(j);
        continue;
      }
      for (uint32_t j = 0; j < kDk; ++j) std::memcpy(t + j * kDk + j, unit + j * sizeof(float), sizeof(float));
      unit += kDk * sizeof(float);
      for (uint32_t j = 0; j < kDk * kDk; ++j) {
        for (uint32_t r = 0; r < run.rank; ++r)
          t[j] += number(r * kDk + j / kDk) * number((run.rank + r) * kDk + j % kDk);
      }
    }
  }
  return all;
}

TEST(AdaptTransitions, StoresEveryHeadInItsSmallestForm) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (const DType state : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(static_cast<int>(state));
    const Layout layout = OneLayer(state);
    const std::vector<float> computed = Transitions(random);
    std::vector<float> in_place = computed, elsewhere(computed.size());
    const bool wide = state == DType::kF32;
    const DenseTransitions memory{.computed = in_place.data(),
                                  .stored = reinterpret_cast<std::byte*>((wide ? in_place : elsewhere).data())};
    const auto runs = AdaptTransitions(layout, 1000, {&memory, 1}, kEpsilon, nullptr);
    std::vector<TransitionRun> heads;
    for (const auto& run : runs) heads.push_back(run.heads);
    using enum TransitionForm;
    const std::vector<TransitionRun> expected = {
        {0, 0, 1, kZero}, {0, 1, 1, kLowRank, 1}, {0, 2, 1, kLowRank, 3}, {0, 3, 2, kLowRank, 2}, {0, 5, 1, kDense}};
    EXPECT_EQ(heads, expected);
    EXPECT_TRUE(PlanForms(*PlanObject(layout, {}, {}, ObjectKind::kSegment, 1000), heads).ok());
    const std::vector<float> restored = Restored(runs, state);
    for (uint32_t head = 0; head < kHeads; ++head) {
      std::vector<double> difference;
      for (uint32_t i = head * kDk * kDk; i < (head + 1) * kDk * kDk; ++i)
        difference.push_back(restored[i] - computed[i]);
      const double bound = head == kHeads - 1 && !wide ? kDk * 0x1p-11 : kEpsilon;  // dense: only the rounding counts
      EXPECT_LE(kernels::SpectralNormBound(difference, kDk), 1.05 * bound) << "head " << head;
    }
  }
}

TEST(AdaptTransitions, StoresDenseWithoutEpsilon) {
  std::mt19937 random(1);
  const std::vector<float> computed = Transitions(random);
  std::vector<float> memory = computed;
  const DenseTransitions layer{.computed = memory.data(), .stored = reinterpret_cast<std::byte*>(memory.data())};
  const auto runs = AdaptTransitions(OneLayer(DType::kF32), 1000, {&layer, 1}, 0, nullptr);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].heads, (TransitionRun{0, 0, kHeads, TransitionForm::kDense}));
  EXPECT_EQ(runs[0].units, layer.stored);
  EXPECT_EQ(memory, computed);
}

// A table has space for some thousand runs; the layers with the smallest gain stay dense.
TEST(AdaptTransitions, KeepsLayersDenseIfATableIsFull) {
  constexpr uint32_t kLayers = 90, kManyHeads = 64, kSmall = 16;
  Layout layout{.page_tokens = 16};
  layout.layers.assign(kLayers, LinearLayer{.key_heads = 1, .value_heads = kManyHeads, .d_k = kSmall, .d_v = 1});
  std::vector<float> memory(kLayers * kManyHeads * kSmall * kSmall);
  std::vector<DenseTransitions> layers;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    float* const first = memory.data() + layer * kManyHeads * kSmall * kSmall;
    layers.push_back({.layer = layer, .computed = first, .stored = reinterpret_cast<std::byte*>(first)});
    // Every second head is zero; in odd layers one more.
    for (uint32_t head = 0; head < kManyHeads; ++head) {
      const bool zero = head % 2 == 1 || (layer % 2 == 1 && head == 0);
      for (uint32_t i = 0; i < kSmall; ++i) first[head * kSmall * kSmall + i * kSmall + i] = zero ? 0 : 1;
    }
  }
  const auto runs = AdaptTransitions(layout, 1, layers, kEpsilon, nullptr);
  std::vector<TransitionRun> heads;
  std::vector<uint32_t> zeros(kLayers);
  for (const auto& run : runs) {
    heads.push_back(run.heads);
    if (run.heads.form == TransitionForm::kZero) zeros[run.heads.layer] += run.heads.heads;
  }
  EXPECT_TRUE(PlanForms(*PlanObject(layout, {}, {}, ObjectKind::kSegment, 1), heads).ok());
  EXPECT_GT(runs.size(), 3500u) << "most of the table is used";
  EXPECT_GT(std::ranges::count(zeros, 0u), 0);
  for (uint32_t layer = 1; layer < kLayers; layer += 2) EXPECT_EQ(zeros[layer], kManyHeads / 2 + 1) << layer;
}

// The contract's sizes equal those of the kernels.
TEST(TransitionBytes, MatchTheKernels) {
  const kernels::LinearShape shape{.heads = 1, .key_heads = 1, .d_k = 24, .d_v = 40};
  const TupleShape same{.heads = 1, .d_k = 24, .d_v = 40};
  for (const DType state : {DType::kF32, DType::kF16, DType::kBF16}) {
    using enum TransitionForm;
    for (const TransitionForm form : {kScalar, kDiagonal, kDense, kElementwise, kLowRank, kZero}) {
      const int32_t rank = form == kLowRank ? 7 : 0;
      EXPECT_EQ(TransitionBytes(same, state, form, static_cast<uint32_t>(rank)),
                static_cast<uint64_t>(kernels::TransitionBytes(shape, form, rank, TransitionType(state))))
          << static_cast<int>(form);
    }
  }
}

}  // namespace
}  // namespace ashlar
