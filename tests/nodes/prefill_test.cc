// SPDX-License-Identifier: Apache-2.0
// Cold prompts that several nodes' engines compute at once: results are correct, and faults only cost time.
#include "tests/nodes/prefill_nodes.h"

namespace ashlar::nodes {
namespace {

TEST_F(PrefillTest, EnginesOfThreeNodesShareAColdPrompt) {
  Start(3);
  {
    const Worker one(cluster_->daemon(1)), two(cluster_->daemon(2)), here(cluster_->daemon(0));
    for (const size_t node : {0, 1, 2}) WaitForWorkers(node);
    const std::vector<Tokens> prompt = NewPrompt(8);
    TestEngine engine(cluster_->daemon(0).client_options());
    PrefillPlan plan = engine.model().PlanPrefill(Runs(prompt));
    EXPECT_EQ(std::ranges::count(plan.states, PrefillState::kPending), 6);
    Fill(engine, prompt, plan);
    EXPECT_EQ(std::ranges::count(plan.states, PrefillState::kHere), 6);
    EXPECT_EQ(one.published() + two.published() + here.published(), 6);
    EXPECT_TRUE(Eventually([&] { return Sample(0, "ashlar_prefill_segments_total{worker=\"remote\"}") == 4; }));
    EXPECT_EQ(Sample(0, "ashlar_prefill_segments_total{worker=\"local\"}"), 2);
    ExpectToLand(engine, prompt);
    engine.model().EndPrefill(plan);
  }
  ExpectNothingHeld();
}

TEST_F(PrefillTest, AWorkerThatDiesLosesNothing) {
  Start(2);
  {
    const Worker dies(cluster_->daemon(1), Worker::Way::kDies);
    WaitForWorkers(1);
    const std::vector<Tokens> prompt = NewPrompt(4);
    TestEngine engine(cluster_->daemon(0).client_options());
    PrefillPlan plan = PlanWithOthers(engine, Runs(prompt));
    EXPECT_EQ(std::ranges::count(plan.states, PrefillState::kPending), 2);
    Fill(engine, prompt, plan);
    EXPECT_EQ(dies.taken(), 1);
    EXPECT_EQ(std::ranges::count(plan.states, PrefillState::kOwn), 4);
    ExpectToLand(engine, prompt);
    engine.model().EndPrefill(plan);
  }
  ExpectNothingHeld();
}

TEST_F(PrefillTest, AWorkersDaemonThatIsKilledLosesNothing) {
  Start(3);
  {
    const Worker stalls(cluster_->daemon(1), Worker::Way::kStalls), works(cluster_->daemon(2));
    WaitForWorkers(1);
    WaitForWorkers(2);
    const std::vector<Tokens> prompt = NewPrompt(6);
    TestEngine engine(cluster_->daemon(0).client_options());
    PrefillPlan plan = PlanWithOthers(engine, Runs(prompt));
    EXPECT_TRUE(Eventually([&] { return stalls.taken() == 1; }));
    cluster_->daemon(1).Kill();
    Fill(engine, prompt, plan);
    ExpectToLand(engine, prompt);
    EXPECT_TRUE(Eventually([&] { return Sample(0, "ashlar_prefill_assignments_total{outcome=\"failed\"}") >= 1; }));
    engine.model().EndPrefill(plan);
    cluster_->daemon(1).Start();
  }
  ExpectNothingHeld();
}

TEST_F(PrefillTest, AStalledWorkersSegmentsAreReassignedAndItsResultIsFenced) {
  Start(2);
  {
    Worker stalls(cluster_->daemon(1), Worker::Way::kStalls);
    WaitForWorkers(1);
    const std::vector<Tokens> prompt = NewPrompt(4);
    TestEngine engine(cluster_->daemon(0).client_options());
    PrefillPlan plan = PlanWithOthers(engine, Runs(prompt));
    Fill(engine, prompt, plan);
    EXPECT_EQ(stalls.taken(), 1);
    EXPECT_EQ(std::ranges::count(plan.states, PrefillState::kOwn), 4);
    ExpectToLand(engine, prompt);
    stalls.Go();  // it computes what no engine waits for any longer, and reports it
    EXPECT_TRUE(Eventually([&] { return Sample(1, "ashlar_prefill_assignments_total{outcome=\"timed_out\"}") >= 1; }));
    ExpectToLand(engine, prompt);
    engine.model().EndPrefill(plan);
    WaitForWorkers(1);  // it is a worker again
  }
  ExpectNothingHeld();
}

TEST_F(PrefillTest, ACombiningNodeThatIsKilledLeavesNothingBehind) {
  Start(2, kAnnounceAll);
  const std::vector<Tokens> prompt = NewPrompt(6);
  auto stalls = std::make_unique<Worker>(cluster_->daemon(1), Worker::Way::kStalls);
  WaitForWorkers(1);
  {
    TestEngine engine(cluster_->daemon(0).client_options());
    PrefillPlan plan = PlanWithOthers(engine, Runs(prompt));
    EXPECT_TRUE(Eventually([&] { return Sample(1, "ashlar_prefill_assigned_segments") == 3; }));
    cluster_->daemon(0).Kill();
    EXPECT_FALSE(engine.model().AwaitPrefill(plan, milliseconds(10000)));
    EXPECT_THAT(plan.states, testing::Each(PrefillState::kOwn)) << "the engine computes without the cache";
    engine.model().EndPrefill(plan);
  }
  EXPECT_TRUE(Eventually([&] { return Sample(1, "ashlar_prefill_assigned_segments") == 0; }));
  EXPECT_TRUE(Eventually([&] { return cluster_->KeysInEtcd('m') == 1; })) << "its lease has ended";
  EXPECT_TRUE(Eventually([&] { return cluster_->KeysInEtcd('e') == Sample(1, "ashlar_objects"); }));
  cluster_->daemon(0).Start();
  stalls.reset();
  ExpectNothingHeld(/*all_announced=*/true);
}

TEST_F(PrefillTest, LaterPromptsFindAWarmedSegment) {
  Start(2);
  {
    const Worker works(cluster_->daemon(1));
    WaitForWorkers(1);
    const std::vector<Tokens> prompt = NewPrompt(4);
    TestEngine engine(cluster_->daemon(0).client_options());
    // All but the first, each on its own: HYPIC's SEP x SEP.
    std::vector<ObjectRun> runs = Runs(prompt);
    runs.erase(runs.begin());
    PrefillPlan plan = PlanWithOthers(engine, runs, /*warm=*/true);
    EXPECT_THAT(plan.states, testing::Each(PrefillState::kPending));
    while (engine.model().AwaitPrefill(plan, milliseconds(1000))) {
    }
    EXPECT_THAT(plan.states, testing::Each(PrefillState::kHere));
    engine.model().EndPrefill(plan);
    const Match match = engine.Lookup(prompt);
    EXPECT_EQ(match.segments()[0].reason, MissReason::kNeverSeen);
    for (size_t i = 1; i < prompt.size(); ++i) EXPECT_TRUE(match.segments()[i].hit()) << i;
  }
  ExpectNothingHeld();
}

}  // namespace
}  // namespace ashlar::nodes
