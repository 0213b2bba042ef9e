// Keys and values on their way between stored units and paged slots, one row at a time.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/checksum.h"
#include "kernels/reference/reference.h"

namespace ashlar::kernels::reference {
namespace {

// target ← R(delta) source, one key of `dim` floats; in place when they are the same.
void RotateRow(const Rotation& rotation, int64_t delta, int32_t dim, const float* source, float* target) {
  const int32_t pairs = rotation.style == RopeStyle::kNone ? 0 : rotation.rotary_dim / 2;
  for (int32_t i = 0; i < pairs; ++i) {
    const bool half_split = rotation.style == RopeStyle::kHalfSplit;
    const int32_t a = half_split ? i : 2 * i, b = half_split ? i + pairs : 2 * i + 1;
    const double angle = static_cast<double>(delta) * rotation.frequencies[i];
    const double x = source[a], y = source[b];
    target[a] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
    target[b] = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
  }
  if (source != target) std::copy(source + 2 * pairs, source + dim, target + 2 * pairs);
}

float* Row(const PagedSlots& slots, int64_t position, int32_t head) {
  return static_cast<float*>(slots.base) + slots.page_table[position / slots.page_tokens] * slots.page_stride +
         (position % slots.page_tokens) * slots.token_stride + head * slots.head_stride;
}

template <typename T>
void HashUnits(const T* const* units, int64_t tokens, int32_t unit_tokens, size_t token_bytes, uint64_t* checksums) {
  for (int64_t t = 0; t < tokens; t += unit_tokens) {
    checksums[t / unit_tokens] = UnitChecksum(
        units[t / unit_tokens], static_cast<size_t>(std::min<int64_t>(unit_tokens, tokens - t)) * token_bytes);
  }
}

}  // namespace

void RotateKeys(const RotateKeysArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    RotateRow(args.rotation, args.delta, args.dim, static_cast<const float*>(args.source) + row * args.dim,
              static_cast<float*>(args.target) + row * args.dim);
  }
}

void Land(const LandArgs& args) {
  const StoredRows& source = args.source;
  const int64_t token_floats = int64_t{source.heads} * source.dim;
  for (int64_t t = 0; t < source.tokens; ++t) {
    const float* token =
        static_cast<const float*>(source.units[t / source.unit_tokens]) + (t % source.unit_tokens) * token_floats;
    for (int32_t h = 0; h < source.heads; ++h) {
      RotateRow(args.rotation, args.delta, source.dim, token + int64_t{h} * source.dim,
                Row(args.target, args.first_position + t, h));
    }
  }
  if (args.unit_checksums != nullptr) {
    HashUnits(source.units, source.tokens, source.unit_tokens, token_floats * sizeof(float), args.unit_checksums);
  }
}

void Gather(const GatherArgs& args) {
  const int64_t token_floats = int64_t{args.heads} * args.dim;
  for (int64_t t = 0; t < args.tokens; ++t) {
    float* token = static_cast<float*>(args.units[t / args.unit_tokens]) + (t % args.unit_tokens) * token_floats;
    for (int32_t h = 0; h < args.heads; ++h) {
      const float* row = Row(args.source, args.first_position + t, h);
      std::copy(row, row + args.dim, token + int64_t{h} * args.dim);
    }
  }
  if (args.unit_checksums != nullptr) {
    HashUnits(args.units, args.tokens, args.unit_tokens, token_floats * sizeof(float), args.unit_checksums);
  }
}

void Checksum(const ChecksumArgs& args) {
  for (size_t i = 0; i < args.units.size(); ++i) {
    const size_t bytes = i + 1 == args.units.size() ? args.last_unit_bytes : args.unit_bytes;
    const void* hashed = args.units[i];
    if (args.target != nullptr) {
      // What is hashed is the copy: the source may be memory that somebody else can still write.
      std::memcpy(args.target[i], args.units[i], bytes);
      hashed = args.target[i];
    }
    args.unit_checksums[i] = UnitChecksum(hashed, bytes);
  }
}

}  // namespace ashlar::kernels::reference
