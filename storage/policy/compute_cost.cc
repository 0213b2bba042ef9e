// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/compute_cost.h"

#include <algorithm>
#include <cmath>
#include <variant>

namespace ashlar::storage {
namespace {

constexpr double kQueryHeadsPerKeyHead = 4;
constexpr double kFlopsPerSquaredWidth = 2 * 12;  // two FLOPs for each of the 12 w² weights
constexpr double kFlopsPerStateNumber = 6;        // decay, update and read
constexpr double kAssumedWidth = 4096;            // of models of which only opaque layers are known

// Sums over a model's layers and shards.
struct Shapes {
  double layers = 0;
  double attention_layers = 0, query_numbers = 0;
  double linear_layers = 0, value_numbers = 0, state_numbers = 0;
};

ComputeCost Estimate(const Shapes& shapes) {
  double width = kAssumedWidth;
  if (shapes.attention_layers > 0) {
    width = shapes.query_numbers / shapes.attention_layers;
  } else if (shapes.linear_layers > 0) {
    width = shapes.value_numbers / shapes.linear_layers;
  }
  return {.flops_per_token =
              shapes.layers * kFlopsPerSquaredWidth * width * width + kFlopsPerStateNumber * shapes.state_numbers,
          .flops_per_square = 2 * shapes.query_numbers};
}

}  // namespace

ComputeCost CostOf(const ComputeCost& declared, const Layout& layout, const TensorShard& shard) {
  if (declared.flops_per_token > 0) return declared;
  Shapes shapes{.layers = static_cast<double>(layout.layers.size())};
  for (const Layer& layer : layout.layers) {
    if (std::holds_alternative<OpaqueLayer>(layer)) continue;  // its bytes do not tell its width
    if (const auto* const attention = std::get_if<AttentionLayer>(&layer)) {
      // Every shard has the whole latent.
      const double shards = attention->kind == AttentionKind::kMla ? 1 : shard.size;
      shapes.attention_layers += 1;
      shapes.query_numbers += kQueryHeadsPerKeyHead * shards * attention->kv_heads * attention->key_dim;
    } else {
      const auto& linear = std::get<LinearLayer>(layer);
      const double values = static_cast<double>(linear.value_heads) * linear.d_v * shard.size;
      shapes.linear_layers += 1;
      shapes.value_numbers += values;
      shapes.state_numbers += values * linear.d_k;
    }
  }
  return Estimate(shapes);
}

double EstimateSavedFlops(const ObjectHeader& header) {
  if (header.parts.empty() || header.tokens == 0) return 0;
  Shapes shapes{.layers = header.parts.back().layer + 1.0};
  for (const Part& part : header.parts) {
    const double numbers = static_cast<double>(part.Bytes()) / ElementBytes(part.dtype) * header.shard.size;
    if (part.form == PartForm::kKeys && header.stored_tokens > 0) {
      shapes.attention_layers += 1;
      shapes.query_numbers += kQueryHeadsPerKeyHead * numbers / static_cast<double>(header.stored_tokens);
    } else if (part.form == PartForm::kState && part.units > 0) {
      const double heads = static_cast<double>(part.units) * header.shard.size;
      shapes.linear_layers += 1;
      shapes.value_numbers += heads * std::sqrt(numbers / heads);
      shapes.state_numbers += numbers;
    }
  }
  // A block and a span save only their own tokens; a segment and a checkpoint save all tokens up to their end.
  const bool own = header.kind == ObjectKind::kPrefixBlock || header.kind == ObjectKind::kSpan;
  return Estimate(shapes).Flops(own ? header.first_token : 0, header.tokens) / header.shard.size;
}

float SavedFlopsPerByte(const ObjectHeader& header, double flops) {
  const double saved = flops > 0 ? flops : EstimateSavedFlops(header);
  return static_cast<float>(saved / static_cast<double>(header.bytes));
}

}  // namespace ashlar::storage
