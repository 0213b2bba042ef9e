// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/engine.h"

#include <gmock/gmock.h>

#include "examples/refengine/engine_fixture.h"
#include "examples/refengine/plain_forward.h"

namespace ashlar::refengine {
namespace {

using ::testing::HasSubstr;

class EngineTest : public EngineFixture {};

TEST_F(EngineTest, AgreesWithThePlainModel) {
  ExpectAgreesWithThePlainModel();
}

TEST_F(EngineTest, AgreesWithThePlainModelWhenUntiedAndUnrotated) {
  ModelConfig config = TinyConfig(seed_);
  config.tied_head = false;
  config.attention.rotary_dim = 0;
  const Model model(config);
  Engine engine(model, kernels_, threads_);
  std::vector<std::byte> memory(KvPages::RequiredBytes(config, 8, 8));
  KvPages pool(config, 8, 8, memory);
  Sequence sequence(config, pool);
  const std::vector<int32_t> text = Text(50);
  std::vector<float> logits(kVocabulary);
  AdvanceOptions options;
  options.last_logits = logits.data();
  const Step step = Step::Compute(text);
  ASSERT_TRUE(engine.Advance(sequence, {&step, 1}, options).ok());
  EXPECT_LE(RelativeError(logits, PlainForward(model, text).logits.back()), 1e-4);
}

TEST_F(EngineTest, LogitsHaveUnitScaleAndTheStreamStaysBounded) {
  Sequence sequence(config(), pool_);
  const std::vector<float> logits = Prefill(sequence, Text(300));
  double square = 0;
  for (const float logit : logits) square += double{logit} * logit;
  const double rms = std::sqrt(square / logits.size());
  EXPECT_GT(rms, 0.5);
  EXPECT_LT(rms, 20);
}

// Different batches round differently, and layers amplify that: these are equal to fp32 accuracy, not bit by bit.
constexpr double kRounding = 1e-4;

TEST_F(EngineTest, PassesAndRunsMayBeCutAnywhere) {
  const std::vector<int32_t> text = Text(150);
  Sequence whole(config(), pool_);
  const std::vector<float> expected = Prefill(whole, text);
  for (const int64_t pass_tokens : {1, 2, 7, 64}) {
    SCOPED_TRACE(pass_tokens);
    engine_ = std::make_unique<Engine>(model_, kernels_, threads_, EngineOptions{.pass_tokens = pass_tokens});
    Sequence sequence(config(), pool_);
    std::vector<Step> chain;
    for (size_t begin = 0; begin < text.size();) {
      const size_t count = std::min<size_t>(text.size() - begin, 1 + random_() % 40);
      chain.push_back(Step::Compute({text.data() + begin, count}));
      begin += count;
    }
    EXPECT_LE(RelativeError(Run(sequence, chain), expected), kRounding);
    ExpectSameState(sequence.recurrent(), whole.recurrent(), kRounding);
  }
}

TEST_F(EngineTest, DecodingIsPrefillingOneMoreToken) {
  const std::vector<int32_t> text = Text(70);
  Sequence whole(config(), pool_), decoded(config(), pool_);
  const std::vector<float> expected = Prefill(whole, text);
  Prefill(decoded, {text.data(), 60});
  std::vector<float> logits;
  for (size_t token = 60; token < 70; ++token) logits = Prefill(decoded, {text.data() + token, 1});
  EXPECT_LE(RelativeError(logits, expected), kRounding);
  ExpectSameState(decoded.recurrent(), whole.recurrent(), kRounding);
  EXPECT_EQ(decoded.length(), 70);
}

TEST_F(EngineTest, SnapshotsAreTheStatesAfterTheirStep) {
  const std::vector<int32_t> text = Text(80);
  RecurrentState after_first, after_second;
  const std::span<const int32_t> tokens(text);
  Step first = Step::Compute(tokens.first(30)), second = Step::Compute(tokens.subspan(30, 2));
  first.snapshot = &after_first;
  second.snapshot = &after_second;
  const Step chain[] = {first, second, Step::Compute(tokens.subspan(32))};
  Sequence sequence(config(), pool_), until_first(config(), pool_), until_second(config(), pool_);
  const std::vector<float> logits = Run(sequence, chain);
  Prefill(until_first, tokens.first(30));
  Prefill(until_second, tokens.first(32));
  ExpectSameState(after_first, until_first.recurrent(), kRounding);
  ExpectSameState(after_second, until_second.recurrent(), kRounding);

  sequence.Rewind(32, after_second);
  EXPECT_LE(RelativeError(Prefill(sequence, tokens.subspan(32)), logits), kRounding);
}

TEST_F(EngineTest, TwoSequencesShareOnePool) {
  const std::vector<int32_t> text = Text(60), other = Text(60);
  Sequence alone(config(), pool_);
  const std::vector<float> expected = Prefill(alone, text);
  Sequence first(config(), pool_), second(config(), pool_);
  for (size_t token = 0; token < text.size(); token += 20) {
    Prefill(second, {other.data() + token, 20});
    const std::vector<float> logits = Prefill(first, {text.data() + token, 20});
    if (token == 40) {
      EXPECT_LE(RelativeError(logits, expected), kRounding);
    }
  }
}

TEST_F(EngineTest, ClearedSequencesReturnTheirPages) {
  {
    Sequence sequence(config(), pool_);
    Prefill(sequence, Text(100));
    EXPECT_EQ(pool_.free_pages(), kPages - 7);
    sequence.Clear();
    EXPECT_EQ(pool_.free_pages(), kPages);
    EXPECT_EQ(sequence.length(), 0);
    Prefill(sequence, Text(10));
  }
  EXPECT_EQ(pool_.free_pages(), kPages);
}

TEST_F(EngineTest, OnLayerSeesEachLayerInOrderAndMayStop) {
  const std::vector<int32_t> text = Text(20);
  const Step step = Step::Compute(text);
  Sequence sequence(config(), pool_);
  std::vector<int32_t> layers;
  AdvanceOptions options;
  options.on_layer = [&](int32_t layer) {
    layers.push_back(layer);
    return layer < 3;
  };
  EXPECT_EQ(engine_->Advance(sequence, {&step, 1}, options).code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(layers, testing::ElementsAre(0, 1, 2, 3));
  sequence.Clear();
  Sequence fresh(config(), pool_);
  EXPECT_EQ(Prefill(sequence, text), Prefill(fresh, text));
}

TEST_F(EngineTest, RefusesInvalidChainsByNameWithoutChanges) {
  Sequence sequence(config(), pool_);
  const auto error = [&](std::span<const Step> chain, const AdvanceOptions& options = {}) {
    const absl::Status status = engine_->Advance(sequence, chain, options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(sequence.length(), 0);
    EXPECT_EQ(pool_.free_pages(), kPages);
    return std::string(status.message());
  };
  const std::vector<int32_t> text = Text(10), unknown = {1, 2, kVocabulary};
  const std::vector<CachedLayer> empty(config().layers()), short_of_one(config().layers() - 1);
  const Step good = Step::Compute(text);
  EXPECT_THAT(error({}), HasSubstr("chain: empty"));
  EXPECT_THAT(error(std::vector{good, Step::Compute({})}), HasSubstr("chain[1]: neither"));
  EXPECT_THAT(error(std::vector{Step::Compute(unknown)}), HasSubstr("chain[0].tokens[2]"));
  EXPECT_THAT(error(std::vector{Step::Cached(5, short_of_one)}), HasSubstr("chain[0].cached: "));
  EXPECT_THAT(error(std::vector{Step::Cached(0, empty)}), HasSubstr("chain[0].cached_tokens"));
  EXPECT_THAT(error(std::vector{Step::Cached(5, empty)}), HasSubstr("chain[0].cached[0]: incomplete"));
  EXPECT_THAT(error(std::vector{good, Step::Cached(5, empty)}), HasSubstr("chain[1].cached[0]: incomplete"));
  EXPECT_THAT(error(std::vector{good, Step::Checkpoint(5, empty)}), HasSubstr("chain[1].checkpoint"));

  const std::vector<TupleBuffers> none(config().linear_layers());
  const auto capture = [&](int64_t begin, int64_t end, std::span<const TupleBuffers> linear) {
    const CaptureRange range{begin, end, linear};
    AdvanceOptions options;
    options.captures = {&range, 1};
    return error({&good, 1}, options);
  };
  EXPECT_THAT(capture(3, 3, none), HasSubstr("captures[0]: empty"));
  EXPECT_THAT(capture(3, 11, none), HasSubstr("captures[0]: positions 3 to 11"));
  EXPECT_THAT(capture(3, 5, {}), HasSubstr("captures[0].linear"));
  EXPECT_THAT(capture(3, 5, none), HasSubstr("captures[0].linear: null buffer"));
}

TEST_F(EngineTest, RunsOutOfPagesBeforeItComputes) {
  Sequence sequence(config(), pool_);
  const std::vector<int32_t> text = Text(kPages * kPageTokens + 1);
  const Step step = Step::Compute(text);
  EXPECT_EQ(engine_->Advance(sequence, {&step, 1}).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(sequence.length(), 0);
  EXPECT_EQ(pool_.free_pages(), kPages);
}

TEST(GreedyTokenTest, TakesTheGreatestLogitAndTheLowestIdOnTies) {
  EXPECT_EQ(GreedyToken(std::vector<float>{1, 5, 2, 5}), 1);
}

}  // namespace
}  // namespace ashlar::refengine
