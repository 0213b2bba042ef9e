// SPDX-License-Identifier: Apache-2.0
// TinyModel: the model of conversation.cc and prefixes.cc, one linear and one attention layer. It uses only plain types
// of the cache. main.cc contains the same model.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>
#include <vector>

#include "ashlar/engine_types.h"

namespace ashlar::shortest {

// Rows are [tokens][kWidth], fp32: a token's row goes through both layers, and each adds to it.
class TinyModel {
 public:
  static constexpr uint32_t kHeads = 2, kDim = 16, kWidth = kHeads * kDim, kPageTokens = 16;
  static constexpr uint32_t kLinear = 0, kAttention = 1, kLayers = 2;
  static constexpr size_t kState = kHeads * kDim * kDim;  // numbers of the linear layer's states

  // Fills in all of a model but its name. The pointers are good as long as this lives.
  void Describe(engine::Model& model) {
    layers_[kLinear] = {.kind = engine::LayerKind::kLinear, .family = engine::Family::kRetnet};
    layers_[kLinear].key_heads = layers_[kLinear].value_heads = layers_[kAttention].kv_heads = kHeads;
    layers_[kLinear].d_k = layers_[kLinear].d_v = layers_[kAttention].key_dim = layers_[kAttention].value_dim = kDim;
    layers_[kLinear].decay_table = kDecays;
    model.weights_digest = "1";
    model.page_tokens = kPageTokens;
    model.layers = layers_;
    model.layer_count = kLayers;
  }

  void Clear() { rows_.clear(), positions_.clear(); }
  // Appends the rows of tokens [begin, end) of a text.
  void Embed(const int32_t* tokens, uint64_t begin, uint64_t end) {
    for (uint64_t p = begin; p < end; positions_.push_back(p++)) {
      for (uint32_t i = 0; i < kWidth; ++i) rows_.push_back(Weight(tokens[p], i));
    }
  }
  const std::vector<uint64_t>& positions() const { return positions_; }  // positions of the rows
  const float* rows() const { return rows_.data(); }

  void Add(const std::vector<float>& out) { std::ranges::transform(rows_, out, rows_.begin(), std::plus()); }
  // The attention layer: a row is its own key and value, and sees all positions up to its own. `memory` has the pages.
  void Attend(uint8_t* memory, const engine::PagePlace& place, const std::vector<int32_t>& table) {
    const auto slot = [&](uint64_t position, uint64_t offset) {
      offset += table[position / kPageTokens] * place.page_stride + position % kPageTokens * place.token_stride;
      return reinterpret_cast<float*>(memory + offset);
    };
    for (size_t h = 0; h < rows_.size(); h += kDim) {
      const uint64_t position = positions_[h / kWidth];
      std::copy_n(&rows_[h], kDim, slot(position, place.key_offset) + h % kWidth);
      std::copy_n(&rows_[h], kDim, slot(position, place.value_offset) + h % kWidth);
      float sum = 0, out[kDim] = {};
      for (uint64_t p = 0; p <= position; ++p) {
        const float *const key = slot(p, place.key_offset) + h % kWidth, *value = slot(p, place.value_offset);
        const float weight = std::exp(std::inner_product(key, key + kDim, &rows_[h], 0.0f));
        sum += weight;
        for (uint32_t i = 0; i < kDim; ++i) out[i] += weight * value[h % kWidth + i];
      }
      for (uint32_t i = 0; i < kDim; ++i) rows_[h + i] += out[i] / sum;
    }
  }
  // The token that follows the last row.
  int32_t BestToken() const {
    float logits['z' + 1] = {};
    for (int32_t token = 'a'; token <= 'z'; ++token) {
      for (uint32_t i = 0; i < kWidth; ++i) logits[token] += rows_[rows_.size() - kWidth + i] * Weight(token, i);
    }
    return static_cast<int32_t>(std::max_element(logits + 'a', std::end(logits)) - logits);
  }

 private:
  static constexpr float kDecays[kHeads] = {-0.3, -0.01};  // logarithms per token
  static float Weight(int32_t token, uint32_t i) { return 0.3f * std::sin(1.7f * (token + 1) * (i + 3)); }

  engine::Layer layers_[kLayers] = {};
  std::vector<float> rows_;
  std::vector<uint64_t> positions_;
};

}  // namespace ashlar::shortest
