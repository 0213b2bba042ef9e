// SPDX-License-Identifier: Apache-2.0
// Nodes that fetch from one another over a real transport: published objects land on other nodes, whichever node fails.
#include "daemon/peer/peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <random>

#include "daemon/peer/testing/checked_landing.h"
#include "daemon/peer/testing/peer_node.h"
#include "storage/objects/object_bytes.h"
#include "storage/testing/prefix_engine.h"
#include "storage/testing/tokens.h"

namespace ashlar::daemon {
namespace {

using storage::Query;
using storage::TestPages;
using storage::TestPlan;
using ::testing::Each;
using ::testing::ElementsAre;

Query Ask(const ObjectHeader& plan) {
  return {.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
}
ObjectHeader Plan(uint64_t text, uint64_t tokens = 64) {
  return TestPlan(text, tokens);
}

void Await(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

class PeersTest : public ::testing::Test {
 protected:
  // Looks up, lands and checks every byte. Returns the tier of the hit, or the reason of the miss.
  MissReason Land(PeerNode& node, const ObjectHeader& plan, uint64_t text) {
    const Query query = Ask(plan);
    const storage::Match match = node.Lookup({&query, 1});
    tier_ = match.found[0].tier;
    if (match.found[0].reason != MissReason::kNone) return match.found[0].reason;
    return LandUnder(node, match, plan, text);
  }
  // Waits until no lease of a fetch is left.
  static void AwaitNothingLeased(PeerNode& node) {
    Await([&] {
      const PeersStats stats = node.OnLoop([&] { return node.peers.stats(); });
      return stats.holder.leases == 0 && stats.objects.copies == 0 && stats.objects.reading == 0;
    });
  }

  TestCluster cluster_;
  TierKind tier_ = TierKind::kNone;
};

TEST_F(PeersTest, ObjectOfOneNodeLandsAtAnother) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  a.Publish(Plan(1), 1);
  EXPECT_EQ(Land(b, Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(tier_, TierKind::kRemote);
  EXPECT_EQ(Land(b, Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(tier_, TierKind::kDram);
  EXPECT_EQ(Land(b, Plan(2), 2), MissReason::kNeverSeen);
  AwaitNothingLeased(a);
  AwaitNothingLeased(b);
}

TEST_F(PeersTest, EachNodeReportsItsPeers) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c");
  const ObjectHeader plan = Plan(1, 8000);
  a.Publish(plan, 1);
  EXPECT_EQ(Land(b, plan, 1), MissReason::kNone);
  AwaitNothingLeased(b);
  const auto of = [](PeerNode& node, const std::string& other) {
    const TransportStats transport = node.transport->stats();
    const auto figures =
        node.OnLoop([&] { return node.peers.PerNode(transport, 512, [](const Member&) { return true; }); });
    const auto found = std::ranges::find(figures, other, &PeerFigures::node);
    return found == figures.end() ? PeerFigures{} : *found;
  };
  const PeerFigures from_a = of(b, "a"), to_b = of(a, "b"), none = of(b, "c");
  EXPECT_TRUE(from_a.connected);
  EXPECT_EQ(from_a.path, "am");
  EXPECT_THAT(from_a.lanes, ::testing::StartsWith("tcp/"));
  EXPECT_EQ(from_a.received_bytes, plan.bytes);
  EXPECT_GT(from_a.bytes_per_second, 0);
  EXPECT_GT(from_a.rtt_seconds, 0);
  EXPECT_EQ(from_a.sent_bytes, 0u);
  EXPECT_EQ(from_a.failed_calls + from_a.lost_connections + from_a.stalls, 0u);
  // The header is part of the lookup's answer.
  EXPECT_GT(to_b.sent_bytes, plan.bytes - 64 * 1024);
  EXPECT_LE(to_b.sent_bytes, plan.bytes);
  EXPECT_EQ(to_b.received_bytes, 0u);
  EXPECT_EQ(none.node, "c");
  EXPECT_EQ(none.path, "");
  EXPECT_EQ(none.received_bytes, 0u);
}

TEST_F(PeersTest, TheAddressOfADepartedNodeIsErased) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  a.Publish(Plan(1), 1);
  EXPECT_EQ(Land(b, Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(b.transport->stats().peers.size(), 1u);
  a.Leave();
  Await([&] { return b.transport->stats().peers.empty(); });
  EXPECT_GE(b.transport->stats().bytes_received, Plan(1).bytes / 2) << "what it has sent stays counted";
}

TEST_F(PeersTest, ALongObjectIsFetchedInPieces) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const ObjectHeader plan = Plan(1, 8000);
  ASSERT_GT(plan.Extents(), 32u);
  a.Publish(plan, 1);
  EXPECT_EQ(Land(b, plan, 1), MissReason::kNone);
  const PeersStats stats = b.OnLoop([&] { return b.peers.stats(); });
  EXPECT_EQ(stats.objects.bytes, plan.bytes);
  EXPECT_GT(stats.objects.pieces, 8u);
}

TEST_F(PeersTest, AFetchedCopyServesOtherNodes) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c");
  a.Publish(Plan(1), 1);
  EXPECT_EQ(Land(b, Plan(1), 1), MissReason::kNone);
  a.Leave();
  EXPECT_EQ(Land(c, Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(tier_, TierKind::kRemote);
}

TEST_F(PeersTest, AnUnreachableNodeIsAMiss) {
  PeerNode b(cluster_, "b");
  {
    PeerNode a(cluster_, "a");
    a.Publish(Plan(1), 1);
    MutexLock lock(cluster_.mutex);
    cluster_.nodes.erase("a");  // its announcements are still believed
  }
  EXPECT_EQ(Land(b, Plan(1), 1), MissReason::kNeverSeen);
  AwaitNothingLeased(b);
}

// The node is connected but frozen.
TEST_F(PeersTest, AnUnresponsiveNodeIsAMissInTime) {
  PeersOptions options = PeerNode::All();
  options.lookup.deadline = 100'000'000;
  PeerNode a(cluster_, "a"), b(cluster_, "b", 256, options);
  a.Publish(Plan(1), 1);
  std::promise<void> go;
  a.loop.PostCompletion(storage::kNoTenant, [future = go.get_future().share()] { future.wait(); });
  auto landed = std::async(std::launch::async, [&] { return Land(b, Plan(1), 1); });
  EXPECT_EQ(landed.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  EXPECT_EQ(b.OnLoop([&] { return b.peers.stats().lookup.late; }), 1u);
  go.set_value();
  EXPECT_EQ(landed.get(), MissReason::kHolderUnreachable);
  AwaitNothingLeased(a);
  AwaitNothingLeased(b);
}

// The directory is out of date: the node no longer has the object.
TEST_F(PeersTest, AStaleEntryIsAMissAndTheNextHolderIsAsked) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c");
  for (PeerNode* node : {&a, &c}) node->Publish(Plan(1), 1);
  std::vector<TestCluster::Announced> told;
  {
    MutexLock lock(cluster_.mutex);
    told = cluster_.announced;
  }
  a.OnLoop([&] { a.cache.retention().Evict(0, Plan(1).key); });
  {
    MutexLock lock(cluster_.mutex);
    cluster_.announced = told;
  }
  EXPECT_EQ(Land(b, Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(tier_, TierKind::kRemote);
  const auto stats = b.OnLoop([&] { return b.peers.stats().lookup; });
  EXPECT_LE(stats.missed, 1u);
  EXPECT_EQ(stats.opened, 1u);
}

// Neither node's rate is known: the holder with the object in dram is asked.
TEST_F(PeersTest, PrefersDramCopies) {
  for (const TierKind farther : {TierKind::kHbm, TierKind::kSsd}) {
    PeersOptions unhedged = PeerNode::All();
    unhedged.objects.hedge = 0;  // on a slow machine the other holder would be asked too
    PeerNode a(cluster_, "a"), b(cluster_, "b", 256, unhedged), c(cluster_, "c");
    for (PeerNode* node : {&a, &c}) node->Publish(Plan(1), 1);
    {
      MutexLock lock(cluster_.mutex);
      for (TestCluster::Announced& one : cluster_.announced) {
        if (one.member->node == "a") one.holding.tier = farther;
      }
    }
    EXPECT_EQ(Land(b, Plan(1), 1), MissReason::kNone);
    const auto given = [](PeerNode& node) { return node.OnLoop([&] { return node.peers.stats().holder.opened; }); };
    EXPECT_EQ(given(a), 0u);
    EXPECT_EQ(given(c), 1u);
  }
}

// The holder's transport dies with its process; another node has the same bytes.
TEST_F(PeersTest, AHolderThatDiesInMidFetchIsReplaced) {
  auto a = std::make_unique<PeerNode>(cluster_, "a");
  PeerNode b(cluster_, "b"), c(cluster_, "c");
  const ObjectHeader plan = Plan(1, 8000);
  a->Publish(plan, 1);
  ASSERT_EQ(Land(c, plan, 1), MissReason::kNone);
  const Query query = Ask(plan);
  const storage::Match match = b.Lookup({&query, 1});
  ASSERT_EQ(match.found[0].tier, TierKind::kRemote);
  a = nullptr;
  const TestPages pages(TestPages::Holding(plan.tokens + 100));
  EXPECT_THAT(b.Land(match.lease, TestTarget(pages, {{0, 100}})), ElementsAre(MissReason::kNone));
  EXPECT_LT(LandingError(pages, plan, 1, 100), 1e-4);
  b.Release(match.lease);
  AwaitNothingLeased(b);
  AwaitNothingLeased(c);
}

TEST_F(PeersTest, TheDeathOfTheOnlyHolderIsAMiss) {
  auto a = std::make_unique<PeerNode>(cluster_, "a");
  PeerNode b(cluster_, "b");
  const ObjectHeader plan = Plan(1, 8000);
  a->Publish(plan, 1);
  const Query query = Ask(plan);
  const storage::Match match = b.Lookup({&query, 1});
  ASSERT_EQ(match.found[0].tier, TierKind::kRemote);
  a = nullptr;
  const TestPages pages(TestPages::Holding(plan.tokens + 100));
  const std::vector<MissReason> verdict = b.Land(match.lease, TestTarget(pages, {{0, 100}}));
  EXPECT_TRUE(verdict[0] == MissReason::kPeerFailed || verdict[0] == MissReason::kNone) << Name(verdict[0]);
  b.Release(match.lease);
  AwaitNothingLeased(b);
}

// An object that is being fetched stays at its holder, even if others need its space.
TEST_F(PeersTest, AnEvictedObjectIsSentToItsEnd) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const ObjectHeader plan = Plan(1, 8000);
  a.Publish(plan, 1);
  const Query query = Ask(plan);
  const storage::Match match = b.Lookup({&query, 1});
  a.OnLoop([&] { a.cache.retention().Evict(0, plan.key); });
  const TestPages pages(TestPages::Holding(plan.tokens + 100));
  EXPECT_THAT(b.Land(match.lease, TestTarget(pages, {{0, 100}})), ElementsAre(MissReason::kNone));
  EXPECT_LT(LandingError(pages, plan, 1, 100), 1e-4);
  b.Release(match.lease);
  AwaitNothingLeased(a);
  Await([&] { return a.OnLoop([&] { return a.tier->Usage(0).used_bytes; }) == 0; });
}

// A reader that dies holds nothing at its holder.
TEST_F(PeersTest, ADepartedReaderIsErased) {
  PeerNode a(cluster_, "a");
  const ObjectHeader plan = Plan(1, 8000);
  a.Publish(plan, 1);
  {
    PeerNode b(cluster_, "b");
    const Query query = Ask(plan);
    ASSERT_EQ(b.Lookup({&query, 1}).found[0].tier, TierKind::kRemote);
    MutexLock lock(cluster_.mutex);
    cluster_.nodes.erase("a");  // it can no longer announce anything
  }
  a.peers.PeerGone("b");
  AwaitNothingLeased(a);
  a.OnLoop([&] { a.cache.retention().Evict(0, plan.key); });
  Await([&] { return a.OnLoop([&] { return a.tier->Usage(0).used_bytes; }) == 0; });
}

// Requests that are served after their reader has disconnected hold no leases, whether or not they had started.
TEST_F(PeersTest, RequestsOfADepartedReaderLeaveNothing) {
  PeerNode a(cluster_, "a");
  PeerOpen open{.lease_ms = 3'600'000};
  for (uint64_t text = 1; text <= 64; ++text) {
    const ObjectHeader plan = Plan(text);
    if (text <= 4) a.Publish(plan, text);
    open.objects.push_back({.key = plan.key, .shard = plan.shard});
  }
  const auto nodes = [&] { return a.OnLoop([&] { return a.peers.stats().holder.nodes; }); };
  PeerHello reader{.node = "b"};
  a.peers.PeerHere(reader);
  std::promise<absl::Status> here, late;
  a.peers.Open(reader, 0, open, [&](const auto& opened) { here.set_value(opened.status()); });
  EXPECT_EQ(here.get_future().get(), absl::OkStatus());
  EXPECT_EQ(nodes(), 1u);
  a.peers.PeerGone("b");
  a.peers.Open(reader, 0, open, [&](const auto& opened) { late.set_value(opened.status()); });
  EXPECT_TRUE(absl::IsUnavailable(late.get_future().get()));
  EXPECT_EQ(nodes(), 0u);
  AwaitNothingLeased(a);

  // While its calls wait, it disconnects, and another incarnation connects.
  for (uint8_t round = 1; round <= 50; ++round) {
    reader.incarnation.fill(round);
    std::promise<void> opened, prefilled;
    a.OnLoop([&] {
      a.peers.PeerHere(reader);
      a.peers.Open(reader, 0, open, [&](const auto&) { opened.set_value(); });
      a.peers.Prefill(reader, 0, {.key = open.objects[0].key, .lease_ms = open.lease_ms},
                      [&](const auto&) { prefilled.set_value(); });
      if (round % 2 == 0) a.peers.PeerGone("b");
    });
    opened.get_future().get();
    prefilled.get_future().get();
    ASSERT_LE(nodes(), 1u) << "an earlier incarnation is left";
  }
  a.peers.PeerGone("b");
  EXPECT_EQ(nodes(), 0u);
  AwaitNothingLeased(a);
}

// The nearest holder has wrong bytes: a miss, and then a hit from another holder.
TEST_F(PeersTest, AHolderOfDamagedBytesIsSkipped) {
  PeersOptions unhedged = PeerNode::All();
  unhedged.objects.hedge = 0;
  PeerNode a(cluster_, "a"), b(cluster_, "b", 256, unhedged), c(cluster_, "c");
  c.Publish(Plan(2), 2);
  c.loop.PostCompletion(storage::kNoTenant, [] { std::this_thread::sleep_for(std::chrono::seconds(2)); });
  EXPECT_EQ(Land(b, Plan(2), 2), MissReason::kNone);  // measures that c is slow
  for (PeerNode* node : {&a, &c}) node->Publish(Plan(1), 1);
  const Query query = Ask(Plan(1));
  const storage::Match match = a.Lookup({&query, 1});
  a.OnLoop([&] {
    const storage::ObjectBytes bytes(*a.tier, *match.found[0].slot);
    for (std::byte* extent : bytes.extents()) {
      extent[limits::kExtentBytes / 8] ^= std::byte{1};
    }
  });
  a.Release(match.lease);
  EXPECT_EQ(Land(b, Plan(1), 1), MissReason::kChecksumFailed);
  EXPECT_EQ(Land(b, Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(tier_, TierKind::kRemote);
}

TEST_F(PeersTest, APromptResumesFromAnotherNodesPrefix) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const storage::PrefixEngine engine(0);
  const storage::Tokens text = storage::Numbers(0, 600), prompt = storage::Join(text, storage::Numbers(9000, 50));
  std::promise<std::vector<CommitOutcome>> outcome;
  a.loop.PostCompletion(0, [&] {
    a.cache.Commit(PeerNode::kEngine, engine.Offer(text, text.size(), {}),
                   [&](std::vector<CommitOutcome> o) { outcome.set_value(std::move(o)); });
  });
  ASSERT_EQ(outcome.get_future().get().back(), CommitOutcome::kKept);
  const storage::PrefixText asked = engine.Text(prompt);
  const storage::Match match = b.Lookup({}, &asked);
  ASSERT_EQ(match.prefix.depth, text.size());
  const TestPages pages(TestPages::Holding(prompt.size()));
  EXPECT_THAT(b.Land(match.lease, storage::PrefixEngine::Target(pages, match.prefix)), Each(MissReason::kNone));
  EXPECT_EQ(engine.Error(pages, *b.tier, match, prompt), 0.0);
  b.Release(match.lease);
}

TEST_F(PeersTest, OneFetchServesConcurrentLookups) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const ObjectHeader plan = Plan(1, 4000);
  a.Publish(plan, 1);
  std::vector<std::thread> threads;
  std::atomic<int> landed{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const Query query = Ask(plan);
      const storage::Match match = b.Lookup({&query, 1});
      landed += match.found[0].reason == MissReason::kNone;
      b.Release(match.lease);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(landed, 8);
  EXPECT_EQ(Land(b, plan, 1), MissReason::kNone);
}

}  // namespace
}  // namespace ashlar::daemon
