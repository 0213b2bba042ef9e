// SPDX-License-Identifier: Apache-2.0
// Exact prefixes through the cache. Every stored number identifies its text.
#include "storage/prefix/prefixes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "storage/testing/prefixes_fixture.h"

namespace ashlar::storage {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;

TEST_F(PrefixesTest, AConversationResumesAtItsLastToken) {
  Tokens text = Numbers(0, 300);
  for (int turn = 0; turn < 8; ++turn) {
    const Tokens decoded = Numbers(10000 * turn + 5000, 13);
    EXPECT_EQ(Serve(text, decoded), turn == 0 ? 0 : text.size() - 37) << "where the answer before ended";
    text = Join(Join(text, decoded), Numbers(10000 * turn + 8000, 37));
  }
  EXPECT_EQ(rig_.cache->prefixes().stats(1).checkpoints, 8u);
}

// The second prompt captures the beginning that it shares with the first, and the third finds it, across sessions;
// blocks are stored once.
TEST_F(PrefixesTest, PromptsWithACommonPrefixShareItsBytes) {
  const Tokens instructions = Numbers(0, 3 * kBlock + 20);
  Serve(Join(instructions, Numbers(10000, 40)));
  const uint64_t before = rig_.cache->stats().objects;
  const Match second = Ask(Join(instructions, Numbers(20000, 40)));
  EXPECT_EQ(second.prefix.depth, 0u);
  EXPECT_THAT(second.prefix.checkpoint_at, Contains(instructions.size()));
  Serve(Join(instructions, Numbers(20000, 40)));
  EXPECT_EQ(rig_.cache->stats().objects, before + 2) << "two checkpoints, and no block a second time";

  const Tokens third = Join(instructions, Numbers(30000, 40));
  const Match match = Ask(third, kBob);
  EXPECT_EQ(match.prefix.depth, instructions.size());
  EXPECT_EQ(match.prefix.provenance, Provenance::kExact);
  EXPECT_EQ(match.prefix.objects.size(), 4u);
  EXPECT_EQ(Landed(match, third, kBob), 0.0);
}

TEST_F(PrefixesTest, NamespacesShareNoPrefixes) {
  const Tokens text = Numbers(0, 700);
  Serve(text);
  EXPECT_EQ(Ask(Join(text, {1}), kEve).prefix.depth, 0u);
  EXPECT_EQ(Ask(Join(text, {1}), kBob).prefix.depth, 700u);
}

// At least one token is left to compute: its logits are what the engine wants.
TEST_F(PrefixesTest, TheSamePromptIsNotResumedAtItsEnd) {
  const Tokens text = Numbers(0, 2 * kBlock);
  Serve(text);
  EXPECT_EQ(Ask(text).prefix.depth, 0u);
  EXPECT_EQ(Ask(Join(text, {7})).prefix.depth, text.size());
  EXPECT_EQ(Ask({}).prefix.depth, 0u);
  EXPECT_EQ(Ask({1}).prefix.depth, 0u);
}

TEST_F(PrefixesTest, ComposedStatesAreTheirConversationsAlone) {
  const Tokens text = Numbers(0, 600);
  PrefixCommit commit = engine_.Offer(text, 590, {256}, Conversation(1));
  commit.provenance = Provenance::kComposed;
  EXPECT_THAT(Commit(std::move(commit)), ElementsAre(CommitOutcome::kDeclined, CommitOutcome::kKept))
      << "no other prompt passes a depth inside";
  const Tokens next = Join(text, Numbers(10000, 50));
  EXPECT_EQ(Ask(next).prefix.depth, 0u);
  EXPECT_EQ(Ask(next, kAnn, Conversation(2)).prefix.depth, 0u);
  Tokens other = next;
  other[3] = -1;
  EXPECT_EQ(Ask(other, kAnn, Conversation(1)).prefix.depth, 0u) << "another text under its name";

  const Match match = Ask(next, kBob, Conversation(1));
  ASSERT_EQ(match.prefix.depth, 600u);
  EXPECT_TRUE(match.prefix.own);
  EXPECT_EQ(match.prefix.provenance, Provenance::kComposed);
  EXPECT_EQ(Landed(match, next, kBob), 0.0);

  // A text that continues composed states is composed too, and an engine may not commit it as exact.
  PrefixCommit lie = engine_.Offer(next, next.size(), {});
  lie.lease = match.lease;
  EXPECT_THAT(Commit(std::move(lie), kBob), ElementsAre(CommitOutcome::kBadSource));
  PrefixCommit nameless = engine_.Offer(next, next.size(), {});
  nameless.provenance = Provenance::kComposed;
  EXPECT_THAT(Commit(std::move(nameless)), ElementsAre(CommitOutcome::kBadSource));
  EXPECT_EQ(Ask(Join(next, {1})).prefix.depth, 0u);
}

TEST_F(PrefixesTest, AConversationKeepsItsLastTwoStates) {
  Tokens text = Numbers(0, 300);
  std::vector<Tokens> turns;
  for (int turn = 0; turn < 4; ++turn) {
    turns.push_back(text);
    PrefixCommit commit = engine_.Offer(text, text.size(), {}, Conversation(1));
    commit.provenance = Provenance::kComposed;
    EXPECT_THAT(Commit(std::move(commit)), ElementsAre(CommitOutcome::kKept));
    text = Join(text, Numbers(10000 * (turn + 1), 100));
  }
  EXPECT_EQ(Ask(text, kAnn, Conversation(1)).prefix.depth, 600u);
  EXPECT_EQ(Ask(Join(turns[2], {-5, -6}), kAnn, Conversation(1)).prefix.depth, 500u) << "the last turn asked again";
  EXPECT_EQ(Ask(Join(turns[1], {-5, -6}), kAnn, Conversation(1)).prefix.depth, 0u);
  EXPECT_EQ(rig_.cache->stats().objects, 4u) << "two states and the blocks before them";
}

// A segment is of use only whole: a prefix that ends inside one, and saves less than the segment, is not taken.
TEST_F(PrefixesTest, PrefixAndSegmentsAreChosenTogether) {
  const ObjectHeader passage = TestPlan(5, 600);
  ASSERT_TRUE(rig_.Publish(kAnn, passage, 5));
  const Tokens instructions = Numbers(0, 100);
  const Tokens prompt = Join(Join(instructions, Numbers(1000, 600)), Numbers(5000, 300));
  const Query segments[] = {{.kind = ObjectKind::kCheckpoint, .key = TestPlan(6, 100).key, .tokens = 100},
                            {.key = passage.key, .tokens = 600}};
  Serve(Tokens(prompt.begin(), prompt.begin() + 300));
  Match match = Ask(prompt, kAnn, {}, segments);
  EXPECT_EQ(match.prefix.depth, 0u);
  EXPECT_EQ(match.found[1].reason, MissReason::kNone);
  EXPECT_THAT(match.prefix.resumable, ElementsAre(300));
  rig_.cache->Release(kAnn, match.lease);

  Serve(Tokens(prompt.begin(), prompt.begin() + 800));
  match = Ask(prompt, kAnn, {}, segments);
  EXPECT_EQ(match.prefix.depth, 800u);
  EXPECT_EQ(match.found[0].reason, MissReason::kCovered);
  EXPECT_EQ(match.found[1].reason, MissReason::kCovered);
  EXPECT_EQ(match.prefix.objects.begin, 2u);
  EXPECT_EQ(Landed(match, prompt), 0.0);
}

// The tokens before an interior are exact, the head of its segment among them: a prompt may resume in the head, and
// lands the interior after it.
TEST_F(PrefixesTest, APrefixMayEndInASegmentsHead) {
  const uint64_t head = TestLayout().head;
  ASSERT_GT(head, 0u);
  const ObjectHeader passage = TestPlan(5, 600);
  ASSERT_TRUE(rig_.Publish(kAnn, passage, 5));
  const Tokens prompt = Join(Join(Numbers(0, 100), Numbers(1000, 600)), Numbers(5000, 300));
  const Query segments[] = {{.kind = ObjectKind::kCheckpoint, .key = TestPlan(6, 100).key, .tokens = 100},
                            {.key = passage.key, .tokens = 600}};
  Serve(Tokens(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(100 + head)));
  Match match = Ask(prompt, kAnn, {}, segments);
  EXPECT_EQ(match.prefix.depth, 100 + head);
  EXPECT_EQ(match.found[0].reason, MissReason::kCovered);
  EXPECT_EQ(match.found[1].reason, MissReason::kNone);
  EXPECT_EQ(match.prefix.objects.begin, 2u);
  EXPECT_EQ(Landed(match, prompt), 0.0);
  rig_.cache->Release(kAnn, match.lease);

  // The segment cannot follow a prefix that is one token longer.
  Serve(Tokens(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(100 + head + 1)));
  match = Ask(prompt, kAnn, {}, segments);
  EXPECT_EQ(match.prefix.depth, 100 + head);
  EXPECT_THAT(match.prefix.resumable, ElementsAre(100 + head, 100 + head + 1));
  EXPECT_EQ(match.found[1].reason, MissReason::kNone);
}

// Everything after a landed segment is composed.
TEST_F(PrefixesTest, StatesAfterLandedSegmentAreComposed) {
  const ObjectHeader passage = TestPlan(5, 600);
  ASSERT_TRUE(rig_.Publish(kAnn, passage, 5));
  const Tokens prompt = Numbers(1000, 700);
  const Query segment{.key = passage.key, .tokens = 600};
  const Match match = Ask(prompt, kAnn, {}, {&segment, 1});
  const TestPages pages(TestPages::Holding(prompt.size()));
  const auto landing = rig_.StartLanding(kAnn, 1, match.lease, TestTarget(pages, {{0, 0}}));
  rig_.Settle();
  ASSERT_THAT(*landing->verdict, ElementsAre(MissReason::kNone));
  PrefixCommit commit = engine_.Offer(prompt, prompt.size(), {});
  commit.lease = match.lease;
  EXPECT_THAT(Commit(std::move(commit)), ElementsAre(CommitOutcome::kBadSource));
}

TEST_F(PrefixesTest, ACorruptBlockIsAMissAndIsCommittedAgain) {
  const Tokens text = Numbers(0, 700), next = Join(text, {1, 2, 3});
  Serve(text);
  Match match = Ask(next);
  ASSERT_EQ(match.prefix.depth, 700u);
  const Found& block = match.found[match.prefix.objects.begin + 1];
  Corrupt(top(), *block.slot, *block.header, kTestAttentionLayers[0], PartForm::kKeys);
  const TestPages pages(TestPages::Holding(next.size()));
  const auto landing = rig_.StartLanding(kAnn, 1, match.lease, PrefixEngine::Target(pages, match.prefix));
  rig_.Settle();
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kNone, MissReason::kChecksumFailed, MissReason::kNone));
  rig_.cache->Release(kAnn, match.lease);
  EXPECT_EQ(Ask(next).prefix.depth, 0u);
  Serve(text);
  EXPECT_EQ(Serve(next), 700u);
}

TEST_F(PrefixesTest, RefusesAreDataAndChangeNothing) {
  const Tokens text = Numbers(0, 700);
  PrefixCommit commit = engine_.Offer(text, 700, {256});
  commit.checkpoints[0].tensors.pop_back();
  EXPECT_THAT(Commit(std::move(commit)), ElementsAre(CommitOutcome::kBadSource, CommitOutcome::kKept));
  EXPECT_EQ(Ask(Join(text, {1})).prefix.depth, 700u);
  Tokens parted(text.begin(), text.begin() + 300);
  EXPECT_EQ(Ask(parted).prefix.depth, 0u) << "what could not be copied is not kept";
  EXPECT_THAT(Commit(engine_.Offer(text, 700, {}), 99), ElementsAre(CommitOutcome::kUnavailable)) << "no such session";
  rig_.cache->offers().StartDrain();
  EXPECT_THAT(Commit(engine_.Offer(text, 700, {})), ElementsAre(CommitOutcome::kUnavailable));
}

// Its session ends while a text is copied in: the rest is not, and the session is drained when nothing reads its
// memory.
TEST_F(PrefixesTest, ASessionThatEndsStopsItsCommit) {
  const Tokens text = Numbers(0, 20 * kBlock);
  std::vector<CommitOutcome> outcomes;
  rig_.cache->Commit(kAnn, engine_.Offer(text, text.size(), {}),
                     [&](std::vector<CommitOutcome> o) { outcomes = std::move(o); });
  rig_.executor.Complete(0);
  bool drained = false;
  rig_.cache->CloseSession(kAnn, [&] { drained = true; });
  EXPECT_FALSE(drained);
  rig_.Settle();
  EXPECT_TRUE(drained);
  EXPECT_THAT(outcomes, ElementsAre(CommitOutcome::kUnavailable));
  EXPECT_EQ(rig_.cache->stats().reservations, 0u);
  EXPECT_EQ(Ask(Join(text, {1}), kBob).prefix.depth, 0u);
}

// Requests that come while a text is copied in neither find it nor give it up.
TEST_F(PrefixesTest, ALookupDuringACommitDoesNoHarm) {
  const Tokens text = Numbers(0, 12 * kBlock), next = Join(text, {1});
  std::vector<CommitOutcome> outcomes;
  rig_.cache->Commit(kAnn, engine_.Offer(text, text.size(), {5 * kBlock}),
                     [&](std::vector<CommitOutcome> o) { outcomes = std::move(o); });
  while (rig_.executor.pending() > 0) {
    EXPECT_EQ(Ask(next, kBob).prefix.depth, 0u);
    rig_.executor.Complete(0);
  }
  EXPECT_THAT(outcomes, ElementsAre(CommitOutcome::kKept, CommitOutcome::kKept));
  const Match match = Ask(next, kBob);
  EXPECT_EQ(match.prefix.depth, text.size());
  EXPECT_EQ(Landed(match, next, kBob), 0.0);
  EXPECT_THAT(match.prefix.resumable, ElementsAre(5 * kBlock, 12 * kBlock));
}

TEST_F(PrefixesTest, CommitsInFlightAreBounded) {
  std::vector<CommitOutcome> refused;
  for (int32_t i = 0; i < 20; ++i) {
    rig_.cache->Commit(kAnn, engine_.Offer(Numbers(1000 * i, 10), 10, {}), [&](const std::vector<CommitOutcome>& o) {
      if (o[0] == CommitOutcome::kBusy) refused.push_back(o[0]);
    });
  }
  EXPECT_EQ(refused.size(), 4u);
  rig_.Settle();
  EXPECT_EQ(refused.size(), 4u);
  EXPECT_THAT(Commit(engine_.Offer(Numbers(0, 500), 500, {})), ElementsAre(CommitOutcome::kKept));
}

class RestartedPrefixesTest : public PrefixesTest {
 protected:
  RestartedPrefixesTest() : PrefixesTest({.hbm = 0, .dram = 128, .ssd = 256}) {}
};

TEST_F(RestartedPrefixesTest, ResumesFromDiskAfterRestart) {
  const Tokens text = Numbers(0, 3 * kBlock + 77), talk = Numbers(50000, 400);
  Serve(text);
  PrefixCommit own = engine_.Offer(talk, 400, {}, Conversation(1));
  own.provenance = Provenance::kComposed;
  Commit(std::move(own));
  rig_.Settle();
  rig_.Restart();
  Open();
  const Tokens next = Join(text, {1, 2, 3});
  Match match = Ask(next);
  ASSERT_EQ(match.prefix.depth, text.size());
  EXPECT_EQ(match.found[match.prefix.objects.begin].tier, TierKind::kSsd);
  rig_.Settle();
  EXPECT_EQ(Landed(match, next), 0.0);
  EXPECT_EQ(Ask(Join(talk, {1}), kAnn, Conversation(2)).prefix.depth, 0u);
  match = Ask(Join(talk, {1}), kAnn, Conversation(1));
  EXPECT_EQ(match.prefix.depth, 400u);
  EXPECT_TRUE(match.prefix.own);
}

// Two texts of one length: the one that is asked twice does not stand for the other.
TEST_F(RestartedPrefixesTest, TextsOfOneLengthAreEachFoundAgain) {
  const Tokens one = Numbers(0, 300), two = Numbers(5000, 300);
  Serve(one);
  Serve(two);
  rig_.Settle();
  rig_.Restart();
  Open();
  EXPECT_EQ(Ask(Join(one, {1})).prefix.depth, 300u);
  EXPECT_EQ(Ask(Join(one, {2})).prefix.depth, 300u);
  EXPECT_EQ(Ask(Join(two, {1})).prefix.depth, 300u);
}

// A tenant with more namespaces than are remembered at a time.
TEST_F(PrefixesTest, AErasedNamespaceIsFoundAgain) {
  const Tokens text = Numbers(0, 400);
  Serve(text);
  for (uint8_t i = 0; i < 20; ++i) {
    PrefixModel other = *engine_.model();
    other.ns.bytes[0] ^= static_cast<uint8_t>(i + 1);
    const PrefixText asked(std::make_shared<PrefixModel>(other), Join(text, {1}));
    EXPECT_EQ(rig_.cache->Lookup(kAnn, {}, asked, nullptr).prefix.depth, 0u);
  }
  EXPECT_EQ(rig_.cache->prefixes().stats(1).namespaces, 16u);
  EXPECT_EQ(Ask(Join(text, {1})).prefix.depth, 400u);
}

}  // namespace
}  // namespace ashlar::storage
