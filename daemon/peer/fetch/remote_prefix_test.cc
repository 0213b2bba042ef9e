// SPDX-License-Identifier: Apache-2.0
// Prefixes on other nodes, in a namespace with checkpoints of many other texts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <random>
#include <utility>
#include <vector>

#include "daemon/peer/testing/peer_node.h"
#include "storage/testing/prefix_engine.h"
#include "storage/testing/tokens.h"

namespace ashlar::daemon {
namespace {

using storage::Join;
using storage::Match;
using storage::Numbers;
using storage::PrefixEngine;
using storage::TestPages;
using storage::Tokens;
using ::testing::Each;

constexpr uint32_t kForeign = 10'000;
constexpr ConversationId kTalk{1, 1};

class RemotePrefixTest : public ::testing::Test {
 protected:
  RemotePrefixTest() { TellForeign(); }

  // An unreachable node announces checkpoints of other texts at all depths, and a span after each.
  void TellForeign() {
    const auto member = std::make_shared<const Member>(Member{.node = "foreign", .incarnation = 1'000'000});
    std::mt19937_64 random(1);
    const auto draw = [&random] {
      Key key;
      for (uint8_t& byte : key.bytes) byte = static_cast<uint8_t>(random());
      return key;
    };
    const NamespaceId ns = engine_.model()->ns;
    MutexLock lock(cluster_.mutex);
    for (uint32_t depth = 1; depth <= kForeign; ++depth) {
      cluster_.announced.push_back({member, draw(), ns, {.kind = ObjectKind::kCheckpoint, .depth = depth}});
      cluster_.announced.push_back(
          {member, draw(), ns, {.kind = ObjectKind::kSpan, .depth = depth + 40, .span_begin = depth}});
    }
  }
  static std::vector<CommitOutcome> Commit(PeerNode& node, storage::PrefixCommit commit) {
    std::promise<std::vector<CommitOutcome>> outcome;
    node.loop.PostCompletion(0, [&] {
      node.cache.Commit(PeerNode::kEngine, std::move(commit),
                        [&](std::vector<CommitOutcome> o) { outcome.set_value(std::move(o)); });
    });
    return outcome.get_future().get();
  }
  void CommitText(PeerNode& node, size_t tokens, const ConversationId& conversation = {}) {
    storage::PrefixCommit commit = engine_.Offer(First(tokens), tokens, {}, conversation);
    if (conversation != ConversationId{}) commit.provenance = Provenance::kComposed;
    EXPECT_THAT(Commit(node, std::move(commit)), Each(CommitOutcome::kKept));
  }
  // The directory's entries of a node's object are missing, although the node has it: the queue was full.
  void Untell(const PeerNode& node, const Key& key) {
    MutexLock lock(cluster_.mutex);
    EXPECT_EQ(std::erase_if(cluster_.announced,
                            [&](const TestCluster::Announced& one) {
                              return one.member == node.directory.member && one.key == key;
                            }),
              1u);
  }
  // Checks that a node accepts another node's objects.
  static void ExpectHandedOver(PeerNode& from, PeerNode& to, const Key& key) {
    const auto offering = from.OnLoop([&] { return from.cache.offers().Describe(0, key); });
    ASSERT_TRUE(offering.has_value());
    std::promise<TakeOutcome> outcome;
    from.Offer(*to.directory.member, "default",
               {.objects = {{.key = key,
                             .ns = offering->ns,
                             .kind = offering->kind,
                             .bytes = offering->bytes,
                             .uses = offering->uses,
                             .group = offering->group}},
                .kind = OfferKind::kDrain,
                .patience_ms = 10'000},
               [&](absl::StatusOr<std::vector<TakeOutcome>> outcomes) { outcome.set_value(outcomes->at(0)); });
    EXPECT_EQ(outcome.get_future().get(), TakeOutcome::kAccepted);
  }
  static Tokens First(size_t tokens) { return Numbers(0, static_cast<int32_t>(tokens)); }
  // The text's first tokens, followed by others, as deep as the foreign texts.
  static Tokens Prompt(size_t shared) { return Join(First(shared), Numbers(50'000, kForeign + 2000)); }
  // Expects the prompt to resume at `depth`, with the right bytes.
  void ExpectResumes(PeerNode& node, const Tokens& prompt, uint64_t depth, const ConversationId& conversation = {},
                     const Salt& salt = {}) {
    SCOPED_TRACE(depth);
    const storage::PrefixText asked = engine_.Text(prompt, conversation, salt);
    const Match match = node.Lookup({}, &asked);
    ASSERT_EQ(match.prefix.depth, depth);
    const TestPages pages(TestPages::Holding(prompt.size()));
    EXPECT_THAT(node.Land(match.lease, PrefixEngine::Target(pages, match.prefix)), Each(MissReason::kNone));
    EXPECT_EQ(engine_.Error(pages, *node.tier, match, prompt), 0.0);
    node.Release(match.lease);
  }

  const PrefixEngine engine_{0, 1, 256};
  const storage::PrefixText text_ = engine_.Text(First(2000));
  TestCluster cluster_;
};

TEST_F(RemotePrefixTest, APrefixIsFoundAmongManyDeeperTexts) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  CommitText(a, 600);
  ExpectResumes(b, Prompt(600), 600);
}

TEST_F(RemotePrefixTest, APromptThatDivergesFarAfterTheCheckpointFindsIt) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  EXPECT_THAT(Commit(a, engine_.Offer(First(1000), 1000, {600, 800})), Each(CommitOutcome::kKept));
  ExpectResumes(b, Prompt(780), 600);
}

TEST_F(RemotePrefixTest, AConversationsOwnPrefixIsFound) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  CommitText(a, 600, kTalk);
  ExpectResumes(b, Prompt(600), 600, kTalk);
}

TEST_F(RemotePrefixTest, APrefixIsFoundOnlyUnderItsSalt) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  const Salt salt = MakeSalt("one"), another = MakeSalt("another");
  EXPECT_THAT(Commit(a, engine_.Offer(First(600), 600, {}, {}, 0, salt)), Each(CommitOutcome::kKept));
  for (const Salt& other : {Salt{}, another}) {
    const storage::PrefixText asked = engine_.Text(Prompt(600), {}, other);
    EXPECT_EQ(b.Lookup({}, &asked).prefix.depth, 0u);
  }
  ExpectResumes(b, Prompt(600), 600, {}, salt);
}

TEST_F(RemotePrefixTest, AShortPrefixNeedsNoBlock) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  CommitText(a, 200);
  ExpectResumes(b, Prompt(200), 200);
}

TEST_F(RemotePrefixTest, ASpanIsFoundAfterItsCheckpoint) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  EXPECT_THAT(Commit(a, engine_.Offer(First(640), 601, {600}, {}, 600)),
              ::testing::ElementsAre(CommitOutcome::kKept, CommitOutcome::kKeptAsSpan));
  ExpectResumes(b, Prompt(640), 640);
}

TEST_F(RemotePrefixTest, BlocksOfOnePrefixComeFromTwoNodes) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c");
  for (PeerNode* node : {&a, &c}) CommitText(*node, 1000);
  Untell(a, text_.shared().blocks()[1]);
  Untell(c, text_.shared().blocks()[0]);
  Untell(c, text_.shared().blocks()[2]);
  Untell(a, text_.shared().Checkpoint(1000));
  ExpectResumes(b, Prompt(1000), 1000);
}

TEST_F(RemotePrefixTest, MissingBlockFallsBackToShallowerPrefix) {
  for (const size_t missing : {2, 1}) {  // the last one, and one in the middle
    PeerNode a(cluster_, "a"), b(cluster_, "b");
    for (const size_t tokens : {300, 1000}) CommitText(a, tokens);
    Untell(a, text_.shared().blocks()[missing]);
    ExpectResumes(b, Prompt(1000), 300);
  }
}

TEST_F(RemotePrefixTest, ABlockThatNoOtherNodeHasIsFoundLocally) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  for (PeerNode* node : {&a, &b}) CommitText(*node, 1000);
  Untell(a, text_.shared().blocks()[1]);
  b.OnLoop([&] { b.cache.retention().Evict(0, text_.shared().Checkpoint(1000)); });
  b.OnLoop([&] { b.cache.retention().Evict(0, text_.shared().blocks()[2]); });
  ExpectResumes(b, Prompt(1000), 1000);
}

// The checkpoint was stored on this node, and its blocks were evicted. Another node has them.
TEST_F(RemotePrefixTest, ALocalCheckpointIsFoundWithRemoteBlocks) {
  PeerNode a(cluster_, "a"), b(cluster_, "b");
  for (PeerNode* node : {&a, &b}) CommitText(*node, 1000);
  Untell(a, text_.shared().Checkpoint(1000));
  for (const Key& key : text_.shared().blocks().first(3)) {
    b.OnLoop([&] { b.cache.retention().Evict(0, key); });
  }
  ExpectResumes(b, Prompt(1000), 1000);
}

// The same for parts offered by other nodes: only their depths are known here.
TEST_F(RemotePrefixTest, PartsThatWereHandedOverAreFoundAcrossNodes) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c");
  CommitText(a, 1000);
  const auto blocks = text_.shared().blocks();
  const Key checkpoint = text_.shared().Checkpoint(1000);
  for (const Key& key : {checkpoint, blocks[1]}) ExpectHandedOver(a, b, key);
  for (const Key& key : {blocks[0], blocks[2]}) ExpectHandedOver(a, c, key);
  a.Leave();
  ExpectResumes(b, Prompt(1000), 1000);  // the checkpoint is here, and so is a block in the middle
  ExpectResumes(c, Prompt(1000), 1000);  // the first block is here
}

TEST_F(RemotePrefixTest, ASpanAndItsCheckpointAreFoundAcrossNodes) {
  PeerNode a(cluster_, "a"), b(cluster_, "b"), c(cluster_, "c");
  EXPECT_THAT(Commit(a, engine_.Offer(First(640), 601, {600}, {}, 600)),
              ::testing::ElementsAre(CommitOutcome::kKept, CommitOutcome::kKeptAsSpan));
  ExpectHandedOver(a, b, text_.shared().Checkpoint(600));
  for (const Key& key : {text_.shared().Span(600, 640), text_.shared().blocks()[0], text_.shared().blocks()[1]}) {
    ExpectHandedOver(a, c, key);
  }
  a.Leave();
  ExpectResumes(b, Prompt(640), 640);
  ExpectResumes(c, Prompt(640), 640);
}

}  // namespace
}  // namespace ashlar::daemon
