// SPDX-License-Identifier: Apache-2.0
#include "client/session/span.h"

#include <algorithm>
#include <cstring>

namespace ashlar {

SpanInputs::SpanInputs(const LinearLayer& layer, const MappedSpan& span, uint32_t index)
    : layer_(layer),
      mapped_(span.layers[index]),
      tokens_(span.tokens),
      keys_(Read(mapped_.keys)),
      values_(Read(mapped_.values)),
      gates_(Read(mapped_.gates)),
      betas_(Read(mapped_.betas)) {}

std::vector<float> SpanInputs::Read(const MappedRows& rows) const {
  std::vector<float> numbers;
  if (rows.empty()) return numbers;
  const uint64_t columns = rows.row_bytes / ElementBytes(rows.dtype);
  numbers.reserve(tokens_ * columns);
  for (uint64_t token = 0; token < tokens_; ++token) {
    for (uint64_t i = 0; i < columns; ++i) {
      numbers.push_back(kernels::ReadElement(rows.dtype, rows.Row(token), static_cast<int64_t>(i)));
    }
  }
  return numbers;
}

kernels::TokenInputs SpanInputs::inputs() const {
  const auto stride = [this](const std::vector<float>& rows) { return static_cast<int64_t>(rows.size() / tokens_); };
  const auto data = [](const std::vector<float>& rows) { return rows.empty() ? nullptr : rows.data(); };
  return {.tokens = static_cast<int64_t>(tokens_),
          .k = data(keys_),
          .v = data(values_),
          .g = data(gates_),
          .beta = data(betas_),
          .k_stride = stride(keys_),
          .v_stride = stride(values_),
          .g_stride = stride(gates_),
          .beta_stride = stride(betas_)};
}

std::vector<std::byte> SpanInputs::ConvTail(const void* checkpoint) const {
  if (mapped_.conv_inputs.empty()) return {};
  const uint64_t rows = layer_.conv_kernel - 1, row_bytes = mapped_.conv_inputs.row_bytes;
  std::vector<std::byte> tail(rows * row_bytes);
  const auto* const before = static_cast<const std::byte*>(checkpoint);
  const bool token_first = layer_.conv_order == TailOrder::kTokenFirst;
  const uint64_t element = ElementBytes(ConvType(layer_));
  // Distances in a tail between tokens and between channels.
  const uint64_t token_bytes = token_first ? row_bytes : element,
                 channel_bytes = token_first ? element : rows * element;
  for (uint64_t i = 0; i < rows;
       ++i) {  // row i of the tail is row tokens_ + i of the checkpoint's tail and of the span's
    const uint64_t row = tokens_ + i;
    std::byte* const to = tail.data() + i * token_bytes;
    const bool is_before = row < rows;
    const std::byte* const from = is_before ? before + row * token_bytes : mapped_.conv_inputs.Row(row - rows);
    if (token_first) {
      std::memcpy(to, from, row_bytes);
      continue;
    }
    for (uint64_t channel = 0; channel < layer_.conv_channels; ++channel) {
      std::memcpy(to + channel * channel_bytes, from + channel * (is_before ? channel_bytes : element), element);
    }
  }
  return tail;
}

}  // namespace ashlar
