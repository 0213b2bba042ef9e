// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/span_staging.h"

namespace ashlar::rag {

SpanStaging::SpanStaging(const refengine::ModelConfig& config, uint64_t tokens) {
  const refengine::LinearConfig& linear = config.linear;
  const auto rows = [&](int32_t floats) { return memory_.emplace_back(tokens * static_cast<size_t>(floats)).data(); };
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    const refengine::SpanRows to{.keys = rows(linear.key_channels()),
                                 .values = rows(linear.value_channels()),
                                 .gates = rows(linear.gate_channels() / 2),
                                 .betas = rows(linear.gate_channels() / 2),
                                 .conv_inputs = rows(linear.conv_channels())};
    rows_.push_back(to);
    recorded_.push_back({static_cast<uint32_t>(layer), to.keys, to.values, to.gates, to.betas, to.conv_inputs});
  }
  tape_ = {.tokens = static_cast<int64_t>(tokens), .linear = rows_};
}

}  // namespace ashlar::rag
