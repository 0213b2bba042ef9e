// SPDX-License-Identifier: Apache-2.0
#include "client/engine/tensors.h"

#include <algorithm>
#include <cstring>
#include <variant>

#include "client/engine/near_memory.h"
#include "client/engine/status.h"
#include "proto/tuple_parts.h"

namespace ashlar::engine {
namespace {

bool LiesIn(const Region& region, const void* data, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(region.data()), at = reinterpret_cast<uintptr_t>(data);
  return data == nullptr || (at >= begin && at - begin <= region.size() && bytes <= region.size() - (at - begin));
}

// Rows of equal size and equal distance, in bytes.
struct RowGrid {
  uint64_t rows = 0, row = 0, apart = 0;
  bool dense() const { return apart == row || rows < 2; }
};
RowGrid StateGrid(const ashlar::Layer& any, const LinearTensors& tensors) {
  if (const auto* opaque = std::get_if<OpaqueLayer>(&any)) return {1, opaque->state_bytes, opaque->state_bytes};
  const auto& layer = std::get<LinearLayer>(any);
  const uint64_t element = ElementBytes(layer.state_dtype), head = uint64_t{layer.d_k} * layer.d_v * element;
  const auto apart = static_cast<uint64_t>(tensors.state_head_stride) * element;
  return {layer.value_heads, head, apart == 0 ? head : apart};
}
RowGrid TailGrid(const ashlar::Layer& any, const LinearTensors& tensors) {
  const auto* const linear = std::get_if<LinearLayer>(&any);
  if (linear == nullptr || linear->conv_kernel == 0) return {};
  const LinearLayer& layer = *linear;
  const uint64_t tokens = layer.conv_kernel - 1, channels = layer.conv_channels;
  const bool by_token = layer.conv_order == TailOrder::kTokenFirst;
  const uint64_t rows = by_token ? tokens : channels;
  const uint64_t element = rows == 0 ? 0 : ElementBytes(ConvType(layer));
  const uint64_t row = (by_token ? channels : tokens) * element;
  const auto apart = static_cast<uint64_t>(tensors.conv_row_stride) * element;
  return {rows, row, apart == 0 ? row : apart};
}

}  // namespace

TensorBytes::TensorBytes(const ashlar::Layer& any) {
  if (const auto* opaque = std::get_if<OpaqueLayer>(&any)) {
    state = opaque->state_bytes;
    return;
  }
  const auto& layer = std::get<LinearLayer>(any);
  const uint64_t heads = layer.value_heads, element = ElementBytes(layer.state_dtype);
  state = heads * layer.d_k * layer.d_v * element;
  if (layer.state_dtype == DType::kF16) exponents = heads * sizeof(int32_t);
  conv_tail = ConvTailBytes(layer);
  const TupleShape shape = TupleShapeOf(layer);
  transition = heads * TransitionBytes(shape, layer.state_dtype, shape.transition);
}

uint64_t TensorBytes::staged(bool with_transition) const {
  return Staging::Align(state) + Staging::Align(exponents) + Staging::Align(conv_tail) +
         (with_transition ? Staging::Align(transition) : 0);
}

Status CheckTensors(const ashlar::Layout& layout, const Region& region, std::span<const LinearTensors> linear,
                    bool with_transition, const std::string& field) {
  size_t given = 0;
  for (uint32_t layer = 0; layer < layout.layers.size(); ++layer) {
    if (!HasState(layout.layers[layer])) continue;
    const std::string at = absl::StrCat(field, "[", given, "]");
    if (given == linear.size())
      return Invalid(field, "_count: ", linear.size(), "; layer ", layer, ", which has a state, is missing");
    const LinearTensors& tensors = linear[given++];
    const TensorBytes bytes(layout.layers[layer]);
    if (tensors.layer != layer) return Invalid(at, ".layer: ", tensors.layer, "; expected ", layer);
    if (tensors.state == nullptr) return Invalid(at, ".state: null");
    if (tensors.state_head_stride > kMostStride)
      return Invalid(at, ".state_head_stride: ", tensors.state_head_stride, "; expected at most ", kMostStride);
    if (tensors.conv_row_stride > kMostStride)
      return Invalid(at, ".conv_row_stride: ", tensors.conv_row_stride, "; expected at most ", kMostStride);
    const RowGrid state = StateGrid(layout.layers[layer], tensors), tail = TailGrid(layout.layers[layer], tensors);
    if (std::holds_alternative<OpaqueLayer>(layout.layers[layer]) && tensors.state_head_stride != 0)
      return Invalid(at, ".state_head_stride: ", tensors.state_head_stride, "; expected 0 for an opaque layer");
    if (tensors.state_head_stride < 0 || state.apart < state.row)
      return Invalid(at, ".state_head_stride: ", tensors.state_head_stride, "; heads overlap");
    if (tensors.conv_row_stride < 0 || tail.apart < tail.row)
      return Invalid(at, ".conv_row_stride: ", tensors.conv_row_stride, "; rows overlap");
    if (bytes.conv_tail > 0 && tensors.conv_tail == nullptr) return Invalid(at, ".conv_tail: null");
    if (bytes.exponents > 0 && tensors.state_exponents == nullptr) return Invalid(at, ".state_exponents: null");
    if (with_transition && tensors.transition == nullptr) return Invalid(at, ".transition: null");
    if (Status near = CheckNear(region, tensors, at); !near.ok()) return near;
  }
  if (given < linear.size())
    return Invalid(field, "_count: ", linear.size(), "; the model has ", given, " layers with a state");
  return {};
}

bool LieIn(const Region& region, const ashlar::Layout& layout, std::span<const LinearTensors> linear) {
  return std::ranges::all_of(linear, [&](const LinearTensors& tensors) {
    const ashlar::Layer& layer = layout.layers[tensors.layer];
    const TensorBytes bytes(layer);
    return StateGrid(layer, tensors).dense() && TailGrid(layer, tensors).dense() &&
           LiesIn(region, tensors.state, bytes.state) &&
           (bytes.conv_tail == 0 || LiesIn(region, tensors.conv_tail, bytes.conv_tail)) &&
           (bytes.exponents == 0 || LiesIn(region, tensors.state_exponents, bytes.exponents));
  });
}

std::vector<PublishParts::Linear> InPlace(std::span<const LinearTensors> linear) {
  std::vector<PublishParts::Linear> parts;
  for (const LinearTensors& tensors : linear) {
    parts.push_back({.layer = tensors.layer,
                     .state = static_cast<const std::byte*>(tensors.state),
                     .state_exponents = tensors.state_exponents,
                     .conv_tail = static_cast<const std::byte*>(tensors.conv_tail)});
  }
  return parts;
}

std::vector<PublishParts::Linear> Stage(const ashlar::Layout& layout, std::span<const LinearTensors> linear,
                                        Staging::Held& held) {
  std::vector<PublishParts::Linear> parts;
  for (const LinearTensors& tensors : linear) {
    const ashlar::Layer& layer = layout.layers[tensors.layer];
    const TensorBytes bytes(layer);
    const auto copy = [&held](const void* from, uint64_t size) -> std::byte* {
      if (size == 0) return nullptr;
      std::byte* const to = held.Take(size);
      std::memcpy(to, from, size);
      return to;
    };
    const auto gather = [&held](const void* from, const RowGrid& grid, uint64_t size) -> std::byte* {
      if (size == 0) return nullptr;
      std::byte* const to = held.Take(size);
      for (uint64_t i = 0; i < grid.rows; ++i) {
        std::memcpy(to + i * grid.row, static_cast<const std::byte*>(from) + i * grid.apart, grid.row);
      }
      return to;
    };
    parts.push_back({.layer = tensors.layer,
                     .state = gather(tensors.state, StateGrid(layer, tensors), bytes.state),
                     .state_exponents = reinterpret_cast<int32_t*>(copy(tensors.state_exponents, bytes.exponents)),
                     .conv_tail = gather(tensors.conv_tail, TailGrid(layer, tensors), bytes.conv_tail)});
  }
  return parts;
}

}  // namespace ashlar::engine
