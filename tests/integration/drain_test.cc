// SPDX-License-Identifier: Apache-2.0
// A daemon that is stopped writes its memory to the disk; its engines compute meanwhile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;

const DaemonOptions kWithDisk{.ssd = "64MiB"};

std::vector<MissReason> ReasonsOf(const Match& match) {
  std::vector<MissReason> reasons;
  for (const SegmentResult& segment : match.segments()) reasons.push_back(segment.reason);
  return reasons;
}

TEST(Drain, MemoryObjectsAreOnDiskAfterRestart) {
  DaemonProcess daemon(kWithDisk);
  const std::vector<Tokens> prompt = MakePrompt(4, 4, 100);
  TestEngine(daemon.client_options()).PublishPrompt(prompt);  // once: admission does not accept it on the disk
  EXPECT_EQ(daemon.Metric("ashlar_tier_copied_bytes_total{from=\"dram\",tenant=\"default\",to=\"ssd\"}"), 0);
  EXPECT_EQ(daemon.Terminate(), 0);
  daemon.Start();
  TestEngine engine(daemon.client_options());
  const Match match = engine.Lookup(prompt);
  for (size_t i = 0; i < prompt.size(); ++i) {
    ASSERT_TRUE(match.segments()[i].hit()) << i;
    EXPECT_EQ(match.segments()[i].tier, TierKind::kSsd);
  }
  engine.FillTargets(std::byte{0});
  EXPECT_THAT(engine.Land(match, prompt).Wait(kPatience), Each(MissReason::kNone));
  for (size_t i = 0; i < prompt.size(); ++i) engine.ExpectTuples(match, i, prompt[i]);
}

TEST(Drain, AnEngineKeepsItsLeasesAndGetsNoNewOnes) {
  DaemonProcess daemon(DaemonOptions{.ssd = "64MiB", .drain_seconds = 60});
  const std::vector<Tokens> prompt = MakePrompt(4, 2, 100);
  TestEngine engine(daemon.client_options());
  engine.PublishPrompt(prompt);
  std::optional<Match> match = engine.Lookup(prompt);
  daemon.Signal(SIGTERM);
  ASSERT_TRUE(Eventually([&] { return daemon.Metric("ashlar_draining") == 1; }));
  EXPECT_THAT(ReasonsOf(engine.Lookup(prompt)), Each(MissReason::kDaemonUnavailable));
  EXPECT_EQ(engine.Reserve(ObjectKind::kSegment, MakeRun(77, 50)).outcome, ReserveOutcome::kUnavailable);
  EXPECT_EQ(Client::Connect(daemon.client_options()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(engine.Land(*match, prompt).Wait(kPatience), Each(MissReason::kNone));
  engine.ExpectTuples(*match, 1, prompt[1]);
  EXPECT_TRUE(match->valid());
  match.reset();  // now nothing is left
  EXPECT_EQ(daemon.Wait(), 0);
}

TEST(Drain, EndsAtItsDeadlineOrASecondSignal) {
  for (const bool impatient : {false, true}) {
    DaemonProcess daemon(DaemonOptions{.drain_seconds = impatient ? 3600u : 1u});
    const std::vector<Tokens> prompt = MakePrompt(4, 2, 100);
    TestEngine engine(daemon.client_options());
    engine.PublishPrompt(prompt);
    const Match match = engine.Lookup(prompt);  // held until the test ends
    daemon.Signal(SIGTERM);
    ASSERT_TRUE(Eventually([&] { return daemon.Metric("ashlar_draining") == 1; }) || !impatient);
    if (impatient) daemon.Signal(SIGINT);
    EXPECT_EQ(daemon.Wait(), 0);
    EXPECT_TRUE(Eventually([&] { return !match.valid(); }));
  }
}

TEST(Drain, AKillDuringTheDrainDoesNoHarm) {
  DaemonProcess daemon(kWithDisk);
  const std::vector<Tokens> prompt = MakePrompt(4, 8, 400);
  for (const int delay_ms : {0, 2, 5, 10, 20, 40}) {
    {
      TestEngine engine(daemon.client_options());
      for (size_t i = 0; i < prompt.size(); ++i) {
        if (!engine.Lookup(prompt).segments()[i].hit()) engine.Publish(KindOfSegment(i), prompt[i]);
      }
    }
    daemon.Signal(SIGTERM);
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    daemon.Kill();
    daemon.Start();
    TestEngine engine(daemon.client_options(), {.tokens = 4096});
    const Match match = engine.Lookup(prompt);
    const std::vector<MissReason> verdict = engine.Land(match, prompt).Wait(kPatience);
    for (size_t i = 0; i < prompt.size(); ++i) {
      if (verdict[i] == MissReason::kNone) {
        engine.ExpectTuples(match, i, prompt[i]);
      } else {
        EXPECT_EQ(match.segments()[i].reason, MissReason::kNeverSeen);
      }
    }
  }
}

}  // namespace
}  // namespace ashlar::integration
