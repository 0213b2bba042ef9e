// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/overlap_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace ashlar::storage {
namespace {

using ::testing::DoubleNear;
using ::testing::IsEmpty;

double WeightAt(const std::vector<OverlapForecast::Mass>& model, uint64_t depth, uint64_t around = 0) {
  double weight = 0;
  for (const OverlapForecast::Mass& mass : model) {
    if (mass.depth + around >= depth && mass.depth <= depth + around) weight += mass.weight;
  }
  return weight;
}

double Sum(const std::vector<OverlapForecast::Mass>& model) {
  double sum = 0;
  for (const OverlapForecast::Mass& mass : model) sum += mass.weight;
  return sum;
}

TEST(OverlapModelTest, IsEmptyAtFirst) {
  const OverlapModel model;
  EXPECT_THAT(model.Forecast().Within(1000), IsEmpty());
}

TEST(OverlapModelTest, AGuessCountsAsOneDivergence) {
  OverlapModel model;
  EXPECT_THAT(model.Forecast(SIZE_MAX, true).Within(1000), IsEmpty());
  for (int observed = 1; observed < 5; ++observed) {
    model.Observe(700, 1000);
    const std::vector<OverlapForecast::Mass> masses = model.Forecast(64, true).Within(1000);
    const double guess = 1.0 / (observed + 1);
    EXPECT_THAT(WeightAt(masses, 700), DoubleNear(1 - guess, 1e-9));
    EXPECT_THAT(WeightAt(masses, 512) + WeightAt(masses, 1000 - 512), DoubleNear(guess / 20, 1e-9));
    EXPECT_THAT(WeightAt(masses, 4) + WeightAt(masses, 1000 - 4), DoubleNear(guess / 20, 1e-9));
    EXPECT_LE(Sum(masses), 1 + 1e-9);
  }
}

// A forecast in parts has few masses, none of which is after the places that it stands for, or much before them.
TEST(OverlapModelTest, PartsAreServedByTheirFirstDepth) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 20'000; ++i) {
    const uint64_t length = 4000 + random() % 4000;
    model.Observe(random() % 3 == 0 ? 700 : 1000 + random() % 3000, length);
  }
  constexpr size_t kParts = 64;
  for (const uint64_t length : {500u, 3000u, 8000u, 20'000u}) {
    const std::vector<OverlapForecast::Mass> exact = model.Forecast().Within(length);
    const std::vector<OverlapForecast::Mass> parts = model.Forecast(kParts).Within(length);
    EXPECT_LE(parts.size(), 4 * kParts);
    double before_exact = 0, before_parts = 0;
    size_t next = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const OverlapForecast::Mass& mass = parts[i];
      for (; next < exact.size() && exact[next].depth < mass.depth; ++next) before_exact += exact[next].weight;
      // One range of each histogram may be open at a depth, and one is left out if the prompt is shorter.
      if (i == 0 || parts[i - 1].depth < mass.depth) {
        EXPECT_NEAR(before_parts, before_exact, 3.0 / kParts) << mass.depth;
      }
      before_parts += mass.weight;
    }
    EXPECT_NEAR(WeightAt(parts, 700), WeightAt(exact, 700), 1.0 / kParts);
  }
}

// Instructions of one length before different queries.
TEST(OverlapModelTest, ExpectsTheSameDepthFromTheStart) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 200; ++i) model.Observe(900, 1000 + random() % 5000);
  EXPECT_GT(WeightAt(model.Forecast().Within(7777), 900), 0.9);
}

// Documents of any length before a short question.
TEST(OverlapModelTest, ExpectsTheSameDistanceFromTheEnd) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 200; ++i) {
    const uint64_t length = 1000 + random() % 5000;
    model.Observe(length - 30, length);
  }
  EXPECT_GT(WeightAt(model.Forecast().Within(7777), 7777 - 30), 0.9);
}

// Questions are not all of one length: a guess that is off by a few tokens counts as a good one.
TEST(OverlapModelTest, NearPredictionsCount) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 400; ++i) {
    const uint64_t length = 1000 + random() % 50000;
    model.Observe(length - 25 - random() % 11, length);
  }
  EXPECT_GT(WeightAt(model.Forecast().Within(77777), 77777 - 30, 5), 0.9);
}

// The mixture follows the histogram that predicts recent requests best, whichever was better long before.
TEST(OverlapModelTest, FollowsThePredictorOfTheLastRequests) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 2000; ++i) model.Observe(900, 5000 + random() % 50000);
  EXPECT_LT(WeightAt(model.Forecast().Within(77777), 77777 - 30, 16), 0.01);
  for (int i = 0; i < 500; ++i) {
    const uint64_t length = 5000 + random() % 50000;
    model.Observe(length - 30, length);
  }
  // Four fifths of the weight of distances from the end is still from the time of equal depths.
  const std::vector<OverlapForecast::Mass> now = model.Forecast().Within(77777);
  EXPECT_GT(WeightAt(now, 77777 - 30), 0.15);
  EXPECT_LT(WeightAt(now, 900), 0.03) << "asked for no more than its least share";
}

TEST(OverlapModelTest, LaterRequestsCountMore) {
  OverlapModel model;
  for (int i = 0; i < 8192; ++i) model.Observe(100, 100'000);
  for (int i = 0; i < 8192; ++i) model.Observe(200, 100'000);
  const std::vector<OverlapForecast::Mass> masses = model.Forecast().Within(50'000);
  // A weight falls to 1/e in 4096 requests.
  EXPECT_THAT(WeightAt(masses, 100) / WeightAt(masses, 200), DoubleNear(std::exp(-2), 0.001));
}

// Much longer than the interval at which weights are scaled down (100 ln 10 · 4096 requests).
TEST(OverlapModelTest, WeightsDoNotOverflow) {
  OverlapModel model;
  for (int i = 0; i < 1'200'000; ++i) model.Observe(100 + (i % 2 == 0 ? 0 : 50), 100'000);
  const std::vector<OverlapForecast::Mass> masses = model.Forecast().Within(50'000);
  EXPECT_THAT(WeightAt(masses, 100) / WeightAt(masses, 150), DoubleNear(1, 0.01));
  EXPECT_THAT(Sum(model.Forecast().Within(100'000)), DoubleNear(1, 1e-6));
}

TEST(OverlapModelTest, StaysBounded) {
  OverlapModel model;
  for (uint64_t i = 0; i < 40'000; ++i) model.Observe(1 + i * 7, 1'000'000'000 + i * 20);
  const std::vector<OverlapForecast::Mass> masses = model.Forecast().Within(2'000'000'000);
  EXPECT_LE(masses.size(), 2u * 4096);
  EXPECT_GE(masses.size(), 2000u);
  EXPECT_LE(Sum(masses), 1 + 1e-9);
  // The latest is present; the oldest was dropped.
  EXPECT_GT(WeightAt(masses, 1 + 39'999 * 7), 0);
  EXPECT_EQ(WeightAt(masses, 1), 0);
}

// Depths at which many requests diverged stay, even if many requests diverge once at other depths.
TEST(OverlapModelTest, DropsTheLightestFirst) {
  OverlapModel model;
  for (uint64_t i = 0; i < 30'000; ++i) model.Observe(i % 3 == 0 ? 500 : 1000 + i, 100'000'000);
  EXPECT_GT(WeightAt(model.Forecast().Within(50'000'000), 500), 0.15);
}

TEST(OverlapModelTest, MassesAreInsideThePromptAndSorted) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 500; ++i) {
    const uint64_t length = random() % 300;
    model.Observe(random() % 300, length);  // beyond the prompt's end, too: decoded tokens were common
    const uint64_t end = random() % 300;
    const std::vector<OverlapForecast::Mass> masses = model.Forecast().Within(end);
    uint64_t before[2] = {0, 0};
    uint64_t last = 0;
    for (const OverlapForecast::Mass& mass : masses) {
      ASSERT_GT(mass.depth, before[mass.from_end]) << "each depth once per histogram";
      ASSERT_GE(mass.depth, last);
      ASSERT_LE(mass.depth, end);
      ASSERT_GT(mass.weight, 0);
      before[mass.from_end] = last = mass.depth;
    }
    ASSERT_LE(Sum(masses), 1 + 1e-9);
    // In a longer prompt, each mass keeps its depth or its distance from the end.
    const std::vector<OverlapForecast::Mass> longer = model.Forecast().Within(end + 40);
    for (const OverlapForecast::Mass& mass : masses) {
      const uint64_t depth = mass.from_end ? mass.depth + 40 : mass.depth;
      ASSERT_TRUE(std::ranges::any_of(longer, [&](const OverlapForecast::Mass& other) {
        return other.depth == depth && other.from_end == mass.from_end && other.weight == mass.weight;
      })) << mass.depth;
    }
  }
}

// A prompt that is a prefix of the next one diverges at its own end.
TEST(OverlapModelTest, CountsThePromptsEnd) {
  OverlapModel model;
  for (uint64_t i = 0; i < 50; ++i) model.Observe(100 + i * 40, 100 + i * 40);
  EXPECT_GT(WeightAt(model.Forecast().Within(9999), 9999), 0.8);
}

}  // namespace
}  // namespace ashlar::storage
