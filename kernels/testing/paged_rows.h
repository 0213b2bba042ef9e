// SPDX-License-Identifier: Apache-2.0
// Random stored rows, page pools and rotations for the tests of operations that move, rotate and read keys and values.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/testing/random.h"

namespace ashlar::kernels::testing {

// The order of tokens and heads in a page: tokens first (NHD) or heads first (HND). kLoose: tokens first, with gaps.
enum class PageOrder { kTokensFirst, kHeadsFirst, kLoose };

// The element type of a row, and whether the row has a scale.
struct RowFormat {
  DType dtype = DType::kF32;
  bool scaled = false;  // 8-bit types: one scale per row

  // The greatest rounding error of a number near `value`, in a row of this scale.
  double Rounding(double value, double scale) const;
  std::string Name() const;
};
inline constexpr RowFormat kRowFormats[] = {{DType::kF32},         {DType::kF16},    {DType::kBF16},
                                            {DType::kF8E4M3},      {DType::kF8E5M2}, {DType::kF8E4M3, true},
                                            {DType::kF8E5M2, true}};

struct RowsShape {
  int64_t tokens = 0;
  int32_t unit_tokens = 0, heads = 0, dim = 0;
  RowFormat format;

  int64_t Units() const { return (tokens + unit_tokens - 1) / unit_tokens; }
};
RowsShape RandomRowsShape(Random& random, RowFormat format);

// Dense rows and their scales, numbers in [−2, 2].
struct Rows {
  Rows(RowFormat format, int64_t rows, int32_t dim);
  Rows(RowFormat format, int64_t rows, int32_t dim, Random& random);

  double Scale(int64_t row) const { return format.scaled ? scales[row] : 1.0; }
  double Value(int64_t row, int32_t i) const {
    return ReadElement(format.dtype, bytes.data(), row * dim + i) * Scale(row);
  }
  bool operator==(const Rows& other) const { return bytes == other.bytes && scales == other.scales; }

  RowFormat format;
  int64_t rows;
  int32_t dim;
  std::vector<std::byte> bytes;
  std::vector<float> scales;  // empty if the format has none
};
// The largest |actual − expected| over all numbers, as a fraction of two roundings and `slack`; infinity if either is
// not a number. Two back ends that each round once differ by at most 1.
double LargestDifference(const Rows& actual, const Rows& expected, double slack);

// Units in separate memory; a partly filled last unit only has space for its tokens, so that a sanitizer detects any
// access to its padding.
class Units {
 public:
  explicit Units(const RowsShape& shape);
  Units(const RowsShape& shape, Random& random);
  Units(const Units&) = delete;

  StoredRows View() const;
  void* const* pointers() { return pointers_.data(); }
  float* const* scales() { return scale_pointers_.empty() ? nullptr : scale_pointers_.data(); }
  const std::vector<Rows>& values() const { return values_; }
  std::vector<uint64_t> Checksums() const;
  std::vector<uint64_t> ScaleChecksums() const;

 private:
  void Point();

  const RowsShape shape_;
  std::vector<Rows> values_;
  std::vector<void*> pointers_;
  std::vector<float*> scale_pointers_;
};

// A pool of pages and the page table of a sequence with `tokens` tokens from `first_position`. Entries of other pages
// of the sequence are far outside the pool: reading through them crashes.
class Pages {
 public:
  // Pages start at a cache line; `misaligned`: one number past it, off any vector's alignment.
  Pages(Random& random, const RowsShape& rows, PageOrder order, int32_t page_tokens, int64_t first_position,
        bool misaligned = false);

  // The pool's bytes at first.
  static constexpr std::byte kUntouched{0x31};
  static constexpr float kUntouchedScale = 0.125f;

  struct Memory {
    std::vector<std::byte> bytes;
    std::vector<float> scales;
    bool operator==(const Memory&) const = default;
  };
  PagedSlots View() { return ViewOf(memory_); }
  // The same slots in other memory of the same size.
  PagedSlots ViewOf(Memory& memory) const;
  Memory& memory() { return memory_; }

  // The rows of a memory's tokens, and the memory with the tokens' rows replaced by `rows`.
  Rows RowsOf(Memory& memory) const;
  void SetRows(Memory& memory, const Rows& rows) const;
  // Returns whether memories agree everywhere outside the tokens' rows.
  bool SameElsewhere(const Memory& a, const Memory& b) const;

 private:
  template <typename Fn>
  void ForEachRow(const PagedSlots& slots, Fn fn) const;

  const RowsShape shape_;
  const int64_t first_position_;
  int64_t page_stride_, token_stride_, head_stride_, offset_;
  const int32_t page_tokens_;
  std::vector<int32_t> table_;
  Memory memory_;
};

// The frequency table base^(−2i / rotary_dim), and the rotation that reads it.
std::vector<double> Frequencies(int32_t rotary_dim, double base);

// R(delta) of a key, in fp64. A second implementation, because the reference is compared with it too.
void TurnExactly(const Rotation& rotation, int64_t delta, std::vector<double>& key);

}  // namespace ashlar::kernels::testing
