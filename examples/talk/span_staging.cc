#include "examples/talk/span_staging.h"

#include <cstring>

namespace ashlar::talk {
namespace {

size_t Align(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

}  // namespace

size_t SpanStaging::Bytes(const refengine::ModelConfig& config, uint64_t tokens) {
  const refengine::LinearConfig& linear = config.linear;
  size_t layer = 0;
  for (const int32_t floats : {linear.key_channels(), linear.value_channels(), linear.gate_channels() / 2,
                               linear.gate_channels() / 2, linear.conv_channels()}) {
    layer += Align(tokens * static_cast<size_t>(floats) * sizeof(float));
  }
  return layer * static_cast<size_t>(config.linear_layers());
}

SpanStaging::SpanStaging(const refengine::ModelConfig& config, std::byte* at, uint64_t tokens, DType dtype)
    : dtype_(dtype), tokens_(tokens), at_(at) {
  const refengine::LinearConfig& linear = config.linear;
  const auto rows = [tokens](int32_t floats) { return std::vector<float>(tokens * static_cast<size_t>(floats)); };
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    layers_.push_back({.layer = static_cast<uint32_t>(layer),
                       .keys = rows(linear.key_channels()),
                       .values = rows(linear.value_channels()),
                       .gates = rows(linear.gate_channels() / 2),
                       .betas = rows(linear.gate_channels() / 2),
                       .conv_inputs = rows(linear.conv_channels())});
  }
  for (Layer& layer : layers_) {
    rows_.push_back({.keys = layer.keys.data(),
                     .values = layer.values.data(),
                     .gates = layer.gates.data(),
                     .betas = layer.betas.data(),
                     .conv_inputs = layer.conv_inputs.data()});
  }
  tape_ = {.tokens = static_cast<int64_t>(tokens), .linear = rows_};
}

CapturedSpan SpanStaging::Take(uint64_t tokens) {
  CapturedSpan span{.begin = static_cast<uint64_t>(tape_.begin)};
  std::byte* at = at_;
  const auto place = [&](const std::vector<float>& rows, DType dtype) -> std::byte* {
    if (rows.empty()) return nullptr;
    std::byte* const placed = at;
    const size_t count = rows.size() / tokens_ * tokens;
    for (size_t i = 0; i < count; ++i) {
      kernels::WriteElement(dtype, placed, static_cast<int64_t>(i), rows[i]);
    }
    at += Align(rows.size() * sizeof(float));
    return placed;
  };
  for (const Layer& layer : layers_) {
    CapturedSpan::Linear& out = span.linear.emplace_back(CapturedSpan::Linear{.layer = layer.layer});
    out.keys = place(layer.keys, dtype_);
    out.values = place(layer.values, dtype_);
    out.gates = reinterpret_cast<const float*>(place(layer.gates, DType::kF32));
    out.betas = reinterpret_cast<const float*>(place(layer.betas, DType::kF32));
    out.conv_inputs = place(layer.conv_inputs, DType::kF32);  // the layout's states are fp32
  }
  return span;
}

}  // namespace ashlar::talk
