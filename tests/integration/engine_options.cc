// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/engine_options.h"

#include <gtest/gtest.h>

#include <variant>

#include "client/engine/describe.h"

namespace ashlar::integration {

EngineOptions::EngineOptions(TestEngine& test, const TensorShard& shard, const PrefixUse& prefixes)
    : layout_(test.Whole()), identity_(TestEngine::identity()) {
  const auto rope = [](const Rope& from) {
    return engine::Rope{
        .style = from.kind, .rotary_dim = from.rotary_dim, .scale = from.scale, .frequencies = from.frequencies.data()};
  };
  for (const Layer& layer : layout_.layers) {
    if (const auto* linear = std::get_if<LinearLayer>(&layer)) {
      layers_.push_back({.kind = engine::LayerKind::kLinear,
                         .rope = rope(linear->rope),
                         .family = linear->family,
                         .key_heads = linear->key_heads,
                         .value_heads = linear->value_heads,
                         .d_k = linear->d_k,
                         .d_v = linear->d_v,
                         .state_dtype = linear->state_dtype,
                         .order = linear->order,
                         .conv_channels = linear->conv_channels,
                         .conv_kernel = linear->conv_kernel,
                         .conv_dtype = linear->conv_dtype.value_or(DType{0}),
                         .conv_order = linear->conv_order});
      continue;
    }
    const auto& attention = std::get<AttentionLayer>(layer);
    layers_.push_back({.kind = engine::LayerKind::kGqa,
                       .rope = rope(attention.rope),
                       .kv_heads = attention.kv_heads,
                       .key_dim = attention.key_dim,
                       .value_dim = attention.value_dim,
                       .dtype = attention.dtype,
                       .scales = attention.scales,
                       .stored = attention.stored});
  }
  for (const PagedLayer& layer : test.pages().layers) places_.push_back(engine::ToPlace(layer));
  options.model = {.model_id = identity_.model_id.c_str(),
                   .weights_digest = identity_.weights_digest.c_str(),
                   .dtype = identity_.dtype.c_str(),
                   .page_tokens = layout_.page_tokens,
                   .head = layout_.head,
                   .tail = layout_.tail,
                   .layers = layers_.data(),
                   .layer_count = static_cast<uint32_t>(layers_.size()),
                   .tensor_parallel_rank = shard.rank,
                   .tensor_parallel_size = shard.size};
  options.memory = {
      .pages = test.pages().pages, .places = places_.data(), .place_count = static_cast<uint32_t>(places_.size())};
  options.capture_tokens = prefixes.capture_tokens;
  options.span_tokens = prefixes.span_tokens;
  options.epsilon = 0;  // transitions are returned unchanged
}

engine::Cache OpenSharing(TestEngine& test, const TensorShard& shard, const PrefixUse& prefixes, bool memory,
                          uint32_t land_ms, uint32_t quiet_ms) {
  EngineOptions with(test, shard, prefixes);
  with.options.land_ms = land_ms;
  with.options.quiet_ms = quiet_ms;
  if (!memory) with.options.memory.kind = engine::MemoryKind::kNone;
  engine::Cache cache;
  const engine::Status status = OpenOn(test.client(), test.region(), with.options, &cache);
  EXPECT_TRUE(status.ok()) << status.message;
  return cache;
}

std::string Say(const engine::Status& status) {
  return std::to_string(static_cast<int>(status.code)) + " " + status.message;
}

Computed::Computed(TestEngine& test, const engine::Run& run) {
  const Tokens tokens(run.tokens, run.tokens + run.token_count);
  parts = test.Compute(run.transition ? ObjectKind::kSegment : ObjectKind::kCheckpoint, tokens);
  for (const PublishParts::Linear& part : parts.linear) {
    linear.push_back({.layer = part.layer,
                      .state = part.state,
                      .conv_tail = part.conv_tail,
                      .transition = reinterpret_cast<const float*>(part.transition)});
  }
  run_parts = {.linear = linear.data(),
               .linear_count = static_cast<uint32_t>(linear.size()),
               .page_table = parts.page_table.data(),
               .page_count = parts.page_table.size(),
               .first_position = parts.first_position};
}

std::string StepsOf(const engine::Request& request) {
  std::string said;
  const engine::Plan& plan = request.plan();
  for (uint32_t i = 0; i < plan.step_count; ++i) {
    const engine::Step& step = plan.steps[i];
    said += step.kind == engine::StepKind::kCompute      ? "run "
            : step.kind == engine::StepKind::kCheckpoint ? "checkpoint "
                                                         : "interior ";
    said += std::to_string(step.begin) + "-" + std::to_string(step.end) + " ";
  }
  return said;
}

std::vector<std::string> ReasonsOf(const engine::Request& request) {
  std::vector<std::string> reasons;
  for (uint32_t i = 0; i < request.plan().segment_count; ++i) {
    reasons.push_back(engine::MissName(request.plan().segments[i].reason));
  }
  return reasons;
}

}  // namespace ashlar::integration
