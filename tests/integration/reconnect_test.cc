// SPDX-License-Identifier: Apache-2.0
// Models and regions on an engine's next connection, when the daemon has little space for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::AnyOf;
using testing::Each;

DaemonOptions WithRegions(uint64_t tenant_bytes) {
  return {.tenants = "tenants:\n  - {name: alpha, uids: [" + std::to_string(::getuid()) +
                     "], dram_bytes: 32MiB, region_bytes: " + std::to_string(tenant_bytes) + "}\n"};
}

uint64_t RegionBytes() {
  const DaemonProcess daemon;
  return TestEngine(daemon.client_options()).region().size();
}

bool Lands(TestEngine& engine, const std::vector<Tokens>& prompt) {
  engine.FillTargets(std::byte{0});
  const std::vector<MissReason> reasons = engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience);
  return testing::Matches(Each(MissReason::kNone))(reasons);
}

class Reconnect : public testing::Test {
 protected:
  // The engine's RPC connection breaks, but its process and its session socket live on.
  void ExpectServedAfterTheLossOfRpc(const DaemonOptions& options, TestEngine::Memory memory) {
    const DaemonProcess daemon(options);
    TestEngine engine(daemon.client_options(), {}, memory);
    engine.PublishPrompt(prompt_);
    const Match old = engine.Lookup(prompt_);
    EXPECT_TRUE(old.valid());
    for (int loss = 0; loss < 3; ++loss) {
      BreakConnections(daemon.client_options().rpc_socket);
      ASSERT_TRUE(Eventually([&] { return engine.Lookup(prompt_).segments()[1].hit(); })) << "it never came back";
      ASSERT_TRUE(Eventually([&] { return Lands(engine, prompt_); })) << "its memory never came back";
      engine.ExpectLanded(ObjectKind::kSegment, prompt_[1], prompt_[0].size(), std::byte{0});
      EXPECT_TRUE(engine.Lookup(prompt_).valid());
      EXPECT_FALSE(old.valid()) << "its lease ended with its session";
      EXPECT_NE(old.tuples(1), nullptr) << "but it stays mapped";
    }
    EXPECT_THAT(engine.Land(old, prompt_).Wait(kPatience), Each(MissReason::kLeaseLost));
  }

  const std::vector<Tokens> prompt_ = MakePrompt(1, 2, 60);
};

TEST_F(Reconnect, NeedsNoSecondSession) {
  ExpectServedAfterTheLossOfRpc({.sessions = "sessions: {max_sessions: 1}\n"}, TestEngine::Memory::kRegistered);
}

TEST_F(Reconnect, RegisteredRegionsNeedNoExtraBudget) {
  ExpectServedAfterTheLossOfRpc(WithRegions(RegionBytes() * 3 / 2), TestEngine::Memory::kRegistered);
}

TEST_F(Reconnect, HostedRegionsNeedNoExtraBudget) {
  ExpectServedAfterTheLossOfRpc(WithRegions(RegionBytes() * 3 / 2), TestEngine::Memory::kHosted);
}

TEST_F(Reconnect, OnlyAMatchWithALeaseIsValid) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  EXPECT_FALSE(engine.Lookup(prompt_).valid()) << "nothing was found";
  engine.PublishPrompt(prompt_);
  Match released = engine.Lookup(prompt_), lost = engine.Lookup(prompt_);
  released.Release();
  EXPECT_FALSE(released.valid());
  EXPECT_TRUE(lost.valid());
  BreakConnections(daemon.client_options().session_socket);
  EXPECT_FALSE(lost.valid());
  ASSERT_TRUE(Eventually([&] { return engine.Lookup(prompt_).valid(); }));
  const Match orphaned = engine.Lookup(prompt_);
  daemon.Kill();
  EXPECT_FALSE(orphaned.valid());
  engine.ExpectTuples(orphaned, 1, prompt_[1]);
}

// A region that does not fit is lost, and nothing else: lookups continue, and it is restored as soon as there is space.
TEST_F(Reconnect, ARegionWithoutSpaceFailsAlone) {
  const uint64_t bytes = RegionBytes();
  DaemonProcess daemon(WithRegions(bytes * 5 / 2));
  auto first = std::make_unique<TestEngine>(daemon.client_options());
  auto second = std::make_unique<TestEngine>(daemon.client_options());
  daemon.Kill();
  daemon.Configure(WithRegions(bytes * 3 / 2));
  daemon.Start();
  ASSERT_TRUE(Eventually([&] { return first->client().connected() && second->client().connected(); }));
  // One of the two has its memory again.
  ASSERT_TRUE(Eventually([&] {
    for (auto* engine : {&first, &second}) {
      const Reservation reservation = (*engine)->Reserve(ObjectKind::kCheckpoint, prompt_[0]);
      const PublishParts parts = (*engine)->Compute(ObjectKind::kCheckpoint, prompt_[0]);
      if ((*engine)->model().Publish(reservation, parts) != PublishOutcome::kPublished) {
        (*engine)->model().Abandon(reservation);
        continue;
      }
      if (engine == &second) std::swap(first, second);
      return true;
    }
    return false;
  }));
  first->Publish(ObjectKind::kSegment, prompt_[1]);
  EXPECT_TRUE(Lands(*first, prompt_));
  const Match found = second->Lookup(prompt_);
  EXPECT_TRUE(found.segments()[1].hit());
  second->ExpectTuples(found, 1, prompt_[1]);
  EXPECT_THAT(second->Land(found, prompt_).Wait(kPatience), Each(MissReason::kBusy));
  const Tokens run = MakeRun(9, 60);
  const Reservation reservation = second->Reserve(ObjectKind::kSegment, run);
  const PublishParts parts = second->Compute(ObjectKind::kSegment, run);
  EXPECT_EQ(second->model().Publish(reservation, parts), PublishOutcome::kBusy);
  first = nullptr;
  EXPECT_TRUE(Eventually([&] { return Lands(*second, prompt_); })) << "there is space now";
  EXPECT_EQ(second->model().Publish(reservation, parts), PublishOutcome::kPublished) << "the reservation is still ours";
}

TEST_F(Reconnect, AClientThatWaitsForSpaceEndsAtOnceIfTheDaemonHangs) {
  const uint64_t bytes = RegionBytes();
  DaemonProcess daemon(WithRegions(bytes * 3 / 2));
  auto engine = std::make_unique<TestEngine>(daemon.client_options());
  daemon.Kill();
  daemon.Configure(WithRegions(bytes / 2));
  daemon.Start();
  ASSERT_TRUE(Eventually([&] { return engine->client().connected(); }));
  daemon.Freeze();
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));  // it asks again several times in this time
  const auto asked = std::chrono::steady_clock::now();
  engine.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - asked, kPatience / 4);
}

}  // namespace
}  // namespace ashlar::integration
