// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/transfer.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <span>
#include <tuple>

#include "proto/limits.h"

namespace ashlar::storage {
namespace {

const kernels::PagedSlots& SlotsOf(PartForm form, const PagedRows& rows) {
  return form == PartForm::kValues || form == PartForm::kValueScales ? rows.values : rows.keys;
}

bool IsOpaque(const PagedRows& rows) {
  return rows.value_dim == 0;
}

// Returns whether a part of an attention layer or an opaque one has the shape of the page rows, including scales.
bool SameShape(const ObjectHeader& object, const Part& part, const PagedRows& rows) {
  const kernels::PagedSlots& slots = SlotsOf(part.form, rows);
  if (rows.heads <= 0 || static_cast<uint32_t>(rows.heads) > limits::kMaxHeads) return false;
  if (IsScales(part.form)) {
    const Part* const scaled =
        object.Find(part.layer, part.form == PartForm::kKeyScales ? PartForm::kKeys : PartForm::kValues);
    return slots.scales != nullptr && part.dtype == DType::kF32 && scaled != nullptr &&
           part.unit_tokens == scaled->unit_tokens &&
           part.unit_bytes == uint64_t{part.unit_tokens} * rows.heads * sizeof(float);
  }
  if ((part.form == PartForm::kOpaqueRows) != IsOpaque(rows)) return false;
  const int32_t dim = part.form == PartForm::kValues ? rows.value_dim : rows.key_dim;
  const uint64_t most = IsOpaque(rows) ? limits::kExtentBytes : limits::kMaxHeadDim;
  if (dim <= 0 || static_cast<uint64_t>(dim) > most) return false;
  if (part.dtype != slots.dtype) return false;
  if ((slots.scales != nullptr) != (object.Find(part.layer, ScalesOf(part.form)) != nullptr)) return false;
  return part.unit_bytes == uint64_t{part.unit_tokens} * rows.heads * dim * ElementBytes(part.dtype);
}

const PagedRows* FindRows(std::span<const PagedRows> rows, uint32_t layer) {
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const PagedRows& r) { return r.layer == layer; });
  return found == rows.end() ? nullptr : &*found;
}

// Returns whether the layer's part of the page table covers the object's stored tokens, or the first `tokens` of them.
// For consecutive parts only the end of the last one is known here.
bool PagesReach(const PagedRows& rows, std::span<const int32_t> table, const ObjectHeader& object,
                uint64_t first_position, uint64_t tokens = UINT64_MAX) {
  if (rows.keys.page_tokens <= 0 || rows.values.page_tokens <= 0) return false;
  if (rows.keys.base == nullptr || rows.values.base == nullptr) return false;
  // A page table has int32 entries, and pages have int32 tokens: at most 2^62 positions.
  if (first_position > uint64_t{std::numeric_limits<int64_t>::max()} / 2) return false;
  if (rows.keys.page_table != rows.values.page_table) return false;
  const int32_t* const begin = rows.keys.page_table == nullptr ? table.data() : rows.keys.page_table;
  const int32_t* const table_end = table.data() + table.size();
  if (std::less()(begin, table.data()) || std::less()(table_end, begin)) return false;  // belongs to another vector
  const uint64_t end = first_position + object.first_token + std::min(object.stored_tokens, tokens);
  const auto page_tokens = static_cast<uint64_t>(std::min(rows.keys.page_tokens, rows.values.page_tokens));
  return (end + page_tokens - 1) / page_tokens <= static_cast<uint64_t>(table_end - begin);
}

}  // namespace

const kernels::Gpu* GpuOf(const PublishSource& source) {
  for (const PublishSource::Tensor& tensor : source.tensors) {
    if (tensor.gpu != nullptr) return tensor.gpu;
  }
  return source.rows.empty() ? nullptr : source.rows.front().gpu;
}

const kernels::Gpu* GpuOf(const LandTarget& target) {
  return target.rows.empty() ? nullptr : target.rows.front().gpu;
}

bool LiesOn(const PublishSource& source, const kernels::Gpu& gpu) {
  const auto there = [&gpu](const auto& place) { return place.gpu == &gpu; };
  return std::ranges::all_of(source.tensors, there) && std::ranges::all_of(source.rows, there);
}

const PublishSource::Tensor* FindTensor(const PublishSource& source, const Part& part) {
  const auto order = [](const PublishSource::Tensor& tensor) {
    return std::tuple(tensor.layer, tensor.form, tensor.first_head);
  };
  const std::tuple wanted(part.layer, part.form, part.head_group);
  const auto found = std::ranges::lower_bound(source.tensors, wanted, {}, order);
  return found != source.tensors.end() && order(*found) == wanted ? &*found : nullptr;
}

bool Fits(const PublishSource& source, const ObjectHeader& plan) {
  return std::all_of(plan.parts.begin(), plan.parts.end(), [&](const Part& part) {
    if (IsPaged(part.form)) {
      const PagedRows* rows = FindRows(source.rows, part.layer);
      return rows != nullptr && source.page_table != nullptr && SameShape(plan, part, *rows) &&
             PagesReach(*rows, *source.page_table, plan, source.first_position);
    }
    if (part.Empty()) return true;
    const PublishSource::Tensor* tensor = FindTensor(source, part);
    return tensor != nullptr && tensor->data != nullptr;
  });
}

bool Fits(const LandTarget& target, const ObjectHeader& object, const LandTarget::Segment& segment) {
  if (segment.tokens == 0) return true;  // nothing to write
  const auto row_parts =
      std::count_if(object.parts.begin(), object.parts.end(), [](const Part& part) { return IsRows(part.form); });
  const auto opaque = std::ranges::count_if(target.rows, IsOpaque);
  const ptrdiff_t expected = object.stored_tokens > 0 ? 2 * std::ssize(target.rows) - opaque : 0;
  if (row_parts != expected) return false;
  return std::all_of(object.parts.begin(), object.parts.end(), [&](const Part& part) {
    if (!IsPaged(part.form)) return true;
    const PagedRows* rows = FindRows(target.rows, part.layer);
    return rows != nullptr && SameShape(object, part, *rows) &&
           PagesReach(*rows, target.page_table, object, segment.first_position, segment.tokens);
  });
}

}  // namespace ashlar::storage
