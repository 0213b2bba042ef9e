// SPDX-License-Identifier: Apache-2.0
// Offers between nodes: accepted where there is space, transferred in a drain, replicated if hot.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/peer/testing/peer_node.h"
#include "storage/testing/prefix_engine.h"
#include "storage/testing/tokens.h"

namespace ashlar::daemon {
namespace {

using storage::Query;
using storage::TestPages;

ObjectHeader OfferPlan(uint64_t text, uint64_t tokens = 64) {
  return storage::TestPlan(text, tokens);
}

void WaitFor(const std::function<bool()>& condition) {
  for (int i = 0; i < 20'000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_TRUE(condition());
}

class OffersTest : public ::testing::Test {
 protected:
  static PeerOffer OfferOf(PeerNode& from, const ObjectHeader& plan, OfferKind kind, uint32_t patience_ms) {
    const auto offering = from.OnLoop([&] { return from.cache.offers().Describe(0, plan.key); });
    return {.objects = {{.key = plan.key,
                         .ns = plan.ns,
                         .kind = plan.kind,
                         .bytes = offering ? offering->bytes : plan.bytes,
                         .uses = offering ? offering->uses : 0,
                         .saves_a_byte = offering ? offering->saves_a_byte : 1}},
            .kind = kind,
            .patience_ms = patience_ms};
  }
  // The answer's only outcome.
  static std::future<TakeOutcome> Send(PeerNode& from, PeerNode& to, PeerOffer offer) {
    const auto outcome = std::make_shared<std::promise<TakeOutcome>>();
    from.Offer(*to.directory.member, "default", std::move(offer),
               [outcome](absl::StatusOr<std::vector<TakeOutcome>> outcomes) {
                 outcome->set_value(outcomes.ok() ? outcomes->at(0) : TakeOutcome::kFailed);
               });
    return outcome->get_future();
  }
  // Offers the objects that `from` has of a text to `to`.
  static TakeOutcome Offer(PeerNode& from, PeerNode& to, const ObjectHeader& plan, OfferKind kind = OfferKind::kDrain,
                           uint32_t patience_ms = 10'000) {
    return Send(from, to, OfferOf(from, plan, kind, patience_ms)).get();
  }
  static std::vector<TierKind> Where(PeerNode& node, const ObjectHeader& plan) {
    return node.OnLoop([&] { return node.cache.upkeep().inventory().Where(0, plan.key); });
  }
  // Lands from the node's own memory, and compares every byte.
  static void ExpectHere(PeerNode& node, const ObjectHeader& plan, uint64_t text) {
    const Query query{.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
    const storage::Match match = node.Lookup({&query, 1});
    ASSERT_EQ(match.found[0].tier, TierKind::kDram);
    const TestPages pages(TestPages::Holding(plan.tokens + 100));
    EXPECT_EQ(node.Land(match.lease, TestTarget(pages, {{0, 100}}))[0], MissReason::kNone);
    EXPECT_LT(LandingError(pages, plan, text, 100), 1e-4);
    node.Release(match.lease);
  }
  static void Drain(PeerNode& node) {
    node.OnLoop([&] {
      node.cache.offers().StartDrain();
      node.peers.SetDraining(true);
    });
  }
  static bool Drained(PeerNode& node) {
    return node.OnLoop([&] { return !node.peers.transferring(); });
  }

  static void Ask(PeerNode& node, const ObjectHeader& plan, storage::SessionId session = PeerNode::kEngine) {
    const Query query{.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens};
    const storage::Match match = node.Lookup({&query, 1}, nullptr, session);
    ASSERT_EQ(match.found[0].reason, MissReason::kNone);
    node.Release(match.lease, session);
  }
  static uint64_t MemoryOnly(PeerNode& node) {
    return node.OnLoop([&] { return node.cache.stats().memory_only.objects; });
  }

  TestCluster cluster_;
};

// The node's thread does nothing else until this ends.
class StandsStill {
 public:
  explicit StandsStill(PeerNode& node) {
    node.loop.PostCompletion(storage::kNoTenant, [future = go_.get_future().share()] { future.wait(); });
  }
  ~StandsStill() { go_.set_value(); }

 private:
  std::promise<void> go_;
};

TEST_F(OffersTest, AnOfferIsAcceptedAndServed) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c");
  const ObjectHeader plan = OfferPlan(1, 8000);
  a.Publish(plan, 1);
  EXPECT_EQ(Offer(a, b, plan), TakeOutcome::kAccepted);
  EXPECT_EQ(Offer(a, b, plan), TakeOutcome::kAlreadyPresent);
  ExpectHere(b, plan, 1);
  a.Leave();
  const Query query{.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens};
  const storage::Match match = c.Lookup({&query, 1});
  EXPECT_EQ(match.found[0].tier, TierKind::kRemote) << "b has told the others";
  c.Release(match.lease);
}

TEST_F(OffersTest, OfferWithoutObjectFails) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  EXPECT_EQ(Offer(a, b, OfferPlan(1)), TakeOutcome::kFailed);
  EXPECT_THAT(Where(b, OfferPlan(1)), ::testing::IsEmpty());
  EXPECT_EQ(b.OnLoop([&] { return b.peers.stats().offered.under_way; }), 0u);
}

// A hot object only uses free space; a draining node's object also replaces less valuable ones.
TEST_F(OffersTest, OfferDisplacesNoMoreValuableObject) {
  PeerNode a(cluster_, "a"), b(cluster_, "b", 16);
  const ObjectHeader plan = OfferPlan(1, 2000);
  a.Publish(plan, 1);
  std::vector<ObjectHeader> full;
  for (uint64_t text = 2;
       b.OnLoop([&] { return b.tier->Usage(0); }).used_bytes + plan.bytes <= 16 * limits::kExtentBytes; ++text) {
    full.push_back(OfferPlan(text, 1000));
    b.Publish(full.back(), text);
  }
  EXPECT_EQ(Offer(a, b, plan, OfferKind::kHot), TakeOutcome::kNoSpace);
  for (const ObjectHeader& there : full) EXPECT_FALSE(Where(b, there).empty());
  EXPECT_EQ(Offer(a, b, plan), TakeOutcome::kNoSpace) << "it is worth no more a byte";
  for (const ObjectHeader& there : full) EXPECT_FALSE(Where(b, there).empty());
  // More uses give it a higher value.
  const Query query{.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens, .flops = 1e18};
  for (int i = 0; i < 4; ++i) a.Release(a.Lookup({&query, 1}).lease);
  EXPECT_EQ(Offer(a, b, plan), TakeOutcome::kAccepted);
  ExpectHere(b, plan, 1);
}

TEST_F(OffersTest, ADrainingNodeRefusesOffers) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  a.Publish(OfferPlan(1), 1);
  b.OnLoop([&] { b.cache.offers().StartDrain(); });
  EXPECT_EQ(Offer(a, b, OfferPlan(1)), TakeOutcome::kDraining);
  b.OnLoop([&] { b.cache.offers().EndDrain(); });
  EXPECT_EQ(Offer(a, b, OfferPlan(1)), TakeOutcome::kAccepted);
}

TEST_F(OffersTest, OffersInFlightAreBounded) {
  PeersOptions options = PeerNode::All();
  options.offers.objects = 0;
  PeerNode a(cluster_, "a"), b(cluster_, "b", 256, options);
  a.Publish(OfferPlan(1), 1);
  EXPECT_EQ(Offer(a, b, OfferPlan(1)), TakeOutcome::kBusy);
}

TEST_F(OffersTest, ADrainTransfersObjectsThatOnlyMemoryHas) {
  auto a = std::make_unique<PeerNode>(cluster_, "a");
  PeerNode b(cluster_, "b"), c(cluster_, "c");
  std::vector<ObjectHeader> plans;
  for (uint64_t text = 1; text <= 40; ++text) {
    plans.push_back(OfferPlan(text, 200));
    a->Publish(plans.back(), text);
  }
  Drain(*a);
  WaitFor([&] { return Drained(*a); });
  EXPECT_EQ(a->OnLoop([&] { return a->cache.stats().memory_only.objects; }), 0u);
  a = nullptr;
  for (uint64_t text = 1; text <= plans.size(); ++text) {
    const ObjectHeader& plan = plans[text - 1];
    const bool at_b = !Where(b, plan).empty();
    EXPECT_NE(at_b, !Where(c, plan).empty()) << text;
    ExpectHere(at_b ? b : c, plan, text);
  }
}

// Ten prefixes of different lengths: the blocks and checkpoints of each are sent to one node, and both nodes find all
// of them.
TEST_F(OffersTest, ADrainKeepsEachPrefixTogether) {
  const storage::PrefixEngine engine(0, 1, 256);
  PeerNode a(cluster_, "a", 1024), b(cluster_, "b", 1024), c(cluster_, "c", 1024);
  const auto text_of = [](int i) { return storage::Numbers(10'000 * i, 300 + 150 * i); };
  for (int i = 0; i < 10; ++i) {
    const storage::Tokens text = text_of(i);
    std::promise<void> done;
    a.loop.PostCompletion(0, [&] {
      a.cache.Commit(PeerNode::kEngine, engine.Offer(text, text.size(), {280}), [&](const auto&) { done.set_value(); });
    });
    done.get_future().get();
  }
  Drain(a);
  WaitFor([&] { return Drained(a); });
  EXPECT_EQ(MemoryOnly(a), 0u);
  a.Leave();
  size_t split = 0;
  for (int i = 0; i < 10; ++i) {
    const storage::PrefixText text = engine.Text(text_of(i));
    std::vector<Key> keys(text.shared().blocks().begin(), text.shared().blocks().end());
    keys.push_back(text.shared().Checkpoint(text.tokens().size()));
    const auto at_b = b.OnLoop([&] {
      return std::ranges::count_if(keys,
                                   [&](const Key& key) { return !b.cache.upkeep().inventory().Where(0, key).empty(); });
    });
    split += at_b > 0 && static_cast<size_t>(at_b) < keys.size();
  }
  EXPECT_EQ(split, 0u);
  for (PeerNode* node : {&b, &c}) {
    for (int i = 0; i < 10; ++i) {
      const storage::Tokens shared = text_of(i);
      const storage::PrefixText prompt = engine.Text(storage::Join(shared, storage::Numbers(500'000, 10)));
      const storage::Match match = node->Lookup({}, &prompt);
      EXPECT_EQ(match.prefix.depth, shared.size()) << "prefix " << i;
      node->Release(match.lease);
    }
  }
}

TEST_F(OffersTest, ReportsObjectsWithoutPlaceAsLost) {
  PeerNode a(cluster_, "a"), b(cluster_, "b", 8);
  for (uint64_t text = 1; text <= 40; ++text) a.Publish(OfferPlan(text, 200), text);
  Drain(a);
  WaitFor([&] { return Drained(a); });
  const uint64_t left = a.OnLoop([&] { return a.cache.stats().memory_only.objects; });
  const PeersStats stats = a.OnLoop([&] { return a.peers.stats(); });
  auto handed = stats.drained.outcomes;
  EXPECT_GT(left, 0u);
  EXPECT_EQ(left + handed[TakeOutcome::kAccepted], 40u);
  // The drain is cancelled: all objects count as only in memory again, and the node serves.
  a.OnLoop([&] {
    a.cache.offers().EndDrain();
    a.peers.SetDraining(false);
  });
  EXPECT_EQ(a.OnLoop([&] { return a.cache.stats().memory_only.objects; }), 40u);
  ExpectHere(a, OfferPlan(1, 200), 1);
}

TEST_F(OffersTest, ADrainWithoutOtherNodesEndsAtOnce) {
  PeerNode a(cluster_, "a");
  a.Publish(OfferPlan(1), 1);
  Drain(a);
  WaitFor([&] { return Drained(a); });
  EXPECT_EQ(a.OnLoop([&] { return a.cache.stats().memory_only.objects; }), 1u);
}

TEST_F(OffersTest, ADrainContinuesWithOtherNodesWhenOneDies) {
  PeerNode a(cluster_, "a");
  auto b = std::make_unique<PeerNode>(cluster_, "b");
  PeerNode c(cluster_, "c");
  std::vector<ObjectHeader> plans;
  for (uint64_t text = 1; text <= 20; ++text) {
    plans.push_back(OfferPlan(text, 1000));
    a.Publish(plans.back(), text);
  }
  Drain(a);
  b = nullptr;
  WaitFor([&] { return Drained(a); });
  const PeersStats stats = a.OnLoop([&] { return a.peers.stats(); });
  auto handed = stats.drained.outcomes;
  EXPECT_EQ(handed[TakeOutcome::kAccepted], plans.size());
}

TEST_F(OffersTest, HotObjectIsReplicatedToFreeNode) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c"), d(cluster_, "d");
  const ObjectHeader plan = OfferPlan(1, 1000), cold = OfferPlan(2, 1000);
  a.Publish(plan, 1);
  a.Publish(cold, 2);
  Ask(b, plan);
  Ask(b, cold);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_TRUE(Where(d, plan).empty()) << "one node is not several";
  Ask(c, plan);
  WaitFor([&] { return !Where(d, plan).empty(); });
  EXPECT_TRUE(Where(d, cold).empty());
  ExpectHere(d, plan, 1);
  const PeersStats stats = a.OnLoop([&] { return a.peers.stats(); });
  EXPECT_EQ(stats.replicated.bytes, d.OnLoop([&] { return d.peers.stats(); }).offered.bytes);
}

// A node that fetches an offered object does not count as a further requester.
TEST_F(OffersTest, AReplicaIsNotReplicatedAgain) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c"), d(cluster_, "d"), e(cluster_, "e"), f(cluster_, "f");
  const ObjectHeader plan = OfferPlan(1, 1000);
  a.Publish(plan, 1);
  Ask(b, plan);
  Ask(c, plan);
  const auto copies = [&] { return !Where(d, plan).empty() + !Where(e, plan).empty() + !Where(f, plan).empty(); };
  WaitFor([&] { return copies() > 0; });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(copies(), 1);
  EXPECT_EQ(a.made(), 1u);
}

TEST_F(OffersTest, ARefusedReplicaPausesNoOtherTenants) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c"), d(cluster_, "d");
  const ObjectHeader plan = OfferPlan(1, 1000), other = OfferPlan(2, 1000);
  a.Publish(plan, 1);
  a.Publish(PeerNode::kOther, other, storage::TestSource(other, 2));
  a.Refuse("d", absl::NotFoundError("tenant: not shared with this peer"), "other");
  Ask(b, other, PeerNode::kOther);
  Ask(c, other, PeerNode::kOther);
  WaitFor([&] { return a.made() > 0; });
  Ask(b, plan);
  Ask(c, plan);
  WaitFor([&] { return !Where(d, plan).empty(); });
}

TEST_F(OffersTest, AReplicaIsOfferedAgainIfItsCallIsRefused) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c"), d(cluster_, "d");
  const ObjectHeader plan = OfferPlan(1, 1000);
  a.Publish(plan, 1);
  a.Refuse("d", absl::ResourceExhaustedError("too many calls"));
  Ask(b, plan);
  Ask(c, plan);
  WaitFor([&] { return a.made() > 1; });
  a.Refuse("d", absl::OkStatus());
  WaitFor([&] { return !Where(d, plan).empty(); });
}

TEST_F(OffersTest, ADrainContinuesIfATenantIsNotShared) {
  PeersOptions options = PeerNode::All();
  options.drain_transfer.bytes_of_a_node = options.drain_transfer.bytes_of_an_offer = 1;  // one object after another
  PeerNode a(cluster_, "a", 256, options), b(cluster_, "b");
  a.Refuse("b", absl::NotFoundError("tenant: not shared with this peer"), "other");
  for (uint64_t text = 1; text <= 8; ++text) {
    a.Publish(PeerNode::kOther, OfferPlan(text), storage::TestSource(OfferPlan(text), text));
    Ask(a, OfferPlan(text), PeerNode::kOther);  // the most used ones go first
    a.Publish(OfferPlan(10 + text), 10 + text);
  }
  Drain(a);
  WaitFor([&] { return Drained(a); });
  EXPECT_EQ(MemoryOnly(a), 8u);
  for (uint64_t text = 1; text <= 8; ++text) EXPECT_FALSE(Where(b, OfferPlan(10 + text)).empty()) << text;
  EXPECT_EQ(a.made(), 9u) << "the node is asked once for what is not shared";
}

TEST_F(OffersTest, ADrainRetriesABusyNode) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  a.Publish(OfferPlan(1), 1);
  a.Refuse("b", absl::ResourceExhaustedError("too many calls"));
  Drain(a);
  WaitFor([&] { return a.made() > 10; });
  EXPECT_FALSE(Drained(a));
  a.Refuse("b", absl::OkStatus());
  WaitFor([&] { return Drained(a); });
  EXPECT_EQ(MemoryOnly(a), 0u);
}

// Objects that wait to be offered again fall back to the disk, and the drain ends.
TEST_F(OffersTest, ADrainEndsWhenTheLastOtherNodeLeaves) {
  PeersOptions patient = PeerNode::All(), busy = PeerNode::All();
  patient.drain_transfer.pause = 3'600'000'000'000;
  busy.offers.objects = 0;
  PeerNode a(cluster_, "a", 256, patient), b(cluster_, "b", 256, busy);
  a.Publish(OfferPlan(1), 1);
  Drain(a);
  WaitFor([&] { return a.OnLoop([&] { return a.peers.stats().drained.outcomes.contains(TakeOutcome::kBusy); }); });
  EXPECT_FALSE(Drained(a));
  b.Leave();
  WaitFor([&] { return Drained(a); });
  EXPECT_EQ(MemoryOnly(a), 1u);
}

TEST_F(OffersTest, OffersPerNodeAreBounded) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c");
  a.Publish(OfferPlan(1), 1);
  Offerer offerer(a.loop, a, PeerNode::Tenants());
  const auto may = [&](PeerNode& to) { return a.OnLoop([&] { return offerer.MayOffer(*to.directory.member); }); };
  size_t answered = 0;
  {
    const StandsStill still(b);
    a.OnLoop([&] {
      const storage::Offering offering = *a.cache.offers().Describe(0, OfferPlan(1).key);
      for (; offerer.MayOffer(*b.directory.member) && answered < 100; ++answered) {
        offerer.Offer(b.directory.member, {offering}, OfferKind::kHot, 10'000, [&](const auto&) { --answered; });
      }
    });
    EXPECT_EQ(a.made(), Offerer::kMostOffers);
    EXPECT_FALSE(may(b));
    EXPECT_TRUE(may(c));
  }
  WaitFor([&] { return a.OnLoop([&] { return answered == 0; }); });
  EXPECT_TRUE(may(b));
}

TEST_F(OffersTest, AFrozenNodeLeavesSpaceForOtherOffers) {
  PeersOptions options = PeerNode::All();
  options.offers.objects = 4;
  PeerNode a(cluster_, "a"), b(cluster_, "b", 256, options), c(cluster_, "c");
  std::vector<PeerOffer> offers;
  for (uint64_t text = 1; text <= 4; ++text) {
    a.Publish(OfferPlan(text), text);
    offers.push_back(OfferOf(a, OfferPlan(text), OfferKind::kDrain, 10'000));
  }
  c.Publish(OfferPlan(5), 5);
  std::vector<std::future<TakeOutcome>> outcomes;
  {
    const StandsStill still(a);
    for (const PeerOffer& offer : offers) outcomes.push_back(Send(a, b, offer));
    EXPECT_EQ(Offer(c, b, OfferPlan(5)), TakeOutcome::kAccepted);
  }
  std::map<TakeOutcome, int> counts;
  for (std::future<TakeOutcome>& outcome : outcomes) ++counts[outcome.get()];
  EXPECT_EQ(counts[TakeOutcome::kAccepted], 2);
  EXPECT_EQ(counts[TakeOutcome::kBusy], 2) << "one node may use half of the bytes";
}

TEST_F(OffersTest, AnIncomingObjectCountsOnce) {
  PeersOptions options = PeerNode::All();
  options.offers.objects = 1;
  PeerNode a(cluster_, "a"), b(cluster_, "b", 256, options);
  const ObjectHeader plan = OfferPlan(1);
  a.Publish(plan, 1);
  const PeerOffer offer = OfferOf(a, plan, OfferKind::kDrain, 1);
  const auto under_way = [&] { return b.OnLoop([&] { return b.peers.stats().offered.under_way; }); };
  {
    const StandsStill still(a);
    EXPECT_EQ(Send(a, b, offer).get(), TakeOutcome::kTimedOut);
    EXPECT_EQ(Send(a, b, offer).get(), TakeOutcome::kTimedOut);
    EXPECT_EQ(under_way(), 1u);
  }
  WaitFor([&] { return under_way() == 0; });
  ExpectHere(b, plan, 1);
}

}  // namespace
}  // namespace ashlar::daemon
