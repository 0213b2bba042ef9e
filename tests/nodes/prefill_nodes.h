// SPDX-License-Identifier: Apache-2.0
// PrefillTest: daemons of a cluster, whose engines compute cold prompts together.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/test_engine.h"
#include "tests/nodes/daemon_cluster.h"
#include "tests/nodes/figures.h"

namespace ashlar::nodes {

using integration::DaemonOptions;
using integration::DaemonProcess;
using integration::Eventually;
using integration::MakePrompt;
using integration::TestEngine;
using integration::Tokens;
using std::chrono::milliseconds;

inline constexpr std::byte kPoison{0x5a};
inline constexpr size_t kSegmentTokens = 60;
inline constexpr char kAnnounceAll[] = "  announce: all\n";  // the test compares the directory with etcd

inline ObjectKind KindOf(size_t segment) {
  return segment == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment;
}

// An engine that offers prefill, on its own thread. A segment takes `takes`, plus the time of its publish.
class Worker {
 public:
  enum class Way { kComputes, kStalls, kDies };

  explicit Worker(const DaemonProcess& daemon, Way way = Way::kComputes, milliseconds takes = milliseconds(0))
      : way_(way), takes_(takes), thread_([this, options = daemon.client_options()] { Run(options); }) {}
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
      if (way_ == Way::kDies) return;  // the session ends with the engine
      const Reservation reservation = engine.Reserve(work.kind, work.tokens);
      bool published = reservation.outcome == ReserveOutcome::kAlreadyPresent;
      std::this_thread::sleep_for(takes_);
      if (reservation.granted()) {
        const PublishOutcome outcome = engine.model().Publish(reservation, engine.Compute(work.kind, work.tokens));
        published = outcome == PublishOutcome::kPublished;
      }
      if (published) ++published_;
      results.push_back({.assignment = work.assignment, .generation = work.generation, .published = published});
    }
  }

  std::atomic<Way> way_;
  const milliseconds takes_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> taken_ = 0, published_ = 0;
  std::thread thread_;
};

class PrefillTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
  }
  // `more`: YAML for the field `cluster` of each daemon.
  void Start(size_t daemons, const std::string& more = "") {
    cluster_ = std::make_unique<DaemonCluster>(ClusterOptions{
        .daemons = daemons,
        .etcd = true,
        .complete =
            [more](const NodePlace& place, DaemonOptions* options) {
              options->cluster =
                  absl::StrCat("cluster:\n  node: ", place.name, "\n  control_address: ", place.control_address,
                               "\n  transport_address: ", place.transport_address, "\n  tls: {insecure: true}",
                               "\n  etcd: {endpoints: [\"", place.etcd_endpoints[0], "\"], lease_seconds: 3}\n", more);
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
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // others may remember that it had none
  }
  std::vector<Tokens> NewPrompt(size_t segments) { return MakePrompt(random_(), segments, kSegmentTokens); }

  static std::vector<ObjectRun> Runs(const std::vector<Tokens>& prompt) {
    std::vector<ObjectRun> runs;
    for (size_t i = 0; i < prompt.size(); ++i) runs.push_back({.kind = KindOf(i), .tokens = prompt[i], .media = {}});
    return runs;
  }
  // A plan that includes other nodes: on a busy machine they may answer too late to get a part.
  static PrefillPlan PlanWithOthers(TestEngine& engine, const std::vector<ObjectRun>& runs, bool warm = false) {
    PrefillPlan plan = engine.model().PlanPrefill(runs, warm);
    for (int tries = 0; tries < 50 && std::ranges::count(plan.states, PrefillState::kPending) == 0; ++tries) {
      engine.model().EndPrefill(plan);
      std::this_thread::sleep_for(milliseconds(100));
      plan = engine.model().PlanPrefill(runs, warm);
    }
    return plan;
  }
  // Computes the segments that the plan leaves to this engine, and waits for the rest.
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
  // Once every engine has disconnected, no node holds anything, and etcd has no keys of ended objects.
  void ExpectNothingHeld(bool all_announced = false) {
    const Stopwatch since;
    EXPECT_TRUE(Eventually([&] { return cluster_->Held(all_announced).empty(); })) << cluster_->Held(all_announced);
    Figure("until nothing is held, ms", since.ms());
  }

  const uint64_t seed_ = std::random_device{}();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, seed_};
  std::mt19937_64 random_{seed_};
  std::unique_ptr<DaemonCluster> cluster_;
};

}  // namespace ashlar::nodes
