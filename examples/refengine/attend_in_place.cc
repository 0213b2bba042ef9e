// SPDX-License-Identifier: Apache-2.0
// Attention over segments that are shared in place. The sequence's own keys are rotated to their positions; shared keys
// are not. Each kind takes one pass, and the passes are merged by their log-sum-exp.
#include <algorithm>
#include <cmath>
#include <vector>

#include "examples/refengine/mixers.h"
#include "examples/refengine/rows.h"

namespace ashlar::refengine {
namespace {

struct Spans {
  std::vector<kernels::KeySpan> own, shared;  // spans of positions before `end`
};

Spans SpansOf(const Sequence& sequence, int32_t attention_layer, int64_t end) {
  const KvPages& pool = sequence.pool();
  Spans spans;
  int64_t own_from = 0;
  const auto own_to = [&](int64_t position) {
    if (position <= own_from) return;
    const int32_t* table = sequence.page_table().data();
    spans.own.push_back({.keys = pool.Keys(attention_layer, table),
                         .values = pool.Values(attention_layer, table),
                         .first_slot = own_from,
                         .tokens = position - own_from,
                         .position = own_from});
  };
  for (const SharedSpan& span : sequence.shared()) {
    if (span.position >= end) break;
    own_to(span.position);
    spans.shared.push_back({.keys = pool.Keys(attention_layer, span.page_table.data()),
                            .values = pool.Values(attention_layer, span.page_table.data()),
                            .first_slot = span.first_slot,
                            .tokens = std::min(span.tokens, end - span.position),
                            .position = span.position,
                            .origin = span.origin});
    own_from = span.position + span.tokens;
  }
  own_to(end);
  return spans;
}

}  // namespace

void AttentionMixer::AttendInPlace(int32_t layer, const Pass& pass, const Sequence& sequence) {
  const ModelConfig& config = machine_.model.config();
  const AttentionConfig& attention = config.attention;
  const Spans spans = SpansOf(sequence, config.kind_index(layer), pass.positions.back() + 1);
  kernels::AttendArgs args;
  args.shape = {.kind = AttentionKind::kGqa,
                .query_heads = attention.query_heads,
                .kv_heads = attention.kv_heads,
                .key_dim = attention.head_dim,
                .value_dim = attention.head_dim,
                .scale = 1.0f / std::sqrt(static_cast<float>(attention.head_dim))};
  const std::vector<double>& frequencies = machine_.model.frequencies();
  if (!frequencies.empty()) {
    args.rotation = {RopeStyle::kHalfSplit, static_cast<int32_t>(2 * frequencies.size()), frequencies.data()};
  }
  args.tokens = pass.rows();
  args.q = projected_;
  args.q_stride = columns();
  args.positions = pass.positions.data();
  args.out = mixed_;
  args.out_stride = query_dim();
  args.lse = lse_memory_.Get(pass.rows() * attention.query_heads);
  args.spans = spans.own;
  machine_.kernels.AttendLanded(args, machine_.queue).Wait();
  args.spans = spans.shared;
  args.merge = true;
  machine_.kernels.AttendRotatedQuery(args, machine_.queue).Wait();
  ForRows(machine_.workers, pass.rows(), [&](int64_t row) {
    float* out = mixed_ + row * query_dim();
    const float* gate = projected_ + row * columns() + query_dim();
    for (int32_t head = 0; head < attention.query_heads; ++head) {
      SigmoidGate(out + head * attention.head_dim, gate + head * attention.head_dim, 1.0f, attention.head_dim);
    }
  });
}

}  // namespace ashlar::refengine
