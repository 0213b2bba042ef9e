// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/paged_rows.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/checksum.h"
#include "kernels/testing/names.h"

namespace ashlar::kernels::testing {
namespace {

// The distance of neighbouring numbers just above zero.
double LeastUnit(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 0x1p-24;
    case DType::kF8E4M3:
      return 0x1p-9;
    case DType::kF8E5M2:
      return 0x1p-16;
    default:
      return 0;
  }
}

int64_t RowBytes(RowFormat format, int32_t dim) {
  return dim * static_cast<int64_t>(ElementBytes(format.dtype));
}

}  // namespace

double RowFormat::Rounding(double value, double scale) const {
  return std::max(UnitRoundoff(dtype) * std::abs(value), LeastUnit(dtype) * scale / 2);
}

std::string RowFormat::Name() const {
  return testing::Name(dtype) + (scaled ? " with scales" : "");
}

RowsShape RandomRowsShape(Random& random, RowFormat format) {
  return {.tokens = random.Integer(1, 150),
          .unit_tokens = static_cast<int32_t>(random.Integer(1, 40)),
          .heads = static_cast<int32_t>(random.Integer(1, 4)),
          .dim = static_cast<int32_t>(random.Integer(4, 80)),
          .format = format};
}

Rows::Rows(RowFormat its_format, int64_t its_rows, int32_t its_dim)
    : format(its_format),
      rows(its_rows),
      dim(its_dim),
      bytes(its_rows * RowBytes(its_format, its_dim)),
      scales(its_format.scaled ? its_rows : 0) {}

Rows::Rows(RowFormat its_format, int64_t its_rows, int32_t its_dim, Random& random)
    : Rows(its_format, its_rows, its_dim) {
  for (float& scale : scales) scale = static_cast<float>(random.Uniform(0.001, 0.01));
  for (int64_t row = 0; row < rows; ++row) {
    for (int32_t i = 0; i < dim; ++i) {
      WriteElement(format.dtype, bytes.data(), row * dim + i,
                   static_cast<float>(random.Uniform(-2, 2) / (format.scaled ? 0.01 : 1)));
    }
  }
}

double LargestDifference(const Rows& actual, const Rows& expected, double slack) {
  double largest = actual.bytes.size() == expected.bytes.size() ? 0 : INFINITY;
  if (largest != 0) return largest;
  for (int64_t row = 0; row < actual.rows; ++row) {
    for (int32_t i = 0; i < actual.dim; ++i) {
      const double a = actual.Value(row, i), b = expected.Value(row, i);
      const double difference = std::abs(a - b) / (2 * actual.format.Rounding(a, actual.Scale(row)) + slack);
      largest = std::isnan(difference) ? INFINITY : std::max(largest, difference);
    }
  }
  return largest;
}

Units::Units(const RowsShape& shape) : shape_(shape) {
  for (int64_t begin = 0; begin < shape.tokens; begin += shape.unit_tokens) {
    values_.emplace_back(shape.format, std::min<int64_t>(shape.unit_tokens, shape.tokens - begin) * shape.heads,
                         shape.dim);
  }
  Point();
}

Units::Units(const RowsShape& shape, Random& random) : shape_(shape) {
  for (int64_t begin = 0; begin < shape.tokens; begin += shape.unit_tokens) {
    values_.emplace_back(shape.format, std::min<int64_t>(shape.unit_tokens, shape.tokens - begin) * shape.heads,
                         shape.dim, random);
  }
  Point();
}

void Units::Point() {
  for (Rows& unit : values_) {
    pointers_.push_back(unit.bytes.data());
    if (shape_.format.scaled) scale_pointers_.push_back(unit.scales.data());
  }
}

StoredRows Units::View() const {
  return {.units = pointers_.data(),
          .scales = scale_pointers_.empty() ? nullptr : scale_pointers_.data(),
          .unit_tokens = shape_.unit_tokens,
          .tokens = shape_.tokens,
          .heads = shape_.heads,
          .dim = shape_.dim,
          .dtype = shape_.format.dtype};
}

std::vector<uint64_t> Units::Checksums() const {
  std::vector<uint64_t> checksums;
  for (const Rows& unit : values_) checksums.push_back(UnitChecksum(unit.bytes.data(), unit.bytes.size()));
  return checksums;
}

std::vector<uint64_t> Units::ScaleChecksums() const {
  std::vector<uint64_t> checksums;
  for (const Rows& unit : values_) {
    checksums.push_back(UnitChecksum(unit.scales.data(), unit.scales.size() * sizeof(float)));
  }
  return checksums;
}

Pages::Pages(Random& random, const RowsShape& rows, PageOrder order, int32_t page_tokens, int64_t first_position,
             bool misaligned)
    : shape_(rows), first_position_(first_position), page_tokens_(page_tokens) {
  const int64_t gap = order == PageOrder::kLoose ? random.Integer(1, 5) : 0;
  if (order == PageOrder::kHeadsFirst) {
    token_stride_ = rows.dim;
    head_stride_ = int64_t{page_tokens} * rows.dim;
    page_stride_ = rows.heads * head_stride_;
  } else {
    head_stride_ = rows.dim + gap;
    token_stride_ = rows.heads * head_stride_ + gap;
    page_stride_ = page_tokens * token_stride_ + gap;
  }
  const int64_t first_page = first_position / page_tokens;
  const int64_t last_page = (first_position + std::max<int64_t>(rows.tokens, 1) - 1) / page_tokens;
  const auto pages = static_cast<int32_t>(last_page - first_page + 1);
  table_.assign(last_page + 2, INT32_MAX);
  // Twice as many pages as needed, in random order.
  std::ranges::copy_n(random.Permutation(2 * pages).begin(), pages, table_.begin() + first_page);
  constexpr size_t kLine = 64;
  const size_t element = ElementBytes(rows.format.dtype);
  memory_.bytes.assign(kLine + element * (1 + 2 * pages * page_stride_), kUntouched);
  const size_t past_line = reinterpret_cast<uintptr_t>(memory_.bytes.data()) % kLine;
  offset_ = static_cast<int64_t>((kLine - past_line) % kLine + (misaligned ? element : 0));
  if (rows.format.scaled) memory_.scales.assign(2 * pages * page_tokens * (rows.heads + 1), kUntouchedScale);
}

PagedSlots Pages::ViewOf(Memory& memory) const {
  return {.base = memory.bytes.data() + offset_,
          .page_stride = page_stride_,
          .token_stride = token_stride_,
          .head_stride = head_stride_,
          .page_tokens = page_tokens_,
          .page_table = table_.data(),
          .dtype = shape_.format.dtype,
          .scales = memory.scales.empty() ? nullptr : memory.scales.data(),
          .scale_page_stride = int64_t{page_tokens_} * (shape_.heads + 1),
          .scale_token_stride = 1,
          .scale_head_stride = page_tokens_};
}

template <typename Fn>
void Pages::ForEachRow(const PagedSlots& slots, Fn fn) const {
  for (int64_t row = 0; row < shape_.tokens * shape_.heads; ++row) {
    const int64_t position = first_position_ + row / shape_.heads, head = row % shape_.heads;
    const int64_t page = table_[position / page_tokens_], slot = position % page_tokens_;
    const int64_t element = page * page_stride_ + slot * token_stride_ + head * head_stride_;
    const int64_t scale =
        page * slots.scale_page_stride + slot * slots.scale_token_stride + head * slots.scale_head_stride;
    fn(row, static_cast<std::byte*>(slots.base) + element * static_cast<int64_t>(ElementBytes(slots.dtype)),
       slots.scales == nullptr ? nullptr : slots.scales + scale);
  }
}

Rows Pages::RowsOf(Memory& memory) const {
  Rows rows(shape_.format, shape_.tokens * shape_.heads, shape_.dim);
  const auto row_bytes = RowBytes(shape_.format, shape_.dim);
  ForEachRow(ViewOf(memory), [&](int64_t row, const std::byte* at, const float* scale) {
    std::memcpy(rows.bytes.data() + row * row_bytes, at, row_bytes);
    if (scale != nullptr) rows.scales[row] = *scale;
  });
  return rows;
}

void Pages::SetRows(Memory& memory, const Rows& rows) const {
  const auto row_bytes = RowBytes(shape_.format, shape_.dim);
  ForEachRow(ViewOf(memory), [&](int64_t row, std::byte* at, float* scale) {
    std::memcpy(at, rows.bytes.data() + row * row_bytes, row_bytes);
    if (scale != nullptr) *scale = rows.scales[row];
  });
}

bool Pages::SameElsewhere(const Memory& a, const Memory& b) const {
  Memory without_a = a, without_b = b;
  const Rows none(shape_.format, shape_.tokens * shape_.heads, shape_.dim);
  SetRows(without_a, none);
  SetRows(without_b, none);
  return without_a == without_b;
}

std::vector<double> Frequencies(int32_t rotary_dim, double base) {
  std::vector<double> frequencies(rotary_dim / 2);
  for (int32_t i = 0; i < rotary_dim / 2; ++i) frequencies[i] = std::pow(base, -2.0 * i / rotary_dim);
  return frequencies;
}

void TurnExactly(const Rotation& rotation, int64_t delta, std::vector<double>& key) {
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

}  // namespace ashlar::kernels::testing
