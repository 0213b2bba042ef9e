// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/optimum.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "nlohmann/json.hpp"
#include "tools/replay/replay.h"

namespace ashlar::replay {
namespace {

constexpr storage::PrefixCosts kSmallCosts{
    .page_tokens = 1, .page_bytes = 10, .checkpoint_bytes = 1000, .flops_per_token = 100, .flops_per_square = 1};

class OptimumTest : public ::testing::Test {
 protected:
  OptimumTest() { std::filesystem::create_directories(folder_); }
  ~OptimumTest() override { std::filesystem::remove_all(folder_); }

  // Texts of these numbers of tokens, and requests for them; each request is for several texts in a row.
  Trace MakeTrace(const std::vector<uint64_t>& lengths, const std::vector<std::vector<size_t>>& requests) const {
    std::ofstream texts(folder_ / "t.segs.jsonl"), prompts(folder_ / "t.reqs.jsonl");
    for (size_t text = 0; text < lengths.size(); ++text) {
      std::vector<int32_t> tokens;
      for (uint64_t i = 0; i < lengths[text]; ++i) tokens.push_back(static_cast<int32_t>(text * 1000 + i));
      texts << nlohmann::json({{"id", text}, {"tok", tokens}}) << "\n";
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      prompts << nlohmann::json(
                     {{"sid", i}, {"turn", 0}, {"ts", i}, {"ins", requests[i]}, {"outs", nlohmann::json::array()}})
              << "\n";
    }
    texts.close();
    prompts.close();
    absl::StatusOr<Trace> trace = ReadTrace("stf", (folder_ / "t").string());
    EXPECT_TRUE(trace.ok()) << trace.status();
    return *std::move(trace);
  }

 private:
  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) / ("optimum_test_" + std::to_string(getpid()));
};

TEST_F(OptimumTest, WithoutContentionItIsWhatTheTraceShares) {
  const Trace trace = MakeTrace({300, 40, 50}, {{0, 1}, {0, 2}, {0, 1}});
  EXPECT_NEAR(Optimum(trace, kSmallCosts, 1).TokenHitRate(1000000), (300 + 340) / (340 + 350 + 340.0), 1e-9);
  EXPECT_NEAR(Optimum(trace, kSmallCosts, 64).TokenHitRate(1000000), (256 + 320) / (340 + 350 + 340.0), 1e-9);
  EXPECT_NEAR(Optimum(trace, kSmallCosts, 512).TokenHitRate(1000000), 0, 1e-9);
}

// Texts of one size are either kept from one request to the next or not: the best choice is known, and because whole
// texts fill the capacity, no relaxation is better.
TEST_F(OptimumTest, IsTheBestChoiceForTextsOfOneSize) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  constexpr uint64_t kTokens = 256, kBytes = 1000 + 10 * kTokens;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<size_t>> requests;
    for (int i = 0; i < 18; ++i) requests.push_back({random() % 6});
    std::vector<std::pair<size_t, size_t>> intervals;  // from a request to the next one for the same text
    for (size_t i = 0; i < requests.size(); ++i) {
      for (size_t j = i; j-- > 0;) {
        if (requests[j] != requests[i]) continue;
        intervals.push_back({j, i});
        break;
      }
    }
    const uint64_t texts = 1 + random() % 3;
    uint64_t best = 0;
    for (uint64_t choice = 0; choice < uint64_t{1} << intervals.size(); ++choice) {
      std::vector<uint64_t> used(requests.size(), 0);
      uint64_t hits = 0;
      bool fits = true;
      for (size_t k = 0; k < intervals.size() && fits; ++k) {
        if ((choice >> k & 1) == 0) continue;
        ++hits;
        for (size_t t = intervals[k].first; t < intervals[k].second; ++t) fits &= ++used[t] <= texts;
      }
      if (fits) best = std::max(best, hits);
    }
    const Trace trace = MakeTrace(std::vector<uint64_t>(6, kTokens), requests);
    const double exact = static_cast<double>(best) / static_cast<double>(requests.size());
    const double bound = Optimum(trace, kSmallCosts, kTokens).TokenHitRate(texts * kBytes);
    EXPECT_GE(bound, exact - 1e-9);
    EXPECT_LE(bound, exact + 0.02);
  }
}

TEST_F(OptimumTest, NoPolicyIsAboveIt) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  std::vector<uint64_t> lengths;
  for (int i = 0; i < 40; ++i) lengths.push_back(1 + random() % 200);
  std::vector<std::vector<size_t>> requests;
  for (int i = 0; i < 600; ++i) requests.push_back({random() % 4, 4 + random() % 8, 12 + random() % 28});
  const Trace trace = MakeTrace(lengths, requests);
  const Model model{.name = "small", .costs = kSmallCosts, .flops_per_second = 1e9, .link_bytes_per_second = 1e9};
  std::vector<RunSpec> specs;
  for (const uint64_t capture : {1, 16, 48, 64}) {
    for (const uint64_t capacity : {6000, 20000, 60000}) {
      for (const char* policy : {"vllm", "sglang", "sglang-now", "marconi:0.5", "marconi-offload:0.1", "ashlar"}) {
        specs.push_back({policy, capacity, capture});
      }
    }
  }
  const auto runs = Replay(trace, model, specs, 2, [](uint64_t, uint64_t) {});
  ASSERT_TRUE(runs.ok()) << runs.status();
  for (const auto& run : *runs) {
    EXPECT_LE(run.token_hit_rate(), run.optimum + 1e-9)
        << run.policy << ", " << run.capacity_bytes << " bytes, capture " << run.capture;
  }
}

}  // namespace
}  // namespace ashlar::replay
