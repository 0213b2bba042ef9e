// SPDX-License-Identifier: Apache-2.0
// Engines that are killed while several nodes compute a cold prompt: the requester, and one that computes for it.
// ASHLAR_PREFILL_KILLS=50 sets the number of kills of each.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/engine_process.h"
#include "tests/nodes/prefill_nodes.h"

namespace ashlar::nodes {
namespace {

using integration::EngineProcess;

constexpr size_t kSegments = 8;
constexpr milliseconds kComputing{20};  // per segment; an argument of integration_engine

class PrefillKillsTest : public PrefillTest {
 protected:
  static int Kills(int usual) { return Times("ASHLAR_PREFILL_KILLS", usual); }
  void Sleep(milliseconds most) {
    const auto moment = std::chrono::microseconds(random_() % std::chrono::microseconds(most).count());
    std::this_thread::sleep_for(moment);
  }
  // Like Fill, while another engine may be at the same segment.
  static void Complete(TestEngine& engine, const std::vector<Tokens>& prompt, PrefillPlan& plan) {
    std::vector<bool> computed(prompt.size(), false);
    for (bool pending = true; pending;) {
      for (size_t i = 0; i < prompt.size(); ++i) {
        if (plan.states[i] != PrefillState::kOwn || computed[i]) continue;
        computed[i] = true;
        const Reservation reservation = engine.Reserve(KindOf(i), prompt[i]);
        if (!reservation.granted()) continue;
        const PublishOutcome published = engine.model().Publish(reservation, engine.Compute(KindOf(i), prompt[i]));
        EXPECT_EQ(published, PublishOutcome::kPublished);
      }
      pending = engine.model().AwaitPrefill(plan, milliseconds(10000));
      for (size_t i = 0; i < prompt.size(); ++i) pending |= plan.states[i] == PrefillState::kOwn && !computed[i];
    }
  }
  // Assembles a cold prompt until all of it is found: a segment reserved by a killed engine is computed again.
  static void ExpectServed(TestEngine& engine, const std::vector<Tokens>& prompt) {
    const auto whole = [&] {
      PrefillPlan plan = engine.model().PlanPrefill(Runs(prompt));
      Complete(engine, prompt, plan);
      const Match match = engine.Lookup(prompt);
      engine.model().EndPrefill(plan);
      return std::ranges::all_of(match.segments(), [](const SegmentResult& segment) { return segment.hit(); });
    };
    ASSERT_TRUE(Eventually(whole));
    ExpectToLand(engine, prompt);
  }
};

// At any moment between its plan and its landing. Its daemon releases what it held. Others continue, including one
// whose prompt shares segments with it, and its own prompt is served to the next engine that requests it.
TEST_F(PrefillKillsTest, ACombiningEngineLeavesNothingBehind) {
  Start(3, kAnnounceAll);
  const int kills = Kills(5);
  double worst = 0;
  {
    using Way = Worker::Way;
    const Worker here(cluster_->daemon(0), Way::kComputes, kComputing),
        one(cluster_->daemon(1), Way::kComputes, kComputing), two(cluster_->daemon(2), Way::kComputes, kComputing);
    for (const size_t node : {0, 1, 2}) WaitForWorkers(node);
    TestEngine engine(cluster_->daemon(0).client_options());
    int in_mid_plan = 0;
    for (int kill = 0; kill < kills; ++kill) {
      const uint64_t drawn = random_();
      SCOPED_TRACE(absl::StrCat("kill ", kill, " of the prompt ", drawn));
      const std::vector<Tokens> prompt = MakePrompt(drawn, kSegments, kSegmentTokens);
      std::vector<Tokens> other = NewPrompt(kSegments);
      if (kill % 2 == 0) std::copy(prompt.begin() + kSegments / 2, prompt.end(), other.begin() + kSegments / 2);
      EngineProcess combiner(
          cluster_->daemon(0).client_options(),
          {"combine", std::to_string(drawn), std::to_string(kSegments), std::to_string(kSegmentTokens)});
      ASSERT_EQ(combiner.ReadLine(), "planning");
      if (kill > 0) Sleep(milliseconds(120));
      PrefillPlan plan = engine.model().PlanPrefill(Runs(other));
      const double own = plan.id == 0 ? 0 : 1;
      const auto open = [&] { return Sample(0, "ashlar_prefill_plans_in_progress") > own; };
      if (kill % 2 == 1) Eventually(open, milliseconds(2000));
      if (kill % 2 == 0 && kill > 0) Sleep(milliseconds(120));
      in_mid_plan += open() ? 1 : 0;
      combiner.Kill();
      const Stopwatch since;
      EXPECT_TRUE(Eventually(
          [&] { return Sample(0, "ashlar_sessions") == 2 && Sample(0, "ashlar_prefill_plans_in_progress") <= own; }));
      worst = std::max(worst, since.ms());
      Complete(engine, other, plan);
      ExpectServed(engine, other);
      engine.model().EndPrefill(plan);
      ExpectServed(engine, prompt);
    }
    EXPECT_GT(in_mid_plan, 0) << "a kill before its plan, or after its end, shows little";
    Figure("killed", kills);
    Figure("of these with a plan open", in_mid_plan);
  }
  Figure("until its session and its plan had ended, at most, ms", worst);
  ExpectNothingHeld(/*all_announced=*/true);
}

TEST_F(PrefillKillsTest, AnEngineThatComputesForOthersLosesNothing) {
  Start(2, kAnnounceAll);
  const int kills = Kills(3);
  double worst = 0;
  {
    TestEngine engine(cluster_->daemon(0).client_options());
    for (int kill = 0; kill < kills; ++kill) {
      const std::vector<Tokens> prompt = NewPrompt(kSegments);
      EngineProcess worker(cluster_->daemon(1).client_options(), {"prefill", "0", "0", "0"});
      ASSERT_EQ(worker.ReadLine(), "serving");
      WaitForWorkers(1);
      PrefillPlan plan = PlanWithOthers(engine, Runs(prompt));
      ASSERT_GT(std::ranges::count(plan.states, PrefillState::kPending), 0);
      ASSERT_EQ(worker.ReadLine(), "taken");
      Sleep(2 * kComputing);
      worker.Kill();
      const Stopwatch since;
      Fill(engine, prompt, plan);
      worst = std::max(worst, since.ms());
      EXPECT_TRUE(std::ranges::all_of(plan.states, [](PrefillState state) { return state != PrefillState::kPending; }));
      ExpectToLand(engine, prompt);
      engine.model().EndPrefill(plan);
    }
  }
  Figure("killed", kills);
  Figure("until all was computed by others, at most, ms", worst);
  ExpectNothingHeld(/*all_announced=*/true);
}

}  // namespace
}  // namespace ashlar::nodes
