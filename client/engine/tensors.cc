#include "client/engine/tensors.h"

#include <algorithm>
#include <cstring>
#include <variant>

#include "client/engine/status.h"
#include "proto/tuple_parts.h"

namespace ashlar::engine {
namespace {

const LinearLayer& LinearAt(const ashlar::Layout& layout, uint32_t layer) {
  return std::get<LinearLayer>(layout.layers[layer]);
}

bool LiesIn(const Region& region, const void* data, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(region.data()), at = reinterpret_cast<uintptr_t>(data);
  return data == nullptr || (at >= begin && at - begin <= region.size() && bytes <= region.size() - (at - begin));
}

}  // namespace

TensorBytes::TensorBytes(const LinearLayer& layer) {
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

Status CheckTensors(const ashlar::Layout& layout, std::span<const LinearTensors> linear, bool with_transition,
                    const std::string& field) {
  size_t given = 0;
  for (uint32_t layer = 0; layer < layout.layers.size(); ++layer) {
    if (!std::holds_alternative<LinearLayer>(layout.layers[layer])) continue;
    const std::string at = absl::StrCat(field, "[", given, "]");
    if (given == linear.size()) return Invalid(field, "_count: ", linear.size(), ", and layer ", layer, " is missing");
    const LinearTensors& tensors = linear[given++];
    const TensorBytes bytes(LinearAt(layout, layer));
    if (tensors.layer != layer) return Invalid(at, ".layer: ", tensors.layer, " in place of ", layer);
    if (tensors.state == nullptr) return Invalid(at, ".state: null");
    if (bytes.conv_tail > 0 && tensors.conv_tail == nullptr) return Invalid(at, ".conv_tail: null");
    if (bytes.exponents > 0 && tensors.state_exponents == nullptr) return Invalid(at, ".state_exponents: null");
    if (with_transition && tensors.transition == nullptr) return Invalid(at, ".transition: null");
  }
  if (given < linear.size()) return Invalid(field, "_count: ", linear.size(), " of ", given, " linear layers");
  return {};
}

bool LieIn(const Region& region, const ashlar::Layout& layout, std::span<const LinearTensors> linear) {
  return std::ranges::all_of(linear, [&](const LinearTensors& tensors) {
    const TensorBytes bytes(LinearAt(layout, tensors.layer));
    return LiesIn(region, tensors.state, bytes.state) &&
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
    const TensorBytes bytes(LinearAt(layout, tensors.layer));
    const auto copy = [&held](const void* from, uint64_t size) -> std::byte* {
      if (size == 0) return nullptr;
      std::byte* const to = held.Take(size);
      std::memcpy(to, from, size);
      return to;
    };
    parts.push_back({.layer = tensors.layer,
                     .state = copy(tensors.state, bytes.state),
                     .state_exponents = reinterpret_cast<int32_t*>(copy(tensors.state_exponents, bytes.exponents)),
                     .conv_tail = copy(tensors.conv_tail, bytes.conv_tail)});
  }
  return parts;
}

}  // namespace ashlar::engine
