// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/stored_segment.h"

#include <algorithm>
#include <type_traits>

namespace ashlar::refengine {
namespace {

constexpr int32_t kUnitTokens = 64;

// Pointers to units of kUnitTokens rows each.
template <typename Float>
auto Units(Float* rows, int64_t tokens, const AttentionConfig& attention) {
  using Unit = std::conditional_t<std::is_const_v<Float>, const void, void>;
  const int64_t unit_floats = int64_t{kUnitTokens} * attention.kv_heads * attention.head_dim;
  std::vector<Unit*> units;
  for (int64_t first = 0; first < tokens; first += kUnitTokens)
    units.push_back(rows + first / kUnitTokens * unit_floats);
  return units;
}

}  // namespace

StoredSegment::StoredSegment(const ModelConfig& config, int64_t tokens, SeamWidths seams)
    : tokens_(tokens),
      seams_(seams),
      tuples_(config.linear_layers()),
      rows_(config.attention_layers()),
      tables_(config) {
  const LinearConfig& linear = config.linear;
  for (Tuple& tuple : tuples_) {
    tuple.transition.resize(linear.value_heads * linear.transition_floats());
    tuple.state.resize(linear.value_heads * linear.state_floats());
    tuple.conv_tail.resize(int64_t{linear.conv_kernel - 1} * linear.conv_channels());
    buffers_.push_back({tuple.transition.data(), tuple.state.data(), tuple.conv_tail.data()});
  }
  const int64_t units = (interior() + kUnitTokens - 1) / kUnitTokens;
  const int64_t row_floats = int64_t{config.attention.kv_heads} * config.attention.head_dim;
  for (Rows& rows : rows_) {
    rows.keys.resize(units * kUnitTokens * row_floats);
    rows.values.resize(units * kUnitTokens * row_floats);
  }
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    const Tuple& tuple = tuples_[config.kind_index(layer)];
    PointAt(linear, tuple.transition.data(), tuple.state.data(), tables_.heads(layer));
    tables_[layer].conv_tail = tuple.conv_tail.data();
  }
}

CaptureRange StoredSegment::Capture(int64_t start) const {
  return {start + seams_.head, start + tokens_ - seams_.tail, buffers_};
}

void StoredSegment::GatherRows(const Model& model, const Sequence& sequence, int64_t start,
                               const kernels::Kernels& kernels, kernels::Queue& queue) {
  const AttentionConfig& attention = model.config().attention;
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    Rows& rows = rows_[layer];
    const auto key_units = Units(rows.keys.data(), interior(), attention);
    const auto value_units = Units(rows.values.data(), interior(), attention);
    kernels::GatherArgs args{.source = sequence.pool().Keys(layer, sequence.page_table().data()),
                             .first_position = start + seams_.head,
                             .units = key_units.data(),
                             .unit_tokens = kUnitTokens,
                             .tokens = interior(),
                             .heads = attention.kv_heads,
                             .dim = attention.head_dim};
    kernels.Gather(args, queue).Wait();
    args.source = sequence.pool().Values(layer, sequence.page_table().data());
    args.units = value_units.data();
    kernels.Gather(args, queue).Wait();
    if (start == 0) continue;
    kernels
        .RotateKeys({.rotation = model.rotation(),
                     .delta = -start,
                     .rows = interior() * attention.kv_heads,
                     .dim = attention.head_dim,
                     .source = rows.keys.data(),
                     .target = rows.keys.data()},
                    queue)
        .Wait();
  }
}

void StoredSegment::LandRows(const Model& model, Sequence& sequence, int64_t start, const kernels::Kernels& kernels,
                             kernels::Queue& queue) const {
  const AttentionConfig& attention = model.config().attention;
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    const Rows& rows = rows_[layer];
    const auto key_units = Units(rows.keys.data(), interior(), attention);
    const auto value_units = Units(rows.values.data(), interior(), attention);
    kernels::LandArgs args{.source = {.units = key_units.data(),
                                      .unit_tokens = kUnitTokens,
                                      .tokens = interior(),
                                      .heads = attention.kv_heads,
                                      .dim = attention.head_dim},
                           .rotation = model.rotation(),
                           .delta = start,
                           .target = sequence.pool().Keys(layer, sequence.page_table().data()),
                           .first_position = start + seams_.head};
    kernels.Land(args, queue).Wait();
    args.source.units = value_units.data();
    args.rotation = {};
    args.target = sequence.pool().Values(layer, sequence.page_table().data());
    kernels.Land(args, queue).Wait();
  }
}

absl::Status PrefillIsolated(Engine& engine, KvPages& pool, std::span<const int32_t> tokens,
                             const kernels::Kernels& kernels, kernels::Queue& queue, StoredSegment& segment) {
  Sequence sequence(engine.model().config(), pool);
  const Step step = Step::Compute(tokens);
  const CaptureRange capture = segment.Capture(0);
  AdvanceOptions options;
  options.captures = {&capture, 1};
  if (const absl::Status status = engine.Advance(sequence, {&step, 1}, options); !status.ok()) return status;
  segment.GatherRows(engine.model(), sequence, 0, kernels, queue);
  return absl::OkStatus();
}

ReplacedTransitions::ReplacedTransitions(const ModelConfig& config, With with)
    : config_(config), with_(with), identity_(config.linear.transition_floats()) {
  if (config.linear.form() != TransitionForm::kDense) return;  // a logarithm: zero
  for (int64_t i = 0; i < config.linear.d_k; ++i) identity_[i * config.linear.d_k + i] = 1.0f;
}

LayerTables ReplacedTransitions::operator()(std::span<const CachedLayer> layers) const {
  LayerTables replaced(config_, layers);
  for (int32_t layer = 0; layer < config_.layers(); ++layer) {
    for (kernels::HeadTuple& head : replaced.heads(layer)) {
      head.form = with_ == With::kZero ? TransitionForm::kZero : config_.linear.form();
      head.transition = with_ == With::kZero ? nullptr : identity_.data();
    }
  }
  return replaced;
}

}  // namespace ashlar::refengine
