// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/attention_inputs.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace ashlar::kernels::testing {
namespace {

// Unrotated rows, rotated to their positions, each token by one position more than the last, like an engine does it:
// with the rotation's scale, and rounded once.
Rows TurnToPlace(const Rows& rows, int32_t heads, const Rotation& rotation, int64_t first_delta) {
  Rows turned(rows.format, rows.rows, rows.dim);
  for (int64_t row = 0; row < rows.rows; ++row) {
    std::vector<double> key(rows.dim);
    for (int32_t i = 0; i < rows.dim; ++i) key[i] = rows.Value(row, i);
    TurnExactly(rotation, first_delta + row / heads, key);
    for (int32_t i = 0; rotation.style != RopeStyle::kNone && i < rotation.rotary_dim; ++i) key[i] *= rotation.scale;
    double scale = 1;
    if (rows.format.scaled) {
      for (const double x : key) scale = std::max(scale, std::abs(x));
      scale = turned.scales[row] = static_cast<float>(scale / LargestFinite(rows.format.dtype));
    }
    for (int32_t i = 0; i < rows.dim; ++i) {
      WriteElement(rows.format.dtype, turned.bytes.data(), row * rows.dim + i, static_cast<float>(key[i] / scale));
    }
  }
  return turned;
}

// Zero-based rows landed at their segment's start.
Rows LandAt(const Rows& rows, const Rotation& rotation, int64_t origin) {
  Rows landed(rows.format, rows.rows, rows.dim);
  Runner(Reference())
      .Run(RotateKeysArgs{.rotation = rotation,
                          .delta = origin,
                          .rows = rows.rows,
                          .dim = rows.dim,
                          .dtype = rows.format.dtype,
                          .source = rows.bytes.data(),
                          .target = landed.bytes.data(),
                          .source_scales = rows.format.scaled ? rows.scales.data() : nullptr,
                          .target_scales = rows.format.scaled ? landed.scales.data() : nullptr});
  return landed;
}

}  // namespace

AttendOperation OperationFor(Stand stand) {
  constexpr AttendOperation operations[] = {&Kernels::AttendLanded, &Kernels::AttendUnrotated,
                                            &Kernels::AttendRotatedQuery};
  return operations[static_cast<size_t>(stand)];
}

std::string NameOf(Stand stand) {
  return std::array{"landed", "unrotated", "zero-based"}[static_cast<size_t>(stand)];
}

std::string Describe(const AttentionCase& what) {
  const AttentionShape& shape = what.shape;
  std::string text = (shape.kind == AttentionKind::kMla ? "mla, " : "gqa, ") + what.format.Name() + ", heads " +
                     std::to_string(shape.query_heads) + " : " + std::to_string(shape.kv_heads) + ", dims " +
                     std::to_string(shape.key_dim) + ", " + std::to_string(shape.value_dim) + ", style " +
                     std::to_string(static_cast<int>(what.style)) + ", rotary " + std::to_string(what.rotary_dim) +
                     ", window " + std::to_string(shape.window) + ", queries " + std::to_string(what.queries.size());
  for (const SpanPlace& span : what.spans) {
    text += ", " + std::to_string(span.tokens) + " keys at " + std::to_string(span.position) + " from " +
            std::to_string(span.origin);
  }
  return text;
}

AttentionCase RandomCase(Random& random, AttentionKind kind, RowFormat format, int64_t start) {
  AttentionCase what;
  const bool mla = kind == AttentionKind::kMla;
  what.shape.kind = kind;
  what.shape.kv_heads = mla ? 1 : static_cast<int32_t>(random.Integer(1, 3));
  what.shape.query_heads = what.shape.kv_heads * static_cast<int32_t>(random.Integer(1, 9));
  // Whole vectors, which may be read in place, and sizes that leave remainders.
  const auto dim_of_any_kind = [&] {
    return static_cast<int32_t>(random.Integer(0, 1) == 0 ? 64 * random.Integer(1, 2) : random.Integer(4, 90));
  };
  what.shape.key_dim = dim_of_any_kind();
  what.shape.value_dim = dim_of_any_kind();
  what.shape.scale = 1 / std::sqrt(static_cast<float>(what.shape.QueryDim()));
  what.format = format;
  what.style = std::array{RopeStyle::kNone, RopeStyle::kHalfSplit, RopeStyle::kInterleaved}[random.Integer(0, 2)];
  const int32_t dim = mla ? what.shape.value_dim : what.shape.key_dim;
  what.rotary_dim = random.Integer(0, 2) == 0 ? dim / 2 * 2 : 2 * static_cast<int32_t>(random.Integer(1, dim / 2));
  what.rope_scale = random.Integer(0, 1) == 0 ? 1.0f : 1.25f;
  int64_t position = start;
  for (int64_t i = random.Integer(1, 4); i > 0; --i) {
    const int64_t head = random.Integer(0, 9);  // tokens of the segment that are not in the span
    const int64_t tokens = random.Integer(0, 3) == 0 ? 0 : random.Integer(1, 120);
    what.spans.push_back({tokens, position + head, position});
    position += head + tokens;
  }
  const int64_t queries = random.Integer(0, 1) == 0 ? 1 : random.Integer(2, 16);
  for (int64_t i = 0; i < queries; ++i) what.queries.push_back(std::max<int64_t>(position - random.Integer(0, 60), 0));
  if (random.Integer(0, 1) == 0) what.shape.window = random.Integer(1, 150);
  return what;
}

double LargestError(const AttentionShape& shape, const Attended& actual, const Attended& expected) {
  double largest = actual.out.size() == expected.out.size() ? 0 : INFINITY;
  const auto width = static_cast<size_t>(shape.OutDim());
  for (size_t row = 0; row < expected.lse.size(); ++row) {
    double difference = 0, norm = 0;
    for (size_t i = row * width; i < (row + 1) * width; ++i) {
      difference += std::pow(double{actual.out[i]} - expected.out[i], 2);
      norm += std::pow(double{expected.out[i]}, 2);
    }
    double error = difference == 0 ? 0 : std::sqrt(difference / norm);
    if (actual.lse[row] != expected.lse[row])
      error = std::max(error, std::abs(double{actual.lse[row]} - expected.lse[row]));
    largest = std::isnan(error) ? INFINITY : std::max(largest, error);
  }
  return largest;
}

AttentionContext::AttentionContext(Random& random, const AttentionCase& what)
    : what_(what),
      frequencies_(Frequencies(what.rotary_dim, 1e6)),
      queries_(
          random.Normals(what.queries.size() * static_cast<size_t>(what.shape.query_heads * what.shape.QueryDim()))) {
  for (const SpanPlace& place : what.spans) AddSpan(random, place);
}

void AttentionContext::AddSpan(Random& random, const SpanPlace& place) {
  const AttentionShape& shape = what_.shape;
  const bool mla = shape.kind == AttentionKind::kMla;
  const Rotation rotation = Args(Stand::kLanded).rotation;
  const Rows keys(what_.format, place.tokens * shape.kv_heads, shape.key_dim, random);
  const Rows values(what_.format, place.tokens * shape.kv_heads, shape.value_dim, random);
  const Rows& unrotated = mla ? values : keys;
  const Rows zero_based = TurnToPlace(unrotated, shape.kv_heads, rotation, place.position - place.origin);
  const Rows landed = LandAt(zero_based, rotation, place.origin);
  const Rows* const turned[] = {&landed, &unrotated, &zero_based};
  const int64_t first_slot = random.Integer(0, 40);
  const auto put = [&](const Rows& rows) {
    const auto order =
        std::array{PageOrder::kTokensFirst, PageOrder::kHeadsFirst, PageOrder::kLoose}[random.Integer(0, 2)];
    const RowsShape rows_shape = {
        .tokens = place.tokens, .heads = shape.kv_heads, .dim = rows.dim, .format = rows.format};
    auto& pages = *pages_.emplace_back(std::make_unique<Pages>(
        random, rows_shape, order, static_cast<int32_t>(random.Integer(1, 40)), first_slot, random.Integer(0, 1) == 1));
    pages.SetRows(pages.memory(), rows);
    return pages.View();
  };
  for (const Stand stand : kStands) {
    const Rows& standing = *turned[static_cast<size_t>(stand)];
    spans_[static_cast<size_t>(stand)].push_back({.keys = put(mla ? keys : standing),
                                                  .values = put(mla ? standing : values),
                                                  .first_slot = first_slot,
                                                  .tokens = place.tokens,
                                                  .position = place.position,
                                                  .origin = place.origin});
  }
}

AttendArgs AttentionContext::Args(Stand stand, size_t first_span, size_t spans) const {
  const std::vector<KeySpan>& all = spans_[static_cast<size_t>(stand)];
  const size_t first = std::min(first_span, all.size());
  return {.shape = what_.shape,
          .rotation = {what_.style, what_.rotary_dim, frequencies_.data(), what_.rope_scale},
          .spans = std::span(all).subspan(first, std::min(spans, all.size() - first)),
          .tokens = static_cast<int64_t>(what_.queries.size()),
          .q = queries_.data(),
          .positions = what_.queries.data(),
          .q_stride = int64_t{what_.shape.query_heads} * what_.shape.QueryDim(),
          .out_stride = int64_t{what_.shape.query_heads} * what_.shape.OutDim()};
}

Attended AttentionContext::Run(Runner& runner, Stand stand, AttendArgs args) const {
  Attended result;
  result.out.assign(static_cast<size_t>(args.tokens * args.out_stride), -1.0f);
  result.lse.assign(static_cast<size_t>(args.tokens * what_.shape.query_heads), -1.0f);
  args.out = result.out.data();
  args.lse = result.lse.data();
  runner.Run(OperationFor(stand), args);
  return result;
}

}  // namespace ashlar::kernels::testing
