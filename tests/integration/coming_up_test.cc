// SPDX-License-Identifier: Apache-2.0
// A hit that only the disk has is promoted while engines use it: an engine waits for each layer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "tests/integration/serving_fixture.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::ElementsAre;
using testing::Pair;

constexpr int kTimes = 5;  // an engine that does not wait may still find it

class ComingUp : public Serving {
 protected:
  void SetUp() override {
    daemon_.Configure(
        {.dram = "512MiB", .arena = "64MiB", .ssd = "512MiB", .admission = "all", .drain_seconds = 30, .threads = 1});
    Cool();
  }
  // Restarts the daemon, with the contents of its disk.
  void Cool() {
    ASSERT_EQ(daemon_.Terminate(), 0);
    daemon_.Start();
  }
};

TEST_F(ComingUp, PromotedObjectsGiveTheSameAnswers) {
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3, 4, 5, 6});
  std::vector<float> expected;
  {
    ServingEngine engine(daemon_.client_options(), runtime());
    engine.Serve(prompt);
    expected = engine.Serve(prompt).logits;
  }
  for (int i = 0; i < kTimes; ++i) {
    Cool();
    ServingEngine engine(daemon_.client_options(), runtime());
    const rag::Served served = engine.Serve(prompt);
    EXPECT_THAT(served.hit_tiers, ElementsAre(Pair(TierKind::kSsd, 7)));
    EXPECT_EQ(served.logits, expected) << "the same bits";
  }
}

TEST_F(ComingUp, ALayersTuplesArePresentAfterWaitLayer) {
  const Shape shape{.layers = 12, .kv_heads = 8, .key_dim = 128, .value_dim = 128};
  const std::vector<Tokens> prompt = MakePrompt(1, 4, 240);
  TestEngine(daemon_.client_options(), shape).PublishPrompt(prompt);
  for (int i = 0; i < kTimes; ++i) {
    Cool();
    TestEngine engine(daemon_.client_options(), shape);
    auto [match, segments, landing] = engine.LookupAndLand(prompt);
    ASSERT_EQ(segments.size(), prompt.size());
    for (uint32_t layer = 0; layer < 2 * shape.layers; layer += 2) {
      ASSERT_TRUE(landing.WaitLayers(layer + 1, kPatience));
      for (uint32_t segment = 0; segment < prompt.size(); ++segment) {
        EXPECT_EQ(match.segments()[segment].tier, TierKind::kSsd);
        engine.ExpectTuple(match, segment, prompt[segment], layer);
      }
    }
    EXPECT_THAT(landing.Wait(kPatience), testing::Each(MissReason::kNone));
  }
}

// The metadata thread creates no arena while engines wait for its answers.
TEST_F(ComingUp, MemoryIsPreparedBeforeALookupNeedsIt) {
  const Shape shape{.layers = 12, .kv_heads = 8, .key_dim = 128, .value_dim = 128};
  TestEngine(daemon_.client_options(), shape).PublishPrompt(MakePrompt(1, 4, 240));
  Cool();
  const double on_disk = daemon_.Metric("ashlar_tier_used_bytes{tenant=\"default\",tier=\"ssd\"}");
  EXPECT_GT(on_disk, 64 << 20);
  EXPECT_TRUE(Eventually(
      [&] { return daemon_.Metric("ashlar_tier_allocated_bytes{tenant=\"default\",tier=\"dram\"}") >= on_disk; }));
}

// For example for segments whose pages another request has filled.
TEST_F(ComingUp, TuplesLoadWithoutKeysAndValues) {
  constexpr std::byte kUntouched{0x5a};
  const std::vector<Tokens> prompt = MakePrompt(1, 4, 240);
  TestEngine(daemon_.client_options()).PublishPrompt(prompt);
  Cool();
  TestEngine engine(daemon_.client_options());
  engine.FillTargets(kUntouched);
  const Match match = engine.Lookup(prompt);
  std::vector<LandSegment> all;
  for (uint32_t i = 0; i < prompt.size(); ++i) all.push_back({.segment = i, .tuples_only = true});
  EXPECT_THAT(engine.model().Land(match, {}, all).Wait(kPatience), testing::Each(MissReason::kNone));
  for (size_t i = 0; i < prompt.size(); ++i) engine.ExpectTuples(match, i, prompt[i]);
  EXPECT_TRUE(engine.TargetsAre(kUntouched));
}

}  // namespace
}  // namespace ashlar::integration
