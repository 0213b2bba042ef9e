// SPDX-License-Identifier: Apache-2.0
// Models open and close, as in an engine that swaps adapters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;

constexpr size_t kOpenAtATime = 64;

Identity WithAdapter(int adapter) {
  Identity identity = TestEngine::identity();
  identity.lora = "adapter " + std::to_string(adapter);
  return identity;
}

TEST(Models, AreClosedWithLastCopy) {
  const DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const Layout layout = engine.model().layout();
  for (int adapter = 0; adapter < 200; ++adapter) {
    const auto model = engine.client().OpenModel(WithAdapter(adapter), layout);
    ASSERT_TRUE(model.ok()) << adapter << ": " << model.status();
    Model copy = *model;
    ASSERT_TRUE(copy.DeclarePages(engine.region(), engine.pages()).ok());
  }
  std::vector<Model> open;
  for (size_t i = 1; i < kOpenAtATime; ++i) open.push_back(*engine.client().OpenModel(WithAdapter(0), layout));
  EXPECT_EQ(engine.client().OpenModel(WithAdapter(0), layout).status().code(), absl::StatusCode::kResourceExhausted);
  open.pop_back();
  EXPECT_TRUE(engine.client().OpenModel(WithAdapter(1), layout).ok());
}

TEST(Models, MayRedeclarePages) {
  const DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  for (int i = 0; i < 300; ++i) {
    const absl::Status declared = engine.model().DeclarePages(engine.region(), engine.pages());
    ASSERT_TRUE(declared.ok()) << i << ": " << declared;
  }
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 60);
  engine.PublishPrompt(prompt);
  EXPECT_THAT(engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience), Each(MissReason::kNone));
}

// Two openings of a model are independent: closing one, or declaring its pages, does not affect the other.
TEST(Models, DoNotShareWhatIsDeclared) {
  const DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 60);
  engine.PublishPrompt(prompt);
  {
    auto same = engine.client().OpenModel(TestEngine::identity(), engine.model().layout());
    ASSERT_TRUE(same.ok());
    EXPECT_EQ(same->ns(), engine.model().ns());
    ASSERT_TRUE(same->DeclarePages(engine.region(), engine.pages()).ok());
  }
  EXPECT_TRUE(engine.client().OpenModel(WithAdapter(0), engine.model().layout()).ok());  // closes the other first
  EXPECT_THAT(engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience), Each(MissReason::kNone));
}

TEST(Models, FastModelsAreToldToCompute) {
  const DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 60);
  engine.PublishPrompt(prompt);
  ASSERT_THAT(engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience), Each(MissReason::kNone));
  const auto fast = engine.client().OpenModel(TestEngine::identity(), engine.model().layout(), Shard(),
                                              CostModel{.tokens_per_second = 1e12});
  ASSERT_TRUE(fast.ok());
  const Tokens other = MakeRun(99, 60);
  Model model = *fast;
  const ObjectRun run{.kind = ObjectKind::kSegment, .tokens = other};
  EXPECT_EQ(model.Reserve({&run, 1})[0].outcome, ReserveOutcome::kDeclined);
  const std::vector<uint64_t> lengths = {prompt[0].size()};
  EXPECT_EQ(model.Lookup({prompt[0], lengths}).segments()[0].reason, MissReason::kSlowerThanRecompute);
}

TEST(Models, MayCloseDuringLanding) {
  const DaemonProcess daemon;
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 400);
  TestEngine(daemon.client_options()).PublishPrompt(prompt);
  for (int i = 0; i < 10; ++i) {
    TestEngine engine(daemon.client_options());
    engine.FillTargets(std::byte{0});
    const Match match = engine.Lookup(prompt);
    Landing landing = engine.Land(match, prompt);
    const Layout layout = engine.model().layout();
    engine.CloseModel();
    EXPECT_TRUE(engine.client().OpenModel(WithAdapter(i), layout).ok());
    ASSERT_THAT(landing.Wait(kPatience), Each(MissReason::kNone));
    engine.ExpectLanded(ObjectKind::kSegment, prompt[1], prompt[0].size(), std::byte{0});
    engine.ExpectTuples(match, 1, prompt[1]);
  }
}

}  // namespace
}  // namespace ashlar::integration
