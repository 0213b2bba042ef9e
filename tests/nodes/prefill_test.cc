// Cold prompts that several nodes' engines compute at once: what comes is right, and whatever fails costs time only.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/test_engine.h"
#include "tests/nodes/daemon_cluster.h"

namespace ashlar::nodes {
namespace {

using integration::DaemonOptions;
using integration::DaemonProcess;
using integration::Eventually;
using integration::MakePrompt;
using integration::TestEngine;
using integration::Tokens;
using std::chrono::milliseconds;

constexpr std::byte kPoison{0x5a};
constexpr size_t kSegmentTokens = 60;

ObjectKind KindOf(size_t segment) {
  return segment == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment;
}

// An engine that offers prefill, on a thread of its own.
class Worker {
 public:
  enum class Way { kComputes, kStalls, kDies };

  explicit Worker(const DaemonProcess& daemon, Way way = Way::kComputes)
      : way_(way), thread_([this, options = daemon.client_options()] { Run(options); }) {}
  ~Worker() {
    stop_ = true;
    thread_.join();
  }

  int taken() const { return taken_; }
  int published() const { return published_; }
  void Go() { way_ = Way::kComputes; }

 private:
  void Run(const ClientOptions& options) {
    TestEngine engine(options);
    std::vector<PrefillResult> results;
    while (!stop_) {
      auto given = engine.model().ServePrefill(results, milliseconds(100));
      results.clear();
      if (!given.ok()) std::this_thread::sleep_for(milliseconds(20));
      if (!given.ok() || !given->has_value()) continue;
      ++taken_;
      const PrefillWork& work = **given;
      while (way_ == Way::kStalls && !stop_) std::this_thread::sleep_for(milliseconds(5));
      if (way_ == Way::kDies) return;  // its session ends with it
      const Reservation reservation = engine.Reserve(work.kind, work.tokens);
      bool published = reservation.outcome == ReserveOutcome::kAlreadyPresent;
      if (reservation.granted()) {
        const PublishOutcome outcome = engine.model().Publish(reservation, engine.Compute(work.kind, work.tokens));
        published = outcome == PublishOutcome::kPublished;
      }
      if (published) ++published_;
      results.push_back({.assignment = work.assignment, .generation = work.generation, .published = published});
    }
  }

  std::atomic<Way> way_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> taken_ = 0, published_ = 0;
  std::thread thread_;
};

class PrefillTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
  }
  void Start(size_t daemons) {
    cluster_ = std::make_unique<DaemonCluster>(ClusterOptions{
        .daemons = daemons,
        .etcd = true,
        .complete =
            [](const NodePlace& place, DaemonOptions* options) {
              options->cluster =
                  absl::StrCat("cluster:\n  node: ", place.name, "\n  control_address: ", place.control_address,
                               "\n  transport_address: ", place.transport_address, "\n  tls: {insecure: true}",
                               "\n  etcd: {endpoints: [\"", place.etcd_endpoints[0], "\"], lease_seconds: 3}\n");
            },
        .network = {.relay = false}});
    for (size_t node = 0; node < daemons; ++node) {
      EXPECT_TRUE(
          Eventually([&] { return Sample(node, "ashlar_peers_connected") == static_cast<double>(daemons - 1); }));
    }
  }
  double Sample(size_t node, const std::string& name) { return cluster_->daemon(node).Metric(name); }
  void WaitForWorkers(size_t node, double workers = 1) {
    EXPECT_TRUE(Eventually([&] { return Sample(node, "ashlar_prefill_workers") == workers; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // others may know that it had none
  }
  std::vector<Tokens> NewPrompt(size_t segments) { return MakePrompt(random_(), segments, kSegmentTokens); }

  static std::vector<ObjectRun> Runs(const std::vector<Tokens>& prompt) {
    std::vector<ObjectRun> runs;
    for (size_t i = 0; i < prompt.size(); ++i) runs.push_back({.kind = KindOf(i), .tokens = prompt[i], .media = {}});
    return runs;
  }
  // Computes what the plan leaves to this engine, and waits for the rest.
  static void Fill(TestEngine& engine, const std::vector<Tokens>& prompt, PrefillPlan& plan) {
    std::vector<bool> computed(prompt.size(), false);
    for (bool pending = true; pending;) {
      for (size_t i = 0; i < prompt.size(); ++i) {
        if (plan.states[i] != PrefillState::kOwn || computed[i]) continue;
        computed[i] = true;
        engine.Publish(KindOf(i), prompt[i]);
      }
      pending = engine.model().AwaitPrefill(plan, milliseconds(10000));
      for (size_t i = 0; i < prompt.size(); ++i) pending |= plan.states[i] == PrefillState::kOwn && !computed[i];
    }
  }
  // All of the prompt is there now, and right.
  static void ExpectToLand(TestEngine& engine, const std::vector<Tokens>& prompt) {
    engine.FillTargets(kPoison);
    const Match match = engine.Lookup(prompt);
    for (const SegmentResult& segment : match.segments()) EXPECT_EQ(segment.reason, MissReason::kNone);
    Landing landing = engine.Land(match, prompt);
    ASSERT_THAT(landing.Wait(integration::kPatience), testing::Each(MissReason::kNone));
    uint64_t position = 0;
    for (size_t i = 0; i < prompt.size(); ++i) {
      engine.ExpectLanded(KindOf(i), prompt[i], position, kPoison);
      position += prompt[i].size();
    }
  }
  // No lease, reservation, assignment or plan is left on any node.
  void ExpectNothingHeld() {
    for (size_t node = 0; node < cluster_->daemons(); ++node) {
      for (const char* name :
           {"ashlar_leases", "ashlar_reservations", "ashlar_peer_leases", "ashlar_prefill_open_plans",
            "ashlar_prefill_pending_segments", "ashlar_prefill_given_segments"}) {
        EXPECT_TRUE(Eventually([&] { return Sample(node, name) == 0; })) << name << " of node " << node;
      }
    }
  }

  const uint64_t seed_ = std::random_device{}();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, seed_};
  std::mt19937_64 random_{seed_};
  std::unique_ptr<DaemonCluster> cluster_;
};

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
    EXPECT_TRUE(Eventually([&] { return Sample(0, "ashlar_prefill_segments_total{worker=\"elsewhere\"}") == 4; }));
    EXPECT_EQ(Sample(0, "ashlar_prefill_segments_total{worker=\"here\"}"), 2);
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
    PrefillPlan plan = engine.model().PlanPrefill(Runs(prompt));
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
    PrefillPlan plan = engine.model().PlanPrefill(Runs(prompt));
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

TEST_F(PrefillTest, AStalledWorkersSegmentsGoToOthersAndItsLateResultIsFenced) {
  Start(2);
  {
    Worker stalls(cluster_->daemon(1), Worker::Way::kStalls);
    WaitForWorkers(1);
    const std::vector<Tokens> prompt = NewPrompt(4);
    TestEngine engine(cluster_->daemon(0).client_options());
    PrefillPlan plan = engine.model().PlanPrefill(Runs(prompt));
    Fill(engine, prompt, plan);
    EXPECT_EQ(stalls.taken(), 1);
    EXPECT_EQ(std::ranges::count(plan.states, PrefillState::kOwn), 4);
    ExpectToLand(engine, prompt);
    stalls.Go();  // it computes what nobody waits for any more, and says so
    EXPECT_TRUE(Eventually([&] { return Sample(1, "ashlar_prefill_assignments_total{outcome=\"late\"}") >= 1; }));
    ExpectToLand(engine, prompt);
    engine.model().EndPrefill(plan);
    WaitForWorkers(1);  // it is one again
  }
  ExpectNothingHeld();
}

TEST_F(PrefillTest, ACombiningNodeThatIsKilledLeavesNothingBehind) {
  Start(2);
  const Worker stalls(cluster_->daemon(1), Worker::Way::kStalls);
  WaitForWorkers(1);
  const std::vector<Tokens> prompt = NewPrompt(6);
  {
    TestEngine engine(cluster_->daemon(0).client_options());
    PrefillPlan plan = engine.model().PlanPrefill(Runs(prompt));
    EXPECT_TRUE(Eventually([&] { return Sample(1, "ashlar_prefill_given_segments") == 3; }));
    cluster_->daemon(0).Kill();
    EXPECT_FALSE(engine.model().AwaitPrefill(plan, milliseconds(10000)));
    EXPECT_THAT(plan.states, testing::Each(PrefillState::kOwn)) << "the engine computes without the cache";
    engine.model().EndPrefill(plan);
  }
  EXPECT_TRUE(Eventually([&] { return Sample(1, "ashlar_prefill_given_segments") == 0; }));
  cluster_->daemon(0).Start();
  ExpectNothingHeld();
}

TEST_F(PrefillTest, AWarmedSegmentIsWhatLaterPromptsFind) {
  Start(2);
  {
    const Worker works(cluster_->daemon(1));
    WaitForWorkers(1);
    const std::vector<Tokens> prompt = NewPrompt(4);
    TestEngine engine(cluster_->daemon(0).client_options());
    // All but the first, each by itself: HYPIC's SEP x SEP.
    std::vector<ObjectRun> runs = Runs(prompt);
    runs.erase(runs.begin());
    PrefillPlan plan = engine.model().PlanPrefill(runs, /*warm=*/true);
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
