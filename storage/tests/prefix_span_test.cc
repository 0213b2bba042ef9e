// SPDX-License-Identifier: Apache-2.0
// Buffered spans through the cache: a prompt that diverges inside an answer resumes at that token. Every stored number
// identifies its text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "storage/prefix/prefixes.h"
#include "storage/testing/prefix_engine.h"
#include "storage/testing/tenants.h"
#include "storage/testing/tiered_rig.h"
#include "storage/testing/tokens.h"

namespace ashlar::storage {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr uint64_t kBlock = 256;
constexpr ConversationId kTalk{1, 1}, kAnother{2, 1};

class SpansTest : public ::testing::Test {
 protected:
  explicit SpansTest(const TieredOptions& options = {.hbm = 0, .dram = 256, .ssd = 0}) : rig_(options) { Open(); }

  void Open() {
    for (const SessionId session : {kAnn, kBob}) rig_.cache->OpenSession(session, 1);
  }
  Match Ask(const Tokens& prompt, const ConversationId& conversation = {}) {
    return rig_.cache->Lookup(kAnn, {}, engine_.Text(prompt, conversation), nullptr);
  }
  std::vector<CommitOutcome> Commit(PrefixCommit commit) {
    std::vector<CommitOutcome> outcomes;
    rig_.cache->Commit(kAnn, std::move(commit), [&](std::vector<CommitOutcome> o) { outcomes = std::move(o); });
    rig_.Settle();
    return outcomes;
  }
  // States before the prompt's last token, and the span from there to the answer's end.
  PrefixCommit Answer(const Tokens& prompt, const Tokens& decoded, const ConversationId& conversation = {}) {
    PrefixCommit commit =
        engine_.Offer(Join(prompt, decoded), prompt.size(), {prompt.size() - 1}, conversation, prompt.size() - 1);
    if (conversation != ConversationId{}) commit.provenance = Provenance::kComposed;
    return commit;
  }
  static Tokens First(const Tokens& tokens, size_t count) {
    return {tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(count)};
  }
  std::vector<MissReason> Land(const Match& match, const TestPages& pages) {
    const auto landing = rig_.StartLanding(kAnn, ++landings_, match.lease, PrefixEngine::Target(pages, match.prefix));
    rig_.Settle();
    EXPECT_TRUE(landing->verdict);
    return *landing->verdict;
  }
  // Expects the prompt to resume at `depth`, by this number of span tokens, with the right bytes and none after them.
  void ExpectResumes(const Tokens& prompt, uint64_t depth, uint32_t span, const ConversationId& conversation = {}) {
    SCOPED_TRACE(depth);
    const Match match = Ask(prompt, conversation);
    ASSERT_EQ(match.prefix.depth, depth);
    ASSERT_EQ(match.prefix.span_tokens, span);
    ASSERT_EQ(match.prefix.objects.size(), (depth - span) / kBlock + (span > 0 ? 2 : 1));
    const TestPages pages(TestPages::Holding(prompt.size() + 1));
    EXPECT_THAT(Land(match, pages), Each(MissReason::kNone));
    EXPECT_EQ(engine_.Error(pages, *rig_.dram, match, prompt), 0.0);
    for (const size_t attention : {0, 1}) EXPECT_EQ(*pages.Key(attention, depth, 0), 0) << "landed behind the prefix";
    rig_.cache->Release(kAnn, match.lease);
  }

  TieredRig rig_;
  PrefixEngine engine_{1, 1, 256}, plain_{1};
  LandingId landings_ = 0;
};

TEST_F(SpansTest, APromptThatDivergesInsideAnAnswerResumesAtThatToken) {
  const Tokens prompt = Numbers(0, 300), text = Join(prompt, Numbers(5000, 40));
  EXPECT_THAT(Commit(Answer(prompt, Numbers(5000, 40))), ElementsAre(CommitOutcome::kKept, CommitOutcome::kKeptAsSpan));
  EXPECT_EQ(rig_.cache->stats().objects, 3u) << "a block, states, a span";
  ExpectResumes(prompt, 299, 0);
  for (const size_t common : {300, 301, 317, 339, 340}) {
    ExpectResumes(Join(First(text, common), {-1, -2, -3}), common, static_cast<uint32_t>(common - 299));
  }
  const Match match = Ask(Join(First(text, 310), {-1}));
  EXPECT_EQ(match.prefix.resumable.front(), 299u);
  EXPECT_EQ(match.prefix.resumable.back(), 310u);
  EXPECT_EQ(match.prefix.resumable.size(), 12u) << "every depth inside";
  EXPECT_EQ(rig_.cache->prefixes().stats(1).spans, 1u);
  EXPECT_GT(rig_.cache->prefixes().stats(1).span_saved_bytes, 0u);
}

// The span has its own keys and values, so the blocks after its begin need not exist.
TEST_F(SpansTest, ASpanReachesOverBlocks) {
  const Tokens prompt = Numbers(0, 200), decoded = Numbers(5000, 80), text = Join(prompt, decoded);
  Commit(Answer(prompt, decoded));
  EXPECT_EQ(rig_.cache->stats().objects, 2u);
  for (const size_t common : {kBlock - 1, kBlock, kBlock + 1, size_t{280}}) {
    ExpectResumes(Join(First(text, common), {-1}), common, static_cast<uint32_t>(common - 199));
  }
}

TEST_F(SpansTest, EnginesThatCannotRebuildResumeFromStates) {
  const Tokens prompt = Numbers(0, 300), decoded = Numbers(5000, 40), next = Join(Join(prompt, decoded), {7});
  Commit(Answer(prompt, decoded));
  const Match match = rig_.cache->Lookup(kBob, {}, plain_.Text(next), nullptr);
  EXPECT_EQ(match.prefix.depth, 299u);
  EXPECT_EQ(match.prefix.span_tokens, 0u);
  EXPECT_THAT(match.prefix.resumable, ElementsAre(299u));
  // These engines have declared that they capture no spans, so a span that they offer is ignored.
  const Tokens other = Numbers(9000, 100);
  PrefixCommit commit = plain_.Offer(other, 60, {59});
  commit.span = PrefixCommit::Span{.begin = 59, .tensors = {}};
  EXPECT_THAT(Commit(std::move(commit)), ElementsAre(CommitOutcome::kKept, CommitOutcome::kKept));
}

TEST_F(SpansTest, AConversationsAnswersCanBeResumedInside) {
  const Tokens prompt = Numbers(0, 300), decoded = Numbers(5000, 40), text = Join(prompt, decoded);
  EXPECT_THAT(Commit(Answer(prompt, decoded, kTalk)), ElementsAre(CommitOutcome::kKept, CommitOutcome::kKeptAsSpan));
  for (const size_t common : {300, 320, 340}) {
    const Tokens next = Join(First(text, common), {-1, -2});
    ExpectResumes(next, common, static_cast<uint32_t>(common - 299), kTalk);
    EXPECT_EQ(Ask(next).prefix.depth, 0u);
    EXPECT_EQ(Ask(next, kAnother).prefix.depth, 0u);
  }
  // A second answer to the same turn: the states that both answers start from stay, and so does the older state.
  EXPECT_THAT(Commit(Answer(prompt, Numbers(7000, 30), kTalk)),
              ElementsAre(CommitOutcome::kAlreadyPresent, CommitOutcome::kKeptAsSpan));
  ExpectResumes(Join(First(text, 320), {-1}), 320, 21, kTalk);
  ExpectResumes(Join(Join(prompt, Numbers(7000, 12)), {-1}), 312, 13, kTalk);
  // After two more turns, nothing of it is left.
  const Tokens second = Join(Join(prompt, Numbers(7000, 30)), Numbers(20000, 50));
  Commit(Answer(second, Numbers(21000, 20), kTalk));
  const Tokens third = Join(Join(second, Numbers(21000, 20)), Numbers(30000, 50));
  Commit(Answer(third, Numbers(31000, 20), kTalk));
  ExpectResumes(Join(Join(third, Numbers(31000, 5)), {-1}), third.size() + 5, 6, kTalk);
  EXPECT_EQ(Ask(Join(First(text, 320), {-1}), kTalk).prefix.depth, 0u);
}

TEST_F(SpansTest, ACorruptSpanIsAMissAndIsDropped) {
  const Tokens prompt = Numbers(0, 300), decoded = Numbers(5000, 40),
               next = Join(First(Join(prompt, decoded), 310), {-1});
  for (const auto& [layer, form] : {std::pair(0u, PartForm::kSpanKeys), {kTestAttentionLayers[0], PartForm::kValues}}) {
    Commit(Answer(prompt, decoded));
    const Match match = Ask(next);
    ASSERT_EQ(match.prefix.depth, 310u);
    const Found& span = match.found[match.prefix.objects.span];
    Corrupt(*rig_.dram, *span.slot, *span.header, layer, form);
    const TestPages pages(TestPages::Holding(next.size()));
    EXPECT_THAT(Land(match, pages), ElementsAre(MissReason::kNone, MissReason::kNone, MissReason::kChecksumFailed));
    rig_.cache->Release(kAnn, match.lease);
    ExpectResumes(next, 299, 0);
  }
}

TEST_F(SpansTest, SpanIsNotFoundWithoutBase) {
  const Tokens prompt = Numbers(0, 300), decoded = Numbers(5000, 40),
               next = Join(First(Join(prompt, decoded), 310), {-1});
  Commit(Answer(prompt, decoded));
  const Match match = Ask(next);
  const Found& states = match.found[match.prefix.objects.checkpoint];
  Corrupt(*rig_.dram, *states.slot, *states.header, 0, PartForm::kState);
  const TestPages pages(TestPages::Holding(next.size()));
  EXPECT_THAT(Land(match, pages), testing::Contains(MissReason::kChecksumFailed));
  rig_.cache->Release(kAnn, match.lease);
  EXPECT_EQ(Ask(next).prefix.depth, 0u);
  EXPECT_EQ(rig_.cache->prefixes().stats(1).spans, 0u);
  Commit(Answer(prompt, decoded));
  ExpectResumes(next, 310, 11);
}

TEST_F(SpansTest, ASpanThatCannotBeCopiedIsNotKept) {
  const Tokens prompt = Numbers(0, 300), decoded = Numbers(5000, 40);
  PrefixCommit commit = Answer(prompt, decoded);
  commit.span->tensors.pop_back();
  EXPECT_THAT(Commit(std::move(commit)), ElementsAre(CommitOutcome::kKept, CommitOutcome::kBadSource));
  ExpectResumes(Join(First(Join(prompt, decoded), 310), {-1}), 299, 0);
  EXPECT_EQ(rig_.cache->prefixes().stats(1).spans, 0u);
  // Longer than the declared buffer of the engine: treated as if no span was offered.
  const PrefixEngine shorter(1, 1, 16);
  PrefixCommit longer = shorter.Offer(Join(Numbers(20000, 100), decoded), 100, {99}, {}, 99);
  EXPECT_THAT(Commit(std::move(longer)), ElementsAre(CommitOutcome::kKept, CommitOutcome::kKept));
}

class CrowdedSpansTest : public SpansTest {
 protected:
  CrowdedSpansTest() { rig_.cache->SetBounds(1, {.prefix_bytes = 12 * limits::kExtentBytes}); }
};

// A span that the planner evicts leaves the tiers, and the stored bytes never exceed the capacity.
TEST_F(CrowdedSpansTest, EvictedSpansLeaveTheCache) {
  std::mt19937_64 random(1);
  std::map<uint64_t, Tokens> talks;
  uint64_t inside = 0;
  for (int32_t request = 0; request < 120; ++request) {
    Tokens& text = talks[random() % 4];
    if (text.size() > 900) text.clear();
    if (text.size() > 10) text.resize(text.size() - 10);  // every turn diverges inside the previous answer
    text = Join(text, Numbers(100000 * (request + 1), text.empty() ? 150 : 30));
    const Match match = Ask(text);
    inside += match.prefix.span_tokens > 0 ? 1 : 0;
    const Tokens decoded = Numbers(100000 * (request + 1) + 5000, static_cast<int32_t>(20 + random() % 30));
    Commit(Answer(text, decoded));
    rig_.cache->Release(kAnn, match.lease);
    text = Join(text, decoded);
    EXPECT_LE(rig_.cache->prefixes().stats(1).bytes, 12 * limits::kExtentBytes);
    EXPECT_LE(rig_.dram->Usage(1).used_bytes, 12 * limits::kExtentBytes);
  }
  EXPECT_GT(inside, 5u);
  EXPECT_GT(std::ranges::count(rig_.observer.evicted, MissReason::kEvicted), 20);
}

class RestartedSpansTest : public SpansTest {
 protected:
  RestartedSpansTest() : SpansTest({.hbm = 0, .dram = 128, .ssd = 256}) {}
};

// After a restart no text is known: a span is found again by a prompt that contains all of it, and then by all other
// prompts.
TEST_F(RestartedSpansTest, AreRecoveredFromDisk) {
  const Tokens prompt = Numbers(0, 300), decoded = Numbers(5000, 40), text = Join(prompt, decoded);
  const Tokens talk = Numbers(50000, 280), said = Join(talk, decoded);
  Commit(Answer(prompt, decoded));
  Commit(Answer(talk, decoded, kTalk));
  rig_.Settle();
  rig_.Restart();
  Open();
  const Tokens inside = Join(First(text, 310), {-1});
  EXPECT_EQ(Ask(inside).prefix.depth, 299u);
  rig_.Settle();
  ExpectResumes(Join(text, {-1}), 340, 41);
  ExpectResumes(inside, 310, 11);
  ExpectResumes(Join(said, {-1}), 320, 41, kTalk);
  ExpectResumes(Join(First(said, 300), {-1}), 300, 21, kTalk);
  EXPECT_EQ(Ask(Join(said, {-1}), kAnother).prefix.depth, 0u);
}

}  // namespace
}  // namespace ashlar::storage
