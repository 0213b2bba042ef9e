#include "client/mapped_object.h"

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"

namespace ashlar::internal {
namespace {

bool HasTransition(ObjectKind kind) {
  return kind == ObjectKind::kSegment;
}

size_t CountHeads(const Layout& layout) {
  size_t heads = 0;
  for (const Layer& layer : layout.layers) {
    if (const auto* linear = std::get_if<LinearLayer>(&layer)) heads += linear->value_heads;
  }
  return heads;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MappedObject>> MappedObject::Open(std::span<const MappedRun> runs,
                                                                 const ExpectedObject& expected) {
  std::unique_ptr<MappedObject> object(new MappedObject);
  if (absl::Status status = object->Locate(runs); !status.ok()) return status;
  const absl::string_view first(reinterpret_cast<const char*>(object->extents_.front()), limits::kExtentBytes);
  absl::StatusOr<ObjectHeader> header = DecodeHeader(first);
  if (!header.ok()) return header.status();
  object->header_ = *std::move(header);
  if (absl::Status status = object->Check(expected); !status.ok()) return status;
  if (absl::Status status = object->FormTuples(expected); !status.ok()) return status;
  return object;
}

absl::Status MappedObject::Locate(std::span<const MappedRun> runs) {
  for (const MappedRun& run : runs) {
    const uint64_t end = (uint64_t{run.first} + run.count) * limits::kExtentBytes;
    if (end > run.arena->size()) return absl::OutOfRangeError("extents outside their arena");
    for (uint64_t i = 0; i < run.count; ++i) {
      extents_.push_back(run.arena->data() + (run.first + i) * limits::kExtentBytes);
    }
    arenas_.push_back(run.arena);
  }
  if (extents_.empty()) return absl::OutOfRangeError("an object without extents");
  return absl::OkStatus();
}

absl::Status MappedObject::Check(const ExpectedObject& expected) const {
  if (header_.ns != expected.ns) return absl::DataLossError("object header: another namespace");
  if (header_.kind != expected.kind) return absl::DataLossError("object header: another kind");
  if (header_.tokens != expected.tokens) return absl::DataLossError("object header: another length");
  if (header_.Extents() > extents_.size()) return absl::DataLossError("object header: longer than its extents");
  return absl::OkStatus();
}

absl::Status MappedObject::FormTuples(const ExpectedObject& expected) {
  const Layout& layout = *expected.layout;
  heads_.reserve(CountHeads(layout));  // pointers into it must stay
  tuples_.resize(layout.layers.size());
  for (uint32_t i = 0; i < layout.layers.size(); ++i) {
    const auto* linear = std::get_if<LinearLayer>(&layout.layers[i]);
    if (linear == nullptr) continue;
    tuples_[i].view = {.heads = heads_.data() + heads_.size(), .position = static_cast<int64_t>(expected.start)};
    if (absl::Status status = FormHeads(*linear, i); !status.ok()) return status;
    if (linear->conv_channels == 0) continue;
    const auto tail = FindPart(i, PartForm::kConvTail, 1, uint64_t{linear->conv_kernel - 1} * linear->conv_channels);
    if (!tail.ok()) return tail.status();
    tuples_[i].conv_tail = Unit(**tail, 0);
  }
  return absl::OkStatus();
}

absl::Status MappedObject::FormHeads(const LinearLayer& linear, uint32_t layer) {
  const uint64_t d_k = linear.d_k;
  const Part* transition = nullptr;
  if (HasTransition(header_.kind)) {
    const auto part = FindPart(layer, PartForm::kTransitionDense, linear.value_heads, d_k * d_k);
    if (!part.ok()) return part.status();
    transition = *part;
  }
  const auto state = FindPart(layer, PartForm::kState, linear.value_heads, d_k * linear.d_v);
  if (!state.ok()) return state.status();
  for (uint32_t head = 0; head < linear.value_heads; ++head) {
    kernels::HeadTuple& tuple = heads_.emplace_back();
    tuple = {.form = kernels::TransitionForm::kZero, .state = Unit(**state, head)};
    if (transition == nullptr) continue;
    tuple.form = kernels::TransitionForm::kDense;
    tuple.transition = Unit(*transition, head);
  }
  return absl::OkStatus();
}

absl::StatusOr<const Part*> MappedObject::FindPart(uint32_t layer, PartForm form, uint32_t units,
                                                   uint64_t unit_floats) const {
  const Part* part = header_.Find(layer, form);
  if (part == nullptr || part->dtype != DType::kF32 || part->units != units ||
      part->Bytes() != units * unit_floats * sizeof(float)) {
    return absl::DataLossError(absl::StrCat("object header: layer ", layer, " lacks its ", Name(form)));
  }
  return part;
}

const float* MappedObject::Unit(const Part& part, uint32_t unit) const {
  const uint64_t offset = part.UnitOffset(unit);
  return reinterpret_cast<const float*>(extents_[offset / limits::kExtentBytes] + offset % limits::kExtentBytes);
}

}  // namespace ashlar::internal
