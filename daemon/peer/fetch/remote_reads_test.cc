// SPDX-License-Identifier: Apache-2.0
// Nodes that read each other's arenas by remote reads, which UCX emulates in software: published objects land on other
// nodes, whichever node fails.
#include <gtest/gtest.h>

#include "daemon/peer/testing/checked_landing.h"
#include "daemon/peer/testing/peer_node.h"
#include "storage/testing/tokens.h"

namespace ashlar::daemon {
namespace {

using storage::Query;

class RemoteReadsTest : public ::testing::Test {
 protected:
  std::unique_ptr<PeerNode> Node(const std::string& name) {
    return std::make_unique<PeerNode>(cluster_, name, 256, PeerNode::All(), RemoteReads::kBySoftware);
  }
  static void Await(const std::function<bool()>& condition) {
    while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  static Query Ask(const ObjectHeader& plan) {
    return {.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
  }
  static storage::Match Find(PeerNode& node, const ObjectHeader& plan) {
    const Query query = Ask(plan);
    storage::Match match = node.Lookup({&query, 1});
    EXPECT_EQ(match.found[0].tier, TierKind::kRemote);
    return match;
  }
  // `from` has the object in registered arenas, and is connected with `to`, which has read from it.
  void PublishForReading(PeerNode& from, PeerNode& to, const ObjectHeader& plan, uint64_t text) {
    const ObjectHeader first = storage::TestPlan(1000, 64);
    from.Publish(first, 1000);
    EXPECT_EQ(LandUnder(to, Find(to, first), first, 1000), MissReason::kNone);
    from.Publish(plan, text);
    const uint64_t held = from.OnLoop([&] { return from.tier->Usage().held_bytes; });
    Await([&] { return from.transport->stats().registered_bytes == held; });
  }
  static void AwaitNothingLeased(PeerNode& node) {
    Await([&] {
      const PeersStats stats = node.OnLoop([&] { return node.peers.stats(); });
      return stats.holder.leases == 0 && stats.objects.copies == 0 && stats.objects.reading == 0;
    });
  }

  TestCluster cluster_;
  const ObjectHeader plan_ = storage::TestPlan(1, 8000);
};

TEST_F(RemoteReadsTest, ObjectIsReadByAnotherNode) {
  const auto a = Node("a"), b = Node("b");
  PublishForReading(*a, *b, plan_, 1);
  const uint64_t before = b->transport->stats().read_bytes;
  EXPECT_EQ(LandUnder(*b, Find(*b, plan_), plan_, 1), MissReason::kNone);
  EXPECT_EQ(b->transport->stats().read_bytes - before, plan_.bytes - EncodedHeaderBytes(plan_.parts.size()));
  AwaitNothingLeased(*a);
  AwaitNothingLeased(*b);
  Await([&] { return a->transport->stats().loans == 0; });
}

TEST_F(RemoteReadsTest, ANodeWithoutReadsIsServedByMessages) {
  const auto a = Node("a");
  PeerNode b(cluster_, "b");
  PublishForReading(*a, b, plan_, 1);
  EXPECT_EQ(LandUnder(b, Find(b, plan_), plan_, 1), MissReason::kNone);
  EXPECT_EQ(b.transport->stats().read_bytes, 0u);
}

TEST_F(RemoteReadsTest, AnEvictedObjectIsReadToItsEnd) {
  const auto a = Node("a"), b = Node("b");
  PublishForReading(*a, *b, plan_, 1);
  const storage::Match match = Find(*b, plan_);
  a->OnLoop([&] { a->cache.retention().Evict(0, plan_.key); });
  a->OnLoop([&] { a->cache.retention().Evict(0, storage::TestPlan(1000, 64).key); });
  EXPECT_EQ(LandUnder(*b, match, plan_, 1), MissReason::kNone);
  AwaitNothingLeased(*a);
  Await([&] { return a->OnLoop([&] { return a->tier->Usage(0).used_bytes; }) == 0; });
}

TEST_F(RemoteReadsTest, AHolderThatDiesInMidFetchIsReplaced) {
  auto a = Node("a");
  const auto b = Node("b"), c = Node("c");
  PublishForReading(*a, *b, plan_, 1);
  ASSERT_EQ(LandUnder(*c, Find(*c, plan_), plan_, 1), MissReason::kNone);
  const storage::Match match = Find(*b, plan_);
  a = nullptr;
  EXPECT_EQ(LandUnder(*b, match, plan_, 1), MissReason::kNone);
  AwaitNothingLeased(*b);
  AwaitNothingLeased(*c);
}

}  // namespace
}  // namespace ashlar::daemon
