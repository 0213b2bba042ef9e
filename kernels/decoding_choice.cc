// SPDX-License-Identifier: Apache-2.0
#include "kernels/decoding_choice.h"

#include <algorithm>
#include <cmath>

namespace ashlar::kernels {
namespace {

// State bytes that a token reads if it does not flush.
double ReadBytes(const DecodeBytes& bytes) {
  return bytes.rounded > 0 ? bytes.rounded : bytes.state;
}
// State bytes that a flushing token moves, excluding buffer slots.
double FlushBytes(const DecodeBytes& bytes) {
  return 2 * bytes.state + bytes.rounded;
}

}  // namespace

DecodeBytes DecodeBytesOf(const LinearShape& shape, DType state, DType buffer, std::optional<DType> rounded) {
  const double heads = shape.heads, key_heads = shape.key_heads, d_k = shape.d_k, d_v = shape.d_v;
  const auto element = static_cast<double>(ElementBytes(buffer));
  return {.state = heads * d_k * d_v * static_cast<double>(ElementBytes(state)),
          .slot = (key_heads * d_k + heads * d_v) * element + heads * SlotGateWidth(shape) * sizeof(float),
          .rounded = rounded ? heads * d_k * d_v * static_cast<double>(ElementBytes(*rounded)) : 0};
}

double RecurrentBytes(const DecodeBytes& bytes) {
  return 2 * bytes.state;
}

double ChunkwiseBytes(const DecodeBytes& bytes, int32_t capacity) {
  const double c = capacity;
  return (ReadBytes(bytes) * (c - 1) + FlushBytes(bytes)) / c + bytes.slot * (c - 1) / 2 + bytes.slot * (c - 1) / c;
}

int32_t BestCapacity(const DecodeBytes& bytes) {
  const double deferred = FlushBytes(bytes) - ReadBytes(bytes) - bytes.slot;  // one token in c pays for this
  if (deferred <= 0) return 1;
  const double best = std::sqrt(2 * deferred / bytes.slot);
  const int32_t below = std::max(1, static_cast<int32_t>(best));
  return ChunkwiseBytes(bytes, below + 1) < ChunkwiseBytes(bytes, below) ? below + 1 : below;
}

DecodeCosts CostsOf(const DecodeBytes& bytes) {
  return {.advance = RecurrentBytes(bytes),
          .recurrent = RecurrentBytes(bytes),
          .read = ReadBytes(bytes) + bytes.slot,
          .flush = FlushBytes(bytes),
          .slot = bytes.slot,
          .flush_slot = bytes.slot,
          .stateless = bytes.slot};
}

double ChunkwiseCost(const DecodeCosts& costs, int32_t capacity) {
  const double c = capacity;
  return ((c - 1) * costs.read + (c - 1) * (c - 2) / 2 * costs.slot + costs.flush + (c - 1) * costs.flush_slot) / c;
}

DecodeChoice ChooseDecoding(const DecodeCosts& costs, std::optional<int64_t> buffered_context) {
  const double recurrent = std::min(costs.advance, costs.recurrent);
  DecodeChoice chosen{DecodeForm::kRecurrent, costs.advance < costs.recurrent ? 0 : 1, recurrent};
  for (int32_t capacity = 2; capacity <= kMostCapacity; ++capacity) {
    const double cost = ChunkwiseCost(costs, capacity);
    if (cost > kWorthwhile * recurrent || cost >= chosen.cost) continue;
    chosen = {DecodeForm::kChunkwise, capacity, cost};
  }
  if (!buffered_context) return chosen;
  const double without_state = costs.stateless + static_cast<double>(*buffered_context) * costs.slot;
  return without_state < chosen.cost ? DecodeChoice{DecodeForm::kKvOnly, 0, without_state} : chosen;
}

}  // namespace ashlar::kernels
