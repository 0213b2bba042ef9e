#include "storage/transfer.h"

#include <algorithm>
#include <limits>
#include <span>

#include "proto/limits.h"

namespace ashlar::storage {
namespace {

bool HoldsRows(const Part& part) {
  return part.form == PartForm::kKeys || part.form == PartForm::kValues;
}

bool SameShape(const Part& part, const PagedRows& rows) {
  const int32_t dim = part.form == PartForm::kKeys ? rows.key_dim : rows.value_dim;
  if (part.dtype != DType::kF32 || rows.heads <= 0 || dim <= 0) return false;
  if (static_cast<uint32_t>(rows.heads) > limits::kMaxHeads || static_cast<uint32_t>(dim) > limits::kMaxHeadDim) {
    return false;
  }
  return part.unit_bytes == uint64_t{part.unit_tokens} * rows.heads * dim * sizeof(float);
}

const PagedRows* FindRows(std::span<const PagedRows> rows, uint32_t layer) {
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const PagedRows& r) { return r.layer == layer; });
  return found == rows.end() ? nullptr : &*found;
}

// Whether the page table reaches as far as the object's stored tokens.
bool PagesReach(const PagedRows& rows, size_t pages, const ObjectHeader& object, uint64_t first_position) {
  if (rows.keys.page_tokens <= 0 || rows.values.page_tokens <= 0) return false;
  if (rows.keys.base == nullptr || rows.values.base == nullptr) return false;
  // A page table of int32 entries and pages of int32 tokens: 2^62 positions at most.
  if (first_position > uint64_t{std::numeric_limits<int64_t>::max()} / 2) return false;
  const uint64_t end = first_position + object.first_token + object.stored_tokens;
  const auto page_tokens = static_cast<uint64_t>(std::min(rows.keys.page_tokens, rows.values.page_tokens));
  return (end + page_tokens - 1) / page_tokens <= pages;
}

}  // namespace

bool Fits(const PublishSource& source, const ObjectHeader& plan) {
  return std::all_of(plan.parts.begin(), plan.parts.end(), [&](const Part& part) {
    if (HoldsRows(part)) {
      const PagedRows* rows = FindRows(source.rows, part.layer);
      return rows != nullptr && SameShape(part, *rows) &&
             PagesReach(*rows, source.page_table.size(), plan, source.first_position);
    }
    return std::any_of(source.tensors.begin(), source.tensors.end(), [&](const PublishSource::Tensor& tensor) {
      return tensor.layer == part.layer && tensor.form == part.form && tensor.data != nullptr;
    });
  });
}

bool Fits(const LandTarget& target, const ObjectHeader& object, uint64_t first_position) {
  const auto row_parts = std::count_if(object.parts.begin(), object.parts.end(), HoldsRows);
  if (static_cast<size_t>(row_parts) != 2 * target.rows.size()) return false;
  return std::all_of(target.rows.begin(), target.rows.end(), [&](const PagedRows& rows) {
    const Part* keys = object.Find(rows.layer, PartForm::kKeys);
    const Part* values = object.Find(rows.layer, PartForm::kValues);
    return keys != nullptr && values != nullptr && SameShape(*keys, rows) && SameShape(*values, rows) &&
           PagesReach(rows, target.page_table.size(), object, first_position);
  });
}

}  // namespace ashlar::storage
