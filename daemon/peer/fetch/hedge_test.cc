// A holder that is slow: a second one is asked for the same bytes, and the first to come win.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "daemon/peer/testing/peer_node.h"

namespace ashlar::daemon {
namespace {

using storage::Query;
using storage::TestPages;
using std::chrono::milliseconds;

// Holds its transport's thread up, and with it all that the node sends.
class Stalling final : public GrantedBytes {
 public:
  explicit Stalling(milliseconds time) : time_(time) {}
  void Resolve(uint64_t, uint64_t, std::function<void(absl::StatusOr<Spans>)> answer) override {
    std::this_thread::sleep_for(time_);
    answer(absl::NotFoundError("none"));
  }
  void Written(uint64_t, uint64_t, const absl::Status&) override {}

 private:
  const milliseconds time_;
};

class HedgeTest : public ::testing::Test {
 protected:
  void Stall(PeerNode& node, milliseconds time) {
    const Grant grant = node.transport->Allow(GrantAccess::kRead, 64, std::make_shared<Stalling>(time));
    outside_->Fetch(node.transport->address(), grant, 0, {{target_, sizeof target_}}, 0, [](const absl::Status&) {});
  }
  // Returns the time that it took to land.
  static storage::Nanos Land(PeerNode& node, const ObjectHeader& plan, uint64_t text) {
    const Query query{.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens};
    const storage::Nanos began = node.clock.Now();
    const storage::Match match = node.Lookup({&query, 1});
    EXPECT_EQ(match.found[0].tier, TierKind::kRemote);
    const TestPages pages(TestPages::Holding(plan.tokens + 100));
    EXPECT_THAT(node.Land(match.lease, TestTarget(pages, {{0, 100}})), ::testing::ElementsAre(MissReason::kNone));
    const storage::Nanos took = node.clock.Now() - began;
    EXPECT_LT(LandingError(pages, plan, text, 100), 1e-4);
    node.Release(match.lease);
    return took;
  }
  static RemoteObjects::Stats StatsOf(PeerNode& node) {
    return node.OnLoop([&] { return node.peers.stats().objects; });
  }
  static void AwaitNothingOpen(PeerNode& node) {
    const auto open = [&] {
      const PeersStats stats = node.OnLoop([&] { return node.peers.stats(); });
      return stats.objects.copies + stats.objects.reading + stats.holder.leases;
    };
    for (int i = 0; i < 10'000 && open() > 0; ++i) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_EQ(open(), 0u);
  }

  std::byte target_[64];
  const std::unique_ptr<Transport> outside_ = *Transport::Start({.listen = {"127.0.0.1", 0}});
  TestCluster cluster_;
};

TEST_F(HedgeTest, ASlowHolderIsOvertaken) {
  PeersOptions options = PeerNode::All();
  options.objects.least_patience = options.objects.most_patience = 20'000'000'000;
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b", 256, options);
  const ObjectHeader plan = storage::TestPlan(1, 8000);
  a.Publish(plan, 1);
  Land(c, plan, 1);
  Stall(a, milliseconds(3000));
  std::this_thread::sleep_for(milliseconds(100));  // until it has begun
  EXPECT_LT(Land(b, plan, 1), 2'000'000'000);
  const RemoteObjects::Stats stats = StatsOf(b);
  EXPECT_GE(stats.hedges_won, 1u);
  EXPECT_GE(stats.hedged, stats.hedges_won);
  EXPECT_EQ(stats.failed_pieces, 0u);
  for (PeerNode* node : {&a, &b, &c}) AwaitNothingOpen(*node);
}

TEST_F(HedgeTest, AFastHolderIsNotHedged) {
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b");
  const ObjectHeader plan = storage::TestPlan(1, 2000);
  a.Publish(plan, 1);
  Land(c, plan, 1);
  Land(b, plan, 1);
  EXPECT_EQ(StatsOf(b).moved, 0u);
}

TEST_F(HedgeTest, WithoutASecondHolderOneWaits) {
  PeersOptions options = PeerNode::All();
  options.objects.least_patience = options.objects.most_patience = 20'000'000'000;
  PeerNode a(cluster_, "a"), b(cluster_, "b", 256, options);
  const ObjectHeader plan = storage::TestPlan(1, 2000);
  a.Publish(plan, 1);
  Stall(a, milliseconds(500));
  Land(b, plan, 1);
  EXPECT_EQ(StatsOf(b).hedged, 0u);
}

// Both holders stall now and then: whoever wins, whatever is cancelled, the bytes are right and nothing is left.
TEST_F(HedgeTest, WhoeverWinsTheBytesAreRight) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  PeersOptions options = PeerNode::All();
  options.objects.least_hedge = 10'000'000;
  options.objects.hedge = 1;
  PeerNode a(cluster_, "a"), c(cluster_, "c"), b(cluster_, "b", 64, options);
  for (uint64_t text = 1; text <= 12; ++text) {
    const ObjectHeader plan = storage::TestPlan(text, 500 + random() % 6000);
    a.Publish(plan, text);
    c.Publish(plan, text);
    PeerNode& slow = random() % 2 == 0 ? a : c;
    Stall(slow, milliseconds(random() % 60));
    Land(b, plan, text);
  }
  EXPECT_EQ(StatsOf(b).failed_pieces, 0u);
  for (PeerNode* node : {&a, &b, &c}) AwaitNothingOpen(*node);
}

}  // namespace
}  // namespace ashlar::daemon
