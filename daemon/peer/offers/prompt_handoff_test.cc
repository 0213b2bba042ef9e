// SPDX-License-Identifier: Apache-2.0
// A finished prompt goes to the named node, and is resumed there without a lookup on other nodes.
#include "daemon/peer/offers/prompt_handoff.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "daemon/peer/testing/peer_node.h"
#include "storage/testing/prefix_engine.h"
#include "storage/testing/tokens.h"

namespace ashlar::daemon {
namespace {

using storage::PrefixCommit;
using storage::TestPages;
using storage::Tokens;
using ::testing::Each;

constexpr ConversationId kTalk{7};

class PromptHandoffTest : public ::testing::Test {
 protected:
  CommitOutcome Commit(PeerNode& node, const Tokens& text, Provenance provenance, const ConversationId& conversation) {
    std::promise<std::vector<CommitOutcome>> outcomes;
    node.loop.PostCompletion(0, [&] {
      PrefixCommit commit = engine_.Offer(text, text.size(), {}, conversation);
      commit.provenance = provenance;
      node.cache.Commit(PeerNode::kEngine, std::move(commit),
                        [&](std::vector<CommitOutcome> o) { outcomes.set_value(std::move(o)); });
    });
    return outcomes.get_future().get().back();
  }
  PromptHandoff::Result Handoff(PeerNode& from, const Tokens& text, const ConversationId& conversation,
                                const std::string& to, uint32_t patience_ms = 20'000) {
    const storage::PrefixText handed = engine_.Text(text, conversation);
    std::promise<PromptHandoff::Result> result;
    from.loop.PostCompletion(0, [&] {
      from.peers.handoff().Start(0, handed, to, patience_ms,
                                 [&](const PromptHandoff::Result& r) { result.set_value(r); });
    });
    return result.get_future().get();
  }
  // Resumes at the end of the text, lands it, and compares every number.
  void ExpectToResume(PeerNode& node, const Tokens& text, const ConversationId& conversation, bool own) {
    const Tokens prompt = storage::Join(text, storage::Numbers(9000, 50));
    const storage::PrefixText asked = engine_.Text(prompt, conversation);
    const storage::Match match = node.Lookup({}, &asked);
    ASSERT_EQ(match.prefix.depth, text.size());
    EXPECT_EQ(match.prefix.own, own);
    node.OnLoop([&] {
      for (const storage::Query& query : node.cache.prefixes().AtEnd(0, engine_.Text(text, conversation))) {
        const auto object = node.cache.offers().Describe(0, query.key);
        ASSERT_TRUE(object.has_value());
        EXPECT_EQ(object->pool.kind, own ? storage::PoolKind::kPrivate : storage::PoolKind::kPublic);
      }
    });
    match.prefix.objects.ForEach([&](uint32_t object) { EXPECT_EQ(match.found[object].tier, TierKind::kDram); });
    const TestPages pages(TestPages::Holding(prompt.size()));
    EXPECT_THAT(node.Land(match.lease, storage::PrefixEngine::Target(pages, match.prefix)), Each(MissReason::kNone));
    EXPECT_EQ(engine_.Error(pages, *node.tier, match, prompt), 0.0);
    node.Release(match.lease);
  }
  static OfferCounts OffersOf(PeerNode& node) {
    return node.OnLoop([&] { return node.peers.stats().handed_off.outcomes; });
  }

  const storage::PrefixEngine engine_{0};
  TestCluster cluster_;
};

TEST_F(PromptHandoffTest, AConversationsOwnStatesAreResumedFromAtTheOtherNode) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const Tokens text = storage::Numbers(0, 600);
  ASSERT_EQ(Commit(a, text, Provenance::kComposed, kTalk), CommitOutcome::kKept);
  const PromptHandoff::Result handed = Handoff(a, text, kTalk, "b");
  EXPECT_EQ(handed.outcome, HandoffOutcome::kCompleted);
  EXPECT_GT(handed.bytes, 0u);
  const uint64_t objects = OffersOf(a)[TakeOutcome::kAccepted];
  EXPECT_EQ(objects, 1 + text.size() / engine_.model()->block_tokens);
  a.Leave();  // none of it is requested from any node any longer
  ExpectToResume(b, text, kTalk, /*own=*/true);
  // No other conversation finds it.
  const storage::PrefixText stranger = engine_.Text(storage::Join(text, storage::Numbers(9000, 50)), ConversationId{8});
  const storage::Match match = b.Lookup({}, &stranger);
  EXPECT_EQ(match.prefix.depth, 0u);
  b.Release(match.lease);
}

TEST_F(PromptHandoffTest, AnExactTextIsSentUnderSharedKeys) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const Tokens text = storage::Numbers(0, 600);
  ASSERT_EQ(Commit(a, text, Provenance::kExact, {}), CommitOutcome::kKept);
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kCompleted);
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kCompleted) << "it is there already";
  EXPECT_EQ(Handoff(a, text, kTalk, "a").outcome, HandoffOutcome::kCompleted) << "to its own engines";
  a.Leave();
  ExpectToResume(b, text, {}, /*own=*/false);
}

TEST_F(PromptHandoffTest, ReportsFailedHandoff) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const Tokens text = storage::Numbers(0, 600);
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kNoStates);
  ASSERT_EQ(Commit(a, text, Provenance::kComposed, kTalk), CommitOutcome::kKept);
  EXPECT_EQ(Handoff(a, storage::Join(text, {5}), kTalk, "b").outcome, HandoffOutcome::kNoStates) << "not its end";
  EXPECT_EQ(Handoff(a, text, {}, "b").outcome, HandoffOutcome::kNoStates) << "the conversation's alone";
  EXPECT_EQ(Handoff(a, text, kTalk, "nobody").outcome, HandoffOutcome::kNoNode);
  b.OnLoop([&] { b.cache.offers().StartDrain(); });
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kRefused);
  b.OnLoop([&] { b.cache.offers().EndDrain(); });
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kCompleted);
}

// The node is full of equally valuable objects: an engine there waits for the prompt, so its lookup would make space.
TEST_F(PromptHandoffTest, EvictsLikeALookup) {
  constexpr uint64_t kExtents = 24;
  PeerNode a(cluster_, "a"), b(cluster_, "b", kExtents);
  for (uint64_t text = 1;
       b.OnLoop([&] { return b.tier->Usage(0); }).used_bytes + (1 << 20) <= kExtents * limits::kExtentBytes; ++text) {
    b.Publish(storage::TestPlan(text, 1000), text);
  }
  const Tokens text = storage::Numbers(0, 600);
  ASSERT_EQ(Commit(a, text, Provenance::kComposed, kTalk), CommitOutcome::kKept);
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kCompleted);
  ExpectToResume(b, text, kTalk, /*own=*/true);
}

// No space there can be freed: it is leased.
TEST_F(PromptHandoffTest, IsRefusedWithoutSpace) {
  constexpr uint64_t kExtents = 16;
  PeerNode a(cluster_, "a"), b(cluster_, "b", kExtents);
  std::vector<storage::LeaseId> leases;
  for (uint64_t text = 1;
       b.OnLoop([&] { return b.tier->Usage(0); }).used_bytes + (1 << 20) <= kExtents * limits::kExtentBytes; ++text) {
    const ObjectHeader plan = storage::TestPlan(text, 1000);
    b.Publish(plan, text);
    const storage::Query query{.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens};
    leases.push_back(b.Lookup({&query, 1}).lease);
  }
  const Tokens text = storage::Numbers(0, 3000);
  ASSERT_EQ(Commit(a, text, Provenance::kComposed, kTalk), CommitOutcome::kKept);
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kRefused);
  for (const storage::LeaseId& lease : leases) b.Release(lease);
}

// The node does not answer in time; its later actions do no harm.
TEST_F(PromptHandoffTest, TimeIsBounded) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const Tokens text = storage::Numbers(0, 600);
  ASSERT_EQ(Commit(a, text, Provenance::kComposed, kTalk), CommitOutcome::kKept);
  std::promise<void> go;
  b.loop.PostCompletion(storage::kNoTenant, [future = go.get_future().share()] { future.wait(); });
  const storage::Nanos began = a.clock.Now();
  EXPECT_EQ(Handoff(a, text, kTalk, "b", /*patience_ms=*/100).outcome, HandoffOutcome::kTimedOut);
  EXPECT_LT(a.clock.Now() - began, 10'000'000'000);
  go.set_value();
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kCompleted);
  ExpectToResume(b, text, kTalk, /*own=*/true);
}

// The node is busy at first, and gone when it is asked again. That is reported at once.
TEST_F(PromptHandoffTest, ReportsANodeThatLeavesDuringTheHandoff) {
  PeersOptions busy = PeerNode::All();
  busy.offers.calls = 0;
  PeerNode a(cluster_, "a"), b(cluster_, "b", 256, busy);
  const Tokens text = storage::Numbers(0, 600);
  ASSERT_EQ(Commit(a, text, Provenance::kComposed, kTalk), CommitOutcome::kKept);
  auto handed = std::async(std::launch::async, [&] { return Handoff(a, text, kTalk, "b", /*patience_ms=*/10'000); });
  while (OffersOf(a)[TakeOutcome::kBusy] == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  b.Leave();
  EXPECT_EQ(handed.get().outcome, HandoffOutcome::kNoNode);
}

// One tenant alone may use half of the limit; another one gets the rest. Few of their offers wait for the node at a
// time.
TEST_F(PromptHandoffTest, HandoffsPerTenantAreBounded) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const Tokens text = storage::Numbers(0, 600);
  ASSERT_EQ(Commit(a, text, Provenance::kComposed, kTalk), CommitOutcome::kKept);
  std::promise<void> go;
  b.loop.PostCompletion(storage::kNoTenant, [future = go.get_future().share()] { future.wait(); });
  const storage::PrefixText handed = engine_.Text(text, kTalk);
  std::atomic<size_t> answered{0};
  const size_t most = PromptHandoff::Options().most / 2;
  for (size_t i = 0; i < most; ++i) {
    a.loop.PostCompletion(
        0, [&] { a.peers.handoff().Start(0, handed, "b", 20'000, [&](const PromptHandoff::Result&) { ++answered; }); });
  }
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kBusy);
  a.OnLoop([&] {
    a.peers.handoff().Start(1, handed, "b", 20'000, [](const PromptHandoff::Result& result) {
      EXPECT_EQ(result.outcome, HandoffOutcome::kNoStates) << "another tenant, which has nothing of it";
    });
  });
  EXPECT_LE(a.made(), Offerer::kMostOffers);
  go.set_value();
  while (answered < most) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(Handoff(a, text, kTalk, "b").outcome, HandoffOutcome::kCompleted);
}

TEST_F(PromptHandoffTest, ADrainWaitsForIt) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const Tokens text = storage::Numbers(0, 600);
  ASSERT_EQ(Commit(a, text, Provenance::kComposed, kTalk), CommitOutcome::kKept);
  a.Share("b", false);  // so that the drain offers nothing
  a.OnLoop([&] {
    a.cache.offers().StartDrain();
    a.peers.SetDraining(true);
  });
  const auto handing = [&] { return a.OnLoop([&] { return a.peers.transferring(); }); };
  while (handing()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  a.Share("b", true);
  std::promise<void> go;
  b.loop.PostCompletion(storage::kNoTenant, [future = go.get_future().share()] { future.wait(); });
  auto handed = std::async(std::launch::async, [&] { return Handoff(a, text, kTalk, "b"); });
  while (a.made() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(handing());
  go.set_value();
  EXPECT_EQ(handed.get().outcome, HandoffOutcome::kCompleted);
  EXPECT_FALSE(handing());
  ExpectToResume(b, text, kTalk, /*own=*/true);
}

// The connection carries as many calls as it can.
TEST_F(PromptHandoffTest, RetriesARefusedCall) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const Tokens text = storage::Numbers(0, 600);
  ASSERT_EQ(Commit(a, text, Provenance::kComposed, kTalk), CommitOutcome::kKept);
  a.Refuse("b", absl::ResourceExhaustedError("too many calls"));
  auto handed = std::async(std::launch::async, [&] { return Handoff(a, text, kTalk, "b"); });
  while (a.made() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  a.Refuse("b", absl::OkStatus());
  EXPECT_EQ(handed.get().outcome, HandoffOutcome::kCompleted);
}

}  // namespace
}  // namespace ashlar::daemon
