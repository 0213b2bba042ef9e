// SPDX-License-Identifier: Apache-2.0
// Decoding linear layers from buffers (KVBuffer §3): the last tokens' keys and corrected writes are buffered, and
// applied to the state many tokens at a time. All families but mamba1, whose decay is not a vector over d_k.
// decoding_choice.h chooses the form and the buffer's length. kernels.h has the rules that hold for every operation.
// The reference engine can decode in this way (examples/refengine/decode_buffers.h).
//
// With S_0 the state, G the inclusive sum of log decays from the buffer's first token (a scalar, or a vector over d_k)
// and u_j the value that token j writes at its key:  S_t = e^{G_t} S_0 + Σ_{j ≤ t} e^{G_t − G_j} k_j u_jᵀ,
//   u_t = β_t (v_t − (e^{g_t} k_t)ᵀ S_{t−1})  if tokens erase,   β_t v_t for mamba2,   v_t otherwise.
// A buffered u is valid only after its own prefix.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/linear.h"

namespace ashlar::kernels {

// One request's buffer in one layer: pages of `page_tokens` slots, three planes with the same page numbers. Slot j is
// in page page_table[j / page_tokens] at row j % page_tokens; a plane's pages are dense and follow one another.
struct TokenBuffer {
  void* keys = nullptr;    // [pages][page_tokens][key_heads, d_k] in `dtype`
  void* writes = nullptr;  // [pages][page_tokens][heads, d_v] in `dtype`: u
  float* gates = nullptr;  // [pages][page_tokens][heads, SlotGateWidth(shape)]: each token's log decay
  DType dtype = DType::kF32;
  int32_t page_tokens = 0;
  const int32_t* page_table = nullptr;
  int32_t filled = 0;  // slots in use; the caller maintains the count, and drops rejected drafts by lowering it
};
// Log decays of one token and head: 1, or d_k for gla and kda.
int32_t SlotGateWidth(const LinearShape& shape);
// Slot j's row in every plane.
inline int64_t SlotRow(const TokenBuffer& buffer, int32_t j) {
  return int64_t{buffer.page_table[j / buffer.page_tokens]} * buffer.page_tokens + j % buffer.page_tokens;
}

// An fp32 state may have a `rounded` copy of 16 bits, which tokens that do not flush read instead: half the bytes. The
// error of outputs is about the same as with buffers of that type, and does not accumulate, because states are computed
// from states. A flush reads and writes the state and rounds it again. The caller makes the first copy, and the next
// one whenever it changes the state otherwise: RebuildState of 0 tokens with the copy as its target.
struct BufferedRequest {
  StateView state;     // before the buffer's first slot; heads null: zero (a context that was never flushed)
  StateView rounded;   // fp16 or bf16; heads null: none
  TokenBuffer buffer;  // the call fills slots from `filled`; planes may be null if it needs no slot
  bool flush = false;  // DecodeBuffered: afterwards the state holds all slots and the new token, and is written
};
// Returns the state that a request's tokens read.
inline const StateView& StartOf(const BufferedRequest& request) {
  return request.flush || request.rounded.heads == nullptr ? request.state : request.rounded;
}

// Decodes one token of each request: computes its output S_tᵀ q_t, and appends its key, write and gate to the buffer.
// With `flush` one pass reads and updates the state; the new token enters the state alone and fills no slot, and the
// caller continues with filled = 0. A buffer with filled = 0 and flush is recurrent decoding.
struct DecodeBufferedArgs {
  LinearShape shape;
  std::span<const BufferedRequest> requests;
  TokenInputs inputs;    // tokens = requests.size(), in the requests' order; q is needed
  float* out = nullptr;  // [tokens][heads, d_v]
  int64_t out_stride = 0;
};

// Computes `drafts` tokens of each request at once: one pass over state and buffer gives all their outputs, and slots
// filled … filled + drafts − 1 hold them. No state is written and none is allocated; the caller accepts n of them by
// raising `filled` by n.
struct VerifyDraftsArgs {
  LinearShape shape;
  std::span<const BufferedRequest> requests;  // flush must be false
  int32_t drafts = 0;                         // 1 … kMaxDrafts
  TokenInputs inputs;                         // tokens = requests.size() × drafts, request by request; q is needed
  float* out = nullptr;                       // [tokens][heads, d_v]
  int64_t out_stride = 0;
};
inline constexpr int32_t kMaxDrafts = 16;

// The state after the first `tokens` slots of a buffer: a checkpoint inside a span, the update with accepted drafts, or
// the first state of a context that was never flushed. In place if target and request.state are the same. Does not read
// rounded copies, and only writes one if that is its target.
struct RebuildStateArgs {
  LinearShape shape;
  BufferedRequest request;
  int32_t tokens = 0;  // ≤ buffer.filled
  StateView target;    // out
};

}  // namespace ashlar::kernels
