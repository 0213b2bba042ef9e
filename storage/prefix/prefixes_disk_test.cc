// SPDX-License-Identifier: Apache-2.0
// Exact prefixes and the disk: how much a conversation writes, and what a restart finds of it.
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
  rig_.cache->StartDrain();
  rig_.Settle();
  rig_.Restart();
  Open();
  EXPECT_EQ(Ask(Join(text_, {1})).prefix.depth, text_.size());
}

}  // namespace
}  // namespace ashlar::storage
