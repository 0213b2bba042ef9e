// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/decode_engine.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "examples/refengine/engine.h"
#include "examples/refengine/tokenizer.h"
#include "kernels/testing/names.h"

namespace ashlar::bench {
namespace {

using refengine::DecodeBuffering;
using refengine::Engine;
using refengine::ModelConfig;
using refengine::Part;
using refengine::Sequence;
using refengine::Step;

constexpr int32_t kPageTokens = 64, kPrompt = 64;

// Linear layers like Qwen3-Next's, whose states together exceed most caches, in a model that is thin between them: the
// projections of a whole model would take most of a single sequence's token.
ModelConfig ThinConfig(bool quick) {
  ModelConfig config;
  config.d_model = 64;
  config.blocks = quick ? 1 : 8;
  config.mlp_dim = 64;
  config.linear = {.key_heads = 16, .value_heads = 32, .d_k = 128, .d_v = 128};
  config.attention = {.query_heads = 2, .kv_heads = 1, .head_dim = 64, .rotary_dim = 16};
  return config;
}

// One sequence that decodes by one engine.
class Loop {
 public:
  Loop(const refengine::Model& model, kernels::Workers& workers, const DecodeBuffering& decoding, int64_t tokens)
      : engine_(model, kernels::Host(), workers, {.decoding = decoding}),
        pages_(static_cast<int32_t>((kPrompt + tokens) / kPageTokens + 1)),
        memory_(refengine::KvPages::RequiredBytes(model.config(), kPageTokens, pages_)),
        pool_(model.config(), kPageTokens, pages_, memory_),
        sequence_(model.config(), pool_),
        logits_(refengine::kVocabulary) {
    std::vector<int32_t> prompt(kPrompt);
    std::iota(prompt.begin(), prompt.end(), 40);
    Advance(prompt, nullptr);
  }

  void Decode(int32_t tokens) {
    for (int32_t i = 0; i < tokens; ++i) {
      refengine::Profile profile;
      const int32_t token = 97 + next_++ % 26;
      seconds_.push_back(Seconds([&] { Advance({&token, 1}, &profile); }));
      layer_seconds_.push_back(profile[Part::kRecurrence]);
    }
  }
  void Erase() { seconds_.clear(), layer_seconds_.clear(); }
  // Medians over whole rounds of a buffer of the means: {token, layers}.
  std::pair<double, double> Times(int32_t round) const {
    const auto of = [&](const std::vector<double>& times) {
      std::vector<double> means;
      for (size_t i = 0; i + static_cast<size_t>(round) <= times.size(); i += static_cast<size_t>(round)) {
        means.push_back(std::accumulate(times.begin() + static_cast<ptrdiff_t>(i),
                                        times.begin() + static_cast<ptrdiff_t>(i) + round, 0.0) /
                        round);
      }
      return Median(means);
    };
    return {of(seconds_), of(layer_seconds_)};
  }
  const std::vector<float>& logits() const { return logits_; }

 private:
  void Advance(std::span<const int32_t> tokens, refengine::Profile* profile) {
    const Step step = Step::Compute(tokens);
    const absl::Status status =
        engine_.Advance(sequence_, {&step, 1}, {.last_logits = logits_.data(), .profile = profile});
    if (status.ok()) return;
    std::fprintf(stderr, "ashlar-bench decode: %s\n", status.ToString().c_str());
    std::abort();
  }

  Engine engine_;
  const int32_t pages_;
  std::vector<std::byte> memory_;
  refengine::KvPages pool_;
  Sequence sequence_;
  std::vector<float> logits_;
  std::vector<double> seconds_, layer_seconds_;
  int32_t next_ = 0;
};

double ErrorOf(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += double{a[i] - b[i]} * (a[i] - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

// Both loops alternate, one round of the buffer each.
nlohmann::json Compare(const Options& options, const refengine::Model& model, const DecodeBuffering& way,
                       kernels::Workers& workers) {
  const int32_t round = std::max(way.capacity, 4);
  const int64_t tokens = int64_t{round} * (3 * options.repetitions + 2);
  Loop recurrent(model, workers, {}, tokens), buffered(model, workers, way, tokens);
  for (int i = -1; i < 3 * options.repetitions; ++i) {
    if (i == 0) recurrent.Erase(), buffered.Erase();  // warm
    recurrent.Decode(round);
    buffered.Decode(round);
  }
  const auto [token, layers] = buffered.Times(round);
  const auto [recurrent_token, recurrent_layers] = recurrent.Times(round);
  return {{"buffer", way.capacity},
          {"dtype", kernels::testing::Name(way.dtype)},
          {"copies", way.copies},
          {"ms_per_token", token * 1e3},
          {"recurrent_ms_per_token", recurrent_token * 1e3},
          {"layers_ms", layers * 1e3},
          {"recurrent_layers_ms", recurrent_layers * 1e3},
          {"speedup", recurrent_token / token},
          {"speedup_of_layers", recurrent_layers / layers},
          {"logits_error", ErrorOf(buffered.logits(), recurrent.logits())}};
}

}  // namespace

void DecodeByEngine(const Options& options, kernels::Workers& workers, nlohmann::json& rows) {
  std::printf("\n%-6s %10s %6s %6s %6s %8s %8s %13s %9s %13s %8s %10s %10s\n", "engine", "state MiB", "buffer", "dtype",
              "copies", "chosen", "ms/token", "recurrent ms", "layers ms", "recurrent ms", "speedup", "of layers",
              "logits off");
  for (const bool thin : {false, true}) {
    const refengine::Model model(thin ? ThinConfig(options.quick) : refengine::DemoConfig());
    const refengine::LinearConfig& linear = model.config().linear;
    const int64_t bytes = model.config().linear_layers() * linear.value_heads * linear.state_floats() * 4;
    const DecodeBuffering exact = refengine::MeasuredBuffering(model, kernels::Host(), workers, 1, false);
    const DecodeBuffering rounded = refengine::MeasuredBuffering(model, kernels::Host(), workers, 1, true);
    std::vector<std::pair<DecodeBuffering, const char*>> ways = {
        {{1, DType::kF32, false}, ""}, {{4, DType::kF32, false}, ""}, {{8, DType::kF32, false}, ""},
        {{8, DType::kF16, true}, ""},  {{12, DType::kF16, true}, ""}, {exact, "exact"},
        {rounded, "rounded"}};
    for (const auto& [way, chosen] : ways) {
      nlohmann::json row = Compare(options, model, way, workers);
      row.update({{"model", thin ? "thin" : "demo"}, {"state_bytes", bytes}, {"chosen", chosen}});
      const auto number = [&](const char* name) { return row.at(name).get<double>(); };
      std::printf("%-6s %10.1f %6d %6s %6s %8s %8.3f %13.3f %9.3f %13.3f %8.2f %10.2f %10.1e\n", thin ? "thin" : "demo",
                  static_cast<double>(bytes) / (1 << 20), way.capacity, row.at("dtype").get<std::string>().c_str(),
                  way.copies ? "yes" : "no", chosen, number("ms_per_token"), number("recurrent_ms_per_token"),
                  number("layers_ms"), number("recurrent_layers_ms"), number("speedup"), number("speedup_of_layers"),
                  number("logits_error"));
      std::fflush(stdout);
      rows.push_back(std::move(row));
    }
  }
}

}  // namespace ashlar::bench
