// SPDX-License-Identifier: Apache-2.0
// Attention, one query at a time over all visible keys, with every score in memory before the softmax.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/reference/reference.h"
#include "kernels/reference/row.h"

namespace ashlar::kernels::reference {
namespace {

// The position to which the pages' keys are rotated.
enum class Keys { kLanded, kUnrotated, kZeroBased };

std::vector<double> ReadRow(const PagedSlots& slots, int64_t slot, int32_t head, int32_t dim) {
  const Row row = RowAt(slots, slot, head);
  std::vector<double> values(static_cast<size_t>(dim));
  for (int32_t i = 0; i < dim; ++i) {
    values[i] = double{ReadElement(slots.dtype, row.data, i)} * (row.scale == nullptr ? 1.0f : *row.scale);
  }
  return values;
}

// Rotates to its own position, from none: the only rotation that applies the rotation's scale.
void Place(const AttendArgs& args, int64_t position, std::vector<double>& key) {
  const int32_t first = args.shape.kind == AttentionKind::kMla ? args.shape.key_dim : 0;
  Turn(args.rotation, position, key.data() + first);
  if (args.rotation.style == RopeStyle::kNone) return;
  for (int32_t i = first; i < first + args.rotation.rotary_dim; ++i) key[i] *= args.rotation.scale;
}

struct Seen {
  std::vector<double> key, value;
  const KeySpan* span;
};

// Returns all keys and values of a kv head that one token sees.
std::vector<Seen> See(const AttendArgs& args, Keys stand, int64_t position, int32_t kv_head) {
  const AttentionShape& shape = args.shape;
  std::vector<Seen> seen;
  for (const KeySpan& span : args.spans) {
    for (int64_t i = 0; i < span.tokens; ++i) {
      const int64_t at = span.position + i;
      if (at > position || (shape.window > 0 && at <= position - shape.window)) continue;
      std::vector<double> key = ReadRow(span.keys, span.first_slot + i, kv_head, shape.key_dim);
      std::vector<double> value = ReadRow(span.values, span.first_slot + i, kv_head, shape.value_dim);
      if (shape.kind == AttentionKind::kMla) {
        std::vector<double> latent = key;
        key.insert(key.end(), value.begin(), value.end());
        value = std::move(latent);
      }
      if (stand == Keys::kUnrotated) Place(args, at, key);
      seen.push_back({std::move(key), std::move(value), &span});
    }
  }
  return seen;
}

// The scores of the keys that a query sees.
std::vector<double> Score(const AttendArgs& args, Keys stand, int64_t token, int32_t head,
                          const std::vector<Seen>& seen) {
  const int32_t dim = args.shape.QueryDim();
  const float* const q = args.q + token * args.q_stride + int64_t{head} * dim;
  std::vector<double> query, scores;
  const KeySpan* placed_for = nullptr;
  for (const Seen& one : seen) {
    if (one.span != placed_for) {
      query.assign(q, q + dim);
      Place(args, args.positions[token] - (stand == Keys::kZeroBased ? one.span->origin : 0), query);
      placed_for = one.span;
    }
    double score = 0;
    for (int32_t d = 0; d < dim; ++d) score += query[d] * one.key[d];
    scores.push_back(score * args.shape.scale);
  }
  return scores;
}

void AttendHead(const AttendArgs& args, Keys stand, int64_t token, int32_t head, const std::vector<Seen>& seen) {
  const int32_t width = args.shape.OutDim();
  float* const out = args.out + token * args.out_stride + int64_t{head} * width;
  float* const lse = args.lse == nullptr ? nullptr : args.lse + token * args.shape.query_heads + head;
  const std::vector<double> scores = Score(args, stand, token, head, seen);
  // With `merge`, an earlier result counts as one more key.
  const double before = args.merge ? double{*lse} : -INFINITY;
  double most = before;
  for (const double score : scores) most = std::max(most, score);
  std::vector<double> sum(static_cast<size_t>(width));
  double total = 0;
  if (before != -INFINITY) {
    total = std::exp(before - most);
    for (int32_t d = 0; d < width; ++d) sum[d] = total * out[d];
  }
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - most);
    total += weight;
    for (int32_t d = 0; d < width; ++d) sum[d] += weight * seen[i].value[d];
  }
  for (int32_t d = 0; d < width; ++d) out[d] = total == 0 ? 0.0f : static_cast<float>(sum[d] / total);
  if (lse != nullptr) *lse = static_cast<float>(total == 0 ? -INFINITY : most + std::log(total));
}

void Attend(const AttendArgs& args, Keys stand) {
  const int32_t group = args.shape.query_heads / args.shape.kv_heads;
  for (int64_t token = 0; token < args.tokens; ++token) {
    for (int32_t kv_head = 0; kv_head < args.shape.kv_heads; ++kv_head) {
      const std::vector<Seen> seen = See(args, stand, args.positions[token], kv_head);
      for (int32_t g = 0; g < group; ++g) AttendHead(args, stand, token, kv_head * group + g, seen);
    }
  }
}

}  // namespace

void AttendLanded(const AttendArgs& args) {
  Attend(args, Keys::kLanded);
}

void AttendUnrotated(const AttendArgs& args) {
  Attend(args, Keys::kUnrotated);
}

void AttendRotatedQuery(const AttendArgs& args) {
  Attend(args, Keys::kZeroBased);
}

}  // namespace ashlar::kernels::reference
