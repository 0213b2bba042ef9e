// SPDX-License-Identifier: Apache-2.0
// One daemon that serves two GPUs: engines on each, a common dram tier, and an optional hbm tier on each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/gpu.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr std::byte kUntouched{0x3c};

// The parameter: with a tier on each GPU, or with dram only.
class TwoGpus : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::string why;
    for (int i = 0; i < 2; ++i) {
      gpus_[i] = kernels::FindGpu(i, &why);
      if (gpus_[i] == nullptr) GTEST_SKIP() << "two GPUs are needed: " << why;
    }
    DaemonOptions options{.gpu = "gpu: [{device: 0}, {device: 1}]\n", .program = GPU_ASHLARD};
    if (GetParam()) {
      options.gpu += "hbm: [{capacity_bytes: 4MiB, arena_bytes: 2MiB}, {capacity_bytes: 4MiB, arena_bytes: 2MiB}]\n";
    }
    options.ssd = "64MiB";
    options.admission = "all";
    daemon_ = std::make_unique<DaemonProcess>(options);
  }
  std::unique_ptr<TestEngine> Engine(int gpu, TensorShard shard = {}) {
    return std::make_unique<TestEngine>(daemon_->client_options(), Shape{.shard = shard, .gpu = gpu},
                                        TestEngine::Memory::kGpuRegistered);
  }
  TierKind Top() const { return GetParam() ? TierKind::kHbm : TierKind::kDram; }
  static std::vector<TierKind> TiersOf(const Match& match) {
    std::vector<TierKind> tiers;
    for (const SegmentResult& segment : match.segments()) tiers.push_back(segment.tier);
    return tiers;
  }
  static void ExpectLandsMatch(TestEngine& engine, const Match& match, const std::vector<Tokens>& prompt) {
    engine.FillTargets(kUntouched);
    Landing landing = engine.Land(match, prompt);
    ASSERT_THAT(landing.Wait(kPatience), Each(MissReason::kNone));
    uint64_t position = 0;
    for (size_t i = 0; i < prompt.size(); ++i) {
      engine.ExpectTuples(match, i, prompt[i]);
      engine.ExpectLanded(KindOfSegment(i), prompt[i], position, kUntouched);
      position += prompt[i].size();
    }
  }
  static void ExpectLandsPrompt(TestEngine& engine, const std::vector<Tokens>& prompt) {
    ExpectLandsMatch(engine, engine.Lookup(prompt), prompt);
  }

  const kernels::Gpu* gpus_[2] = {};
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_P(TwoGpus, EnginesOnBothGpusShareTheCache) {
  const auto first = Engine(0), second = Engine(1);
  TestEngine host(daemon_->client_options());
  const std::vector<std::vector<Tokens>> prompts = {MakePrompt(1, 3, 90), MakePrompt(2, 3, 110), MakePrompt(3, 2, 60)};
  first->PublishPrompt(prompts[0]);
  second->PublishPrompt(prompts[1]);
  host.PublishPrompt(prompts[2]);
  for (TestEngine* reader : {first.get(), second.get(), &host}) {
    for (const std::vector<Tokens>& prompt : prompts) ExpectLandsPrompt(*reader, prompt);
  }
  EXPECT_THAT(TiersOf(first->Lookup(prompts[0])), Each(Top()));
  EXPECT_THAT(TiersOf(second->Lookup(prompts[0])), Each(Top())) << "it has come there";
  EXPECT_THAT(TiersOf(host.Lookup(prompts[1])), Each(TierKind::kDram));
}

// Ranks of one model, each on a different GPU: one looks up, both land their shards.
TEST_P(TwoGpus, EachShardLandsOnItsRanksGpu) {
  const auto rank0 = Engine(0, {.rank = 0, .size = 2});
  const auto rank1 = Engine(1, {.rank = 1, .size = 2});
  const std::vector<Tokens> prompt = MakePrompt(4, 3, 80);
  rank0->PublishPrompt(prompt);
  rank1->PublishPrompt(prompt);
  const Match match = rank0->Lookup(prompt);
  EXPECT_THAT(TiersOf(match), Each(Top()));
  const Match theirs = rank1->model().Attach(match.lease(), std::vector<uint64_t>(3, 80));
  ExpectLandsMatch(*rank0, match, prompt);
  ExpectLandsMatch(*rank1, theirs, prompt);
  // A shard that is evicted on one GPU is promoted there again.
  for (uint64_t i = 0; i < 12; ++i) {
    const std::vector<Tokens> more = MakePrompt(20 + i, 2, 100);
    rank0->PublishPrompt(more);
    rank1->PublishPrompt(more);
    ASSERT_TRUE(Eventually([&] { return daemon_->Metric("ashlar_tier_copies_in_progress") == 0; }));
  }
  const Match again = rank0->Lookup(prompt);
  const Match theirs_again = rank1->model().Attach(again.lease(), std::vector<uint64_t>(3, 80));
  ExpectLandsMatch(*rank0, again, prompt);
  ExpectLandsMatch(*rank1, theirs_again, prompt);
}

TEST_P(TwoGpus, LosingAnEngineOnOneGpuDoesNotAffectTheOther) {
  const auto first = Engine(0);
  const std::vector<Tokens> prompt = MakePrompt(5, 3, 70), theirs = MakePrompt(6, 3, 70);
  first->PublishPrompt(prompt);
  const Match held = first->Lookup(prompt);
  // The metrics are updated once per second.
  const auto sessions = [&](double count) {
    return Eventually([&] { return daemon_->Metric("ashlar_sessions") == count; });
  };
  EXPECT_TRUE(sessions(1));
  {
    const auto second = Engine(1);
    second->PublishPrompt(theirs);
    const Match match = second->Lookup(prompt);
    EXPECT_TRUE(sessions(2));
  }
  EXPECT_TRUE(sessions(1));
  ExpectLandsMatch(*first, held, prompt);
  ExpectLandsPrompt(*first, theirs);
  const auto third = Engine(1);
  ExpectLandsPrompt(*third, theirs);
}

TEST_P(TwoGpus, DrainedObjectsReturnToEitherGpu) {
  const auto first = Engine(0), second = Engine(1);
  const std::vector<Tokens> ours = MakePrompt(7, 3, 80), theirs = MakePrompt(8, 3, 80);
  first->PublishPrompt(ours);
  second->PublishPrompt(theirs);
  EXPECT_EQ(daemon_->Terminate(), 0);
  daemon_->Start();
  ASSERT_TRUE(Eventually([&] { return second->Reserve(ObjectKind::kSegment, MakeRun(9, 50)).granted(); }));
  EXPECT_THAT(TiersOf(second->Lookup(ours)), Each(TierKind::kSsd));
  ExpectLandsPrompt(*second, ours);
  ExpectLandsPrompt(*second, theirs);
  const auto other = Engine(0);
  ExpectLandsPrompt(*other, theirs);
}

TEST_P(TwoGpus, RegionsReportTheirGpu) {
  auto nameless = Client::Connect(daemon_->client_options());
  ASSERT_TRUE(nameless.ok()) << nameless.status();
  kernels::ArenaError error;
  const auto arena = gpus_[1]->MakeArena(2 << 20, &error);
  ASSERT_NE(arena, nullptr) << error.message;
  const absl::Status which =
      (*nameless)->RegisterGpuRegion(arena->descriptor(), arena->data(), arena->bytes()).status();
  EXPECT_EQ(which.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(which.message(), HasSubstr("register_region.gpu: required, because the daemon serves 2 GPUs"));
  const auto first = gpus_[0]->MakeArena(2 << 20, &error);
  ASSERT_NE(first, nullptr) << error.message;
  const auto region =
      (*nameless)->RegisterGpuRegion(first->descriptor(), first->data(), first->bytes(), gpus_[0]->id());
  ASSERT_TRUE(region.ok()) << region.status();
  const absl::Status other =
      (*nameless)->RegisterGpuRegion(arena->descriptor(), arena->data(), arena->bytes(), gpus_[1]->id()).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(other.message(), HasSubstr("register_region.gpu: the session's other regions are on another GPU"));
}

INSTANTIATE_TEST_SUITE_P(With, TwoGpus, ::testing::Bool(),
                         [](const auto& instance) { return instance.param ? "Hbm" : "DramAlone"; });

TEST(OneOfTwoGpus, ARegionOnTheOtherGpuIsRefusedByName) {
  std::string why;
  const kernels::Gpu* const other = kernels::FindGpu(1, &why);
  if (kernels::FindGpu(0, &why) == nullptr || other == nullptr) GTEST_SKIP() << "two GPUs are needed: " << why;
  DaemonProcess daemon({.gpu = "gpu: {device: 0}\n", .program = GPU_ASHLARD});
  auto client = Client::Connect(daemon.client_options());
  ASSERT_TRUE(client.ok()) << client.status();
  kernels::ArenaError error;
  const auto arena = other->MakeArena(2 << 20, &error);
  ASSERT_NE(arena, nullptr) << error.message;
  const absl::Status refused =
      (*client)->RegisterGpuRegion(arena->descriptor(), arena->data(), arena->bytes(), other->id()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(), HasSubstr("register_region.gpu: is not a GPU of this daemon"));
}

}  // namespace
}  // namespace ashlar::integration
