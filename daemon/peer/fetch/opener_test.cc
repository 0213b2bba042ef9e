// SPDX-License-Identifier: Apache-2.0
// Failed calls and the nodes that they are counted for; leases whose Close call did not arrive.
#include "daemon/peer/fetch/opener.h"

#include <gtest/gtest.h>

#include <future>

#include "daemon/peer/testing/peer_node.h"

namespace ashlar::daemon {
namespace {

class OpenerTest : public ::testing::Test {
 protected:
  Opener::Opened Open(const ObjectHeader& plan) {
    std::promise<Opener::Opened> opened;
    b_.loop.PostCompletion(0, [&] {
      opener_.Open(0, a_.directory.member, {{.key = plan.key, .shard = plan.shard}},
                   [&](Opener::Opened answer) { opened.set_value(std::move(answer)); });
    });
    return opened.get_future().get();
  }
  bool MayAsk() {
    return b_.OnLoop([&] { return rates_.MayAsk("a"); });
  }

  TestCluster cluster_;
  PeerNode a_{cluster_, "a"}, b_{cluster_, "b"};
  PeerRates rates_;
  Opener opener_{b_.loop, b_.clock, b_.directory, b_, rates_, PeerNode::Tenants()};
};

TEST_F(OpenerTest, RefusingATenantIsNotANodeFailure) {
  const ObjectHeader plan = storage::TestPlan(1, 64);
  for (const absl::Status& refusal :
       {absl::PermissionDeniedError("not shared"), absl::NotFoundError("not shared there"),
        absl::ResourceExhaustedError("too many calls")}) {
    b_.Refuse("a", refusal);
    EXPECT_EQ(Open(plan).front().status(), refusal);
    EXPECT_TRUE(MayAsk()) << refusal;
  }
  b_.Refuse("a", absl::UnavailableError("not connected"));
  EXPECT_FALSE(Open(plan).front().ok());
  EXPECT_FALSE(MayAsk());
}

TEST_F(OpenerTest, LeasesWhoseCloseWasRefusedAreClosedLater) {
  const ObjectHeader plan = storage::TestPlan(1, 64);
  a_.Publish(plan, 1);
  const Opener::Opened opened = Open(plan);
  ASSERT_TRUE(opened.front().ok());
  const auto leases = [&] { return a_.OnLoop([&] { return a_.peers.stats().holder.leases; }); };
  EXPECT_EQ(leases(), 1u);
  b_.Refuse("a", absl::ResourceExhaustedError("too many calls"));
  b_.OnLoop([&] {
    opener_.Close(a_.directory.member, opened.front()->lease);
    opener_.Flush();
  });
  b_.OnLoop([] {});  // its result is known
  EXPECT_EQ(leases(), 1u);
  b_.Refuse("a", absl::OkStatus());
  b_.OnLoop([&] { opener_.Flush(); });
  EXPECT_EQ(leases(), 0u);
}

}  // namespace
}  // namespace ashlar::daemon
