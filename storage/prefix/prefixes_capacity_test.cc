// SPDX-License-Identifier: Apache-2.0
// Exact prefixes with little capacity: which are evicted, and that no prompt gets the bytes of another text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "storage/testing/prefixes_fixture.h"

namespace ashlar::storage {
namespace {

class PricedPrefixesTest : public PrefixesTest {
 protected:
  PricedPrefixesTest() { rig_.cache->SetBounds(1, {.prefix_bytes = 24 * limits::kExtentBytes}); }
};

// A prefix that the planner gives up leaves the tiers, and the stored bytes never exceed its capacity.
TEST_F(PricedPrefixesTest, EvictedPrefixesLeaveTheCache) {
  std::mt19937_64 random(1);
  std::map<int, Tokens> talks;
  uint64_t resumed = 0;
  for (int request = 0; request < 120; ++request) {
    const int talk = static_cast<int>(random() % 6);
    Tokens& text = talks[talk];
    if (text.empty() || text.size() > 1200) text = Join(Numbers(0, 200), Numbers(100000 * (request + 1), 150));
    const Tokens decoded = Numbers(100000 * (request + 1) + 5000, static_cast<int32_t>(1 + random() % 100));
    resumed += Serve(text, decoded) > 0 ? 1 : 0;
    text = Join(Join(text, decoded), Numbers(100000 * (request + 1) + 8000, 30));
    EXPECT_LE(rig_.cache->prefixes().stats(1).bytes, 24 * limits::kExtentBytes);
    EXPECT_LE(rig_.dram->Usage(1).used_bytes, 24 * limits::kExtentBytes);
  }
  EXPECT_GT(resumed, 40u);
  EXPECT_GT(std::ranges::count(rig_.observer.evicted, MissReason::kEvicted), 20);
}

// A leased prefix stays until it is released, whatever more valuable prefix comes.
TEST_F(PricedPrefixesTest, LeasedPrefixStaysAfterEviction) {
  const Tokens text = Numbers(0, 700), next = Join(text, {1, 2, 3});
  Serve(text);
  const Match match = Ask(next);
  ASSERT_EQ(match.prefix.depth, 700u);
  for (int32_t i = 1; i < 60; ++i) {
    const Tokens other = Numbers(10000 * i, 600);
    Serve(other);
    Serve(Join(other, {1}));
    Serve(Join(other, {2}));
  }
  ASSERT_EQ(Ask(next, kBob).prefix.depth, 0u) << "it was to be given up";
  EXPECT_EQ(Landed(match, next), 0.0);
  const uint64_t before = rig_.cache->stats().objects;
  rig_.cache->Release(kAnn, match.lease);
  EXPECT_LT(rig_.cache->stats().objects, before);
}

// The thread that creates arenas, in the test's hands.
class GrowingPrefixesTest : public PrefixesTest {
 protected:
  GrowingPrefixesTest() {
    rig_.dram->CreateOn([this](TenantId tenant, const std::shared_ptr<ComingArena>& arena) {
      coming_.emplace_back(tenant, arena);
      return true;
    });
  }
  void StartCommit(const Tokens& text) {
    rig_.cache->Commit(kAnn, engine_.Offer(text, text.size(), {}),
                       [&](std::vector<CommitOutcome> outcomes) { outcomes_ = std::move(outcomes); });
    rig_.Settle();
  }
  void CreateArenas() {
    while (!coming_.empty()) {
      const auto [tenant, arena] = coming_.front();
      coming_.erase(coming_.begin());
      arena->MakeAhead();
      EXPECT_TRUE(rig_.dram->Prepared(tenant, arena).ok());
      rig_.Settle();
    }
  }

  std::vector<std::pair<TenantId, std::shared_ptr<ComingArena>>> coming_;
  std::vector<CommitOutcome> outcomes_;
};

TEST_F(GrowingPrefixesTest, ACommitWaitsForMemoryWhileOtherCallsGoOn) {
  const Tokens text = Numbers(0, 3000);
  StartCommit(text);
  EXPECT_TRUE(outcomes_.empty());
  EXPECT_EQ(rig_.dram->Usage(1).used_bytes, 0u);
  ASSERT_EQ(coming_.size(), 1u);
  EXPECT_EQ(Ask(Numbers(100'000, 700), kBob).prefix.depth, 0u);
  CreateArenas();
  EXPECT_THAT(outcomes_, testing::ElementsAre(CommitOutcome::kKept));
  EXPECT_GT(rig_.dram->Usage(1).used_bytes, 8 * limits::kExtentBytes) << "more than one arena";
  const Tokens next = Join(text, {1});
  const Match match = Ask(next);
  EXPECT_EQ(match.prefix.depth, text.size());
  EXPECT_EQ(Landed(match, next), 0.0);
}

TEST_F(GrowingPrefixesTest, TheEndOfASessionEndsACommitThatWaitsForMemory) {
  StartCommit(Numbers(0, 700));
  bool drained = false;
  rig_.cache->CloseSession(kAnn, [&] { drained = true; });
  EXPECT_FALSE(drained) << "the commit has not ended";
  CreateArenas();
  EXPECT_TRUE(drained);
  EXPECT_THAT(outcomes_, testing::ElementsAre(CommitOutcome::kUnavailable));
  EXPECT_EQ(rig_.dram->Usage(1).used_bytes, 0u);
}

class CrowdedPrefixesTest : public PrefixesTest {
 protected:
  CrowdedPrefixesTest() : PrefixesTest({.hbm = 0, .dram = 44, .ssd = 0}) {}
};

// Segments that are used all the time take half of the capacity, and texts that do not all fit beside them take turns.
// Eviction by recency alone would lose every text before its next turn.
TEST_F(CrowdedPrefixesTest, KeepsPrefixesThatFitBesideSegments) {
  std::vector<ObjectHeader> segments;
  for (uint64_t text = 1; text <= 6; ++text) {
    segments.push_back(TestPlan(text, 64));
    ASSERT_TRUE(rig_.Publish(kAnn, segments.back(), text));
  }
  int resumed = 0;
  for (int32_t round = 0; round < 60; ++round) {
    for (int32_t text = 0; text < 6; ++text) {
      for (const ObjectHeader& segment : segments) {
        const Match hit = rig_.Lookup(kAnn, segment);
        rig_.cache->Release(kAnn, hit.lease);
      }
      const Tokens prompt = Join(Numbers(100000 * (text + 1), 600), {round});
      const Match match = Ask(prompt);
      if (match.prefix.depth > 0) {
        ++resumed;
      } else {
        Commit(engine_.Offer(prompt, prompt.size(), match.prefix.checkpoint_at));
      }
      rig_.cache->Release(kAnn, match.lease);
    }
  }
  EXPECT_GT(resumed, 150) << "of 360; three of the six fit";
}

// An engine that declares no FLOPs has its prefixes priced like its segments.
TEST_F(CrowdedPrefixesTest, PrefixOfUndeclaredCostStaysWhileSegmentsPass) {
  const PrefixEngine undeclared(1, 1, 0, {});
  const Tokens text = Numbers(0, 600);
  Commit(undeclared.Offer(text, text.size(), {}));
  for (uint64_t segment = 1; segment <= 40; ++segment) {
    ASSERT_TRUE(rig_.Publish(kAnn, TestPlan(segment, 64), segment));
  }
  EXPECT_FALSE(rig_.observer.evicted.empty());
  const Match match = rig_.cache->Lookup(kAnn, {}, undeclared.Text(Join(text, {1})), nullptr);
  EXPECT_EQ(match.prefix.depth, 600u);
}

// Texts over three tokens that part and join again everywhere, capacity far too small, engines that do not commit or
// capture only some: whatever is resumed is what was computed for exactly these tokens.
TEST_F(PricedPrefixesTest, RandomTextsNeverGetAnothersBytes) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<Tokens> known = {{}};
    uint64_t resumed = 0;
    for (int request = 0; request < 60; ++request) {
      Tokens prompt = known[random() % known.size()];
      prompt.resize(random() % (prompt.size() + 1));
      for (int chunk = static_cast<int>(random() % 5); chunk >= 0; --chunk) {
        prompt.insert(prompt.end(), 100 + random() % 3 * 56, static_cast<int32_t>(random() % 3));
      }
      const ConversationId conversation =
          random() % 3 == 0 ? Conversation(static_cast<uint8_t>(random() % 3)) : ConversationId{};
      const Match match = Ask(prompt, kAnn, conversation);
      if (match.prefix.depth > 0) {
        ASSERT_EQ(Landed(match, prompt), 0.0) << seed << ", " << request;
        ++resumed;
      }
      std::vector<uint64_t> captured;
      for (const uint64_t depth : match.prefix.checkpoint_at) {
        if (random() % 4 > 0 && depth < prompt.size()) captured.push_back(depth);
      }
      PrefixCommit commit = engine_.Offer(prompt, prompt.size(), captured, conversation);
      commit.lease = match.lease;
      const bool composed = match.prefix.depth > 0 && match.prefix.provenance == Provenance::kComposed;
      if (conversation != ConversationId{} && (composed || random() % 2 == 0))
        commit.provenance = Provenance::kComposed;
      if (random() % 5 > 0) Commit(std::move(commit));
      rig_.cache->Release(kAnn, match.lease);
      known.push_back(std::move(prompt));
    }
    EXPECT_GE(resumed, 8u) << seed;
  }
}

}  // namespace
}  // namespace ashlar::storage
