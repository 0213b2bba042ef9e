// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/overlap_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace ashlar::storage {
namespace {

using ::testing::DoubleNear;
using ::testing::IsEmpty;

double WeightAt(const std::vector<OverlapModel::Mass>& model, uint64_t depth, uint64_t around = 0) {
  double weight = 0;
  for (const OverlapModel::Mass& mass : model) {
    if (mass.depth + around >= depth && mass.depth <= depth + around) weight += mass.weight;
  }
  return weight;
}

double Sum(const std::vector<OverlapModel::Mass>& model) {
  double sum = 0;
  for (const OverlapModel::Mass& mass : model) sum += mass.weight;
  return sum;
}

TEST(OverlapModelTest, IsEmptyAtFirst) {
  const OverlapModel model;
  EXPECT_EQ(model.observed(), 0u);
  EXPECT_THAT(model.Between(0, 1000), IsEmpty());
}

// Instructions of one length in front of whatever was asked.
TEST(OverlapModelTest, ExpectsTheSameDepthFromTheStart) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 200; ++i) model.Observe(900, 1000 + random() % 5000);
  EXPECT_EQ(model.observed(), 200u);
  EXPECT_GT(WeightAt(model.Between(0, 7777), 900), 0.9);
}

// Documents of any length with a short question behind.
TEST(OverlapModelTest, ExpectsTheSameDistanceFromTheEnd) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 200; ++i) {
    const uint64_t length = 1000 + random() % 5000;
    model.Observe(length - 30, length);
  }
  EXPECT_GT(WeightAt(model.Between(0, 7777), 7777 - 30), 0.9);
}

// Questions are not all of one length: a guess that is off by a few tokens counts as a good one.
TEST(OverlapModelTest, ForetellingNearlyCounts) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 400; ++i) {
    const uint64_t length = 1000 + random() % 50000;
    model.Observe(length - 25 - random() % 11, length);
  }
  EXPECT_GT(WeightAt(model.Between(0, 77777), 77777 - 30, 5), 0.9);
}

// Foresight is of the last requests: who foretells them is asked, whoever was right for long before.
TEST(OverlapModelTest, FollowsWhoForetellsTheLastRequests) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 2000; ++i) model.Observe(900, 5000 + random() % 50000);
  EXPECT_LT(WeightAt(model.Between(1000, 77777), 77777 - 30, 16), 0.01);
  for (int i = 0; i < 500; ++i) {
    const uint64_t length = 5000 + random() % 50000;
    model.Observe(length - 30, length);
  }
  // Four fifths of what the distances from the end are is still the time when depths were alike.
  const std::vector<OverlapModel::Mass> now = model.Between(0, 77777);
  EXPECT_GT(WeightAt(now, 77777 - 30), 0.15);
  EXPECT_LT(WeightAt(now, 900), 0.03) << "asked for no more than its least share";
}

TEST(OverlapModelTest, LaterRequestsCountMore) {
  OverlapModel model;
  for (int i = 0; i < 8192; ++i) model.Observe(100, 100'000);
  for (int i = 0; i < 8192; ++i) model.Observe(200, 100'000);
  const std::vector<OverlapModel::Mass> masses = model.Between(0, 50'000);
  // A weight falls to 1/e in 4096 requests.
  EXPECT_THAT(WeightAt(masses, 100) / WeightAt(masses, 200), DoubleNear(std::exp(-2), 0.001));
}

// Far longer than it takes for weights to be scaled down (100 ln 10 · 4096 requests).
TEST(OverlapModelTest, WeightsDoNotOverflow) {
  OverlapModel model;
  for (int i = 0; i < 1'200'000; ++i) model.Observe(100 + (i % 2 == 0 ? 0 : 50), 100'000);
  const std::vector<OverlapModel::Mass> masses = model.Between(0, 50'000);
  EXPECT_THAT(WeightAt(masses, 100) / WeightAt(masses, 150), DoubleNear(1, 0.01));
  EXPECT_THAT(Sum(model.Between(0, 100'000)), DoubleNear(1, 1e-6));
}

TEST(OverlapModelTest, StaysBounded) {
  OverlapModel model;
  for (uint64_t i = 0; i < 40'000; ++i) model.Observe(1 + i * 7, 1'000'000'000 + i * 20);
  const std::vector<OverlapModel::Mass> masses = model.Between(0, 2'000'000'000);
  EXPECT_LE(masses.size(), 2u * 4096);
  EXPECT_GE(masses.size(), 2000u);
  EXPECT_LE(Sum(masses), 1 + 1e-9);
  // The latest is there; the oldest went.
  EXPECT_GT(WeightAt(masses, 1 + 39'999 * 7), 0);
  EXPECT_EQ(WeightAt(masses, 1), 0);
}

// Depths at which many requests parted stay, however many requests parted somewhere else once.
TEST(OverlapModelTest, TheLightestGoFirst) {
  OverlapModel model;
  for (uint64_t i = 0; i < 30'000; ++i) model.Observe(i % 3 == 0 ? 500 : 1000 + i, 100'000'000);
  EXPECT_GT(WeightAt(model.Between(0, 50'000'000), 500), 0.15);
}

TEST(OverlapModelTest, AnswersForWhatLiesBetween) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapModel model;
  for (int i = 0; i < 500; ++i) {
    const uint64_t length = random() % 300;
    model.Observe(random() % 300, length);  // beyond the prompt's end, too: decoded tokens were common
    const uint64_t begin = random() % 300, end = random() % 300;
    const std::vector<OverlapModel::Mass> masses = model.Between(begin, end);
    uint64_t before = begin;
    for (const OverlapModel::Mass& mass : masses) {
      ASSERT_GT(mass.depth, before) << "by depth, each once, behind the begin";
      ASSERT_LE(mass.depth, end);
      ASSERT_GT(mass.weight, 0);
      before = mass.depth;
    }
    ASSERT_LE(Sum(masses), 1 + 1e-9);
    ASSERT_TRUE(begin < end || masses.empty());
    // Nothing is lost between two ranges that meet.
    const uint64_t middle = (begin + end) / 2;
    if (end > begin) {
      double behind = 0;
      for (const OverlapModel::Mass& mass : masses) behind += mass.depth > middle ? mass.weight : 0;
      ASSERT_THAT(Sum(model.Between(middle, end)), DoubleNear(behind, 1e-9));
    }
  }
}

// The end itself is where a prompt is parted from that is a part of the next one.
TEST(OverlapModelTest, ThePromptsEndCounts) {
  OverlapModel model;
  for (uint64_t i = 0; i < 50; ++i) model.Observe(100 + i * 40, 100 + i * 40);
  EXPECT_GT(WeightAt(model.Between(0, 9999), 9999), 0.8);
  EXPECT_EQ(WeightAt(model.Between(9999, 9999), 9999), 0) << "nothing is behind its begin";
}

}  // namespace
}  // namespace ashlar::storage
