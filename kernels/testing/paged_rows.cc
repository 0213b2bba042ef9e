#include "kernels/testing/paged_rows.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ashlar::kernels::testing {

RowsShape RandomRowsShape(Random& random) {
  return {.tokens = random.Integer(1, 150),
          .unit_tokens = static_cast<int32_t>(random.Integer(1, 40)),
          .heads = static_cast<int32_t>(random.Integer(1, 4)),
          .dim = static_cast<int32_t>(random.Integer(4, 80))};
}

Units::Units(const RowsShape& shape, float fill) : shape_(shape), values_(shape.Units()) {
  for (int64_t u = 0; u < shape.Units(); ++u) {
    const int64_t tokens = std::min<int64_t>(shape.unit_tokens, shape.tokens - u * shape.unit_tokens);
    values_[u].assign(tokens * shape.heads * shape.dim, fill);
    pointers_.push_back(values_[u].data());
  }
}

Units::Units(const RowsShape& shape, Random& random) : Units(shape, 0.0f) {
  for (std::vector<float>& unit : values_) {
    for (float& value : unit) value = static_cast<float>(random.Uniform(-2, 2));
  }
}

StoredRows Units::View() const {
  return {.units = pointers_.data(),
          .unit_tokens = shape_.unit_tokens,
          .tokens = shape_.tokens,
          .heads = shape_.heads,
          .dim = shape_.dim};
}

Pages::Pages(Random& random, const RowsShape& rows, PageOrder order, int32_t page_tokens, int64_t first_position,
             bool misaligned)
    : page_tokens_(page_tokens) {
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
  const int64_t last_page = (first_position + rows.tokens - 1) / page_tokens;
  const auto pages = static_cast<int32_t>(last_page - first_page + 1);
  table_.assign(last_page + 2, INT32_MAX);
  // Twice as many pages as are needed, in random order.
  std::ranges::copy_n(random.Permutation(2 * pages).begin(), pages, table_.begin() + first_page);
  constexpr size_t kLine = 64 / sizeof(float);
  values_.assign(kLine + 1 + 2 * pages * page_stride_, kUntouched);
  const size_t past_line = reinterpret_cast<uintptr_t>(values_.data()) / sizeof(float) % kLine;
  offset_ = static_cast<int64_t>((kLine - past_line) % kLine) + (misaligned ? 1 : 0);
}

PagedSlots Pages::ViewOf(std::vector<float>& values) const {
  return {.base = values.data() + offset_,
          .page_stride = page_stride_,
          .token_stride = token_stride_,
          .head_stride = head_stride_,
          .page_tokens = page_tokens_,
          .page_table = table_.data()};
}

std::vector<double> Frequencies(int32_t rotary_dim, double base) {
  std::vector<double> frequencies(rotary_dim / 2);
  for (int32_t i = 0; i < rotary_dim / 2; ++i) frequencies[i] = std::pow(base, -2.0 * i / rotary_dim);
  return frequencies;
}

}  // namespace ashlar::kernels::testing
