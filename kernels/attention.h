// SPDX-License-Identifier: Apache-2.0
// Full attention over keys in an engine's pages, which are stored in one of three ways: rotated to their positions when
// they were landed (HYPIC §4.4); unrotated, and rotated while they are loaded (MEPIC §5.3); or rotated from their
// segment's start, with a query that is rotated to match. kernels.h has the rules that hold for every operation.
// examples/refengine uses the first and the third way; only tests and ashlar-bench use the second, until there are
// bindings of engines whose models store unrotated keys (StoredKeys).
#pragma once

#include <cstdint>
#include <span>

#include "kernels/rows.h"
#include "tensor/types.h"

namespace ashlar::kernels {

struct AttentionShape {
  AttentionKind kind = AttentionKind::kGqa;
  int32_t query_heads = 0;
  int32_t kv_heads = 0;   // divides query_heads; query head h reads kv head h / (query_heads / kv_heads). mla: 1
  int32_t key_dim = 0;    // gqa; mla: the latent's dimension
  int32_t value_dim = 0;  // gqa; mla: the rotary key part's dimension
  float scale = 1;        // factor of the scores
  int64_t window = 0;     // a key at position p is seen from t where t − window < p ≤ t; 0: every p ≤ t

  // Width of a query and of an output row. mla: the query is the absorbed [latent, rotary part]; the output a latent.
  constexpr int32_t QueryDim() const { return kind == AttentionKind::kMla ? key_dim + value_dim : key_dim; }
  constexpr int32_t OutDim() const { return kind == AttentionKind::kMla ? key_dim : value_dim; }
};
inline constexpr int32_t kMaxQueryDim = 1024;

// A run of tokens whose keys and values are in pages: token i of the span is at slot first_slot + i of its own page
// table, and at position + i in the prompt.
struct KeySpan {
  PagedSlots keys;    // mla: the latents
  PagedSlots values;  // mla: the rotary key parts
  int64_t first_slot = 0;
  int64_t tokens = 0;
  int64_t position = 0;
  // Zero-based keys: the position of their segment's start; key i was rotated by position + i − origin.
  int64_t origin = 0;
};

// softmax(scale · q·k) V over all keys of the spans that each query sees. A NaN among them makes the output NaN.
// Queries are unrotated, with their positions; each operation rotates them as needed. Frequencies must be fixed numbers
// (no scaling that depends on length).
struct AttendArgs {
  AttentionShape shape;
  Rotation rotation;  // rotation of the first dimensions of a key; MLA: of the rotary part
  std::span<const KeySpan> spans;
  int64_t tokens = 0;                  // queries
  const float* q = nullptr;            // [tokens][query_heads, QueryDim()]
  const int64_t* positions = nullptr;  // [tokens]
  float* out = nullptr;                // [tokens][query_heads, OutDim()]; zeros for queries that see nothing
  float* lse = nullptr;  // [tokens, query_heads], log Σ e^{score}; −∞ for queries that see nothing; may be null
  // Merge into the contents of `out` and `lse`, from an earlier call over other spans: the result is attention over
  // both.
  bool merge = false;
  int64_t q_stride = 0, out_stride = 0;  // floats, from one token to the next
};

}  // namespace ashlar::kernels
