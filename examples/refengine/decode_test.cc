// SPDX-License-Identifier: Apache-2.0
// Decoding from buffers in the engine's own loop, checked against the recurrence.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "examples/refengine/engine_fixture.h"
#include "kernels/decoding_choice.h"

namespace ashlar::refengine {
namespace {

constexpr int64_t kPrompt = 70;
// Accepted errors of states, and of all logits of an answer together: with fp32 buffers, and with fp32 buffers and fp16
// copies. A single layer has errors of 1e-5 and 4e-4 (kernels/testing/errors.h), which later layers amplify.
constexpr double kExact = 2e-5, kRounded = 6e-3;
// For the logits of one token, which may all be small.
constexpr double kTokenRounded = 2e-2;

class DecodeTest : public EngineFixture, public testing::WithParamInterface<Family> {
 protected:
  DecodeTest() : EngineFixture(GetParam() == Family::kGdn ? TinyConfig : TinyLightningConfig) {}

  // An engine with this decoding, compared with the fixture's, which decodes as it prefills.
  std::unique_ptr<Engine> Decoding(const DecodeBuffering& decoding) {
    return std::make_unique<Engine>(model_, kernels_, threads_, EngineOptions{.decoding = decoding});
  }
  static std::vector<float> Step1(Engine& engine, Sequence& sequence, int32_t token) {
    std::vector<float> logits(kVocabulary);
    const Step step = Step::Compute({&token, 1});
    const absl::Status status = engine.Advance(sequence, {&step, 1}, {.last_logits = logits.data()});
    EXPECT_TRUE(status.ok()) << status;
    return logits;
  }
  static void Run1(Engine& engine, Sequence& sequence, std::span<const int32_t> tokens, RecurrentState* snapshot) {
    Step step = Step::Compute(tokens);
    step.snapshot = snapshot;
    const absl::Status status = engine.Advance(sequence, {&step, 1});
    EXPECT_TRUE(status.ok()) << status;
  }
};

std::string NameOf(const DecodeBuffering& way) {
  return std::to_string(way.capacity) + (way.dtype == DType::kF32 ? " fp32" : " fp16") + (way.copies ? " copies" : "");
}

TEST_P(DecodeTest, MatchesTheRecurrence) {
  const std::vector<int32_t> text = Text(kPrompt + 40);
  const std::span<const int32_t> prompt = std::span(text).first(kPrompt), answer = std::span(text).subspan(kPrompt);
  Sequence expected(config(), pool_);
  Prefill(expected, prompt);
  std::vector<float> logits;
  const auto append = [](std::vector<float>& all, const std::vector<float>& more) {
    all.insert(all.end(), more.begin(), more.end());
  };
  for (const int32_t token : answer) append(logits, Step1(*engine_, expected, token));
  for (const DecodeBuffering way :
       {DecodeBuffering{1}, DecodeBuffering{2}, DecodeBuffering{8}, DecodeBuffering{33}, DecodeBuffering{64},
        DecodeBuffering{8, DType::kF16}, DecodeBuffering{8, DType::kF32, true}, DecodeBuffering{2, DType::kF16, true},
        DecodeBuffering{11, DType::kF16, true}}) {
    SCOPED_TRACE(NameOf(way));
    const double bound = way.dtype == DType::kF32 && !way.copies ? kExact : kRounded;
    const std::unique_ptr<Engine> engine = Decoding(way);
    Sequence sequence(config(), pool_);
    Run1(*engine, sequence, prompt, nullptr);
    std::vector<float> decoded;
    for (size_t i = 0; i < answer.size(); ++i) {
      append(decoded, Step1(*engine, sequence, answer[i]));
      EXPECT_EQ(sequence.buffered(), static_cast<int32_t>(i + 1) % way.capacity);
    }
    EXPECT_LE(RelativeError(decoded, logits), bound);
    engine->Settle(sequence);
    EXPECT_EQ(sequence.buffered(), 0);
    ExpectSameState(sequence.recurrent(), expected.recurrent(), bound);
  }
}

// Runs, snapshots and captures find the same states as without buffers.
TEST_P(DecodeTest, OtherWorkSettles) {
  const std::vector<int32_t> text = Text(kPrompt + 60);
  const std::span<const int32_t> all(text);
  for (const DecodeBuffering way : {DecodeBuffering{8}, DecodeBuffering{8, DType::kF16, true}}) {
    SCOPED_TRACE(NameOf(way));
    const double bound = way.copies ? kRounded : kExact;
    const std::unique_ptr<Engine> engine = Decoding(way);
    Sequence sequence(config(), pool_), expected(config(), pool_);
    RecurrentState there, wanted;
    int64_t done = 0;
    const auto advance = [&](int64_t tokens, bool snapshot) {
      Run1(*engine, sequence, all.subspan(done, tokens), snapshot ? &there : nullptr);
      Run1(*engine_, expected, all.subspan(done, tokens), snapshot ? &wanted : nullptr);
      done += tokens;
    };
    advance(kPrompt, false);
    for (int i = 0; i < 5; ++i) advance(1, false);
    EXPECT_EQ(sequence.buffered(), 5);
    advance(7, true);
    EXPECT_EQ(sequence.buffered(), 0);
    ExpectSameState(there, wanted, bound);
    for (int i = 0; i < 11; ++i) advance(1, false);
    EXPECT_EQ(sequence.buffered(), 3);
    advance(1, true);  // a token with a snapshot does not count as decoding
    EXPECT_EQ(sequence.buffered(), 0);
    ExpectSameState(there, wanted, bound);
    advance(1, false);
    const int32_t next = all[done];
    EXPECT_LE(RelativeError(Step1(*engine, sequence, next), Step1(*engine_, expected, next)),
              way.copies ? kTokenRounded : kExact);
  }
}

// Waiting tokens belong to the text before the rewind.
TEST_P(DecodeTest, GoingBackErasesBufferedTokens) {
  const std::vector<int32_t> text = Text(kPrompt + 20);
  const std::span<const int32_t> all(text);
  const std::unique_ptr<Engine> engine = Decoding({8, DType::kF16, true});
  Sequence sequence(config(), pool_), expected(config(), pool_);
  RecurrentState there;
  Run1(*engine, sequence, all.first(kPrompt), &there);
  for (int i = 0; i < 3; ++i) Step1(*engine, sequence, all[kPrompt + 10 + i]);
  sequence.Rewind(kPrompt, there);
  EXPECT_EQ(sequence.buffered(), 0);
  Run1(*engine_, expected, all.first(kPrompt), nullptr);
  for (int i = 0; i < 10; ++i) {
    const int32_t token = all[kPrompt + i];
    EXPECT_LE(RelativeError(Step1(*engine, sequence, token), Step1(*engine_, expected, token)), kTokenRounded);
  }
  sequence.Clear();
  EXPECT_EQ(sequence.buffered(), 0);
  const std::vector<float> alone = Step1(*engine, sequence, all[0]);
  expected.Clear();
  EXPECT_LE(RelativeError(alone, Step1(*engine_, expected, all[0])), kTokenRounded);
}

// An abandoned pass leaves a sequence that can be rewound.
TEST_P(DecodeTest, DropsACancelledToken) {
  const std::vector<int32_t> text = Text(kPrompt + 8);
  const std::unique_ptr<Engine> engine = Decoding({8});
  Sequence sequence(config(), pool_);
  RecurrentState there;
  Run1(*engine, sequence, std::span(text).first(kPrompt), &there);
  Step1(*engine, sequence, text[kPrompt]);
  const Step step = Step::Compute({&text[kPrompt + 1], 1});
  EXPECT_EQ(engine->Advance(sequence, {&step, 1}, {.on_layer = [](int32_t layer) { return layer < 2; }}).code(),
            absl::StatusCode::kCancelled);
  sequence.Rewind(kPrompt, there);
  Sequence expected(config(), pool_);
  Run1(*engine_, expected, std::span(text).first(kPrompt), nullptr);
  for (int i = 0; i < 8; ++i) {
    const int32_t token = text[static_cast<size_t>(kPrompt + i)];
    EXPECT_LE(RelativeError(Step1(*engine, sequence, token), Step1(*engine_, expected, token)), kExact);
  }
}

TEST_P(DecodeTest, StaleStatesAreNotRead) {
  const std::unique_ptr<Engine> engine = Decoding({8});
  Sequence sequence(config(), pool_);
  Step1(*engine, sequence, 'a');
  EXPECT_DEATH((void)sequence.recurrent(), "not settled: 1 tokens wait");
}

TEST_P(DecodeTest, IsMeasured) {
  for (const bool may_round : {false, true}) {
    const DecodeBuffering way = MeasuredBuffering(model_, kernels_, threads_, 2, may_round);
    EXPECT_GE(way.capacity, 0);
    EXPECT_LE(way.capacity, kernels::kMostCapacity);
    EXPECT_FALSE(way.copies && !may_round);
    const std::unique_ptr<Engine> engine = Decoding(way);
    Sequence sequence(config(), pool_), expected(config(), pool_);
    for (const int32_t token : Text(20)) {
      EXPECT_LE(RelativeError(Step1(*engine, sequence, token), Step1(*engine_, expected, token)), kTokenRounded);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, DecodeTest, testing::Values(Family::kGdn, Family::kLightning),
                         [](const auto& instance) { return instance.param == Family::kGdn ? "gdn" : "lightning"; });

}  // namespace
}  // namespace ashlar::refengine
