// SPDX-License-Identifier: Apache-2.0
// The model written again from its formulas: one token after the other, plain loops, fp64. Tests compare the engine
// with it; only the weights are shared.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "examples/refengine/model.h"

namespace ashlar::refengine {

struct PlainResult {
  std::vector<std::vector<double>> logits;  // [tokens][vocabulary]
  // After the last token, one entry per linear layer.
  std::vector<std::vector<double>> states;   // [value_heads, d_k, d_v]
  std::vector<std::vector<double>> windows;  // [conv_kernel − 1, conv_channels]
};

PlainResult PlainForward(const Model& model, std::span<const int32_t> tokens);

}  // namespace ashlar::refengine
