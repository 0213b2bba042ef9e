// SPDX-License-Identifier: Apache-2.0
// Tables of parts: properties of forms, and positions of units.
#include "proto/object.h"

#include <algorithm>
#include <utility>

#include "proto/limits.h"

namespace ashlar {

absl::string_view Name(PartForm form) {
  switch (form) {
    case PartForm::kTransitionDense:
      return "transition_dense";
    case PartForm::kState:
      return "state";
    case PartForm::kConvTail:
      return "conv_tail";
    case PartForm::kKeys:
      return "keys";
    case PartForm::kValues:
      return "values";
    case PartForm::kKeyScales:
      return "key_scales";
    case PartForm::kValueScales:
      return "value_scales";
    case PartForm::kTransitionScalar:
      return "transition_scalar";
    case PartForm::kTransitionDiagonal:
      return "transition_diagonal";
    case PartForm::kTransitionElementwise:
      return "transition_elementwise";
    case PartForm::kTransitionLowRank:
      return "transition_low_rank";
    case PartForm::kTransitionZero:
      return "transition_zero";
    case PartForm::kStateExponents:
      return "state_exponents";
    case PartForm::kSpanKeys:
      return "span_keys";
    case PartForm::kSpanValues:
      return "span_values";
    case PartForm::kSpanGates:
      return "span_gates";
    case PartForm::kSpanBetas:
      return "span_betas";
    case PartForm::kSpanConvInputs:
      return "span_conv_inputs";
    case PartForm::kOpaqueRows:
      return "opaque_rows";
    case PartForm::kOpaqueState:
      return "opaque_state";
  }
  return "unknown";
}

PartForm PartFormOf(TransitionForm kind) {
  switch (kind) {
    case TransitionForm::kScalar:
      return PartForm::kTransitionScalar;
    case TransitionForm::kDiagonal:
      return PartForm::kTransitionDiagonal;
    case TransitionForm::kDense:
      return PartForm::kTransitionDense;
    case TransitionForm::kElementwise:
      return PartForm::kTransitionElementwise;
    case TransitionForm::kLowRank:
      return PartForm::kTransitionLowRank;
    case TransitionForm::kZero:
      return PartForm::kTransitionZero;
  }
  return PartForm::kTransitionZero;  // does not happen for a checked kind
}

std::optional<TransitionForm> TransitionFormOf(PartForm form) {
  switch (form) {
    case PartForm::kTransitionScalar:
      return TransitionForm::kScalar;
    case PartForm::kTransitionDiagonal:
      return TransitionForm::kDiagonal;
    case PartForm::kTransitionDense:
      return TransitionForm::kDense;
    case PartForm::kTransitionElementwise:
      return TransitionForm::kElementwise;
    case PartForm::kTransitionLowRank:
      return TransitionForm::kLowRank;
    case PartForm::kTransitionZero:
      return TransitionForm::kZero;
    default:
      return std::nullopt;
  }
}

uint64_t Part::End() const {
  return Empty() ? 0 : UnitOffset(units - 1) + last_unit_bytes;
}

uint64_t Part::UnitOffset(uint32_t unit) const {
  constexpr uint64_t kAlignment = limits::kUnitAlignment;
  const uint64_t stride = (unit_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const uint64_t extent_start = offset / limits::kExtentBytes * limits::kExtentBytes;
  const uint64_t first_extent_units = (limits::kExtentBytes - (offset - extent_start) - unit_bytes) / stride + 1;
  if (unit < first_extent_units) return offset + unit * stride;
  const uint64_t extent_units = (limits::kExtentBytes - unit_bytes) / stride + 1;
  const uint64_t rest = unit - first_extent_units;
  return extent_start + (1 + rest / extent_units) * limits::kExtentBytes + rest % extent_units * stride;
}

const Part* ObjectHeader::Find(uint32_t layer, PartForm form) const {
  // Parts are sorted by layer, then form: by PlanObject and by DecodeHeader.
  const auto found = std::lower_bound(parts.begin(), parts.end(), std::pair(layer, form),
                                      [](const Part& part, const std::pair<uint32_t, PartForm>& wanted) {
                                        return std::pair(part.layer, part.form) < wanted;
                                      });
  return found != parts.end() && found->layer == layer && found->form == form ? &*found : nullptr;
}

std::span<const Part> ObjectHeader::Layer(uint32_t layer) const {
  return {std::ranges::lower_bound(parts, layer, {}, &Part::layer),
          std::ranges::upper_bound(parts, layer, {}, &Part::layer)};
}

uint64_t ObjectHeader::Extents() const {
  return (bytes + limits::kExtentBytes - 1) / limits::kExtentBytes;
}

}  // namespace ashlar
