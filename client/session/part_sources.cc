// SPDX-License-Identifier: Apache-2.0
#include "client/session/part_sources.h"

#include <variant>

#include "ashlar/v1/cache.pb.h"
#include "proto/tuple_parts.h"

namespace ashlar::internal {
namespace {

const LinearLayer* LinearAt(const Layout& layout, uint32_t layer) {
  return layer < layout.layers.size() ? std::get_if<LinearLayer>(&layout.layers[layer]) : nullptr;
}

}  // namespace

v1::PartSource* PartSources::Place(uint32_t layer, PartForm form, const std::byte* data, uint64_t bytes,
                                   Parts& parts) const {
  const std::optional<uint64_t> offset = region_.OffsetOf(data, bytes);
  if (!offset.has_value()) return nullptr;
  v1::PartSource* part = parts.Add();
  part->set_layer(layer);
  part->set_form(static_cast<uint32_t>(form));
  part->set_region(region_id_);
  part->set_offset(*offset);
  return part;
}

bool PartSources::Add(const PublishParts::Linear& tensors, Parts& parts) const {
  if (tensors.layer >= layout_.layers.size()) return false;
  if (const auto* opaque = std::get_if<OpaqueLayer>(&layout_.layers[tensors.layer])) {
    return opaque->state_bytes > 0 &&
           Place(tensors.layer, PartForm::kOpaqueState, tensors.state, opaque->state_bytes, parts) != nullptr;
  }
  const LinearLayer* const linear = LinearAt(layout_, tensors.layer);
  if (linear == nullptr) return false;
  const uint64_t element = ElementBytes(linear->state_dtype), heads = linear->value_heads;
  const auto add = [&](PartForm form, const void* data, uint64_t bytes) {
    const auto* const at = static_cast<const std::byte*>(data);
    return data == nullptr || Place(tensors.layer, form, at, bytes, parts) != nullptr;
  };
  const uint64_t transition = TransitionBytes(TupleShapeOf(*linear), linear->state_dtype, linear->transition);
  return add(PartFormOf(linear->transition), tensors.transition, heads * transition) &&
         add(PartForm::kState, tensors.state, heads * linear->d_k * linear->d_v * element) &&
         add(PartForm::kStateExponents, tensors.state_exponents, heads * sizeof(int32_t)) &&
         (linear->conv_channels == 0 || add(PartForm::kConvTail, tensors.conv_tail, ConvTailBytes(*linear)));
}

bool PartSources::Add(const PublishParts::Run& run, Parts& parts) const {
  const TransitionRun& heads = run.heads;
  const LinearLayer* const linear = LinearAt(layout_, heads.layer);
  if (linear == nullptr || heads.heads == 0 || heads.heads > linear->value_heads) return false;
  const uint64_t unit = TransitionBytes(TupleShapeOf(*linear), linear->state_dtype, heads.form, heads.rank);
  const PartForm form = PartFormOf(heads.form);
  v1::PartSource* const part = unit == 0 ? parts.Add() : Place(heads.layer, form, run.units, heads.heads * unit, parts);
  if (part == nullptr) return false;
  part->set_layer(heads.layer);
  part->set_form(static_cast<uint32_t>(form));
  part->set_first_head(heads.first_head);
  part->set_heads(heads.heads);
  part->set_rank(heads.rank);
  return true;
}

bool PartSources::Add(const CapturedSpan::Linear& rows, uint64_t tokens, DType dtype, Parts& parts) const {
  const LinearLayer* const linear = LinearAt(layout_, rows.layer);
  if (linear == nullptr) return false;
  const auto add = [&](PartForm form, const void* data, uint64_t row_bytes) {
    const auto* const at = static_cast<const std::byte*>(data);
    return data == nullptr || Place(rows.layer, form, at, tokens * row_bytes, parts) != nullptr;
  };
  const SpanRowBytes bytes = SpanRowBytesOf(*linear, dtype);
  return add(PartForm::kSpanKeys, rows.keys, bytes.keys) && add(PartForm::kSpanValues, rows.values, bytes.values) &&
         add(PartForm::kSpanGates, rows.gates, bytes.gates) && add(PartForm::kSpanBetas, rows.betas, bytes.betas) &&
         add(PartForm::kSpanConvInputs, rows.conv_inputs, bytes.conv_inputs);
}

}  // namespace ashlar::internal
