// SPDX-License-Identifier: Apache-2.0
// Prefetches memory that is read next, while the current memory is computed with.
#pragma once

#include <algorithm>
#include <cstddef>

namespace ashlar::kernels::host {

// Prefetched one part at a time.
struct Ahead {
  static constexpr size_t kLine = 64;
  const char* from = nullptr;
  size_t left = 0, part = 0;  // bytes

  Ahead() = default;
  Ahead(const void* first, size_t bytes, size_t parts)
      : from(static_cast<const char*>(first)),
        left(bytes),
        part(((bytes + parts - 1) / parts + kLine - 1) / kLine * kLine) {}

  void Fetch() {
    const char* const end = from + std::min(part, left);
    left -= static_cast<size_t>(end - from);
    // Not into the nearest cache, which the product needs.
    for (; from < end; from += kLine) __builtin_prefetch(from, 0, 2);
  }
};
// Parts are spread evenly over the work: a core has few buffers for misses, and those that wait for memory block the
// product's reads from the second cache.
struct AheadTuple {
  Ahead transition, state;

  void Fetch() {
    transition.Fetch();
    state.Fetch();
  }
};

}  // namespace ashlar::kernels::host
