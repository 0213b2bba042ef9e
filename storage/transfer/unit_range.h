// SPDX-License-Identifier: Apache-2.0
// UnitRange: the unit of parallel work on an object: a range of one part's units, about 1 MiB.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "proto/object.h"
#include "storage/objects/object_bytes.h"

namespace ashlar::storage {

inline constexpr uint32_t kTaskBytes = 1 << 20;
inline constexpr uint32_t kMaxTaskUnits = 256;  // limits small units, because their addresses are on the task's stack

struct UnitRange {
  const Part* part = nullptr;
  uint32_t first = 0;
  uint32_t count = 0;

  uint32_t LastUnitBytes() const { return part->UnitBytes(first + count - 1); }
  // For keys and values: the first token of the range, and its number of tokens.
  uint64_t FirstRow() const { return uint64_t{first} * part->unit_tokens; }
  uint64_t Rows() const {
    const uint32_t row_bytes = part->unit_bytes / part->unit_tokens;
    return uint64_t{count - 1} * part->unit_tokens + LastUnitBytes() / row_bytes;
  }
};

// Calls fn(UnitRange) for consecutive ranges that cover the non-empty part.
template <typename Fn>
void SplitPart(const Part& part, Fn&& fn) {
  const uint32_t step = std::clamp<uint32_t>(kTaskBytes / part.unit_bytes, 1, kMaxTaskUnits);
  for (uint32_t first = 0; first < part.units; first += step) {
    fn(UnitRange{&part, first, std::min(step, part.units - first)});
  }
}

// Addresses of a range's units in its object.
template <typename T>
std::array<T*, kMaxTaskUnits> UnitPointers(const ObjectBytes& object, const UnitRange& range) {
  std::array<T*, kMaxTaskUnits> pointers;
  for (uint32_t i = 0; i < range.count; ++i) {
    pointers[i] = reinterpret_cast<T*>(object.Unit(*range.part, range.first + i));
  }
  return pointers;
}

}  // namespace ashlar::storage
