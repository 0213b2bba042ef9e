// SPDX-License-Identifier: Apache-2.0
// Linear-attention layers: S_t = T_t S_{t−1} + u_t, o_t = S_tᵀ q_t. Composing tuples of segments, advancing seams
// (HYPIC §4.2–4.3, equations 2, 4, 6). kernels.h has the rules that hold for every operation.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "kernels/rotation.h"
#include "tensor/types.h"

namespace ashlar::kernels {

// One linear-attention layer, or the part of it in one tensor-parallel rank.
struct LinearShape {
  Family family = Family::kGdn;
  int32_t heads = 0;      // value heads; each has its own state
  int32_t key_heads = 0;  // divides `heads`; value head h reads key head h / (heads / key_heads)
  int32_t d_k = 0;        // ≤ kMaxHeadDim
  int32_t d_v = 0;        // ≤ kMaxHeadDim; mamba1's channels are cut into heads of at most this many
  StateOrder order = StateOrder::kKeyFirst;
  // retnet, lightning, mamba2: [heads]; mamba1: [heads][d_k, d_v], k-first in either order; otherwise null. The
  // engine's own numbers, ≤ 0, never derived from a configuration.
  const float* decay_table = nullptr;
  // Rotation of keys inside the layer: only for scalar transitions, which commute with a rotation (S_{C|p} = R(p)
  // S_{C|0}). Tokens' q and k are already rotated; cached end states are rotated by their tuple's `position`.
  Rotation rotation = {};
};
inline constexpr int32_t kMaxHeadDim = 256;

// One head of a tuple, as an object stores it.
struct HeadTuple {
  TransitionForm form = TransitionForm::kDense;
  int32_t rank = 0;                  // kLowRank: 1 … d_k
  const void* transition = nullptr;  // has the form `form`; kZero: null
  const void* state = nullptr;       // zero-start end state, [d_k, d_v] or [d_v, d_k], in the shape's order
  int32_t state_exponent = 0;        // the state is its numbers × 2^state_exponent
};

// The tuple of one segment's interior in one layer.
struct TupleView {
  const HeadTuple* heads = nullptr;  // [shape.heads]
  DType transition_dtype = DType::kF32;
  DType state_dtype = DType::kF32;
  int64_t position = 0;  // position of the segment in the prompt; read only with shape.rotation
};

// The memory to which a tuple is written: every head's transition has the family's natural form.
struct TupleTarget {
  void* const* transition = nullptr;  // [heads]; null where only the end state is wanted
  void* const* state = nullptr;       // [heads]
  DType transition_dtype = DType::kF32;
  DType state_dtype = DType::kF32;
  // [heads], out: needed for fp16, because the states of families without erasing exceed its range. The exponent is the
  // smallest e ≥ 0 for which max|S| ≤ 2^(e + 15). Null for the other types, whose exponent is 0.
  int32_t* state_exponents = nullptr;
};

// A layer's running state, in and out.
struct StateView {
  void* const* heads = nullptr;  // [shape.heads] → [d_k, d_v] or [d_v, d_k]
  DType dtype = DType::kF32;
  int32_t* exponents = nullptr;  // [heads], in and out, for fp16 (see TupleTarget); null for the other types
};

// Per-token inputs of a linear layer, fp32. Keys and queries are inputs of the recurrence: after convolution,
// activation, normalisation, rotation and the query's scale. Strides are floats from one token to the next.
struct TokenInputs {
  int64_t tokens = 0;
  const float* q = nullptr;  // [tokens][key_heads, d_k] (mamba: C); may be null without outputs
  const float* k = nullptr;  // [tokens][key_heads, d_k] (mamba: B)
  const float* v = nullptr;  // [tokens][heads, d_v] (mamba: x)
  // Log decay, ≤ 0. gdn: [tokens][heads]; gla, kda: [tokens][heads, d_k]; otherwise null.
  const float* g = nullptr;
  // deltanet, gdn, kda: β, [tokens][heads]; mamba2: dt, [tokens][heads]; mamba1: dt, [tokens][heads, d_v]; otherwise
  // null.
  const float* beta = nullptr;
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
};
// Numbers of g and of beta per token and head of a family; 0: none.
int32_t GateWidth(const LinearShape& shape);
int32_t BetaWidth(const LinearShape& shape);

// Composes a chain of interiors onto a running state: S ← T_n(… T_1 S + S_1 …) + S_n (HYPIC equation 6). Sums are
// fp32 along the whole chain, whatever the dtypes; the state is rounded once, at the end.
struct ComposeArgs {
  LinearShape shape;
  std::span<const TupleView> interiors;
  StateView state;  // read, then overwritten
};

// Composes a chain of tuples into one: (T_n … T_1, the chain's zero-start end state). Outputs must not alias inputs.
// The result is at position 0: each interior is rotated by its own position, and the result needs no further rotation.
struct ComposeTransitionsArgs {
  LinearShape shape;
  std::span<const TupleView> interiors;
  TupleTarget tuple;  // out
};

// The tuple of a run of tokens: transition and zero-start end state (starting from S = 0, T = I). The caller passes
// exactly the interior's tokens: a tuple that starts at token 0 of the segment is wrong at its seams.
struct CaptureArgs {
  LinearShape shape;
  TokenInputs inputs;
  TupleTarget tuple;  // out
  // Out, for families with dense transitions: [heads, d_k], the product of the tokens' decays, e^ΣG, an input of
  // AdaptTransitions; ones if the family has no gates. Null: not wanted. Not supported by device back ends.
  float* decay = nullptr;
};

// One step of a prompt's chain in one layer: either compose a cached interior, or run tokens [begin, end) of the
// inputs through the recurrence and emit their outputs.
struct SeamStep {
  const TupleView* interior = nullptr;    // null: a computed run
  int64_t begin = 0, end = 0;             // the run's tokens in `inputs`; runs ascend and do not overlap
  const StateView* checkpoint = nullptr;  // out: a copy of the state after this step, or null
};

// Interior, seam, interior, seam … in one call (HYPIC §4.3, figure 8). A full prefill is one run and no interior.
struct AdvanceSeamArgs {
  LinearShape shape;
  std::span<const SeamStep> steps;
  TokenInputs inputs;
  StateView state;       // read, then overwritten
  float* out = nullptr;  // [tokens][heads, d_v], outputs S_tᵀ q_t of every token in a run; may be null
  int64_t out_stride = 0;
};

}  // namespace ashlar::kernels
