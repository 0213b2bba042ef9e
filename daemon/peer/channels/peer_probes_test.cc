// SPDX-License-Identifier: Apache-2.0
// Probes of a node that stopped answering, and then answers again.
#include "daemon/peer/channels/peer_probes.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "daemon/peer/testing/peer_node.h"

namespace ashlar::daemon {
namespace {

class PeerProbesTest : public ::testing::Test {
 protected:
  MissReason Ask() {
    const storage::Match match = b_.Lookup({&query_, 1});
    b_.Release(match.lease);
    return match.found[0].reason;
  }

  TestCluster cluster_;
  PeerNode a_{cluster_, "a"}, b_{cluster_, "b"};
  const ObjectHeader plan_ = storage::TestPlan(1, 64);
  const storage::Query query_{.kind = plan_.kind, .key = plan_.key, .ns = plan_.ns, .tokens = plan_.tokens};
};

TEST_F(PeerProbesTest, ARecoveredNodeIsUsedAtOnce) {
  using std::chrono::steady_clock;
  a_.Publish(plan_, 1);
  b_.Refuse("a", absl::UnavailableError("not connected"));
  // As many failures as in two seconds of lookups.
  const auto cut_until = steady_clock::now() + std::chrono::milliseconds(1800);
  while (steady_clock::now() < cut_until) {
    EXPECT_EQ(Ask(), MissReason::kHolderUnreachable);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  b_.Refuse("a", absl::OkStatus());
  const auto healed = steady_clock::now();
  while (Ask() != MissReason::kNone && steady_clock::now() - healed < std::chrono::seconds(20)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LT(steady_clock::now() - healed, std::chrono::seconds(1));
}

TEST_F(PeerProbesTest, AFailedNodeIsProbedOnceAtATimeAndNotByLookups) {
  a_.Publish(plan_, 1);
  b_.Refuse("a", absl::DeadlineExceededError("no answer"));
  EXPECT_EQ(Ask(), MissReason::kHolderUnreachable);
  const uint64_t made = b_.made();
  const storage::Nanos began = b_.clock.Now();
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Ask(), MissReason::kHolderUnreachable);
  const auto probes = static_cast<uint64_t>((b_.clock.Now() - began) / 250'000'000);
  EXPECT_LE(b_.made(), made + probes + 1) << "a probe each 250 ms";
}

TEST_F(PeerProbesTest, AnObjectThatNoNodeHasWasNeverSeen) {
  EXPECT_EQ(Ask(), MissReason::kNeverSeen);
}

}  // namespace
}  // namespace ashlar::daemon
