// SPDX-License-Identifier: Apache-2.0
#include "client/session/mapped_object.h"

#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"
#include "proto/tuple_parts.h"

namespace ashlar::internal {
namespace {

size_t CountHeads(const Layout& layout) {
  size_t heads = 0;
  for (const Layer& layer : layout.layers) {
    if (const auto* linear = std::get_if<LinearLayer>(&layer)) heads += linear->value_heads;
    if (const auto* opaque = std::get_if<OpaqueLayer>(&layer)) heads += OpaqueUnits(*opaque);
  }
  return heads;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MappedObject>> MappedObject::Open(std::span<const MappedRun> runs,
                                                                 const ExpectedObject& expected) {
  std::unique_ptr<MappedObject> object(new MappedObject);
  if (absl::Status status = object->Locate(runs); !status.ok()) return status;
  absl::StatusOr<ObjectHeader> header = object->ReadHeader();
  if (!header.ok()) return header.status();
  object->header_ = *std::move(header);
  if (absl::Status status = object->Check(expected); !status.ok()) return status;
  const bool span = expected.kind == ObjectKind::kSpan;
  if (absl::Status status = span ? object->FormSpan(expected) : object->FormTuples(expected); !status.ok()) {
    return status;
  }
  return object;
}

absl::Status MappedObject::Locate(std::span<const MappedRun> runs) {
  for (const MappedRun& run : runs) {
    const uint64_t end = (uint64_t{run.first} + run.count) * limits::kExtentBytes;
    if (end > run.arena->size) return absl::OutOfRangeError("extents outside their arena");
    for (uint64_t i = 0; i < run.count; ++i) {
      extents_.push_back(run.arena->data + (run.first + i) * limits::kExtentBytes);
    }
    arenas_.push_back(run.arena);
  }
  if (extents_.empty()) return absl::OutOfRangeError("an object without extents");
  return absl::OkStatus();
}

absl::StatusOr<ObjectHeader> MappedObject::ReadHeader() const {
  const SharedMemory& arena = *arenas_.front();
  if (arena.kind == kernels::MemoryKind::kHost) {
    return DecodeHeader({reinterpret_cast<const char*>(extents_.front()), limits::kExtentBytes});
  }
  std::string copy(limits::kExtentBytes, '\0');
  arena.CopyToHost(copy.data(), extents_.front(), copy.size());
  return DecodeHeader(copy);
}

absl::Status MappedObject::Check(const ExpectedObject& expected) const {
  if (header_.ns != expected.ns) return absl::DataLossError("object header: wrong namespace");
  if (header_.kind != expected.kind) return absl::DataLossError("object header: wrong kind");
  const bool span = expected.kind == ObjectKind::kSpan;
  if (span ? header_.tokens < expected.tokens || header_.first_token != expected.start ||
                 header_.stored_tokens < expected.span_tokens
           : header_.tokens != expected.tokens) {
    return absl::DataLossError("object header: wrong number of tokens");
  }
  if (header_.Extents() > extents_.size()) return absl::DataLossError("object header: longer than its extents");
  return absl::OkStatus();
}

absl::Status MappedObject::FormTuples(const ExpectedObject& expected) {
  const Layout& layout = *expected.layout;
  heads_.reserve(CountHeads(layout));  // pointers to its elements must stay valid
  tuples_.resize(layout.layers.size());
  for (uint32_t i = 0; i < layout.layers.size(); ++i) {
    if (!HasState(layout.layers[i])) continue;
    const auto* linear = std::get_if<LinearLayer>(&layout.layers[i]);
    const absl::Status formed =
        linear != nullptr ? FormHeads(*linear, i) : FormOpaque(std::get<OpaqueLayer>(layout.layers[i]), i);
    if (!formed.ok()) return formed;
    tuples_[i].view.position = static_cast<int64_t>(expected.start);
    tuples_[i].memory = arenas_.front()->kind;
    if (linear == nullptr || linear->conv_channels == 0) continue;
    const Part* const tail = header_.Find(i, PartForm::kConvTail);
    if (tail == nullptr || tail->dtype != ConvType(*linear) || tail->units != 1 ||
        tail->Bytes() != ConvTailBytes(*linear)) {
      return absl::DataLossError(absl::StrCat("object header: layer ", i, " has no convolution tail"));
    }
    tuples_[i].conv_tail = Unit(*tail, 0);
  }
  return absl::OkStatus();
}

absl::Status MappedObject::FormSpan(const ExpectedObject& expected) {
  span_.memory = arenas_.front()->kind;
  span_.tokens = expected.span_tokens;
  span_.layers.resize(expected.layout->layers.size());
  for (uint32_t i = 0; i < span_.layers.size(); ++i) {
    const auto* const linear = std::get_if<LinearLayer>(&expected.layout->layers[i]);
    if (linear == nullptr) continue;
    const Part* const keys = header_.Find(i, PartForm::kSpanKeys);
    const SpanRowBytes bytes = SpanRowBytesOf(*linear, keys == nullptr ? DType::kF32 : keys->dtype);
    MappedSpan::Layer& layer = span_.layers[i];
    for (const auto& [form, row_bytes, rows] : {std::tuple(PartForm::kSpanKeys, bytes.keys, &layer.keys),
                                                {PartForm::kSpanValues, bytes.values, &layer.values},
                                                {PartForm::kSpanGates, bytes.gates, &layer.gates},
                                                {PartForm::kSpanBetas, bytes.betas, &layer.betas},
                                                {PartForm::kSpanConvInputs, bytes.conv_inputs, &layer.conv_inputs}}) {
      if (absl::Status status = FormRows(i, form, row_bytes, *rows); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status MappedObject::FormRows(uint32_t layer, PartForm form, uint64_t row_bytes, MappedRows& rows) const {
  const Part* const part = header_.Find(layer, form);
  const uint64_t stored = part == nullptr ? 0 : part->unit_bytes / part->unit_tokens;
  if (stored != row_bytes) {
    return absl::DataLossError(absl::StrCat("object header: layer ", layer, " has ", Name(form), " of the wrong size"));
  }
  if (part == nullptr) return absl::OkStatus();
  rows = {.unit_tokens = part->unit_tokens, .row_bytes = row_bytes, .dtype = part->dtype};
  for (uint32_t unit = 0; unit < part->units; ++unit) rows.units.push_back(Unit(*part, unit));
  return absl::OkStatus();
}

// Types and forms have the same numbers in the contract and in the kernels.
absl::Status MappedObject::FormHeads(const LinearLayer& linear, uint32_t layer) {
  const absl::StatusOr<TupleParts> tuple = FindTuple(header_, layer, TupleShapeOf(linear));
  if (!tuple.ok()) return tuple.status();
  if (tuple->state->dtype != linear.state_dtype) {
    return absl::DataLossError(absl::StrCat("object header: layer ", layer, " has states of the wrong dtype"));
  }
  tuples_[layer].view = {.heads = heads_.data() + heads_.size(),
                         .transition_dtype = tuple->transition_dtype,
                         .state_dtype = tuple->state->dtype};
  for (uint32_t head = 0; head < linear.value_heads; ++head) {
    const TupleParts::Transition& transition = tuple->transitions[head];
    kernels::HeadTuple& out = heads_.emplace_back(kernels::HeadTuple{
        .form = transition.form, .rank = static_cast<int32_t>(transition.rank), .state = Unit(*tuple->state, head)});
    if (transition.part != nullptr) out.transition = Unit(*transition.part, transition.unit);
  }
  if (tuple->exponents != nullptr) {
    exponents_.push_back(
        {layer, Unit(*tuple->exponents, 0), std::span(heads_).last(static_cast<size_t>(linear.value_heads))});
    Read(exponents_.back());
  }
  return absl::OkStatus();
}

absl::Status MappedObject::FormOpaque(const OpaqueLayer& opaque, uint32_t layer) {
  const Part* const state = header_.Find(layer, PartForm::kOpaqueState);
  if (state == nullptr || state->unit_bytes != OpaqueUnitBytes(opaque) || state->Bytes() != opaque.state_bytes) {
    return absl::DataLossError(
        absl::StrCat("object header: layer ", layer, " has no opaque state of ", opaque.state_bytes, " bytes"));
  }
  tuples_[layer].view = {
      .heads = heads_.data() + heads_.size(), .transition_dtype = kOpaqueType, .state_dtype = kOpaqueType};
  for (uint32_t unit = 0; unit < state->units; ++unit)
    heads_.push_back({.form = TransitionForm::kZero, .state = Unit(*state, unit)});
  return absl::OkStatus();
}

void MappedObject::Read(const Exponents& exponents) const {
  std::vector<int32_t> copy(exponents.heads.size());
  arenas_.front()->CopyToHost(copy.data(), exponents.stored, copy.size() * sizeof(int32_t));
  for (size_t head = 0; head < copy.size(); ++head) exponents.heads[head].state_exponent = copy[head];
}

void MappedObject::Arrived(uint32_t layers) {
  MutexLock lock(mutex_);
  for (; arrived_ < exponents_.size() && exponents_[arrived_].layer < layers; ++arrived_) Read(exponents_[arrived_]);
}

const std::byte* MappedObject::Unit(const Part& part, uint32_t unit) const {
  const uint64_t offset = part.UnitOffset(unit);
  return extents_[offset / limits::kExtentBytes] + offset % limits::kExtentBytes;
}

}  // namespace ashlar::internal
