// SPDX-License-Identifier: Apache-2.0
#include "proto/testing/sample_layouts.h"

#include <algorithm>

#include "proto/limits.h"
#include "proto/tuple_parts.h"

namespace ashlar {
namespace {

uint32_t Uniform(std::mt19937_64& random, uint32_t min, uint32_t max) {
  return std::uniform_int_distribution<uint32_t>(min, max)(random);
}

template <typename T>
T OneOf(std::mt19937_64& random, std::initializer_list<T> values) {
  return values.begin()[Uniform(random, 0, static_cast<uint32_t>(values.size()) - 1)];
}

Rope RandomRope(std::mt19937_64& random, uint32_t dim) {
  Rope rope;
  rope.kind = OneOf(random, {RopeStyle::kNone, RopeStyle::kHalfSplit, RopeStyle::kInterleaved});
  if (dim < 2) rope.kind = RopeStyle::kNone;
  if (rope.kind == RopeStyle::kNone) return rope;
  rope.rotary_dim = 2 * Uniform(random, 1, dim / 2);
  rope.scale = std::uniform_real_distribution<double>(0.5, 2.0)(random);
  for (uint32_t i = 0; i < rope.rotary_dim / 2; ++i) {
    rope.frequencies.push_back(std::uniform_real_distribution<double>(0, 1)(random));
  }
  return rope;
}

AttentionLayer RandomAttention(std::mt19937_64& random) {
  AttentionLayer layer;
  layer.kind = OneOf(random, {AttentionKind::kGqa, AttentionKind::kMla});
  layer.kv_heads = layer.kind == AttentionKind::kMla ? 1 : Uniform(random, 1, 16);
  layer.key_dim = Uniform(random, 1, 300);
  layer.value_dim = Uniform(random, 1, 300);
  layer.dtype = OneOf(random, {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E5M2});
  layer.scales = ElementBytes(layer.dtype) == 1 && Uniform(random, 0, 1) == 1;
  layer.rope = RandomRope(random, layer.kind == AttentionKind::kMla ? layer.value_dim : layer.key_dim);
  layer.stored = OneOf(random, {StoredKeys::kZeroBased, StoredKeys::kUnrotated});
  return layer;
}

LinearLayer RandomLinear(std::mt19937_64& random) {
  LinearLayer layer;
  layer.key_heads = Uniform(random, 1, 8);
  layer.value_heads = layer.key_heads * Uniform(random, 1, 4);
  layer.d_k = Uniform(random, 1, 40);
  layer.d_v = Uniform(random, 1, 40);
  layer.family = static_cast<Family>(Uniform(random, 1, 8));
  size_t decays = 0;
  switch (layer.family) {
    case Family::kRetnet:
    case Family::kLightning:
    case Family::kMamba2:
      layer.transition = TransitionForm::kScalar;
      layer.rope = RandomRope(random, layer.d_k);
      decays = layer.value_heads;
      break;
    case Family::kMamba1:
      layer.transition = TransitionForm::kElementwise;
      decays = size_t{layer.value_heads} * layer.d_k * layer.d_v;
      break;
    case Family::kGla:
      layer.transition = TransitionForm::kDiagonal;
      break;
    default:
      layer.transition = TransitionForm::kDense;
  }
  for (size_t i = 0; i < decays; ++i) {
    layer.decay_table.push_back(std::uniform_real_distribution<float>(-4, 4)(random));
  }
  layer.state_dtype = OneOf(random, {DType::kF32, DType::kF16, DType::kBF16});
  layer.order = OneOf(random, {StateOrder::kKeyFirst, StateOrder::kValueFirst});
  if (Uniform(random, 0, 2) != 0) {
    layer.conv_kernel = Uniform(random, 2, 5);
    layer.conv_channels = Uniform(random, 1, 2000);
    const DType conv = OneOf(random, {DType::kF32, DType::kF16, DType::kBF16});
    if (conv != layer.state_dtype) layer.conv_dtype = conv;
    layer.conv_order = OneOf(random, {TailOrder::kTokenFirst, TailOrder::kChannelFirst});
  }
  return layer;
}

// One run starting at `head`.
TransitionRun RandomRun(std::mt19937_64& random, const LinearLayer& layer, uint32_t index, uint32_t head) {
  TransitionRun run{.layer = index, .first_head = head, .heads = Uniform(random, 1, layer.value_heads - head)};
  run.form = OneOf(random, {layer.transition, TransitionForm::kZero, TransitionForm::kLowRank});
  if (run.form != TransitionForm::kLowRank) return run;
  const TupleShape shape = TupleShapeOf(layer);
  const auto bytes = [&](TransitionForm form, uint32_t rank) {
    return TransitionBytes(shape, layer.state_dtype, form, rank);
  };
  uint32_t most = 0;  // rank that still takes fewer bytes than dense
  while (bytes(TransitionForm::kLowRank, most + 1) < bytes(TransitionForm::kDense, 0)) ++most;
  if (layer.transition != TransitionForm::kDense || most == 0) {
    run.form = layer.transition;
  } else {
    run.rank = Uniform(random, 1, most);
  }
  return run;
}

}  // namespace

Identity ExampleIdentity() {
  return {.model_id = "example/hybrid-2",
          .weights_digest = "sha256:00ff",
          .dtype = "float32",
          .quantization = "",
          .tokenizer_digest = "utf-8",
          .lora = ""};
}

Layout ExampleLayout() {
  Layout layout{.page_tokens = 16, .head = 8, .tail = 4};
  layout.layers.push_back(LinearLayer{.family = Family::kGdn,
                                      .key_heads = 1,
                                      .value_heads = 2,
                                      .d_k = 8,
                                      .d_v = 4,
                                      .order = StateOrder::kKeyFirst,
                                      .conv_channels = 24,
                                      .conv_kernel = 4});
  layout.layers.push_back(
      AttentionLayer{.kv_heads = 2,
                     .key_dim = 16,
                     .value_dim = 16,
                     .rope = {.kind = RopeStyle::kHalfSplit, .rotary_dim = 4, .frequencies = {1.0, 0.01}}});
  return layout;
}

Layout OpaqueLayout() {
  Layout layout = ExampleLayout();
  layout.layers.push_back(OpaqueLayer{.token_bytes = 48, .state_bytes = 100'000});
  layout.layers.push_back(OpaqueLayer{.state_bytes = 6});
  return layout;
}

Layout TailsLayout() {
  Layout layout = ExampleLayout();
  auto& linear = std::get<LinearLayer>(layout.layers[0]);
  linear.conv_dtype = DType::kBF16;
  linear.conv_order = TailOrder::kChannelFirst;
  return layout;
}

Layout RandomLayout(std::mt19937_64& random) {
  Layout layout;
  layout.page_tokens = Uniform(random, 1, 512);
  layout.head = Uniform(random, 0, 32);
  layout.tail = Uniform(random, 0, 32);
  const uint32_t layers = Uniform(random, 1, 8);
  for (uint32_t i = 0; i < layers; ++i) {
    if (Uniform(random, 0, 1) == 0) {
      layout.layers.emplace_back(RandomAttention(random));
    } else {
      const LinearLayer linear = RandomLinear(random);
      if (linear.conv_kernel > 0) layout.head = std::max(layout.head, linear.conv_kernel - 1);
      layout.layers.emplace_back(linear);
    }
  }
  return layout;
}

std::vector<TransitionRun> RandomRuns(std::mt19937_64& random, const Layout& layout) {
  std::vector<TransitionRun> runs;
  for (uint32_t i = 0; i < layout.layers.size(); ++i) {
    const auto* linear = std::get_if<LinearLayer>(&layout.layers[i]);
    if (linear == nullptr || Uniform(random, 0, 3) == 0) continue;
    for (uint32_t head = 0; head < linear->value_heads; head += runs.back().heads) {
      runs.push_back(RandomRun(random, *linear, i, head));
    }
  }
  std::ranges::shuffle(runs, random);
  return runs;
}

}  // namespace ashlar
