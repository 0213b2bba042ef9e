// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <random>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "tools/replay/commands.h"
#include "tools/replay/models.h"
#include "tools/replay/replay.h"
#include "tools/replay/trace.h"
#include "tools/replay/units.h"

namespace ashlar::replay {
namespace {

constexpr storage::PrefixCosts kCosts{
    .page_tokens = 1, .page_bytes = 10, .checkpoint_bytes = 1000, .flops_per_token = 100, .flops_per_square = 1};

std::vector<int32_t> From(int32_t first, size_t count) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}
std::vector<int32_t> operator+(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A document with three questions in turn: the second prompt shows where they part, the third resumes there.
TEST(PublishedPolicies, MarconiResumesFromABranchAtItsThirdVisitAndFromEndsAtOnce) {
  for (const char* name : {"sglang", "marconi:0.5"}) {
    SCOPED_TRACE(name);
    const auto policy = *MakePolicy(name, kCosts, 1000000);
    const std::vector<int32_t> document = From(0, 500);
    EXPECT_EQ(policy->Request(document + From(1000, 10), 505), 0u);
    EXPECT_EQ(policy->Request(document + From(2000, 10), 505), 0u);
    EXPECT_EQ(policy->Request(document + From(3000, 10), 505), 500u);
    EXPECT_EQ(policy->Request(document + From(2000, 10) + From(7000, 20), 525), 510u)
        << "behind the last decoded token";
    EXPECT_EQ(policy->usage().states, 5u);
    EXPECT_EQ(policy->usage().bytes, 5 * 1000 + (500 + 3 * 10 + 20) * 10u);
  }
}

TEST(PublishedPolicies, LeastRecentlyUsedLeavesGoFirst) {
  const auto policy = *MakePolicy("sglang", kCosts, 2 * (1000 + 1000) + 10);
  policy->Request(From(0, 100), 100);
  policy->Request(From(1000, 100), 100);
  EXPECT_EQ(policy->Request(From(0, 100), 100), 100u);
  policy->Request(From(2000, 100), 100);
  EXPECT_EQ(policy->usage().evictions, 1u);
  EXPECT_EQ(policy->Request(From(0, 100), 100), 100u);
  EXPECT_EQ(policy->Request(From(5000, 1000), 1000), 0u) << "larger than all there is";
  EXPECT_EQ(policy->usage().refusals, 1u);
  EXPECT_LE(policy->usage().peak_bytes, 4010u);
}

TEST(PublishedPolicies, BlocksResumeAtMultiplesOfTheirSpacing) {
  const auto policy = *MakePolicy("block:128", kCosts, 1000000);
  EXPECT_EQ(policy->Request(From(0, 500), 500), 0u);
  EXPECT_EQ(policy->Request(From(0, 400) + From(9000, 100), 500), 384u);
  EXPECT_EQ(policy->Request(From(0, 380) + From(9500, 100), 480), 256u);
  EXPECT_EQ(policy->Request(From(0, 448), 448), 384u);
}

// The second request's pages show what is shared, so its prefill captures a state there; the third resumes from it.
TEST(PublishedPolicies, EnginesCaptureASharedBeginningWhenItComesAgain) {
  for (const char* name : {"vllm", "sglang-now", "marconi-offload"}) {
    SCOPED_TRACE(name);
    const auto policy = *MakePolicy(name, kCosts, 1000000);
    const std::vector<int32_t> document = From(0, 512);
    EXPECT_EQ(policy->Request(document + From(1000, 16), 528), 0u);
    EXPECT_EQ(policy->Request(document + From(2000, 16), 528), 0u);
    EXPECT_EQ(policy->Request(document + From(3000, 16), 528), 512u);
    EXPECT_EQ(policy->Request(document + From(2000, 16) + From(7000, 16), 544), 528u) << "the end of a prompt";
  }
}

TEST(PublishedPolicies, VllmsRetentionIntervalCapturesStatesInBetween) {
  for (const auto& [name, capture, resumed] : {std::tuple{"vllm", 1u, 0u},
                                               {"vllm:0", 1u, 0u},
                                               {"vllm:64", 1u, 384u},
                                               {"vllm:64", 96u, 384u},
                                               {"vllm:192", 1u, 384u},
                                               {"vllm:256", 1u, 256u}}) {
    SCOPED_TRACE(std::string(name) + " at " + std::to_string(capture));
    const auto policy = *MakePolicy(name, kCosts, 1000000, capture);
    EXPECT_EQ(policy->Request(From(0, 500), 500), 0u);
    EXPECT_EQ(policy->Request(From(0, 400) + From(9000, 100), 500), resumed);
  }
}

TEST(PublishedPolicies, SglangsStatesHaveAPoolOfTheirOwn) {
  // Two states of 1,000 bytes fit into 0.9 / 1.9 of the capacity; vLLM's blocks of 16 tokens and states share all.
  for (const auto& [name, resumed] : {std::pair{"sglang-now", 0u}, {"vllm", 96u}}) {
    SCOPED_TRACE(name);
    const auto policy = *MakePolicy(name, kCosts, 6000);
    for (int32_t text = 0; text < 3; ++text) policy->Request(From(text * 1000, 96), 96);
    EXPECT_EQ(policy->Request(From(0, 96), 96), resumed);
  }
}

TEST(PublishedPolicies, ReuseAndDepthOutweighRecencyInOffloadsFormula) {
  for (const auto& [name, resumed] : {std::pair{"marconi-offload:0", 96u}, {"vllm", 0u}}) {
    SCOPED_TRACE(name);
    const auto policy = *MakePolicy(name, kCosts, 4200);  // two texts of 96 tokens with their states
    for (int i = 0; i < 4; ++i) policy->Request(From(0, 96), 96);
    for (int32_t text = 1; text < 4; ++text) policy->Request(From(text * 1000, 96), 96);
    EXPECT_EQ(policy->Request(From(0, 96), 96), resumed);
  }
}

// The default decay is that of the connector's example.
TEST(PublishedPolicies, OffloadPolicyIgnoresOldUsesUnlessDecayIsZero) {
  for (const auto& [name, resumed] : {std::pair{"marconi-offload", 0u}, {"marconi-offload:0", 96u}}) {
    SCOPED_TRACE(name);
    const auto policy = *MakePolicy(name, kCosts, 4200);  // two texts of 96 tokens with their states
    for (int i = 0; i < 4; ++i) policy->Request(From(0, 96), 96);
    for (int32_t text = 1; text <= 60; ++text) policy->Request(From(text * 1000, 96), 96);
    EXPECT_EQ(policy->Request(From(0, 96), 96), resumed);
  }
}

TEST(Policies, CapturesAreClippedAlikeForAll) {
  for (const char* name : {"block:64", "vllm", "sglang", "sglang-now", "marconi", "marconi-offload", "ashlar"}) {
    for (const uint64_t capture : {16, 48, 64, 528}) {
      SCOPED_TRACE(std::string(name) + " at " + std::to_string(capture));
      const auto policy = *MakePolicy(name, kCosts, 10000000, capture);
      std::mt19937_64 random(7);
      uint64_t most = 0;
      for (int i = 0; i < 200; ++i) {
        const std::vector<int32_t> text = From(0, 700) + From(static_cast<int32_t>(1000 * (random() % 9)), 400);
        const uint64_t resumed = policy->Request(text + From(100000 + 100 * i, 30), 1120);
        EXPECT_EQ(resumed % capture, 0u);
        most = std::max(most, resumed);
      }
      EXPECT_GE(most, 1100 / std::max<uint64_t>(capture, 64) * capture);
      EXPECT_LE(most, 1100u);
    }
  }
}

TEST(Policies, AshlarResumesConversationsExactlyAndDocumentsAtTheSecondQuestion) {
  const auto policy = *MakePolicy("ashlar", kCosts, 10000000);
  EXPECT_EQ(policy->Request(From(0, 333), 300), 0u);
  EXPECT_EQ(policy->Request(From(0, 333) + From(5000, 40), 350), 333u);
  uint64_t resumed = 0;
  for (int32_t document = 1; document <= 20; ++document) {  // it learns what they look like
    const std::vector<int32_t> text = From(document * 10000, 500 + 10 * static_cast<size_t>(document));
    policy->Request(text + From(document * 1000000, 12), text.size() + 12);
    resumed = policy->Request(text + From(document * 1000000 + 500, 12), text.size() + 12);
  }
  EXPECT_GE(resumed, 690u) << "of 700, before the policy knows where prompts diverge";
}

TEST(Policies, NoPolicyExceedsItsCapacity) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  for (const char* name :
       {"block:64", "vllm", "vllm:64", "sglang", "sglang-now", "marconi", "marconi-offload", "ashlar", "ashlar:64"}) {
    SCOPED_TRACE(name);
    std::mt19937_64 random(seed);
    constexpr uint64_t kCapacity = 20000;
    const auto policy = *MakePolicy(name, kCosts, kCapacity);
    for (int i = 0; i < 1500; ++i) {
      std::vector<int32_t> tokens = From(static_cast<int32_t>(random() % 20) * 1000, 1 + random() % 300);
      tokens = tokens + From(static_cast<int32_t>(random() % 50) * 1000, 1 + random() % 200);
      const uint64_t prompt = 1 + random() % tokens.size(), resumed = policy->Request(tokens, prompt);
      ASSERT_LE(resumed, prompt);
      ASSERT_LE(policy->usage().bytes, kCapacity);
    }
    EXPECT_GT(policy->usage().evictions, 0u);
  }
}

TEST(Policies, AshlarIsChargedForWholePages) {
  const storage::PrefixCosts costs = InPages({.page_tokens = 16, .page_bytes = 160, .checkpoint_bytes = 1000}, 250);
  EXPECT_EQ(costs.page_tokens, 256u);
  EXPECT_EQ(costs.page_bytes, 2560u);
  EXPECT_EQ(InUnits(costs, 64).page_bytes, 640u) << "other policies pay for their tokens";
  const auto pages_bytes = [](uint64_t page) {
    const auto policy = *MakePolicy("ashlar", InPages(kCosts, page), 1000000);
    policy->Request(From(0, 300), 300);
    return policy->usage().bytes - policy->usage().states * kCosts.checkpoint_bytes;
  };
  EXPECT_EQ(pages_bytes(1), 300 * 10u);
  EXPECT_GE(pages_bytes(256), 2 * 2560u) << "a page of 256, and one for the other 44";
  EXPECT_EQ(pages_bytes(256) % 2560, 0u);
}

TEST(Policies, UnknownNamesAreRefused) {
  for (const char* name : {"", "lru", "block", "block:", "block:100", "block:0", "block:x", "marconi:-1", "vllm:2",
                           "sglang-now:1", "marconi-offload:x", "ashlar:0", "ashlar:1.5", "sglang:1", "none:1"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(MakePolicy(name, kCosts, 1).status())) << name;
  }
}

TEST(Models, MarconisConstants) {
  const Model model = *FindModel("marconi-7b");
  EXPECT_EQ(model.costs.page_bytes, 65536u);
  EXPECT_NEAR(static_cast<double>(model.costs.checkpoint_bytes), 26.8e6, 0.05e6);
  for (const char* name : {"qwen3-next", "kimi-linear", "ring-mini"}) EXPECT_TRUE(FindModel(name).ok());
  EXPECT_EQ(FindModel("qwen3-next")->costs.page_bytes, 16 * 24576u);
  EXPECT_TRUE(absl::IsNotFound(FindModel("/nowhere").status()));
}

// The published figures, and Ashlar's for comparison, on the real traces if they are available.
struct Bar {
  const char* trace;
  uint64_t gigabytes;
  double sglang, marconi, ashlar;
};
constexpr Bar kBars[] = {
    {"squality_docqa", 5, .194, .209, .60},     {"squality_docqa", 10, .415, .438, .77},
    {"squality_docqa", 20, .525, .525, .785},   {"squality_docqa", 40, .532, .532, .795},
    {"tau_airline_gpt4o", 2, .569, .579, .597}, {"tau_airline_gpt4o", 4, .676, .631, .677},
    {"tau_airline_gpt4o", 8, .814, .841, .842}, {"tau_airline_gpt4o", 16, .916, .946, .947},
    {"bbh_cot_fewshot", 1, .148, .209, .313},   {"bbh_cot_fewshot", 2, .368, .844, .85},
    {"bbh_cot_fewshot", 4, .679, .887, .888},
};

// Returns the folder of the real traces, or an empty path if there is none.
std::filesystem::path SharedTraces() {
  const char* shared = std::getenv("ASHLAR_SHARED");
  const std::filesystem::path traces =
      (shared != nullptr ? std::filesystem::path(shared) : std::filesystem::path(ASHLAR_SOURCE_DIR) / ".." / "shared") /
      "traces";
  return std::filesystem::exists(traces) ? traces : std::filesystem::path();
}

TEST(Replays, PublishedPoliciesGiveTheirPublishedFiguresAndAshlarMore) {
  const std::filesystem::path traces = SharedTraces();
  if (traces.empty()) GTEST_SKIP() << "no ../shared/traces: real traces are not checked";
  const Model model = *FindModel("marconi-7b");
  for (const Bar& bar : kBars) {
    SCOPED_TRACE(std::string(bar.trace) + ", " + std::to_string(bar.gigabytes) + " GB");
    const absl::StatusOr<Trace> trace = ReadTrace("stf", (traces / bar.trace).string());
    ASSERT_TRUE(trace.ok()) << trace.status();
    const uint64_t capacity = bar.gigabytes * 1000000000;
    const auto runs = Replay(*trace, model, {{"sglang", capacity}, {"marconi", capacity}, {"ashlar", capacity}}, 2,
                             [](uint64_t, uint64_t) {});
    ASSERT_TRUE(runs.ok()) << runs.status();
    EXPECT_NEAR((*runs)[0].token_hit_rate(), bar.sglang, 0.02);
    EXPECT_NEAR((*runs)[1].token_hit_rate(), bar.marconi, 0.02);
    EXPECT_GE((*runs)[2].token_hit_rate(), bar.ashlar);
    EXPECT_GE((*runs)[2].flops_saved, std::max((*runs)[0].flops_saved, (*runs)[1].flops_saved));
  }
}

TEST(Replays, AshlarHitsAtTheGranularityOfEngines) {
  const std::filesystem::path traces = SharedTraces();
  if (traces.empty()) GTEST_SKIP() << "no ../shared/traces: real traces are not checked";
  const Model model = *FindModel("marconi-7b");
  const std::tuple<const char*, uint64_t, uint64_t, double> bars[] = {
      // trace, bytes, capture, token hit rate
      {"squality_docqa", 5000000000, 64, .61},
      {"squality_docqa", 5000000000, 128, .61},
      {"tau_airline_gpt4o", 2000000000, 64, .585},
      {"bbh_cot_fewshot", 2000000000, 64, .858},
  };
  for (const auto& [name, capacity, capture, bar] : bars) {
    SCOPED_TRACE(absl::StrCat(name, ", ", capacity, " bytes, every ", capture, " tokens"));
    const absl::StatusOr<Trace> trace = ReadTrace("stf", (traces / name).string());
    ASSERT_TRUE(trace.ok()) << trace.status();
    const auto runs = Replay(*trace, model, {{"ashlar", capacity, capture}}, 1, [](uint64_t, uint64_t) {});
    ASSERT_TRUE(runs.ok()) << runs.status();
    EXPECT_GE((*runs)[0].token_hit_rate(), bar);
  }
}

}  // namespace
}  // namespace ashlar::replay
