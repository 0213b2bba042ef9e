// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/checkpoint_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace ashlar::storage {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Mass = OverlapForecast::Mass;
using Cost = std::function<double(uint64_t)>;

double TokensAt(uint64_t depth) {
  return static_cast<double>(depth);
}

// Every request that diverges at a depth is recomputed from the last checkpoint at or before it. A direct
// implementation.
double Recomputed(const std::vector<Mass>& model, uint64_t begin, const std::vector<uint64_t>& checkpoints,
                  const Cost& cost) {
  double sum = 0;
  for (const Mass& mass : model) {
    uint64_t from = begin;
    for (const uint64_t checkpoint : checkpoints) {
      if (checkpoint <= mass.depth) from = std::max(from, checkpoint);
    }
    sum += mass.weight * (cost(mass.depth) - cost(from));
  }
  return sum;
}

// The minimum over all ways to place at most `most` checkpoints at multiples of `page` after `begin`.
double LeastByBruteForce(const std::vector<Mass>& model, uint64_t begin, uint64_t page, size_t most, const Cost& cost,
                         std::vector<uint64_t> chosen = {}) {
  double least = Recomputed(model, begin, chosen, cost);
  if (most == 0) return least;
  const uint64_t last = model.empty() ? 0 : model.back().depth;
  const uint64_t after = chosen.empty() ? begin : chosen.back();
  for (uint64_t at = (after / page + 1) * page; at <= last; at += page) {
    chosen.push_back(at);
    least = std::min(least, LeastByBruteForce(model, begin, page, most - 1, cost, chosen));
    chosen.pop_back();
  }
  return least;
}

// A plan for a prompt of the model's length.
struct Planned {
  Planned(const std::vector<Mass>& model, uint64_t begin, uint64_t page, size_t most, const Cost& cost,
          uint64_t shared = 0)
      : tokens(model.empty() ? begin : model.back().depth),
        plan(model, tokens, page, most, cost),
        placed(plan.For({.resume = begin, .shared = std::max(begin, shared), .tokens = tokens}, page, cost)) {}
  size_t most() const { return placed.most(); }
  double Expected(size_t checkpoints) const { return placed.Expected(checkpoints); }
  std::vector<uint64_t> Positions(size_t checkpoints) const { return placed.Positions(checkpoints); }

  uint64_t tokens;
  CheckpointPlan plan;
  CheckpointPlan::Placement placed;
};

// Of `model`, the masses up to `shared` (at least `begin`) are known not to happen.
void ExpectExact(std::vector<Mass> model, uint64_t begin, uint64_t page, size_t most, const Cost& cost,
                 uint64_t shared = 0) {
  const Planned plan(model, begin, page, most, cost, shared);
  std::erase_if(model, [&](const Mass& mass) { return mass.depth <= std::max(begin, shared); });
  const double scale = model.empty() ? 1 : cost(model.back().depth);
  ASSERT_LE(plan.most(), most);
  for (size_t m = 0; m <= plan.most(); ++m) {
    const double least = LeastByBruteForce(model, begin, page, m, cost);
    ASSERT_THAT(plan.Expected(m), DoubleNear(least, 1e-12 * scale)) << m << " checkpoints";
    const std::vector<uint64_t> positions = plan.Positions(m);
    ASSERT_LE(positions.size(), m);
    ASSERT_THAT(Recomputed(model, begin, positions, cost), DoubleNear(least, 1e-12 * scale)) << m << " checkpoints";
    uint64_t before = begin;
    for (const uint64_t position : positions) {
      ASSERT_GT(position, before);
      ASSERT_EQ(position % page, 0u);
      before = position;
    }
  }
  // More checkpoints would make no difference.
  ASSERT_THAT(plan.Expected(plan.most()), DoubleNear(LeastByBruteForce(model, begin, page, most, cost), 1e-12 * scale));
}

std::vector<Mass> RandomModel(std::mt19937_64& random, uint64_t begin, uint64_t end) {
  std::vector<Mass> model;
  double sum = 0;
  for (uint64_t depth = begin + 1; depth <= end; ++depth) {
    if (random() % 3 == 0) continue;
    const double weight = std::exp(static_cast<double>(random() % 1000) / 125);  // some are heavy
    model.push_back({depth, weight});
    sum += weight;
  }
  for (Mass& mass : model) mass.weight /= sum;
  return model;
}

TEST(CheckpointPlanTest, MatchesBruteForce) {
  for (int round = 0; round < 300; ++round) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const uint64_t begin = random() % 5, page = 1 + random() % 4;
    const std::vector<Mass> model = RandomModel(random, random() % (begin + 1), begin + 1 + random() % 12);
    ASSERT_NO_FATAL_FAILURE(ExpectExact(model, begin, page, random() % 5, TokensAt, random() % 8));
  }
}

// Long prefixes cost more per token than short ones, so checkpoints belong deeper.
TEST(CheckpointPlanTest, MatchesBruteForceWithFlops) {
  const Cost flops = [](uint64_t depth) { return TokensAt(depth) * (7 + 3 * TokensAt(depth)); };
  for (int round = 0; round < 100; ++round) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const uint64_t begin = random() % 5, page = 1 + random() % 3;
    const std::vector<Mass> model = RandomModel(random, random() % (begin + 1), begin + 1 + random() % 12);
    ASSERT_NO_FATAL_FAILURE(ExpectExact(model, begin, page, random() % 4, flops, random() % 8));
  }
  const std::vector<Mass> model = {{20, 0.6}, {40, 0.2}};
  EXPECT_THAT(Planned(model, 0, 1, 1, TokensAt).Positions(1), ElementsAre(20));
  EXPECT_THAT(Planned(model, 0, 1, 1, [](uint64_t d) { return std::pow(TokensAt(d), 3); }).Positions(1),
              ElementsAre(40))
      << "0.2 · 40³ is more than 0.8 · 20³";
}

TEST(CheckpointPlanTest, MatchesTheTestVectors) {
  const char* const shared = std::getenv("ASHLAR_SHARED");
  const std::string folder = shared != nullptr ? shared : std::string(ASHLAR_SOURCE_DIR) + "/../shared";
  std::ifstream file(folder + "/vectors/vectors.json");
  if (!file) GTEST_SKIP() << "no " << folder << "/vectors/vectors.json; ASHLAR_SHARED names the folder";
  const nlohmann::json vectors = nlohmann::json::parse(file).at("placement");
  ASSERT_FALSE(vectors.empty());
  for (const nlohmann::json& vector : vectors) {
    std::vector<Mass> model;
    for (const double mass : vector.at("mass")) model.push_back({model.size(), mass});
    model.erase(model.begin());  // prompts that diverge at the start cost nothing, and are not after it
    const size_t budget = vector.at("budget");
    const Planned plan(model, 0, 1, budget, TokensAt);
    EXPECT_THAT(plan.Expected(plan.most()), DoubleNear(vector.at("cost"), 1e-12));
    EXPECT_THAT(Recomputed(model, 0, plan.Positions(budget), TokensAt), DoubleNear(vector.at("cost"), 1e-12));
  }
}

TEST(CheckpointPlanTest, UniformLawsGiveBalancedGaps) {
  for (const uint64_t length : {20u, 99u, 100u, 101u, 640u}) {
    std::vector<Mass> model;
    for (uint64_t depth = 1; depth <= length; ++depth) model.push_back({depth, 1.0 / static_cast<double>(length)});
    for (const size_t most : {1u, 2u, 3u, 7u, 16u}) {
      std::vector<uint64_t> ends = Planned(model, 0, 1, most, TokensAt).Positions(most);
      ASSERT_EQ(ends.size(), most);
      ends.insert(ends.begin(), 0);
      ends.push_back(length + 1);
      uint64_t least = length, largest = 0;
      for (size_t i = 1; i < ends.size(); ++i) {
        least = std::min(least, ends[i] - ends[i - 1]);
        largest = std::max(largest, ends[i] - ends[i - 1]);
      }
      EXPECT_LE(largest - least, 1u) << most << " in " << length;
    }
  }
}

TEST(CheckpointPlanTest, PutsCheckpointsAtPageEnds) {
  const std::vector<Mass> model = {{5, 0.1}, {63, 0.2}, {64, 0.3}, {100, 0.2}, {127, 0.2}};
  const Planned plan(model, 3, 64, 4, TokensAt);
  EXPECT_EQ(plan.most(), 1u) << "64 is the only page's begin that anything is behind";
  EXPECT_THAT(plan.Positions(4), ElementsAre(64));
  EXPECT_THAT(Planned(model, 64, 64, 4, TokensAt).Positions(4), IsEmpty());
}

TEST(CheckpointPlanTest, NeedsNoMoreCheckpointsThanMasses) {
  const std::vector<Mass> model = {{10, 0.25}, {30, 0.5}};
  const Planned plan(model, 0, 1, 8, TokensAt);
  EXPECT_EQ(plan.most(), 2u);
  EXPECT_THAT(plan.Positions(8), ElementsAre(10, 30));
  EXPECT_DOUBLE_EQ(plan.Expected(0), 17.5);
  EXPECT_DOUBLE_EQ(plan.Expected(1), 2.5);
  EXPECT_DOUBLE_EQ(plan.Expected(2), 0);
}

TEST(CheckpointPlanTest, EmptyModelHasNoCheckpoints) {
  const Planned plan({}, 12, 4, 8, TokensAt);
  EXPECT_EQ(plan.most(), 0u);
  EXPECT_EQ(plan.Expected(0), 0);
  EXPECT_THAT(plan.Positions(8), IsEmpty());
}

// Weights that have almost decayed do not justify a checkpoint that saves nothing.
TEST(CheckpointPlanTest, MassesWithoutWeightSaveNothing) {
  const std::vector<Mass> model = {{10, 0.0}, {20, 1.0}, {30, 0.0}};
  const Planned plan(model, 0, 1, 3, TokensAt);
  EXPECT_EQ(plan.Expected(1), 0);
  EXPECT_EQ(plan.Expected(3), 0);
  EXPECT_EQ(Recomputed(model, 0, plan.Positions(3), TokensAt), 0);
}

// For a prompt of another length, checkpoints are still possible ones, and masses keep their place.
TEST(CheckpointPlanTest, PlacesCheckpointsInPromptsOfOtherLengths) {
  for (int round = 0; round < 300; ++round) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<Mass> model = RandomModel(random, 0, 400);
    for (Mass& mass : model) mass.from_end = random() % 2 == 0;
    const uint64_t page = 1 + random() % 16, tokens = 300 + random() % 200;
    const CheckpointPlan plan(model, 400, page, 8, TokensAt);
    const CheckpointPlan::Prompt prompt{.resume = random() % 200, .shared = random() % 300, .tokens = tokens};
    const CheckpointPlan::Placement placed = plan.For(prompt, page, TokensAt);
    double before = std::numeric_limits<double>::infinity();
    for (size_t m = 0; m <= placed.most(); ++m) {
      ASSERT_LE(placed.Expected(m), before);
      before = placed.Expected(m);
      const std::vector<uint64_t> positions = placed.Positions(m);
      ASSERT_LE(positions.size(), m);
      uint64_t last = prompt.resume;
      for (const uint64_t position : positions) {
        ASSERT_GT(position, last);
        ASSERT_LE(position, tokens);
        ASSERT_EQ(position % page, 0u);
        last = position;
      }
    }
  }
  const CheckpointPlan plan({{100, 0.5, false}, {380, 0.5, true}}, 400, 1, 2, TokensAt);
  EXPECT_THAT(plan.For({.tokens = 420}, 1, TokensAt).Positions(2), ElementsAre(100, 400));
}

double PlanSeconds(size_t depths, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Mass> model;
  for (uint64_t depth = 1; depth <= depths; ++depth) {
    model.push_back({depth, static_cast<double>(1 + random() % 1000) / static_cast<double>(1000 * depths)});
  }
  const std::clock_t begin = std::clock();  // CPU time, so that other processes do not count
  const Planned plan(model, 0, 1, 8, TokensAt);
  EXPECT_GT(plan.Expected(8), 0);
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

// The least of several times is the time of the work: other load on the machine can only add to it. The two sizes
// alternate, so that a machine that gets slower meanwhile slows both. Both sizes are such that malloc keeps their
// memory from one time to the next.
TEST(CheckpointPlanTest, DoublingTheDepthsDoublesTheTime) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(NDEBUG)
  GTEST_SKIP() << "times mean nothing here";
#endif
  constexpr size_t kDepths = 512;
  double ratio = std::numeric_limits<double>::infinity();
  for (int attempt = 0; attempt < 10 && ratio > 2.3; ++attempt) {  // a fault of the program would show in each attempt
    double once = ratio = std::numeric_limits<double>::infinity();
    double twice = once;
    for (uint64_t round = 0; round < 31; ++round) {
      once = std::min(once, PlanSeconds(kDepths, round));
      twice = std::min(twice, PlanSeconds(2 * kDepths, round));
    }
    ratio = twice / once;
  }
  EXPECT_LE(ratio, 2.3);
}

}  // namespace
}  // namespace ashlar::storage
