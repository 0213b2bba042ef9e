// SPDX-License-Identifier: Apache-2.0
// Leases: shared between processes, ended by release and by death, and what they protect.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "absl/strings/escaping.h"
#include "proto/hex.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::StartsWith;

constexpr uint64_t kSeed = 5;
constexpr size_t kSegments = 3, kTokens = 60;
const std::vector<uint64_t> kLengths(kSegments, kTokens);

std::vector<std::string> Arguments(const std::string& command, const std::string& lease = "") {
  return {command, std::to_string(kSeed), std::to_string(kSegments), std::to_string(kTokens), lease};
}

TEST(Leases, PassBetweenProcessesOfATenant) {
  DaemonProcess daemon;
  const std::vector<Tokens> prompt = MakePrompt(kSeed, kSegments, kTokens);
  TestEngine engine(daemon.client_options());
  engine.PublishPrompt(prompt);

  std::optional<Match> match = engine.Lookup(prompt);
  EngineProcess second(daemon.client_options(), Arguments("attach", absl::BytesToHexString(match->lease())));
  EXPECT_EQ(second.ReadLine(), "ok none none none");
  match.reset();  // now only the other process holds it
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_leases") == 1; }));

  EngineProcess third(daemon.client_options(), Arguments("match"));
  const std::string line = third.ReadLine();
  ASSERT_THAT(line, testing::EndsWith(" none none none"));
  Match shared = engine.model().Attach(BytesOfHex(line.substr(0, 32)), kLengths);
  ASSERT_TRUE(shared.segments()[2].hit());
  third.Kill();
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_sessions") == 2; }));
  for (size_t i = 0; i < kSegments; ++i) engine.ExpectTuples(shared, i, prompt[i]);
  engine.FillTargets(std::byte{0});
  EXPECT_THAT(engine.Land(shared, prompt).Wait(kPatience), Each(MissReason::kNone));
}

// A request waits in its engine's queue for longer than the daemon keeps an unused match.
TEST(Leases, AreKeptWhileTheirEngineWaits) {
  DaemonOptions options;
  options.more = "leases: {unused_seconds: 2}\n";
  DaemonProcess daemon(options);
  const std::vector<Tokens> prompt = MakePrompt(kSeed, kSegments, kTokens);
  TestEngine engine(daemon.client_options());
  engine.PublishPrompt(prompt);
  const Match match = engine.Lookup(prompt);
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  EXPECT_THAT(engine.Land(match, prompt).Wait(kPatience), Each(MissReason::kNone));
}

TEST(Leases, AreCountedWithinOneClient) {
  DaemonProcess daemon;
  const std::vector<Tokens> prompt = MakePrompt(kSeed, kSegments, kTokens);
  TestEngine engine(daemon.client_options());
  engine.PublishPrompt(prompt);
  std::optional<Match> first = engine.Lookup(prompt);
  std::optional<Match> second = engine.model().Attach(first->lease(), kLengths);
  ASSERT_EQ(second->lease(), first->lease());
  first.reset();
  EXPECT_THAT(engine.Land(*second, prompt).Wait(kPatience), Each(MissReason::kNone));
  second.reset();
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_leases") == 0; }));
}

TEST(Leases, EndedLeasesAreMisses) {
  DaemonProcess daemon;
  const std::vector<Tokens> prompt = MakePrompt(kSeed, kSegments, kTokens);
  TestEngine engine(daemon.client_options());
  engine.PublishPrompt(prompt);
  Match match = engine.Lookup(prompt);
  const std::string lease = match.lease();
  match.Release();
  EXPECT_EQ(match.tuples(0), nullptr);
  EXPECT_EQ(match.lease(), "");
  EXPECT_THAT(engine.Land(match, prompt).Wait(kPatience), Each(MissReason::kLeaseLost));
  const auto attach = [&](const std::string& handle) {
    return engine.model().Attach(handle, kLengths).segments()[0].reason;
  };
  EXPECT_TRUE(Eventually([&] { return attach(lease) == MissReason::kLeaseLost; }));
  EXPECT_EQ(attach(std::string(16, 'x')), MissReason::kLeaseLost);
  EXPECT_EQ(attach("short"), MissReason::kLeaseLost);
}

// A budget of a few objects.
class FullCache : public testing::Test {
 protected:
  static constexpr size_t kRunTokens = 512;

  // Publishes one object more; whatever is not leased may be evicted for it.
  ReserveOutcome PublishAnother() {
    const Tokens run = MakeRun(1'000'000 + next_++, kRunTokens);
    const Reservation reservation = engine_.Reserve(ObjectKind::kSegment, run);
    if (!reservation.granted()) return reservation.outcome;
    EXPECT_EQ(engine_.model().Publish(reservation, engine_.Compute(ObjectKind::kSegment, run)),
              PublishOutcome::kPublished);
    return reservation.outcome;
  }

  DaemonProcess daemon_{{.dram = "8MiB", .arena = "1MiB", .tenants = ""}};
  TestEngine engine_{daemon_.client_options()};
  uint64_t next_ = 0;
};

TEST_F(FullCache, KeepsLeasedAndEvictsUnleased) {
  const std::vector<Tokens> leased = MakePrompt(kSeed, 2, kRunTokens);
  engine_.PublishPrompt(leased);
  const Match match = engine_.Lookup(leased);
  ASSERT_TRUE(match.segments()[1].hit());
  const Tokens unleased = MakeRun(77, kRunTokens);
  engine_.Publish(ObjectKind::kSegment, unleased);
  for (int i = 0; i < 40; ++i) ASSERT_EQ(PublishAnother(), ReserveOutcome::kGranted);  // several times the budget

  EXPECT_EQ(engine_.Lookup({MakeRun(1, 20), unleased}).segments()[1].reason, MissReason::kEvicted);
  EXPECT_TRUE(engine_.Lookup(leased).segments()[1].hit());
  engine_.ExpectTuples(match, 0, leased[0]);
  engine_.ExpectTuples(match, 1, leased[1]);
  EXPECT_THAT(engine_.Land(match, leased).Wait(kPatience), Each(MissReason::kNone));
  EXPECT_LE(daemon_.Metric("ashlar_tier_allocated_bytes{tenant=\"default\",tier=\"dram\"}"), 8 << 20);
}

TEST_F(FullCache, ReportsNoSpaceIfAllLeased) {
  std::vector<Match> leases;
  ReserveOutcome outcome = ReserveOutcome::kGranted;
  for (int i = 0; i < 64 && outcome == ReserveOutcome::kGranted; ++i) {
    outcome = PublishAnother();
    if (outcome == ReserveOutcome::kGranted) {
      leases.push_back(engine_.Lookup({MakeRun(1, 20), MakeRun(1'000'000 + next_ - 1, kRunTokens)}));
      ASSERT_TRUE(leases.back().segments()[1].hit());
    }
  }
  EXPECT_EQ(outcome, ReserveOutcome::kNoSpace);
  for (size_t i = 0; i < leases.size(); ++i) engine_.ExpectTuples(leases[i], 1, MakeRun(1'000'000 + i, kRunTokens));
  leases.pop_back();
  EXPECT_TRUE(Eventually([&] { return PublishAnother() == ReserveOutcome::kGranted; }));
}

TEST_F(FullCache, AKilledEngineFreesItsLeasesWithinTwoSeconds) {
  const std::vector<Tokens> prompt = MakePrompt(kSeed, 6, kRunTokens);
  engine_.PublishPrompt(prompt);
  EngineProcess holder(daemon_.client_options(), {"match", std::to_string(kSeed), "6", std::to_string(kRunTokens)});
  ASSERT_THAT(holder.ReadLine(), testing::EndsWith(" none none none none none none"));
  EngineProcess publisher(daemon_.client_options(), {"reserve", "99", "2", std::to_string(kRunTokens)});
  ASSERT_EQ(publisher.ReadLine(), "reserved granted granted");
  std::vector<Match> mine;
  while (PublishAnother() == ReserveOutcome::kGranted) {
    ASSERT_LT(mine.size(), 64u);
    mine.push_back(engine_.Lookup({MakeRun(1, 20), MakeRun(1'000'000 + next_ - 1, kRunTokens)}));
  }

  const auto killed = std::chrono::steady_clock::now();
  holder.Kill();
  EXPECT_TRUE(Eventually([&] { return PublishAnother() == ReserveOutcome::kGranted; }));
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(2));

  EXPECT_EQ(engine_.Reserve(ObjectKind::kSegment, MakePrompt(99, 2, kRunTokens)[1]).outcome,
            ReserveOutcome::kBeingPublished);
  const auto killed_too = std::chrono::steady_clock::now();
  publisher.Kill();
  EXPECT_TRUE(
      Eventually([&] { return engine_.Reserve(ObjectKind::kSegment, MakePrompt(99, 2, kRunTokens)[1]).granted(); }));
  EXPECT_LT(std::chrono::steady_clock::now() - killed_too, std::chrono::seconds(2));
}

}  // namespace
}  // namespace ashlar::integration
