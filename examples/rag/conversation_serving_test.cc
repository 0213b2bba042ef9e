// SPDX-License-Identifier: Apache-2.0
// Conversations through a real daemon: what is resumed, from which position, and that the bits are equal.
#include "examples/rag/conversation_serving.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "examples/rag/fidelity.h"
#include "examples/rag/local_pages.h"
#include "examples/rag/replay.h"
#include "examples/testing/local_daemon.h"
#include "kernels/host/thread_pool.h"

namespace ashlar::rag {
namespace {

constexpr int32_t kPages = 256;
constexpr uint32_t kPass = 64;
constexpr int64_t kDecoded = 3;
constexpr refengine::SeamWidths kSeams{8, 8};

std::vector<int32_t> Text(int32_t seed, size_t count) {
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>((i * 31 + seed * 17 + i * i % 89) % 251));
  return tokens;
}

class Conversations : public testing::Test {
 protected:
  void SetUp() override {
    auto daemon = tools::LocalDaemon::Start({.dram_bytes = 256u << 20, .threads = 1});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    auto serving = Open({.capture_tokens = kPass});
    ASSERT_TRUE(serving.ok()) << serving.status();
    serving_ = *std::move(serving);
  }

  Runtime runtime() { return {model_, engine_, kernels_, *queue_, pool_}; }
  absl::StatusOr<std::unique_ptr<ConversationServing>> Open(const PrefixUse& prefixes) {
    return ConversationServing::Open(runtime(), {.rpc_socket = daemon_->sockets().rpc_socket,
                                                 .session_socket = daemon_->sockets().session_socket,
                                                 .timeout = std::chrono::seconds(10),
                                                 .seams = kSeams,
                                                 .pages = kPages,
                                                 .prefixes = prefixes});
  }

  Turn Say(Conversation& conversation, std::span<const int32_t> message) {
    std::vector<int32_t>& text = conversation.text.tokens;
    text.insert(text.end(), message.begin(), message.end());
    const auto prompt = text.size();
    Turn turn = serving_->Serve(conversation, kDecoded).value();
    EXPECT_EQ(text.size(), prompt + kDecoded);
    EXPECT_EQ(turn.outcomes.size(), turn.offered.size());
    return turn;
  }

  // The turn's text computed from its first token, with the same cuts as originally.
  void ExpectBitsOfNoCache(const Conversation& conversation, const Turn& turn, Cuts& cuts) {
    cuts.Resume(turn.set->resumed);
    cuts.Add(turn.runs);
    const auto prompt = std::span(conversation.text.tokens).first(turn.prompt_tokens);
    const auto expected = Replay(runtime(), own_.pool(), prompt, cuts);
    ASSERT_TRUE(expected.ok()) << expected.status();
    EXPECT_EQ(turn.served.logits, *expected);
    for (int64_t i = 1; i <= kDecoded; ++i) cuts.Add({static_cast<int64_t>(turn.prompt_tokens) + i});
  }

  // Instructions, two sections, a question.
  Conversation Retrieved(int32_t question) {
    RagPrompt text;
    for (const auto& [seed, count] : {std::pair<int32_t, size_t>{1, 50}, {2, 300}, {3, 280}}) {
      const std::vector<int32_t> part = Text(seed, count);
      text.tokens.insert(text.tokens.end(), part.begin(), part.end());
      text.segment_lengths.push_back(count);
    }
    const std::vector<int32_t> asked = Text(question, 12);
    text.tokens.insert(text.tokens.end(), asked.begin(), asked.end());
    return Conversation(std::move(text));
  }

  const refengine::Model model_{refengine::TinyConfig(/*seed=*/3, /*blocks=*/2)};
  kernels::ThreadPool pool_{2};
  const kernels::Kernels& kernels_ = kernels::Host();
  const std::unique_ptr<kernels::Queue> queue_ = kernels_.MakeQueue(&pool_);
  refengine::Engine engine_{model_, kernels_, pool_, {.pass_tokens = kPass}};
  LocalPages own_{model_.config(), kPages};
  std::unique_ptr<tools::LocalDaemon> daemon_;
  std::unique_ptr<ConversationServing> serving_;
};

TEST_F(Conversations, ResumesTurnsAtTheEndOfTheText) {
  Conversation conversation;
  Cuts cuts;
  uint64_t left = 0;
  for (int32_t turn = 0; turn < 4; ++turn) {
    SCOPED_TRACE(turn);
    const Turn taken = Say(conversation, Text(turn, 200));
    EXPECT_EQ(taken.set->resumed, left);
    EXPECT_EQ(taken.provenance, Provenance::kExact);
    EXPECT_EQ(taken.served.computed_tokens, taken.prompt_tokens - left);
    EXPECT_EQ(taken.outcomes.back(), CommitOutcome::kKept);
    ExpectBitsOfNoCache(conversation, taken, cuts);
    left = conversation.text.tokens.size();
  }
}

TEST_F(Conversations, ConversationsBranchOffSharedInstructions) {
  const std::vector<int32_t> instructions = Text(7, 400);
  constexpr uint64_t kBranch = 400 / kPass * kPass;
  for (int32_t i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    Conversation conversation(RagPrompt{.tokens = instructions});
    const Turn turn = Say(conversation, Text(10 + i, 100));
    Cuts cuts;
    // The first one knows no other; the second one finds where they diverge.
    if (i == 1) {
      EXPECT_THAT(turn.offered, testing::Contains(kBranch));
    }
    if (i >= 2) {
      EXPECT_EQ(turn.set->resumed, kBranch);
    }
    EXPECT_FALSE(turn.own);
    ExpectBitsOfNoCache(conversation, turn, cuts);
  }
}

TEST_F(Conversations, StatesAfterSectionsBelongToTheConversation) {
  Conversation conversation = Retrieved(/*question=*/20), other = Retrieved(20);
  const Turn first = Say(conversation, {});
  EXPECT_EQ(first.provenance, Provenance::kComposed);
  EXPECT_EQ(first.outcomes.back(), CommitOutcome::kKept);
  const std::unique_ptr<refengine::Sequence> stayed = std::move(first.set->sequence);
  for (int32_t turn = 1; turn < 3; ++turn) {
    SCOPED_TRACE(turn);
    const uint64_t left = conversation.text.tokens.size();
    const Turn next = Say(conversation, Text(30 + turn, 90));
    EXPECT_EQ(next.set->resumed, left);
    EXPECT_TRUE(next.own);
    EXPECT_EQ(next.provenance, Provenance::kComposed);
    const auto expected =
        RunOn(runtime(), *stayed, std::span(conversation.text.tokens).first(next.prompt_tokens), next.runs);
    ASSERT_TRUE(expected.ok()) << expected.status();
    EXPECT_EQ(next.served.logits, *expected);
    for (int64_t i = 1; i <= kDecoded; ++i) {
      const std::vector<int64_t> one = {static_cast<int64_t>(next.prompt_tokens) + i};
      ASSERT_TRUE(RunOn(runtime(), *stayed, conversation.text.tokens, one).ok());
    }
  }
  // Another conversation with the same text finds only the sections.
  const Turn same = Say(other, {});
  EXPECT_FALSE(same.own);
  EXPECT_EQ(same.served.hits, 3u);
  EXPECT_EQ(same.served.logits, first.served.logits);
  // An exact text with the same beginning does not resume from states after sections.
  Conversation exact(RagPrompt{.tokens = conversation.text.tokens});
  EXPECT_EQ(Say(exact, Text(40, 10)).provenance, Provenance::kExact);
}

class RegeneratedAnswers : public Conversations, public testing::WithParamInterface<DType> {
 protected:
  static constexpr int64_t kAnswer = 20;
  static constexpr uint32_t kSpan = kAnswer + 1;
  // For states rebuilt from exactly computed ones.
  double bound() const { return GetParam() == DType::kF32 ? 1e-5 : 3e-4; }

  void SetUp() override {
    Conversations::SetUp();
    serving_.reset();
    auto serving = Open({.capture_tokens = kPass, .span_tokens = kSpan, .span_dtype = GetParam()});
    ASSERT_TRUE(serving.ok()) << serving.status();
    serving_ = *std::move(serving);
  }
  // Serves the current end of the conversation, and compares rebuilt states with a sequence that computed all of it.
  Turn Answer(Conversation& conversation) {
    Turn turn = serving_->Serve(conversation, kAnswer).value();
    if (turn.set->plan().prefix_span_tokens == 0 || turn.provenance != Provenance::kExact) return turn;
    refengine::Sequence full(model_.config(), own_.pool());
    // States computed after rebuilt states have an error of that size, and were captured with it.
    const double before = bound() * rebuilt_++;
    const auto step = refengine::Step::Compute(std::span(conversation.text.tokens).first(turn.set->resumed));
    EXPECT_TRUE(engine_.Advance(full, {&step, 1}).ok());
    for (int32_t layer = 0; layer < model_.config().linear_layers(); ++layer) {
      const refengine::RecurrentState& rebuilt = *turn.set->prefix_state;
      EXPECT_LE(RelativeL2(rebuilt.State(layer), full.recurrent().State(layer)), before + bound());
      EXPECT_LE(RelativeL2(rebuilt.ConvWindow(layer), full.recurrent().ConvWindow(layer)), before + 1e-5);
    }
    return turn;
  }

 private:
  int rebuilt_ = 0;  // rebuilt states, each after the one before
};

INSTANTIATE_TEST_SUITE_P(Types, RegeneratedAnswers, testing::Values(DType::kF32, DType::kF16),
                         [](const auto& test) { return test.param == DType::kF32 ? "f32" : "f16"; });

TEST_P(RegeneratedAnswers, AreResumedInsideAndAtTheirBeginning) {
  Conversation conversation(RagPrompt{.tokens = Text(1, 200)});
  const Turn first = Answer(conversation);
  EXPECT_EQ(first.span_tokens, kSpan);
  EXPECT_THAT(first.offered, testing::ElementsAre(199u, 220u));
  EXPECT_THAT(first.outcomes, testing::ElementsAre(CommitOutcome::kKept, CommitOutcome::kKeptAsSpan));
  // The next message comes after half of the answer.
  conversation.text.tokens.resize(211);
  const std::vector<int32_t> message = Text(2, 60);
  conversation.text.tokens.insert(conversation.text.tokens.end(), message.begin(), message.end());
  const Turn second = Answer(conversation);
  EXPECT_EQ(second.set->resumed, 211u);
  EXPECT_EQ(second.set->plan().prefix_span_tokens, 12u);
  EXPECT_EQ(second.served.computed_tokens, 60u);
  EXPECT_EQ(second.outcomes.back(), CommitOutcome::kKeptAsSpan);
  // That turn is answered again: from the states before its last token.
  conversation.text.tokens.resize(271);
  const Turn again = Answer(conversation);
  EXPECT_EQ(again.set->resumed, 270u);
  EXPECT_EQ(again.served.computed_tokens, 1u);
  EXPECT_LE(RelativeL2(again.served.logits, second.served.logits), bound());
  // The conversation continues after all of it.
  const uint64_t left = conversation.text.tokens.size();
  conversation.text.tokens.insert(conversation.text.tokens.end(), message.begin(), message.end());
  EXPECT_EQ(Answer(conversation).set->resumed, left);
}

TEST_P(RegeneratedAnswers, OfComposedTurnsBelongToTheConversation) {
  Conversation conversation = Retrieved(20), other = Retrieved(20);
  const Turn first = Answer(conversation);
  ASSERT_EQ(first.provenance, Provenance::kComposed);
  EXPECT_EQ(first.outcomes.back(), CommitOutcome::kKeptAsSpan);
  const uint64_t prompt = first.prompt_tokens;
  conversation.text.tokens.resize(prompt + 9);
  conversation.text.tokens.push_back(7);
  const Turn second = Answer(conversation);
  EXPECT_TRUE(second.own);
  EXPECT_EQ(second.set->resumed, prompt + 9);
  EXPECT_EQ(second.set->plan().prefix_span_tokens, 10u);
  const Turn same = Answer(other);
  EXPECT_FALSE(same.own);
}

TEST_F(Conversations, WithoutADaemonTurnsAreComputed) {
  Conversation conversation;
  Cuts cuts;
  ExpectBitsOfNoCache(conversation, Say(conversation, Text(1, 300)), cuts);
  ASSERT_EQ(kill(daemon_->pid(), SIGKILL), 0);
  const Turn turn = Say(conversation, Text(2, 100));
  EXPECT_EQ(turn.set->resumed, 0u);
  EXPECT_THAT(turn.outcomes, testing::Each(CommitOutcome::kUnavailable));
  ExpectBitsOfNoCache(conversation, turn, cuts);
}

TEST_F(Conversations, RefusesWhatItCannotServeFrom) {
  const auto unused = Open({});
  EXPECT_EQ(unused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(unused.status().message(), testing::HasSubstr("options.prefixes"));
}

TEST(Conversation, IdsAreDrawn) {
  EXPECT_NE(Conversation().id, Conversation().id);
  EXPECT_NE(Conversation().id, ConversationId{});
}

}  // namespace
}  // namespace ashlar::rag
