// SPDX-License-Identifier: Apache-2.0
// The memory on which the cases of `ashlar-bench kernels` work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "kernels/dtype.h"

namespace ashlar::bench {

// Numbers of either sign, at most `size`, that differ from place to place: random ones would take longer than the
// measured work.
class Numbers {
 public:
  float Next(float size) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (static_cast<float>(state_ >> 40) * 0x1p-23f - 1.0f) * size;
  }

 private:
  uint64_t state_ = 1;
};

// Aligned as objects are in their extents.
struct Buffer {
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete[](bytes, kAlignment); }
  };
  explicit Buffer(size_t bytes) : memory(static_cast<std::byte*>(::operator new[](bytes, kAlignment))) {}
  std::unique_ptr<std::byte[], Free> memory;
};

// The first thousand by number, the rest as copies of them.
inline void FillElements(DType dtype, std::byte* elements, size_t count, float size, Numbers& numbers) {
  const size_t drawn = std::min<size_t>(count, 1021), bytes = count * ElementBytes(dtype);
  for (size_t i = 0; i < drawn; ++i) {
    kernels::WriteElement(dtype, elements, static_cast<int64_t>(i), numbers.Next(size));
  }
  for (size_t at = drawn * ElementBytes(dtype); at < bytes; at *= 2) {
    std::memcpy(elements + at, elements, std::min(at, bytes - at));
  }
}

}  // namespace ashlar::bench
