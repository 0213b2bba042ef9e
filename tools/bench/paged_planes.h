// SPDX-License-Identifier: Apache-2.0
// Pages of keys or values as an engine holds them, for the cases of rows and of attention.
#pragma once

#include <numeric>
#include <vector>

#include "kernels/rows.h"
#include "tools/bench/case_memory.h"

namespace ashlar::bench {

// The element type of rows, and whether they have scales.
struct RowFormat {
  DType dtype = DType::kF32;
  bool scaled = false;

  size_t RowBytes(int64_t dim) const {
    return static_cast<size_t>(dim) * ElementBytes(dtype) + (scaled ? sizeof(float) : 0);
  }
  std::string Suffix() const { return scaled ? ", scales" : ""; }
};
inline constexpr RowFormat kFormats[] = {
    {DType::kF32}, {DType::kF16}, {DType::kBF16}, {DType::kF8E4M3}, {DType::kF8E4M3, true}};

// Dense rows, filled with numbers.
struct PlaneMemory {
  PlaneMemory(RowFormat format, int64_t rows, int64_t dim, Numbers& numbers)
      : elements(static_cast<size_t>(rows * dim) * ElementBytes(format.dtype)),
        scales(format.scaled ? static_cast<size_t>(rows) : 0, 0.01f) {
    FillElements(format.dtype, elements.memory.get(), static_cast<size_t>(rows * dim), format.scaled ? 100.0f : 1.0f,
                 numbers);
  }
  Buffer elements;
  std::vector<float> scales;
};

// One layer's keys or values, [pages][kPageTokens][heads, dim], of a sequence whose pages are in random order.
class PagedPlane {
 public:
  static constexpr int32_t kPageTokens = 16;

  PagedPlane(RowFormat format, int64_t tokens, int32_t heads, int32_t dim, Numbers& numbers)
      : format_(format), heads_(heads), dim_(dim), memory_(format, tokens * heads, dim, numbers) {
    table_.resize(static_cast<size_t>(tokens / kPageTokens));
    std::iota(table_.begin(), table_.end(), 0);
    for (size_t i = table_.size(); i > 1; --i) {
      std::swap(table_[i - 1], table_[static_cast<size_t>((numbers.Next(0.5f) + 0.5f) * static_cast<float>(i - 1))]);
    }
  }

  kernels::PagedSlots View() {
    return {.base = memory_.elements.memory.get(),
            .page_stride = int64_t{kPageTokens} * heads_ * dim_,
            .token_stride = int64_t{heads_} * dim_,
            .head_stride = dim_,
            .page_tokens = kPageTokens,
            .page_table = table_.data(),
            .dtype = format_.dtype,
            .scales = format_.scaled ? memory_.scales.data() : nullptr,
            .scale_page_stride = int64_t{kPageTokens} * heads_,
            .scale_token_stride = heads_,
            .scale_head_stride = 1};
  }

 private:
  RowFormat format_;
  int32_t heads_, dim_;
  PlaneMemory memory_;
  std::vector<int32_t> table_;
};

}  // namespace ashlar::bench
