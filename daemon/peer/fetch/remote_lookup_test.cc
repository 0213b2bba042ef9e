// SPDX-License-Identifier: Apache-2.0
// Lookups that time out while others, which joined them, still wait.
#include "daemon/peer/fetch/remote_lookup.h"

#include <gtest/gtest.h>

#include <future>

#include "daemon/peer/testing/peer_node.h"
#include "storage/testing/manual_clock.h"

namespace ashlar::daemon {
namespace {

using storage::Query;
constexpr storage::Nanos kMillisecond = 1'000'000;

// The nearest holder answers after the first lookup has continued, and no longer has the object.
TEST(RemoteLookupTest, AsksTheNextHolderForWaitingLookups) {
  TestCluster cluster;
  PeerNode a(cluster, "a"), c(cluster, "c"), b(cluster, "b");
  const ObjectHeader plan = storage::TestPlan(1, 64);
  const Query query{.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens};
  for (PeerNode* node : {&a, &c}) node->Publish(plan, 1);
  const auto told = [&] {
    MutexLock lock(cluster.mutex);
    return cluster.announced;
  }();
  a.OnLoop([&] { a.cache.retention().Evict(0, plan.key); });
  {
    MutexLock lock(cluster.mutex);
    cluster.announced = told;  // the directory says that it is there
  }

  storage::ManualClock clock;
  PeerRates rates;
  Opener opener(b.loop, clock, b.directory, b, rates, {"default"});
  RemoteLookup lookup(b.loop, clock, b.directory, opener, rates, {.deadline = 100 * kMillisecond});
  lookup.Start(b.cache, dynamic_cast<RemoteObjects&>(b.peers.source()));
  const RemoteQuestion question{{&query, 1}, nullptr};
  const auto find = [&] {
    const auto found = std::make_shared<std::promise<RemoteLookup::Adopted>>();
    lookup.Find(0, {&question, 1}, [found](RemoteLookup::Adopted adopted) { found->set_value(std::move(adopted)); });
    return found->get_future();
  };
  // In order with the lookups.
  const auto after = [&](storage::Nanos time) {
    std::promise<void> done;
    ASSERT_TRUE(b.loop.Post(0, [&] {
      clock.Advance(time);
      lookup.Tick();
      done.set_value();
    }));
    done.get_future().wait();
  };

  std::promise<void> answer;
  a.loop.PostCompletion(storage::kNoTenant, [&] { answer.get_future().wait(); });
  auto first = find();
  after(90 * kMillisecond);
  auto joined = find();
  after(20 * kMillisecond);
  EXPECT_EQ(first.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_EQ(lookup.stats().joined, 1u);
  EXPECT_EQ(joined.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  answer.set_value();
  RemoteLookup::Adopted adopted = joined.get();
  const storage::Match match = b.OnLoop([&] { return b.cache.Lookup(PeerNode::kEngine, {&query, 1}); });
  EXPECT_EQ(match.found[0].tier, TierKind::kRemote);
  b.Release(match.lease);
  first.get();
  adopted = nullptr;
  after(0);  // unused objects are released
}

TEST(RemoteLookupTest, DoesNotAskNodesThatDoNotShareTheTenant) {
  TestCluster cluster;
  PeerNode a(cluster, "a"), b(cluster, "b"), c(cluster, "c");
  const ObjectHeader plan = storage::TestPlan(1, 64);
  const Query query{.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens};
  a.Publish(plan, 1);
  b.Share("a", false);
  EXPECT_EQ(b.Lookup({&query, 1}).found[0].tier, TierKind::kNone);
  EXPECT_EQ(b.made(), 0u);
  const storage::Match match = c.Lookup({&query, 1});
  EXPECT_EQ(match.found[0].tier, TierKind::kRemote);
  c.Release(match.lease);
}

}  // namespace
}  // namespace ashlar::daemon
