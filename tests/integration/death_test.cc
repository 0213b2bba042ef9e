// SPDX-License-Identifier: Apache-2.0
// The daemon's death, when idle and during a landing; the rule for late writes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using std::chrono::milliseconds;
using testing::Contains;
using testing::Each;

constexpr std::byte kPoison{0x5a}, kOwn{0xa5};
constexpr milliseconds kImpatience{50};
constexpr milliseconds kWatch{300};  // how long slots are watched for late writes

bool AllLanded(const std::vector<MissReason>& reasons) {
  return std::all_of(reasons.begin(), reasons.end(), [](MissReason reason) { return reason == MissReason::kNone; });
}

// 32 MB of keys and values in many layers: long enough to be caught half-way.
constexpr Shape kLarge{.layers = 16, .kv_heads = 4, .key_dim = 64, .value_dim = 64, .tokens = 1200};

class Death : public testing::Test {
 protected:
  Death() : prompt_({MakeRun(1, 100), MakeRun(2, 1000)}) { engine_->PublishPrompt(prompt_); }

  // The engine reuses its slots: nothing else may write there from now on.
  void ExpectNoLateWrite() {
    engine_->FillTargets(kOwn);
    EXPECT_FALSE(Eventually([&] { return !engine_->TargetsAre(kOwn); }, kWatch)) << "a late write";
  }

  // Starts a landing, and calls `interrupt` when its first layer has been written. Tries again if the landing was over
  // by then; null if it always is. `interrupt` returns the result of Wait.
  template <typename Interrupt>
  std::optional<Landing> LandInterrupted(const Match& match, Interrupt interrupt, std::vector<MissReason>& reasons) {
    for (int attempt = 0; attempt < 20; ++attempt) {
      engine_->FillTargets(kPoison);
      Landing landing = engine_->Land(match, prompt_);
      landing.WaitLayers(1, kPatience);
      reasons = interrupt(landing);
      if (!AllLanded(reasons)) return landing;
      daemon_.Thaw();
    }
    return std::nullopt;
  }

  std::vector<MissReason> FreezeAndTimeOut(Landing& landing) {
    daemon_.Freeze();
    return landing.Wait(kImpatience);
  }

  void ExpectWorksAgain() {
    daemon_.Start();
    ASSERT_TRUE(Eventually([&] { return engine_->client().connected(); }));
    EXPECT_THAT(engine_->Lookup(prompt_).segments()[1].reason, MissReason::kNeverSeen);
    engine_->PublishPrompt(prompt_);
    const Match match = engine_->Lookup(prompt_);
    engine_->FillTargets(kPoison);
    ASSERT_THAT(engine_->Land(match, prompt_).Wait(kPatience), Each(MissReason::kNone));
    engine_->ExpectLanded(ObjectKind::kSegment, prompt_[1], prompt_[0].size(), kPoison);
    engine_->ExpectTuples(match, 1, prompt_[1]);
  }

  DaemonProcess daemon_{{.dram = "256MiB", .arena = "16MiB", .tenants = "", .threads = 1}};
  std::unique_ptr<TestEngine> engine_ = std::make_unique<TestEngine>(daemon_.client_options(), kLarge);
  const std::vector<Tokens> prompt_;
};

TEST_F(Death, DuringALandingIsAMissAndQuiesces) {
  const Match match = engine_->Lookup(prompt_);
  engine_->FillTargets(kPoison);
  Landing landing = engine_->Land(match, prompt_);
  ASSERT_TRUE(landing.WaitLayers(1, kPatience));
  daemon_.Kill();
  EXPECT_THAT(landing.Wait(kPatience), Contains(MissReason::kDaemonUnavailable));
  EXPECT_TRUE(landing.WaitQuiesced(kPatience));
  EXPECT_TRUE(landing.quiesced());
  ExpectNoLateWrite();

  // Calls do not wait for the reconnect. Mapped tuples stay readable.
  const auto asked = std::chrono::steady_clock::now();
  EXPECT_EQ(engine_->Lookup(prompt_).segments()[0].reason, MissReason::kDaemonUnavailable);
  EXPECT_EQ(engine_->Reserve(ObjectKind::kSegment, prompt_[1]).outcome, ReserveOutcome::kUnavailable);
  EXPECT_LT(std::chrono::steady_clock::now() - asked, std::chrono::seconds(2));
  engine_->ExpectTuples(match, 1, prompt_[1]);

  ExpectWorksAgain();
  EXPECT_THAT(engine_->Land(match, prompt_).Wait(kPatience), Each(MissReason::kLeaseLost));
  engine_->ExpectTuples(match, 1, prompt_[1]);
}

TEST_F(Death, AClientThatTimesOutNeverSeesALateWrite) {
  const Match match = engine_->Lookup(prompt_);
  std::vector<MissReason> reasons;
  std::optional<Landing> landing = LandInterrupted(
      match, [&](Landing& l) { return FreezeAndTimeOut(l); }, reasons);
  ASSERT_TRUE(landing.has_value()) << "every landing was over before the daemon stood still";
  EXPECT_THAT(reasons, Each(MissReason::kTimedOut));
  EXPECT_FALSE(landing->quiesced());
  EXPECT_FALSE(landing->WaitQuiesced(kImpatience));
  daemon_.Thaw();
  ASSERT_TRUE(landing->WaitQuiesced(kPatience));
  EXPECT_TRUE(landing->quiesced());
  EXPECT_THAT(landing->Wait(kPatience), Each(MissReason::kTimedOut));  // the verdict does not change any more
  ExpectNoLateWrite();

  EXPECT_THAT(engine_->Land(match, prompt_).Wait(kPatience), Each(MissReason::kNone));
}

TEST_F(Death, DeathOfFrozenDaemonQuiescesLandings) {
  const Match match = engine_->Lookup(prompt_);
  std::vector<MissReason> reasons;
  std::optional<Landing> landing = LandInterrupted(
      match, [&](Landing& l) { return FreezeAndTimeOut(l); }, reasons);
  ASSERT_TRUE(landing.has_value());
  EXPECT_FALSE(landing->quiesced());
  daemon_.Kill();
  EXPECT_TRUE(landing->WaitQuiesced(kPatience));
  ExpectNoLateWrite();
}

// The request is in the daemon's socket but unread, and the daemon reads it after the client gave up.
TEST_F(Death, ALandingThatStartsTooLateWritesNothing) {
  const Match match = engine_->Lookup(prompt_);
  engine_->FillTargets(kPoison);
  daemon_.Freeze();
  Landing landing = engine_->Land(match, prompt_);
  EXPECT_THAT(landing.Wait(kImpatience), Each(MissReason::kTimedOut));
  EXPECT_FALSE(landing.quiesced());
  daemon_.Thaw();
  ASSERT_TRUE(landing.WaitQuiesced(kPatience));
  ExpectNoLateWrite();
}

TEST_F(Death, ADroppedLandingQuiescesItsSlots) {
  const Match match = engine_->Lookup(prompt_);
  engine_->FillTargets(kPoison);
  {
    Landing landing = engine_->Land(match, prompt_);
    landing.WaitLayers(1, kPatience);
  }
  ExpectNoLateWrite();
}

// Only the connection breaks, and the daemon continues to write: the engine still needs its confirmation.
TEST_F(Death, LostConnectionIsSurvived) {
  const Match match = engine_->Lookup(prompt_);
  std::vector<MissReason> reasons;
  std::optional<Landing> landing = LandInterrupted(
      match, [&](Landing& l) { return FreezeAndTimeOut(l); }, reasons);
  ASSERT_TRUE(landing.has_value());
  BreakConnections(daemon_.client_options().rpc_socket);
  EXPECT_FALSE(landing->WaitQuiesced(kImpatience));
  daemon_.Thaw();
  ASSERT_TRUE(landing->WaitQuiesced(kPatience));
  ExpectNoLateWrite();

  BreakConnections(daemon_.client_options().rpc_socket);
  // Models are restored before their pages.
  EXPECT_TRUE(
      Eventually([&] { return engine_->Lookup(prompt_).segments()[1].hit() && engine_->client().connected(); }));
  EXPECT_THAT(engine_->Land(engine_->Lookup(prompt_), prompt_).Wait(kPatience), Each(MissReason::kNone));
}

// The connection breaks, and a new connection reaches another daemon that has replaced the one that still writes.
TEST_F(Death, AnotherDaemonDoesNotResolveALanding) {
  const Match match = engine_->Lookup(prompt_);
  std::vector<MissReason> reasons;
  std::optional<Landing> landing = LandInterrupted(
      match, [&](Landing& l) { return FreezeAndTimeOut(l); }, reasons);
  ASSERT_TRUE(landing.has_value());
  DaemonProcess other;
  const std::string socket = daemon_.client_options().rpc_socket;
  BreakConnections(socket);
  std::filesystem::rename(other.client_options().rpc_socket, socket);
  EXPECT_FALSE(landing->WaitQuiesced(kWatch));
  const std::string refused = "ashlar_rpcs_total{code=\"FAILED_PRECONDITION\",method=\"Quiesce\"}";
  EXPECT_GT(other.Metric(refused), 0) << "the other daemon was not asked";
  daemon_.Kill();
  EXPECT_TRUE(landing->WaitQuiesced(kPatience));
  ExpectNoLateWrite();
}

TEST_F(Death, ObjectsMayGoInAnyOrder) {
  std::optional<Match> match = engine_->Lookup(prompt_);
  std::optional<Landing> landing = engine_->Land(*match, prompt_);
  engine_.reset();  // the client, the model, the region
  EXPECT_TRUE(match->valid());
  match.reset();
  EXPECT_THAT(landing->Wait(kPatience), Each(MissReason::kNone));
  landing.reset();
  EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_sessions") == 0; }));

  engine_ = std::make_unique<TestEngine>(daemon_.client_options(), kLarge);
  match = engine_->Lookup(prompt_);
  landing = engine_->Land(*match, prompt_);
  match.reset();
  landing.reset();
  engine_.reset();
  EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_sessions") == 0; }));
}

TEST_F(Death, WhileIdleIsFollowedByAReconnect) {
  for (int life = 0; life < 2; ++life) {
    daemon_.Kill();
    EXPECT_TRUE(Eventually([&] { return !engine_->client().connected(); }));
    ExpectWorksAgain();
  }
  const auto asked = std::chrono::steady_clock::now();
  EXPECT_EQ(daemon_.Terminate(), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - asked, std::chrono::seconds(5)) << "an idle engine held the daemon up";
  EXPECT_TRUE(Eventually([&] { return !engine_->client().connected(); }));
  ExpectWorksAgain();
}

// As if the daemon restarted between the two connects: such a connection is unusable, and is replaced.
TEST(Connect, DetectsSocketsOfTwoDaemons) {
  DaemonProcess first, second;
  ClientOptions options = first.client_options();
  options.rpc_socket = second.client_options().rpc_socket;
  const auto client = Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const Layout layout = TestEngine(first.client_options()).model().layout();
  const auto opening = [&] { return (*client)->OpenModel(TestEngine::identity(), layout).status().code(); };
  EXPECT_EQ(opening(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(Eventually([&] { return opening() == absl::StatusCode::kUnavailable; })) << "it is still in use";
}

// The client has lost its session with a daemon that still listens, and waits for its greeting.
TEST_F(Death, AClientReconnectingToAFrozenDaemonEndsAtOnce) {
  daemon_.Freeze();
  BreakConnections(daemon_.client_options().session_socket);
  ASSERT_TRUE(Eventually([&] { return !engine_->client().connected(); }));
  std::this_thread::sleep_for(milliseconds(100));  // the first pause before a reconnect is a tenth of this
  const auto asked = std::chrono::steady_clock::now();
  engine_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - asked, kPatience / 4);
}

// A reservation belongs to the daemon that granted it: the next one may use its number for something else.
TEST_F(Death, ReservationsDoNotOutliveTheDaemon) {
  const Reservation old = engine_->Reserve(ObjectKind::kSegment, MakeRun(7, 100));
  ASSERT_TRUE(old.granted());
  daemon_.Kill();
  ExpectWorksAgain();
  const Tokens other = MakeRun(8, 100);
  const Reservation fresh = engine_->Reserve(ObjectKind::kSegment, other);
  ASSERT_TRUE(fresh.granted());
  EXPECT_EQ(engine_->model().Publish(old, engine_->Compute(ObjectKind::kSegment, other)),
            PublishOutcome::kUnknownReservation);
}

// Landings are limited: one beyond the limit misses at once, even if the daemon does not answer.
TEST(Land, LandingBeyondLimitIsBusy) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 30);
  engine.PublishPrompt(prompt);
  const Match match = engine.Lookup(prompt);
  daemon.Freeze();
  std::vector<Landing> landings;
  std::vector<MissReason> reasons;
  while (reasons.empty() && landings.size() < 10'000) {
    landings.push_back(engine.Land(match, prompt));
    if (landings.back().quiesced())
      reasons = landings.back().Wait(kImpatience);  // the request never reached the daemon
  }
  EXPECT_THAT(reasons, Each(MissReason::kBusy));
  EXPECT_GT(landings.size(), 100u);
  daemon.Kill();  // when resumed, it would land all of them into the same slots
  landings.clear();
  daemon.Start();
  ASSERT_TRUE(Eventually([&] { return engine.client().connected(); }));
  engine.PublishPrompt(prompt);
  EXPECT_THAT(engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience), Each(MissReason::kNone));
}

// The limit counts landings in progress, not finished ones that the engine has kept.
TEST(Land, FinishedLandingsDoNotCount) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 30);
  engine.PublishPrompt(prompt);
  const Match match = engine.Lookup(prompt);
  std::vector<Landing> finished;
  for (int i = 0; i < 300; ++i) {
    finished.push_back(engine.Land(match, prompt));
    ASSERT_THAT(finished.back().Wait(kPatience), Each(MissReason::kNone)) << i;
  }
}

// A publish that the client abandoned must not become an object of torn bytes.
TEST(Publish, TimedOutPublishIsNeverFound) {
  DaemonProcess daemon;
  ClientOptions options = daemon.client_options();
  options.timeout = milliseconds(500);
  TestEngine engine(options);
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 200);
  const Reservation reservation = engine.Reserve(ObjectKind::kSegment, prompt[1]);
  ASSERT_TRUE(reservation.granted());
  const PublishParts parts = engine.Compute(ObjectKind::kSegment, prompt[1]);
  daemon.Freeze();
  EXPECT_EQ(engine.model().Publish(reservation, parts), PublishOutcome::kUnavailable);
  engine.Compute(ObjectKind::kSegment, MakeRun(99, 200));  // the engine uses the memory for something else
  daemon.Thaw();
  TestEngine patient(daemon.client_options());
  EXPECT_FALSE(patient.Lookup(prompt).segments()[1].hit());
  engine.model().Abandon(reservation);
  EXPECT_FALSE(patient.Lookup(prompt).segments()[1].hit());
}

TEST(Hosted, RegionsOutliveTheDaemon) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options(), {}, TestEngine::Memory::kHosted);
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 50);
  engine.FillTargets(kOwn);
  daemon.Kill();
  EXPECT_TRUE(engine.TargetsAre(kOwn));
  daemon.Start();
  ASSERT_TRUE(Eventually([&] { return engine.client().connected(); }));
  engine.PublishPrompt(prompt);
  const Match match = engine.Lookup(prompt);
  engine.FillTargets(kPoison);
  EXPECT_THAT(engine.Land(match, prompt).Wait(kPatience), Each(MissReason::kNone));
  engine.ExpectLanded(ObjectKind::kSegment, prompt[1], 50, kPoison);
}

}  // namespace
}  // namespace ashlar::integration
