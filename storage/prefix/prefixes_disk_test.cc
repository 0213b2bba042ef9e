// SPDX-License-Identifier: Apache-2.0
// Exact prefixes and the disk: how much a conversation writes, and what a restart recovers.
#include <gtest/gtest.h>

#include "storage/testing/prefixes_fixture.h"

namespace ashlar::storage {
namespace {

class ConversationOnDisk : public PrefixesTest {
 protected:
  static constexpr int kTurns = 40;
  static constexpr int32_t kQuestion = 60, kAnswer = 140;

  ConversationOnDisk() : PrefixesTest({.hbm = 0, .dram = 512, .ssd = 1024, .admission = AdmissionMode::kSecondUse}) {}

  // Two checkpoints a turn: at the end of the prompt, and of the answer.
  void Talk(Provenance provenance, const ConversationId& conversation) {
    for (int32_t turn = 0; turn < kTurns; ++turn) {
      const Tokens prompt = Join(text_, Numbers(1000 * turn, kQuestion));
      const Match match = Ask(prompt, kAnn, conversation);
      EXPECT_EQ(match.prefix.depth, text_.size());
      text_ = Join(prompt, Numbers(1000 * turn + 500, kAnswer));
      PrefixCommit commit = engine_.Offer(text_, prompt.size(), {prompt.size()}, conversation);
      commit.provenance = provenance;
      commit.lease = match.lease;
      Commit(std::move(commit));
      rig_.cache->Release(kAnn, match.lease);
      rig_.Settle();
    }
  }
  double WrittenForAByteOfKeys() const {
    const PrefixModel& model = *engine_.model();
    const double keys = static_cast<double>(text_.size()) * static_cast<double>(model.block_bytes) / model.block_tokens;
    return static_cast<double>(rig_.observer.bytes_to_disk) / keys;
  }
  // A checkpoint is written only if as many bytes of keys are new.
  uint64_t MostLost() const {
    const PrefixModel& model = *engine_.model();
    return (model.costs.checkpoint_bytes + model.costs.page_bytes) * model.block_tokens / model.block_bytes;
  }

  Tokens text_;
};

TEST_F(ConversationOnDisk, WritesLessThanTwiceItsKeysAndIsFoundAfterACrash) {
  Talk(Provenance::kExact, {});
  EXPECT_LT(WrittenForAByteOfKeys(), 2);
  EXPECT_GT(WrittenForAByteOfKeys(), 0.8) << "its blocks are there";
  rig_.Restart();
  Open();
  const uint64_t found = Ask(Join(text_, {1})).prefix.depth;
  EXPECT_GE(found + MostLost() + 2 * (kQuestion + kAnswer), text_.size());
}

TEST_F(ConversationOnDisk, WritesLessThanTwiceItsKeysInItsOwnStates) {
  Talk(Provenance::kComposed, Conversation(1));
  EXPECT_LT(WrittenForAByteOfKeys(), 2);
  EXPECT_GT(WrittenForAByteOfKeys(), 0.8);
}

// A state that many prompts resume from is written however near the one before it is.
TEST_F(ConversationOnDisk, WritesWhatIsFoundTwice) {
  Talk(Provenance::kExact, {});
  for (int32_t other = 1; other <= 2; ++other) {
    const Match match = Ask(Join(text_, {other}));
    ASSERT_EQ(match.prefix.depth, text_.size());
    rig_.cache->Release(kAnn, match.lease);
    rig_.Settle();
  }
  rig_.Restart();
  Open();
  EXPECT_EQ(Ask(Join(text_, {3})).prefix.depth, text_.size());
}

// Whatever was deferred, a drain writes it.
TEST_F(ConversationOnDisk, IsCompleteAfterDrain) {
  Talk(Provenance::kExact, {});
  rig_.cache->offers().StartDrain();
  rig_.Settle();
  rig_.Restart();
  Open();
  EXPECT_EQ(Ask(Join(text_, {1})).prefix.depth, text_.size());
}

// Memory for a few texts, and a disk for all.
class EvictedText : public PrefixesTest {
 protected:
  static constexpr int32_t kLength = kBlock + 44;

  EvictedText() : PrefixesTest(Small()) {}

  static TieredOptions Small() {
    TieredOptions options{.hbm = 0, .dram = 128, .ssd = 1024, .admission = AdmissionMode::kSecondUse};
    options.cache.objects.eviction = EvictionMode::kLru;
    return options;
  }
  static Tokens Text(int32_t number) { return Numbers(10'000 * number, kLength); }
  // Segments, each used once, take the place of all that is in memory.
  void Flood() {
    for (int i = 0; i < 100; ++i, ++next_) {
      ASSERT_TRUE(rig_.Publish(kAnn, TestPlan(next_, 64), next_));
      rig_.Settle();
    }
  }

  uint64_t next_ = 1000;
};

TEST_F(EvictedText, IsNotWrittenIfItWasSeenOnce) {
  for (int32_t text = 1; text <= 5; ++text) {
    Serve(Text(text));
    Flood();
  }
  EXPECT_EQ(rig_.observer.bytes_to_disk, 0u);
  EXPECT_EQ(Ask(Join(Text(1), {1})).prefix.depth, 0u);
}

// Its earlier turns were used, so the last one probably will be.
TEST_F(EvictedText, IsWrittenIfItIsTheLastTurnOfAConversation) {
  const Tokens first = Text(1), second = Join(first, Numbers(5, 40)), third = Join(second, Numbers(500, 40));
  Serve(first);
  EXPECT_EQ(Serve(second), first.size());
  EXPECT_EQ(Serve(third), second.size());
  Flood();
  EXPECT_EQ(Serve(Join(third, {1})), third.size());
}

// Of texts that were evicted after their first turn, many had a second one.
TEST_F(EvictedText, IsWrittenIfOthersLikeItWereContinued) {
  for (int32_t text = 1; text <= 20; ++text) {
    Serve(Text(text));
    Flood();
    Serve(Join(Text(text), {1}));
  }
  Serve(Text(50));
  Flood();
  EXPECT_EQ(Serve(Join(Text(50), {1})), Text(50).size());
}

// Prefixes on the disk, and an engine that knows how fast it computes.
class SlowDisk : public PrefixesTest {
 protected:
  static constexpr int32_t kLength = 2 * kBlock + 88;
  static constexpr Nanos kSecond = 1'000'000'000;

  SlowDisk() : PrefixesTest({.hbm = 0, .dram = 512, .ssd = 1024}) {}

  static Tokens Text(int32_t number) { return Numbers(10'000 * number, kLength); }
  void Put(const Tokens& text) { Commit(engine_.Offer(text, text.size(), {})); }
  // The depth at which a prompt resumes that would take this long to compute.
  uint64_t Depth(const Tokens& tokens, double seconds, Nanos needed_in = 0) {
    PrefixText prompt = engine_.Text(tokens);
    prompt.tokens_per_second = seconds > 0 ? static_cast<double>(tokens.size() - 1) / seconds : 0;
    prompt.needed_at = rig_.clock.Now() + needed_in;
    const Match match = rig_.cache->Lookup(kAnn, {}, prompt, nullptr);
    const uint64_t depth = match.prefix.depth;
    rig_.cache->Release(kAnn, match.lease);
    return depth;
  }
  // Loads a text's three objects together, in this time.
  void Load(const Tokens& text, Nanos took) {
    const Match match = Ask(Join(text, {1}));
    EXPECT_EQ(match.prefix.depth, text.size());
    rig_.clock.Advance(took);
    rig_.Settle();
    rig_.cache->Release(kAnn, match.lease);
  }
};

TEST_F(SlowDisk, PrefixThatLoadsSlowerThanItIsComputedIsNotUsed) {
  for (const int32_t text : {1, 2, 3}) Put(Text(text));
  rig_.Restart();
  Open();
  Load(Text(1), 9 * kSecond);
  rig_.observer.misses.clear();
  EXPECT_EQ(Depth(Join(Text(2), {1}), 3), 0u);
  EXPECT_THAT(rig_.observer.misses, ::testing::ElementsAre(MissReason::kSlowerThanRecompute));
  EXPECT_EQ(rig_.cache->explainer().LastMisses(1, 1)[0].why.reason, MissReason::kSlowerThanRecompute)
      << "and can be explained";
  EXPECT_EQ(Depth(Join(Text(2), {1}), 3, 8 * kSecond), Text(2).size()) << "loaded before it is needed";
  EXPECT_EQ(Depth(Join(Text(3), {1}), 0), Text(3).size()) << "the engine's rate is unknown";
  EXPECT_EQ(Depth(Join(Text(1), {1}), 3), Text(1).size()) << "it is in memory";
}

// Three objects that load together take as long as the slowest, not the sum of their times.
TEST_F(SlowDisk, ObjectsThatLoadTogetherAreNotAddedUp) {
  for (const int32_t text : {1, 2}) Put(Text(text));
  rig_.Restart();
  Open();
  Load(Text(1), 9 * kSecond);
  EXPECT_EQ(Depth(Join(Text(2), {1}), 12), Text(2).size());
}

TEST_F(SlowDisk, ShallowPrefixInMemoryIsUsedInsteadOfADeepOneOnTheDisk) {
  const Tokens deep = Join(Text(2), Text(4));
  for (const Tokens& text : {Text(1), Text(2), deep}) Put(text);
  rig_.Restart();
  Open();
  Load(Text(1), 9 * kSecond);
  Load(Text(2), 9 * kSecond);
  EXPECT_EQ(Depth(Join(deep, {1}), 2), Text(2).size());
  EXPECT_EQ(Depth(Join(deep, {1}), 60), deep.size());
}

TEST_F(SlowDisk, SlowPrefixIsTriedAgainNowAndThen) {
  for (const int32_t text : {1, 2}) Put(Text(text));
  rig_.Restart();
  Open();
  Load(Text(1), 9 * kSecond);
  int used = 0;
  for (int i = 0; i < 16; ++i) used += Depth(Join(Text(2), {1}), 1) > 0 ? 1 : 0;
  EXPECT_EQ(used, 1);
}

}  // namespace
}  // namespace ashlar::storage
