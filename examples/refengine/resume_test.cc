// SPDX-License-Identifier: Apache-2.0
// Texts that resume from kept states: which bits are equal, and the error of rounding where they are not.
#include <cmath>
#include <optional>

#include "examples/refengine/engine_fixture.h"
#include "examples/refengine/held_checkpoint.h"
#include "examples/refengine/stored_segment.h"

namespace ashlar::refengine {
namespace {

constexpr int64_t kPass = 64;

// The cached form of a text's first `depth` tokens.
struct Held {
  StoredSegment rows;
  HeldCheckpoint checkpoint;
};

class Resume : public EngineFixture, public testing::WithParamInterface<ModelConfig (*)(uint64_t, int32_t)> {
 protected:
  Resume() : EngineFixture(GetParam()) {
    engine_ = std::make_unique<Engine>(model_, kernels_, threads_, EngineOptions{.pass_tokens = kPass});
  }

  Held Hold(const Sequence& sequence, int64_t depth, const RecurrentState& state) {
    Held held{StoredSegment(config(), depth, {}), HeldCheckpoint(config(), state)};
    held.rows.GatherRows(model_, sequence, 0, kernels_, *queue_);
    return held;
  }

  // Logits after `tokens`, resumed after the held tokens; `sequence` is empty.
  std::vector<float> Run(Sequence& sequence, const Held& held, std::span<const int32_t> tokens) {
    EXPECT_TRUE(sequence.Reserve(static_cast<int64_t>(tokens.size())));
    held.rows.LandRows(model_, sequence, 0, kernels_, *queue_);
    const Step chain[] = {Step::Checkpoint(held.rows.tokens(), held.checkpoint.layers()),
                          Step::Compute(tokens.subspan(held.rows.tokens()))};
    return EngineFixture::Run(sequence, chain);
  }

  // One run, with the states after `depths`.
  std::vector<float> Run(Sequence& sequence, std::span<const int32_t> tokens, std::span<const int64_t> depths,
                         std::vector<Snapshot>& snapshots) {
    std::vector<Step> chain = {Step::Compute(tokens)};
    snapshots = SnapshotAt(sequence.length(), depths, chain);
    return EngineFixture::Run(sequence, chain);
  }

  void ExpectSameBits(const RecurrentState& actual, const RecurrentState& expected) {
    for (int32_t layer = 0; layer < config().linear_layers(); ++layer) {
      EXPECT_TRUE(std::ranges::equal(actual.State(layer), expected.State(layer))) << "state of linear layer " << layer;
      EXPECT_TRUE(std::ranges::equal(actual.ConvWindow(layer), expected.ConvWindow(layer))) << "window of " << layer;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Families, Resume, testing::Values(&TinyConfig, &TinyLightningConfig),
                         [](const auto& test) { return test.param == &TinyConfig ? "gdn" : "lightning"; });

TEST_P(Resume, ResumedTurnsHaveTheBitsOfAnUninterruptedOne) {
  Sequence stayed(config(), pool_);
  std::vector<int32_t> text;
  std::optional<Held> held;
  for (int turn = 0; turn < 4; ++turn) {
    const std::vector<int32_t> message = Text(1 + static_cast<int64_t>(random_() % 150));
    text.insert(text.end(), message.begin(), message.end());
    Sequence back(config(), pool_);
    std::vector<float> expected = Prefill(stayed, message);
    std::vector<float> logits = held ? Run(back, *held, text) : Prefill(back, text);
    for (int decoded = 0; decoded < 5; ++decoded) {
      ASSERT_EQ(logits, expected) << "turn " << turn << ", " << decoded << " decoded tokens";
      text.push_back(GreedyToken(logits));
      expected = Prefill(stayed, {&text.back(), 1});
      logits = Prefill(back, {&text.back(), 1});
    }
    ExpectSameBits(back.recurrent(), stayed.recurrent());
    held = Hold(back, back.length(), back.recurrent());
  }
}

TEST_P(Resume, AfterWholePassesItHasTheBitsOfOneRun) {
  const std::vector<int32_t> text = Text(300);
  const std::vector<int64_t> depths = {64, 128, 192, 256};
  Sequence whole(config(), pool_), without(config(), pool_);
  std::vector<Snapshot> snapshots;
  const std::vector<float> expected = Run(whole, text, depths, snapshots);
  EXPECT_EQ(Prefill(without, text), expected) << "without snapshots";
  ASSERT_EQ(snapshots.size(), depths.size());
  for (const Snapshot& snapshot : snapshots) {
    SCOPED_TRACE(snapshot.depth);
    Sequence resumed(config(), pool_);
    EXPECT_EQ(Run(resumed, Hold(whole, snapshot.depth, snapshot.state), text), expected);
    ExpectSameBits(resumed.recurrent(), whole.recurrent());
  }
}

TEST_P(Resume, SnapshotsAtMultiplesOfTheRecurrencesTokensChangeNoBit) {
  engine_ = std::make_unique<Engine>(model_, kernels_, threads_);  // one pass
  const std::vector<int32_t> text = Text(400);
  const int64_t start = 1 + static_cast<int64_t>(random_() % 100);  // wherever the run begins
  const std::span<const int32_t> tokens(text);
  Sequence cut(config(), pool_), uncut(config(), pool_);
  Prefill(cut, tokens.first(start));
  Prefill(uncut, tokens.first(start));
  std::vector<int64_t> depths;
  for (int64_t depth = start; depth < 400; depth += kRecurrenceTokens * static_cast<int64_t>(1 + random_() % 4)) {
    depths.push_back(depth);
  }
  std::vector<Snapshot> snapshots;
  EXPECT_EQ(Run(cut, tokens.subspan(start), depths, snapshots), Prefill(uncut, tokens.subspan(start)));
  EXPECT_EQ(snapshots.size() + 1, depths.size()) << "the run begins behind the first";
  ExpectSameBits(cut.recurrent(), uncut.recurrent());
}

TEST_P(Resume, SnapshotsAreTakenOnlyOfReachedStates) {
  const std::vector<int32_t> text = Text(60);
  const std::span<const int32_t> tokens(text);
  Sequence sequence(config(), pool_);
  Prefill(sequence, tokens.first(20));
  const Held held = Hold(sequence, 20, sequence.recurrent());
  // Cached to 20; computed to 30, and to 60.
  std::vector<Step> chain = {Step::Checkpoint(20, held.checkpoint.layers()), Step::Compute(tokens.subspan(20, 10)),
                             Step::Compute(tokens.subspan(30))};
  const int64_t depths[] = {0, 7, 20, 25, 26, 30, 60, 61};
  const std::vector<Snapshot> snapshots = SnapshotAt(0, depths, chain);
  std::vector<int64_t> taken, ends;
  for (const Snapshot& snapshot : snapshots) taken.push_back(snapshot.depth);
  for (const Step& step : chain) ends.push_back(step.count() + (ends.empty() ? 0 : ends.back()));
  EXPECT_EQ(taken, (std::vector<int64_t>{20, 25, 26, 30, 60}));
  EXPECT_EQ(ends, (std::vector<int64_t>{20, 25, 26, 30, 60}));
  Sequence resumed(config(), pool_);
  ASSERT_TRUE(resumed.Reserve(60));
  held.rows.LandRows(model_, resumed, 0, kernels_, *queue_);
  EngineFixture::Run(resumed, chain);
  ExpectSameBits(snapshots.front().state, sequence.recurrent());
  ExpectSameBits(snapshots.back().state, resumed.recurrent());
}

// Matrix products choose their kernels by the number of rows, and the recurrence works in blocks of tokens: a text that
// is cut differently rounds differently. Uses the demo's model, whose weights are always the same.
TEST(ResumeOfTheDemosModel, OtherCutsDifferOnlyByRounding) {
  const Model model(DemoConfig());
  const ModelConfig& config = model.config();
  const kernels::Kernels& kernels = kernels::Host();
  kernels::ThreadPool threads(2);
  const auto queue = kernels.MakeQueue(&threads);
  std::vector<std::byte> memory(KvPages::RequiredBytes(config, 16, 160));
  KvPages pool(config, 16, 160, memory);
  std::vector<int32_t> text(800);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>((i * 31 + i * i % 97) % 251);
  const std::span<const int32_t> tokens(text);
  const auto advance = [&](Engine& engine, Sequence& sequence, std::span<const int32_t> run) {
    std::vector<float> logits(kVocabulary);
    const Step step = Step::Compute(run);
    EXPECT_TRUE(engine.Advance(sequence, {&step, 1}, {.last_logits = logits.data()}).ok());
    return logits;
  };
  Engine whole(model, kernels, threads), passes(model, kernels, threads, {.pass_tokens = 128});
  Sequence sequence(config, pool);
  const std::vector<float> expected = advance(whole, sequence, text);
  for (const size_t depth : {128, 333, 700, 799}) {
    SCOPED_TRACE(depth);
    Sequence left(config, pool), resumed(config, pool);
    advance(passes, left, tokens.first(depth));
    StoredSegment rows(config, static_cast<int64_t>(depth), {});
    rows.GatherRows(model, left, 0, kernels, *queue);
    const HeldCheckpoint checkpoint(config, left.recurrent());
    ASSERT_TRUE(resumed.Reserve(800));
    rows.LandRows(model, resumed, 0, kernels, *queue);
    std::vector<float> logits(kVocabulary);
    const Step chain[] = {Step::Checkpoint(rows.tokens(), checkpoint.layers()), Step::Compute(tokens.subspan(depth))};
    ASSERT_TRUE(passes.Advance(resumed, chain, {.last_logits = logits.data()}).ok());
    EXPECT_LE(RelativeError(logits, expected), 1e-5);
  }
}

// The inputs on a tape give the state after each of their tokens by the recurrence alone, however the text was cut.
TEST_P(Resume, RecordedInputsRebuildTheStates) {
  constexpr int64_t kBegin = 70, kTokens = 40;
  const LinearConfig& linear = config().linear;
  const std::vector<int32_t> text = Text(kBegin + kTokens + 20);
  std::vector<std::vector<float>> memory;
  std::vector<SpanRows> rows(config().linear_layers());
  const auto floats = [&](int32_t of_token) { return memory.emplace_back(kTokens * of_token).data(); };
  for (SpanRows& layer : rows) {
    layer = {floats(linear.key_channels()), floats(linear.value_channels()), floats(linear.value_heads),
             floats(linear.value_heads), floats(linear.conv_channels())};
  }
  const SpanTape tape{.begin = kBegin, .tokens = kTokens, .linear = rows};
  const std::vector<int64_t> depths = {kBegin, kBegin + 1, kBegin + 33, kBegin + kTokens};
  std::vector<Step> chain = {Step::Compute(text)};
  const std::vector<Snapshot> snapshots = SnapshotAt(0, depths, chain);
  Sequence sequence(config(), pool_);
  ASSERT_TRUE(engine_->Advance(sequence, chain, {.tape = &tape}).ok());
  for (size_t i = 1; i < depths.size(); ++i) {
    RecurrentState rebuilt = snapshots[0].state;
    for (int32_t layer = 0; layer < config().layers(); ++layer) {
      if (config().is_attention(layer)) continue;
      const int32_t index = config().kind_index(layer);
      std::vector<void*> heads;
      for (int32_t head = 0; head < linear.value_heads; ++head) {
        heads.push_back(rebuilt.State(index).data() + head * linear.state_floats());
      }
      const bool gated = linear.gate_channels() > 0;
      const kernels::SeamStep run{.begin = 0, .end = depths[i] - kBegin};
      kernels_
          .AdvanceSeam({.shape = model_.linear_shape(layer),
                        .steps = {&run, 1},
                        .inputs = {.tokens = run.end,
                                   .k = rows[index].keys,
                                   .v = rows[index].values,
                                   .g = gated ? rows[index].gates : nullptr,
                                   .beta = gated ? rows[index].betas : nullptr,
                                   .k_stride = linear.key_channels(),
                                   .v_stride = linear.value_channels(),
                                   .g_stride = linear.value_heads,
                                   .beta_stride = linear.value_heads},
                        .state = {.heads = heads.data()}},
                       *queue_)
          .Wait();
      double difference = 0, norm = 0;
      const std::span<const float> expected = snapshots[i].state.State(index);
      for (size_t n = 0; n < expected.size(); ++n) {
        difference += std::pow(rebuilt.State(index)[n] - expected[n], 2);
        norm += std::pow(expected[n], 2);
      }
      EXPECT_LE(std::sqrt(difference / norm), 1e-5) << "layer " << layer << " at " << depths[i];
      const std::span<const float> window = snapshots[i].state.ConvWindow(index);
      for (int32_t back = 1; back < linear.conv_kernel && back <= depths[i] - kBegin; ++back) {
        const float* const input = rows[index].conv_inputs + (depths[i] - kBegin - back) * linear.conv_channels();
        const float* const held = window.data() + (linear.conv_kernel - 1 - back) * linear.conv_channels();
        EXPECT_TRUE(std::equal(input, input + linear.conv_channels(), held));
      }
    }
  }
}

}  // namespace
}  // namespace ashlar::refengine
