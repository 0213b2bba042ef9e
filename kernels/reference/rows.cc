// SPDX-License-Identifier: Apache-2.0
// Copies keys and values between stored units and paged slots, one row at a time.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/row.h"

namespace ashlar::kernels::reference {
namespace {

void CopyRow(DType dtype, int32_t dim, const Row& source, const Row& target) {
  std::memmove(target.data, source.data, static_cast<size_t>(dim) * ElementBytes(dtype));
  if (source.scale != nullptr) *target.scale = *source.scale;
}

// target ← scale · R(delta) source, one key; in place if they are the same. The scale is for rotated dimensions.
void TurnRow(const Rotation& rotation, int64_t delta, double scale, DType dtype, int32_t dim, const Row& source,
             const Row& target) {
  if (rotation.style == RopeStyle::kNone || (delta == 0 && scale == 1)) return CopyRow(dtype, dim, source, target);
  std::vector<double> key(static_cast<size_t>(dim));
  for (int32_t i = 0; i < dim; ++i) key[i] = ReadElement(dtype, source.data, i);
  Turn(rotation, delta, key.data());
  for (int32_t i = 0; i < rotation.rotary_dim; ++i) key[i] *= scale;
  double factor = 1;
  if (source.scale != nullptr) {
    double largest = 0;
    for (const double x : key) largest = std::max(largest, std::abs(x));
    const float old = *source.scale;
    *target.scale = TurnedScale(dtype, old, static_cast<float>(largest));
    factor = double{old} / *target.scale;
  }
  const double limit = ElementBytes(dtype) == 1 ? LargestFinite(dtype) : INFINITY;
  for (int32_t i = 0; i < dim; ++i) {
    WriteElement(dtype, target.data, i, static_cast<float>(std::clamp(key[i] * factor, -limit, limit)));
  }
}

template <typename T>
void HashUnits(T* const* units, int64_t tokens, int32_t unit_tokens, size_t token_bytes, uint64_t* checksums) {
  if (units == nullptr || checksums == nullptr) return;
  for (int64_t t = 0; t < tokens; t += unit_tokens) {
    checksums[t / unit_tokens] = UnitChecksum(
        units[t / unit_tokens], static_cast<size_t>(std::min<int64_t>(unit_tokens, tokens - t)) * token_bytes);
  }
}

}  // namespace

Row RowAt(DType dtype, const void* data, const float* scales, int64_t row, int32_t dim) {
  return {static_cast<std::byte*>(const_cast<void*>(data)) + row * dim * static_cast<int64_t>(ElementBytes(dtype)),
          scales == nullptr ? nullptr : const_cast<float*>(scales) + row};
}

Row RowAt(const PagedSlots& slots, int64_t position, int32_t head) {
  const int64_t page = slots.page_table[position / slots.page_tokens], in_page = position % slots.page_tokens;
  const int64_t element = page * slots.page_stride + in_page * slots.token_stride + head * slots.head_stride;
  const int64_t scale =
      page * slots.scale_page_stride + in_page * slots.scale_token_stride + head * slots.scale_head_stride;
  return {static_cast<std::byte*>(slots.base) + element * static_cast<int64_t>(ElementBytes(slots.dtype)),
          slots.scales == nullptr ? nullptr : slots.scales + scale};
}

void Turn(const Rotation& rotation, int64_t delta, double* key) {
  if (rotation.style == RopeStyle::kNone) return;
  const int32_t pairs = rotation.rotary_dim / 2;
  for (int32_t i = 0; i < pairs; ++i) {
    const bool half_split = rotation.style == RopeStyle::kHalfSplit;
    double &x = key[half_split ? i : 2 * i], &y = key[half_split ? i + pairs : 2 * i + 1];
    const double angle = static_cast<double>(delta) * rotation.frequencies[i];
    const double turned = x * std::cos(angle) - y * std::sin(angle);
    y = x * std::sin(angle) + y * std::cos(angle);
    x = turned;
  }
}

void RotateKeys(const RotateKeysArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t further = args.positions == nullptr ? 0 : args.positions[row / args.rows_per_position];
    TurnRow(args.rotation, args.delta + further, args.scaled ? args.rotation.scale : 1, args.dtype, args.dim,
            RowAt(args.dtype, args.source, args.source_scales, row, args.dim),
            RowAt(args.dtype, args.target, args.target_scales, row, args.dim));
  }
}

void Land(const LandArgs& args) {
  const StoredRows& source = args.source;
  for (int64_t t = 0; t < source.tokens; ++t) {
    const int64_t unit = t / source.unit_tokens, in_unit = t % source.unit_tokens;
    const float* const scales = source.scales == nullptr ? nullptr : source.scales[unit];
    for (int32_t h = 0; h < source.heads; ++h) {
      TurnRow(args.rotation, args.delta, 1, source.dtype, source.dim,
              RowAt(source.dtype, source.units[unit], scales, in_unit * source.heads + h, source.dim),
              RowAt(args.target, args.first_position + t, h));
    }
  }
  const size_t token_bytes = static_cast<size_t>(source.heads) * source.dim * ElementBytes(source.dtype);
  HashUnits(source.units, source.tokens, source.unit_tokens, token_bytes, args.unit_checksums);
  HashUnits(source.scales, source.tokens, source.unit_tokens, source.heads * sizeof(float), args.scale_checksums);
}

void Gather(const GatherArgs& args) {
  const DType dtype = args.source.dtype;
  for (int64_t t = 0; t < args.tokens; ++t) {
    const int64_t unit = t / args.unit_tokens, in_unit = t % args.unit_tokens;
    const float* const scales = args.scales == nullptr ? nullptr : args.scales[unit];
    for (int32_t h = 0; h < args.heads; ++h) {
      CopyRow(dtype, args.dim, RowAt(args.source, args.first_position + t, h),
              RowAt(dtype, args.units[unit], scales, in_unit * args.heads + h, args.dim));
    }
  }
  const size_t token_bytes = static_cast<size_t>(args.heads) * args.dim * ElementBytes(dtype);
  HashUnits(args.units, args.tokens, args.unit_tokens, token_bytes, args.unit_checksums);
  HashUnits(args.scales, args.tokens, args.unit_tokens, args.heads * sizeof(float), args.scale_checksums);
}

void Checksum(const ChecksumArgs& args) {
  for (size_t i = 0; i < args.units.size(); ++i) {
    const size_t bytes = i + 1 == args.units.size() ? args.last_unit_bytes : args.unit_bytes;
    const void* hashed = args.units[i];
    if (args.target != nullptr) {
      // The copy is hashed, because another process may still write to the source.
      std::memcpy(args.target[i], args.units[i], bytes);
      hashed = args.target[i];
    }
    args.unit_checksums[i] = UnitChecksum(hashed, bytes);
  }
}

}  // namespace ashlar::kernels::reference
