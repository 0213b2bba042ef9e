// Random stored rows, page pools and rotations for the tests of Land, Gather and RotateKeys.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/testing/random.h"

namespace ashlar::kernels::testing {

// How tokens and heads lie in a page: tokens first (NHD) or heads first (HND). kLoose: tokens first, with gaps.
enum class PageOrder { kTokensFirst, kHeadsFirst, kLoose };

struct RowsShape {
  int64_t tokens = 0;
  int32_t unit_tokens = 0, heads = 0, dim = 0;

  int64_t Units() const { return (tokens + unit_tokens - 1) / unit_tokens; }
  int64_t UnitFloats() const { return int64_t{unit_tokens} * heads * dim; }
};
RowsShape RandomRowsShape(Random& random);

// Units in memory of their own; a partly filled last unit has only room for its tokens, so that a sanitizer sees any
// step into its padding.
class Units {
 public:
  Units(const RowsShape& shape, float fill);
  Units(const RowsShape& shape, Random& random);
  Units(const Units&) = delete;

  StoredRows View() const;
  float* const* pointers() { return pointers_.data(); }
  std::vector<std::vector<float>>& values() { return values_; }
  const std::vector<std::vector<float>>& values() const { return values_; }

 private:
  const RowsShape shape_;
  std::vector<std::vector<float>> values_;
  std::vector<float*> pointers_;
};

// A pool of pages and the page table of a sequence in which `tokens` tokens stand from `first_position` on. Entries of
// other pages of the sequence lead far outside of the pool: reading through them is a crash.
class Pages {
 public:
  // Pages start at a cache line; `misaligned`: one float past it, off any vector's alignment.
  Pages(Random& random, const RowsShape& rows, PageOrder order, int32_t page_tokens, int64_t first_position,
        bool misaligned = false);

  // What every float of the pool holds at first.
  static constexpr float kUntouched = 0.125f;

  PagedSlots View() { return ViewOf(values_); }
  // The same slots in another buffer of the same size.
  PagedSlots ViewOf(std::vector<float>& values) const;
  std::vector<float>& values() { return values_; }
  void FillRandomly(Random& random) { std::ranges::copy(random.Uniforms(values_.size(), -2, 2), values_.begin()); }

 private:
  int64_t page_stride_, token_stride_, head_stride_, offset_;
  const int32_t page_tokens_;
  std::vector<int32_t> table_;
  std::vector<float> values_;
};

// The frequency table base^(−2i / rotary_dim), and the rotation that reads it.
std::vector<double> Frequencies(int32_t rotary_dim, double base);

}  // namespace ashlar::kernels::testing
