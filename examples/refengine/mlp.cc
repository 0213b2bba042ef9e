// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/matrix.h"
#include "examples/refengine/mixers.h"
#include "examples/refengine/rows.h"

namespace ashlar::refengine {

void Mlp::Run(int32_t layer, int64_t rows, const float* normed, float* residual) {
  const ModelConfig& config = machine_.model.config();
  const LayerWeights& weights = machine_.model.weights().layers[layer];
  const int64_t inner = config.mlp_dim;
  float* gate_up = gate_up_memory_.Get(rows * 2 * inner);
  MatMul({.m = rows,
          .n = 2 * inner,
          .k = config.d_model,
          .a = normed,
          .a_stride = config.d_model,
          .b = weights.gate_up.data(),
          .b_stride = 2 * inner,
          .c = gate_up,
          .c_stride = 2 * inner},
         machine_.workers);
  ForRows(machine_.workers, rows, [&](int64_t row) {
    float* gate = gate_up + row * 2 * inner;
    SwiGlu(gate, gate + inner, inner, gate);
  });
  MatMul({.m = rows,
          .n = config.d_model,
          .k = inner,
          .a = gate_up,
          .a_stride = 2 * inner,
          .b = weights.down.data(),
          .b_stride = config.d_model,
          .c = residual,
          .c_stride = config.d_model,
          .accumulate = true},
         machine_.workers);
}

}  // namespace ashlar::refengine
