// SPDX-License-Identifier: Apache-2.0
// A prompt assembled from cached segments against full recompute: exact parts are equal, and planted mistakes are
// detected.
#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

#include "examples/refengine/composition_fixture.h"

namespace ashlar::refengine {
namespace {

class CompositionTest : public CompositionFixture {};

TEST_F(CompositionTest, OracleCaptureReproducesFullRecompute) {
  for (const int64_t width : {4, 8, 32}) {
    SCOPED_TRACE(width);
    MakePrompt(5, 2 * width + 1, 2 * width + 90);
    const SeamWidths seams{width, width};
    const Composed composed = RunChain(CaptureInContext(seams), seams);
    const Composed recomputed = Recompute(composed.positions);
    EXPECT_LE(RelativeError(composed.logits, recomputed.logits), 1e-4);
    ExpectSameState(composed.end, recomputed.end, 1e-4);
    for (size_t step = 0; step < composed.behind.size(); ++step) {
      SCOPED_TRACE(step);
      ExpectSameState(composed.behind[step], recomputed.behind[step], 1e-4);
    }
  }
}

TEST_F(CompositionTest, SupportsDifferentSeamsAndOneTokenInteriors) {
  const SeamWidths seams{3, 0};
  MakePrompt(6, 4, 5);
  const Composed composed = RunChain(CaptureInContext(seams), seams);
  const Composed recomputed = Recompute(composed.positions);
  EXPECT_LE(RelativeError(composed.logits, recomputed.logits), 1e-4);
  ExpectSameState(composed.end, recomputed.end, 1e-4);
}

TEST_F(CompositionTest, WideSeamsWithoutInteriorAreFullRecompute) {
  MakePrompt(4, 40, 64);
  const SeamWidths seams{32, 32};
  std::vector<StoredSegment> stored = CaptureInContext(seams);
  ASSERT_EQ(stored.size(), 1u);  // the checkpoint alone
  const Composed composed = RunChain(stored, seams);
  const Composed recomputed = Recompute(composed.positions);
  EXPECT_LE(RelativeError(composed.logits, recomputed.logits), 1e-4);
  ExpectSameState(composed.end, recomputed.end, 1e-4);
}

TEST_F(CompositionTest, PassBoundariesMaySplitCapturesAndChains) {
  MakePrompt(4, 60, 90);
  const SeamWidths seams{8, 8};
  const Composed expected = RunChain(CaptureInContext(seams), seams);
  engine_ = std::make_unique<Engine>(model_, kernels_, threads_, EngineOptions{.pass_tokens = 13});
  const Composed cut = RunChain(CaptureInContext(seams), seams);
  EXPECT_LE(RelativeError(cut.logits, expected.logits), 1e-4);
  ExpectSameState(cut.end, expected.end, 1e-4);
}

TEST_F(CompositionTest, ChainsThatEndWithAnInteriorContinue) {
  MakePrompt(3, 60, 90);
  const SeamWidths seams{8, 0};
  const std::vector<StoredSegment> stored = CaptureInContext(seams);
  Sequence whole(config(), pool_), composed(config(), pool_);
  const std::vector<float> expected = Prefill(whole, prompt_);

  ASSERT_TRUE(composed.Reserve(prompt_.size()));
  stored[1].LandRows(model_, composed, Start(1), kernels_, *queue_);
  const std::span<const int32_t> prompt(prompt_);
  const Step chain[] = {Step::Compute(prompt.first(Start(1) + 8)),
                        Step::Cached(stored[1].interior(), stored[1].layers())};
  ASSERT_TRUE(engine_->Advance(composed, chain).ok());
  EXPECT_EQ(composed.length(), Start(2));
  EXPECT_LE(RelativeError(Prefill(composed, prompt.subspan(Start(2))), expected), 1e-4);
  ExpectSameState(composed.recurrent(), whole.recurrent(), 1e-4);
}

TEST_F(CompositionTest, IsolatedSegmentsComposeExactlyInLayer0) {
  for (const int64_t width : {4, 8, 32}) {
    SCOPED_TRACE(width);
    MakePrompt(5, 2 * width + 60, 2 * width + 120);
    const SeamWidths seams{width, width};
    const std::vector<StoredSegment> stored = CaptureIsolated(seams);
    const Composed composed = RunChain(stored, seams);
    const Composed recomputed = Recompute(composed.positions);
    EXPECT_LE(Layer0Error(composed, recomputed), 1e-5);

    const ReplacedTransitions identity(config(), ReplacedTransitions::With::kIdentity);
    const ReplacedTransitions zero(config(), ReplacedTransitions::With::kZero);
    const auto replaced = [](const ReplacedTransitions& by) {
      return [&by](size_t, const LayerTables& tables) { return by(tables.layers()); };
    };
    EXPECT_PRED2(IsVisible, Layer0Error(RunChain(stored, seams, replaced(identity)), recomputed), 0.1);
    EXPECT_PRED2(IsVisible, Layer0Error(RunChain(stored, seams, replaced(zero)), recomputed), 1e-2);
  }
}

// Mistakes of published code, each in layer 0, where the right way is exact.
TEST_F(CompositionTest, KnownMistakesAreDetectedInLayer0) {
  MakePrompt(5, 90, 140);
  const SeamWidths seams{8, 8};
  const std::vector<StoredSegment> stored = CaptureIsolated(seams);
  const Composed right = RunChain(stored, seams);
  const Composed recomputed = Recompute(right.positions);
  ASSERT_LE(Layer0Error(right, recomputed), 1e-5);
  const int32_t d_k = config().linear.d_k, heads = config().linear.value_heads;

  // Layer 0's transitions, changed.
  const auto with_transition = [&](auto&& entry) {
    std::vector<std::vector<float>> matrices;
    matrices.reserve(stored.size() * heads);
    return RunChain(stored, seams, [&](size_t, LayerTables layers) {
      for (int32_t head = 0; head < heads; ++head) {
        std::vector<float>& matrix = matrices.emplace_back(d_k * d_k);
        kernels::HeadTuple& tuple = layers.heads(0)[head];
        const auto* transition = static_cast<const float*>(tuple.transition);
        for (int32_t i = 0; i < d_k; ++i) {
          for (int32_t j = 0; j < d_k; ++j) matrix[i * d_k + j] = entry(transition, i, j);
        }
        tuple.transition = matrix.data();
      }
      return layers;
    });
  };
  const Composed transposed = with_transition([&](const float* t, int32_t i, int32_t j) { return t[j * d_k + i]; });
  EXPECT_PRED2(IsVisible, Layer0Error(transposed, recomputed), 1e-3);
  const Composed twice = with_transition([&](const float* t, int32_t i, int32_t j) {
    float sum = 0;
    for (int32_t m = 0; m < d_k; ++m) sum += t[i * d_k + m] * t[m * d_k + j];
    return sum;
  });
  EXPECT_PRED2(IsVisible, Layer0Error(twice, recomputed), 1e-3);

  const Composed doubled = RunChain(
      stored, seams, [](size_t, LayerTables layers) { return layers; }, true);
  EXPECT_PRED2(IsVisible, Layer0Error(doubled, recomputed), 1e-4);

  // Tuples starting at token 0 instead of `head`, and tails from the segment's end instead of the interior's.
  std::vector<StoredSegment> from_zero, to_end;
  for (const std::vector<int32_t>& section : sections_) {
    const int64_t tokens = section.size();
    ASSERT_TRUE(PrefillIsolated(*engine_, pool_, section, kernels_, *queue_,
                                from_zero.emplace_back(config(), tokens, SeamWidths{0, seams.tail}))
                    .ok());
    ASSERT_TRUE(PrefillIsolated(*engine_, pool_, section, kernels_, *queue_,
                                to_end.emplace_back(config(), tokens, SeamWidths{seams.head, 0}))
                    .ok());
  }
  const Composed started_at_0 = RunChain(stored, seams, [&](size_t i, LayerTables layers) {
    if (i > 0) layers[0].tuple = from_zero[i].layers()[0].tuple;
    return layers;
  });
  EXPECT_PRED2(IsVisible, Layer0Error(started_at_0, recomputed), 1e-3);
  const Composed wrong_tail = RunChain(stored, seams, [&](size_t i, LayerTables layers) {
    if (i > 0) layers[0].conv_tail = to_end[i].layers()[0].conv_tail;
    return layers;
  });
  EXPECT_PRED2(IsVisible, Layer0Error(wrong_tail, recomputed, /*only_landed=*/false), 1e-3);
}

// If a neighbour's convolution tail leaks into isolated prefill, layer 0's tuple is unaffected, because the tuple
// begins after the convolution's reach, but all later layers are corrupted.
TEST_F(CompositionTest, ALeakingTailSpoilsDeeperTuples) {
  MakePrompt(2, 80, 120);
  const SeamWidths seams{8, 8};
  const StoredSegment clean = std::move(CaptureIsolated(seams)[1]);
  Sequence neighbour(config(), pool_);
  Prefill(neighbour, sections_[0]);
  RecurrentState leaked(config());
  for (int32_t layer = 0; layer < config().linear_layers(); ++layer) {
    const auto window = neighbour.recurrent().ConvWindow(layer);
    std::copy(window.begin(), window.end(), leaked.ConvWindow(layer).begin());
  }
  Sequence sequence(config(), pool_);
  sequence.Rewind(0, leaked);
  StoredSegment spoiled(config(), sections_[1].size(), seams);
  const CaptureRange capture = spoiled.Capture(0);
  AdvanceOptions options;
  options.captures = {&capture, 1};
  const Step step = Step::Compute(sections_[1]);
  ASSERT_TRUE(engine_->Advance(sequence, {&step, 1}, options).ok());
  const CaptureRange expected = clean.Capture(0);
  const size_t floats = size_t(config().linear.value_heads) * config().linear.d_k * config().linear.d_v;
  for (int32_t layer = 0; layer < config().linear_layers(); ++layer) {
    const double error =
        RelativeError(std::span(capture.linear[layer].state, floats), std::span(expected.linear[layer].state, floats));
    if (layer == 0) {
      EXPECT_LE(error, 1e-5);
    } else {
      EXPECT_PRED2(IsVisible, error, 1e-3) << layer;
    }
  }
}

// ‖T‖₂ by power iteration on TᵀT.
double SpectralNorm(std::span<const float> matrix, int32_t n) {
  std::vector<double> x(n, 1.0), y(n);
  double norm = 0;
  for (int iteration = 0; iteration < 300; ++iteration) {
    double length = 0;
    for (const double value : x) length += value * value;
    if (length == 0) return 0;  // decayed below fp32's range
    for (double& value : x) value /= std::sqrt(length);
    norm = 0;
    for (int32_t i = 0; i < n; ++i) {
      y[i] = 0;
      for (int32_t j = 0; j < n; ++j) y[i] += matrix[i * n + j] * x[j];
      norm += y[i] * y[i];
    }
    std::fill(x.begin(), x.end(), 0.0);
    for (int32_t i = 0; i < n; ++i) {
      for (int32_t j = 0; j < n; ++j) x[j] += matrix[i * n + j] * y[i];
    }
  }
  return std::sqrt(norm);
}

// Counts the heads of all linear layers that retain their state over one interior (‖T‖₂ ≥ 0.3), and the ones that lose
// it (< 0.1).
struct Memory {
  int heads = 0, persistent = 0, vanishing = 0;
};

Memory MemoryOver(const ModelConfig& config, const StoredSegment& stored) {
  const size_t d_k = config.linear.d_k;
  Memory memory;
  for (const TupleBuffers& tuple : stored.Capture(0).linear) {
    for (int32_t head = 0; head < config.linear.value_heads; ++head) {
      const double norm = SpectralNorm({tuple.transition + head * d_k * d_k, d_k * d_k}, config.linear.d_k);
      EXPECT_LE(norm, 1.0001);
      ++memory.heads;
      memory.persistent += norm >= 0.3;
      memory.vanishing += norm < 0.1;
    }
  }
  return memory;
}

TEST_F(CompositionTest, AQuarterOfTheHeadsRememberOver500Tokens) {
  const std::vector<int32_t> text = Text(516);
  StoredSegment stored(config(), text.size(), {8, 8});
  ASSERT_TRUE(PrefillIsolated(*engine_, pool_, text, kernels_, *queue_, stored).ok());
  const Memory memory = MemoryOver(config(), stored);
  EXPECT_GE(4 * memory.persistent, memory.heads);
  EXPECT_GE(memory.vanishing, 1);
}

// Words of an instruction in random order, as bytes.
std::vector<int32_t> Sentences(std::mt19937& random, size_t bytes) {
  constexpr std::string_view kWords[] = {
      "the",     "cache", "of",     "a",      "segment", "holds",  "every", "state", "that",  "model", "needs",
      "Section", "and",   "tokens", "before", "it",      "answer", "from",  "12",    "pages", "when",  "query",
      "is",      "read",  "in",     "layers", "memory",  "2024",   "how",   "long",  "keys",  "to"};
  std::string text;
  while (text.size() < bytes) {
    text += kWords[random() % std::size(kWords)];
    text += random() % 9 == 0 ? (random() % 4 == 0 ? ".\n" : ", ") : " ";
  }
  return Tokenize(text.substr(0, bytes));
}

// Checks the model of the comparisons, so that their results do not depend on vanishing transitions.
TEST_F(CompositionTest, AQuarterOfTheDemoModelsHeadsRememberOver500Tokens) {
  const Model model(DemoConfig());
  std::vector<std::byte> memory(KvPages::RequiredBytes(model.config(), kPageTokens, 40));
  KvPages pool(model.config(), kPageTokens, 40, memory);
  Engine engine(model, kernels_, threads_);
  const std::vector<int32_t> text = Sentences(random_, 528);
  StoredSegment stored(model.config(), text.size(), {8, 8});
  ASSERT_TRUE(PrefillIsolated(engine, pool, text, kernels_, *queue_, stored).ok());
  const Memory remembered = MemoryOver(model.config(), stored);
  EXPECT_GE(4 * remembered.persistent, remembered.heads);
  EXPECT_GE(remembered.vanishing, 1);
}

}  // namespace
}  // namespace ashlar::refengine
