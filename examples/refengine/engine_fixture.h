// SPDX-License-Identifier: Apache-2.0
// The common fixture of the engine's tests: a small model with fresh random weights, pages, threads, and error
// measures.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "examples/refengine/engine.h"
#include "examples/refengine/plain_forward.h"
#include "examples/refengine/tokenizer.h"
#include "kernels/host/thread_pool.h"

namespace ashlar::refengine {

// ‖a − b‖ / ‖b‖; +∞ if that is not a number, so that NaN exceeds every bound.
template <typename A, typename B>
double RelativeError(const A& a, const B& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  const double error = std::sqrt(difference / norm);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

class EngineFixture : public testing::Test {
 protected:
  static constexpr int32_t kPageTokens = 16, kPages = 96;

  // For a test model that `make` configures.
  explicit EngineFixture(ModelConfig (*make)(uint64_t seed, int32_t blocks) = TinyConfig)
      : seed_(std::random_device()()),
        trace_(__FILE__, __LINE__, ::testing::Message() << "seed " << seed_),
        random_(seed_),
        model_(make(seed_, 2)),
        threads_(2),
        memory_(KvPages::RequiredBytes(model_.config(), kPageTokens, kPages)),
        pool_(model_.config(), kPageTokens, kPages, memory_),
        engine_(std::make_unique<Engine>(model_, kernels_, threads_)),
        queue_(kernels_.MakeQueue(&threads_)) {}

  const ModelConfig& config() const { return model_.config(); }

  // Random tokens that repeat as text does.
  std::vector<int32_t> Text(int64_t count) {
    std::vector<int32_t> tokens(count);
    for (int32_t& token : tokens)
      token = static_cast<int32_t>(random_() % 7 == 0 ? random_() % 256 : 97 + random_() % 12);
    return tokens;
  }

  // Advances and returns the last token's logits.
  std::vector<float> Run(Sequence& sequence, std::span<const Step> chain, AdvanceOptions options = {}) {
    std::vector<float> logits(kVocabulary);
    options.last_logits = logits.data();
    const absl::Status status = engine_->Advance(sequence, chain, options);
    EXPECT_TRUE(status.ok()) << status;
    return logits;
  }
  std::vector<float> Prefill(Sequence& sequence, std::span<const int32_t> tokens) {
    const Step step = Step::Compute(tokens);
    return Run(sequence, {&step, 1});
  }

  void ExpectSameState(const RecurrentState& actual, const RecurrentState& expected, double bound) const {
    for (int32_t layer = 0; layer < config().linear_layers(); ++layer) {
      EXPECT_LE(RelativeError(actual.State(layer), expected.State(layer)), bound) << "state of linear layer " << layer;
      EXPECT_LE(RelativeError(actual.ConvWindow(layer), expected.ConvWindow(layer)), bound)
          << "convolution window of linear layer " << layer;
    }
  }

  // Logits, states and convolution windows of one run over fresh text.
  void ExpectAgreesWithThePlainModel() {
    const std::vector<int32_t> text = Text(90);
    const PlainResult plain = PlainForward(model_, text);
    Sequence sequence(config(), pool_);
    std::vector<float> logits(text.size() * kVocabulary);
    AdvanceOptions options;
    options.all_logits = logits.data();
    const Step step = Step::Compute(text);
    ASSERT_TRUE(engine_->Advance(sequence, {&step, 1}, options).ok());
    // Over all tokens: at a prompt's first tokens an output near zero is normalised, which amplifies its rounding.
    std::vector<double> expected;
    for (const std::vector<double>& row : plain.logits) expected.insert(expected.end(), row.begin(), row.end());
    EXPECT_LE(RelativeError(logits, expected), 1e-4);
    for (int32_t layer = 0; layer < config().linear_layers(); ++layer) {
      EXPECT_LE(RelativeError(sequence.recurrent().State(layer), plain.states[layer]), 1e-4) << layer;
      ASSERT_EQ(sequence.recurrent().ConvWindow(layer).size(), plain.windows[layer].size());
      if (plain.windows[layer].empty()) continue;  // lightning has no convolution
      EXPECT_LE(RelativeError(sequence.recurrent().ConvWindow(layer), plain.windows[layer]), 1e-4) << layer;
    }
  }

  uint32_t seed_;
  testing::ScopedTrace trace_;
  std::mt19937 random_;
  const kernels::Kernels& kernels_ = kernels::Host();
  Model model_;
  kernels::ThreadPool threads_;
  std::vector<std::byte> memory_;
  KvPages pool_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<kernels::Queue> queue_;
};

}  // namespace ashlar::refengine
