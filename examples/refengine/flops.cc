// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/flops.h"

#include "examples/refengine/tokenizer.h"

namespace ashlar::refengine {
namespace {

// Returns the multiply-adds of all matrices that every token passes through, except the head's.
double MatrixWeights(const ModelConfig& config) {
  const LinearConfig& linear = config.linear;
  const AttentionConfig& attention = config.attention;
  const double d = config.d_model;
  const double per_linear =
      d * linear.columns() + d * linear.value_channels() + linear.conv_kernel * linear.conv_channels();
  const double per_attention = d * (3.0 * attention.query_heads + 2.0 * attention.kv_heads) * attention.head_dim;
  return config.linear_layers() * per_linear + config.attention_layers() * per_attention +
         config.layers() * 3.0 * d * config.mlp_dim;
}

}  // namespace

Flops ChainFlops(const ModelConfig& config, int64_t start, std::span<const Step> chain) {
  const LinearConfig& linear = config.linear;
  const AttentionConfig& attention = config.attention;
  const double heads = static_cast<double>(config.linear_layers()) * linear.value_heads;
  const double state = static_cast<double>(linear.state_floats());
  const bool dense = linear.form() == TransitionForm::kDense;
  Flops flops;
  int64_t computed = 0;
  double position = static_cast<double>(start);
  for (const Step& step : chain) {
    const double count = static_cast<double>(step.count());
    if (step.cached.empty()) {
      const double visible = count * position + count * (count + 1) / 2;
      flops.attention += 4.0 * attention.head_dim * attention.query_heads * config.attention_layers() * visible;
      computed += step.count();
    } else if (!step.checkpoint) {
      flops.composition += (dense ? 2.0 * linear.d_k : 2.0) * state * heads;
    }
    position += count;
  }
  flops.matrices = 2.0 * MatrixWeights(config) * computed;
  if (computed > 0) flops.matrices += 2.0 * kVocabulary * config.d_model;
  // Decay, the read of a key (if erased), write, output.
  flops.recurrence = (dense ? 7.0 : 5.0) * state * heads * computed;
  return flops;
}

Flops PrefillFlops(const ModelConfig& config, int64_t tokens) {
  const std::vector<int32_t> ids(tokens);
  const Step step = Step::Compute(ids);
  return ChainFlops(config, 0, {&step, 1});
}

}  // namespace ashlar::refengine
