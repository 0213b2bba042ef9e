// SPDX-License-Identifier: Apache-2.0
// A forked child's copy of a client refuses every call, and does not disturb the parent's session.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <optional>

#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;

const std::vector<uint64_t> kTwoSegments(2, 50);

// Everything that a child may try; the process exits with 0 if every call was refused.
int TryEverything(std::unique_ptr<TestEngine> engine, std::optional<Match> match, std::optional<Landing> landing,
                  const Reservation& reservation, const std::vector<Tokens>& prompt, const ClientOptions& options) {
  using absl::StatusCode;
  const auto refused = [](const absl::Status& status) { EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition); };
  EXPECT_FALSE(engine->client().connected());
  refused(engine->client().OpenModel(TestEngine::identity(), engine->model().layout()).status());
  refused(engine->client().HostRegion(4096).status());
  refused(engine->client().RegisterRegion(0, 4096).status());
  refused(engine->model().DeclarePages(engine->region(), {}));
  EXPECT_EQ(engine->Lookup(prompt).segments()[0].reason, MissReason::kDaemonUnavailable);
  EXPECT_EQ(engine->model().Attach(match->lease(), kTwoSegments).segments()[0].reason, MissReason::kDaemonUnavailable);
  EXPECT_EQ(engine->Reserve(ObjectKind::kSegment, prompt[1]).outcome, ReserveOutcome::kUnavailable);
  EXPECT_EQ(engine->model().Publish(reservation, {}), PublishOutcome::kUnavailable);
  engine->model().Abandon(reservation);
  EXPECT_THAT(engine->Land(*match, prompt).Wait(kPatience), Each(MissReason::kDaemonUnavailable));
  EXPECT_THAT(landing->Wait(kPatience), Each(MissReason::kDaemonUnavailable));
  EXPECT_FALSE(landing->quiesced());
  EXPECT_FALSE(landing->WaitQuiesced(kPatience));
  EXPECT_EQ(match->tuples(1), nullptr);
  refused(Client::Connect(options).status());
  landing.reset();
  match.reset();
  engine.reset();
  return testing::Test::HasFailure() ? 1 : 0;
}

TEST(Fork, AChildIsRefusedAndItsParentContinues) {
  DaemonProcess daemon;
  auto engine = std::make_unique<TestEngine>(daemon.client_options());
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 50);
  engine->PublishPrompt(prompt);
  std::optional<Match> match = engine->Lookup(prompt);
  std::optional<Landing> landing = engine->Land(*match, prompt);
  const Reservation reservation = engine->Reserve(ObjectKind::kSegment, MakeRun(9, 50));
  ASSERT_TRUE(reservation.granted());

  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);  // a call that hangs counts as a failure
    ::_exit(TryEverything(std::move(engine), std::move(match), std::move(landing), reservation, prompt,
                          daemon.client_options()));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;

  EXPECT_THAT(landing->Wait(kPatience), Each(MissReason::kNone));
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_leases") == 1; }));
  engine->ExpectTuples(*match, 1, prompt[1]);
  EXPECT_THAT(engine->Land(*match, prompt).Wait(kPatience), Each(MissReason::kNone));
  EXPECT_EQ(engine->model().Publish(reservation, engine->Compute(ObjectKind::kSegment, MakeRun(9, 50))),
            PublishOutcome::kPublished);
}

TEST(Fork, AChildDoesNotKeepADeadParentsSessionAlive) {
  DaemonProcess daemon;
  EngineProcess engine(daemon.client_options(), {"fork", "1", "2", "50"});
  ASSERT_EQ(engine.ReadLine(), "forked");
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_sessions") == 1; }));
  engine.Kill();  // its child lives until its output is no longer read
  EXPECT_TRUE(Eventually([&] { return daemon.Metric("ashlar_sessions") == 0; }));
}

}  // namespace
}  // namespace ashlar::integration
