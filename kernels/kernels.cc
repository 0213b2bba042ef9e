// SPDX-License-Identifier: Apache-2.0
// Checks arguments for all back ends. A bad argument is a programming error, and aborts.
#include "kernels/kernels.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace ashlar::kernels {
namespace {

void Check(bool holds, const char* operation, const char* field) {
  if (holds) return;
  std::fprintf(stderr, "kernels: %s: %s\n", operation, field);
  std::abort();
}

void CheckRotation(const Rotation& rotation, int32_t dim, const char* operation) {
  if (rotation.style == RopeStyle::kNone) return;
  Check(rotation.style == RopeStyle::kHalfSplit || rotation.style == RopeStyle::kInterleaved, operation,
        "rotation.style is unknown");
  Check(rotation.rotary_dim > 0 && rotation.rotary_dim % 2 == 0 && rotation.rotary_dim <= std::min(dim, kMaxRotaryDim),
        operation, "rotation.rotary_dim must be even, at most dim and at most kMaxRotaryDim");
  Check(rotation.frequencies != nullptr, operation, "rotation.frequencies is null");
}

bool NeedsTable(Family family) {
  return family == Family::kRetnet || family == Family::kLightning || family == Family::kMamba2 ||
         family == Family::kMamba1;
}

void CheckShape(const LinearShape& shape, const char* operation) {
  Check(shape.family >= Family::kRetnet && shape.family <= Family::kKda, operation, "shape.family is unknown");
  Check(shape.heads > 0, operation, "shape.heads must be positive");
  Check(shape.key_heads > 0 && shape.heads % shape.key_heads == 0, operation,
        "shape.key_heads must divide shape.heads");
  Check(shape.d_k > 0 && shape.d_k <= kMaxHeadDim, operation, "shape.d_k must lie in 1 … kMaxHeadDim");
  Check(shape.d_v > 0 && shape.d_v <= kMaxHeadDim, operation, "shape.d_v must lie in 1 … kMaxHeadDim");
  Check(shape.order == StateOrder::kKeyFirst || shape.order == StateOrder::kValueFirst, operation,
        "shape.order is unknown");
  Check((shape.decay_table != nullptr) == NeedsTable(shape.family), operation,
        "shape.decay_table: needed for retnet, lightning, mamba2 and mamba1 alone");
  CheckRotation(shape.rotation, shape.d_k, operation);
  Check(shape.rotation.style == RopeStyle::kNone || NaturalForm(shape.family) == TransitionForm::kScalar, operation,
        "shape.rotation: only scalar transitions commute with a turn");
}

bool IsStateType(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// Forms that composition supports in a layer of this family: a decay of another shape would be an error in the tuple's
// description.
bool FormFits(Family family, TransitionForm form) {
  if (form == TransitionForm::kZero || form == NaturalForm(family)) return true;
  return NaturalForm(family) == TransitionForm::kDense && form == TransitionForm::kLowRank;
}

void CheckInteriors(const LinearShape& shape, std::span<const TupleView> interiors, const char* operation) {
  for (const TupleView& interior : interiors) {
    Check(interior.heads != nullptr, operation, "interiors: a tuple without heads");
    Check(IsStateType(interior.transition_dtype) && IsStateType(interior.state_dtype), operation,
          "interiors: dtypes must be fp32, fp16 or bf16");
    for (int32_t h = 0; h < shape.heads; ++h) {
      const HeadTuple& head = interior.heads[h];
      Check(FormFits(shape.family, head.form), operation, "interiors: a form that the family does not have");
      Check(head.state != nullptr && (head.transition != nullptr || head.form == TransitionForm::kZero), operation,
            "interiors: a tuple without pointers");
      Check(head.form != TransitionForm::kLowRank || (head.rank > 0 && head.rank <= shape.d_k), operation,
            "interiors: rank must lie in 1 … d_k");
    }
  }
}

// Returns whether a table has no null among its pointers.
template <typename T>
bool IsWhole(T* const* table, int64_t count) {
  return std::none_of(table, table + count, [](const T* pointer) { return pointer == nullptr; });
}

void CheckState(const LinearShape& shape, const StateView& state, const char* operation) {
  Check(state.heads != nullptr, operation, "state is null");
  Check(IsWhole(state.heads, shape.heads), operation, "state: a head is null");
  Check(IsStateType(state.dtype), operation, "state.dtype must be fp32, fp16 or bf16");
  Check((state.exponents != nullptr) == (state.dtype == DType::kF16), operation,
        "state.exponents: needed for fp16 alone");
}

void CheckTarget(const LinearShape& shape, const TupleTarget& tuple, const char* operation) {
  Check(tuple.state != nullptr, operation, "tuple.state is null");
  Check(IsWhole(tuple.state, shape.heads), operation, "tuple.state: a head is null");
  Check(tuple.transition == nullptr || IsWhole(tuple.transition, shape.heads), operation,
        "tuple.transition: a head is null");
  Check(IsStateType(tuple.transition_dtype) && IsStateType(tuple.state_dtype), operation,
        "tuple: dtypes must be fp32, fp16 or bf16");
  Check((tuple.state_exponents != nullptr) == (tuple.state_dtype == DType::kF16), operation,
        "tuple.state_exponents: needed for fp16 alone");
}

void CheckInputs(const LinearShape& shape, const TokenInputs& inputs, const char* operation) {
  Check(inputs.tokens >= 0, operation, "inputs.tokens is negative");
  if (inputs.tokens == 0) return;
  Check(inputs.k != nullptr && inputs.v != nullptr, operation, "inputs: k and v are needed");
  Check((inputs.g != nullptr) == (GateWidth(shape) > 0), operation, "inputs.g: needed for gla, gdn and kda alone");
  Check((inputs.beta != nullptr) == (BetaWidth(shape) > 0), operation,
        "inputs.beta: needed for mamba2, mamba1, deltanet, gdn and kda alone");
}

void CheckScales(DType dtype, const void* scales, const char* operation) {
  Check(dtype >= DType::kF32 && dtype <= DType::kF8E5M2, operation, "dtype is unknown");
  Check(scales == nullptr || ElementBytes(dtype) == 1, operation, "scales: for 8-bit types alone");
}

void CheckRounded(const LinearShape& shape, const BufferedRequest& request, const char* operation) {
  if (request.rounded.heads == nullptr) return;
  Check(request.state.heads != nullptr && request.state.dtype == DType::kF32, operation,
        "requests: rounded needs a state of fp32");
  CheckState(shape, request.rounded, operation);
  Check(request.rounded.dtype != DType::kF32, operation, "requests: rounded.dtype must be fp16 or bf16");
}

void CheckBuffer(const LinearShape& shape, const BufferedRequest& request, bool appends, const char* operation) {
  Check(shape.family != Family::kMamba1, operation, "shape.family: mamba1 has no buffers");
  if (request.state.heads != nullptr) CheckState(shape, request.state, operation);
  CheckRounded(shape, request, operation);
  const TokenBuffer& buffer = request.buffer;
  Check(buffer.filled >= 0, operation, "requests: buffer.filled is negative");
  if (buffer.filled == 0 && !appends) return;
  Check(buffer.keys != nullptr && buffer.writes != nullptr && buffer.gates != nullptr, operation,
        "requests: buffer.keys, writes and gates are needed");
  Check(buffer.page_table != nullptr, operation, "requests: buffer.page_table is null");
  Check(buffer.page_tokens > 0, operation, "requests: buffer.page_tokens must be positive");
  Check(IsStateType(buffer.dtype), operation, "requests: buffer.dtype must be fp32, fp16 or bf16");
}

void CheckDecoding(const LinearShape& shape, std::span<const BufferedRequest> requests, int32_t tokens_each,
                   const TokenInputs& inputs, const float* out, const char* operation) {
  CheckShape(shape, operation);
  CheckInputs(shape, inputs, operation);
  Check(inputs.tokens == static_cast<int64_t>(requests.size()) * tokens_each, operation,
        "inputs.tokens: not as many as the requests decode");
  Check(requests.empty() || (inputs.q != nullptr && out != nullptr), operation, "inputs.q and out are needed");
  for (const BufferedRequest& request : requests) CheckBuffer(shape, request, !request.flush, operation);
}

void CheckSlots(const PagedSlots& slots, const char* operation) {
  Check(slots.base != nullptr && slots.page_table != nullptr, operation, "paged slots: base and page_table are needed");
  Check(slots.page_tokens > 0, operation, "paged slots: page_tokens must be positive");
  CheckScales(slots.dtype, slots.scales, operation);
}

void CheckRows(const void* const* units, const float* const* scales, int32_t unit_tokens, int64_t tokens, int32_t heads,
               int32_t dim, const char* operation) {
  Check(unit_tokens > 0 && heads > 0 && dim > 0, operation, "rows: unit_tokens, heads and dim must be positive");
  Check(tokens >= 0, operation, "rows: tokens is negative");
  const int64_t count = (tokens + unit_tokens - 1) / unit_tokens;
  Check(count == 0 || (units != nullptr && IsWhole(units, count)), operation, "rows: a unit is null");
  Check(scales == nullptr || IsWhole(scales, count), operation, "rows: a unit's scales are null");
}

void CheckAttend(const AttendArgs& args, const char* operation) {
  const AttentionShape& shape = args.shape;
  const bool mla = shape.kind == AttentionKind::kMla;
  Check(mla || shape.kind == AttentionKind::kGqa, operation, "shape.kind is unknown");
  Check(shape.kv_heads > 0 && shape.query_heads > 0 && shape.query_heads % shape.kv_heads == 0, operation,
        "shape.kv_heads must divide shape.query_heads");
  Check(!mla || shape.kv_heads == 1, operation, "shape.kv_heads: latent attention has one");
  Check(shape.key_dim > 0 && shape.value_dim > 0 && shape.QueryDim() <= kMaxQueryDim && shape.OutDim() <= kMaxQueryDim,
        operation, "shape: key_dim and value_dim must be positive, and the query and output at most kMaxQueryDim wide");
  Check(shape.window >= 0, operation, "shape.window is negative");
  CheckRotation(args.rotation, mla ? shape.value_dim : shape.key_dim, operation);
  for (const KeySpan& span : args.spans) {
    Check(span.tokens >= 0 && span.first_slot >= 0, operation, "spans: tokens and first_slot must not be negative");
    if (span.tokens == 0) continue;
    CheckSlots(span.keys, operation);
    CheckSlots(span.values, operation);
  }
  Check(args.tokens >= 0, operation, "tokens is negative");
  Check(args.tokens == 0 || (args.q != nullptr && args.positions != nullptr && args.out != nullptr), operation,
        "q, positions and out are needed");
  Check(!args.merge || args.lse != nullptr, operation, "lse: a result cannot be merged without its own");
}

}  // namespace

int32_t GateWidth(const LinearShape& shape) {
  if (shape.family == Family::kGdn) return 1;
  return shape.family == Family::kGla || shape.family == Family::kKda ? shape.d_k : 0;
}

int32_t BetaWidth(const LinearShape& shape) {
  if (shape.family == Family::kMamba1) return shape.d_v;
  return shape.family == Family::kMamba2 || Erases(shape.family) ? 1 : 0;
}

int32_t SlotGateWidth(const LinearShape& shape) {
  return shape.family == Family::kGla || shape.family == Family::kKda ? shape.d_k : 1;
}

Event Kernels::Compose(const ComposeArgs& args, Queue& queue) const {
  CheckShape(args.shape, "Compose");
  CheckInteriors(args.shape, args.interiors, "Compose");
  CheckState(args.shape, args.state, "Compose");
  return DoCompose(args, queue);
}

Event Kernels::ComposeTransitions(const ComposeTransitionsArgs& args, Queue& queue) const {
  CheckShape(args.shape, "ComposeTransitions");
  CheckInteriors(args.shape, args.interiors, "ComposeTransitions");
  CheckTarget(args.shape, args.tuple, "ComposeTransitions");
  Check(args.tuple.transition != nullptr, "ComposeTransitions", "tuple.transition is null");
  return DoComposeTransitions(args, queue);
}

Event Kernels::Capture(const CaptureArgs& args, Queue& queue) const {
  CheckShape(args.shape, "Capture");
  CheckInputs(args.shape, args.inputs, "Capture");
  CheckTarget(args.shape, args.tuple, "Capture");
  Check(args.decay == nullptr || NaturalForm(args.shape.family) == TransitionForm::kDense, "Capture",
        "decay: the family's transitions are its decays");
  Check(args.decay == nullptr || memory() == nullptr, "Capture", "decay: not on a device");
  return DoCapture(args, queue);
}

Event Kernels::AdvanceSeam(const AdvanceSeamArgs& args, Queue& queue) const {
  CheckShape(args.shape, "AdvanceSeam");
  CheckInputs(args.shape, args.inputs, "AdvanceSeam");
  CheckState(args.shape, args.state, "AdvanceSeam");
  Check(args.out == nullptr || args.inputs.tokens == 0 || args.inputs.q != nullptr, "AdvanceSeam",
        "inputs.q is needed for outputs");
  int64_t last = 0;
  for (const SeamStep& step : args.steps) {
    if (step.checkpoint != nullptr) CheckState(args.shape, *step.checkpoint, "AdvanceSeam");
    if (step.interior != nullptr) {
      CheckInteriors(args.shape, {step.interior, 1}, "AdvanceSeam");
      continue;
    }
    Check(step.begin >= last && step.end >= step.begin && step.end <= args.inputs.tokens, "AdvanceSeam",
          "steps: runs must ascend, not overlap, and lie inside the inputs");
    last = step.end;
  }
  return DoAdvanceSeam(args, queue);
}

Event Kernels::DecodeBuffered(const DecodeBufferedArgs& args, Queue& queue) const {
  CheckDecoding(args.shape, args.requests, 1, args.inputs, args.out, "DecodeBuffered");
  for (const BufferedRequest& request : args.requests) {
    Check(!request.flush || request.state.heads != nullptr, "DecodeBuffered", "requests: flush needs a state");
  }
  return DoDecodeBuffered(args, queue);
}

Event Kernels::VerifyDrafts(const VerifyDraftsArgs& args, Queue& queue) const {
  Check(args.drafts > 0 && args.drafts <= kMaxDrafts, "VerifyDrafts", "drafts must lie in 1 … kMaxDrafts");
  CheckDecoding(args.shape, args.requests, args.drafts, args.inputs, args.out, "VerifyDrafts");
  for (const BufferedRequest& request : args.requests) {
    Check(!request.flush, "VerifyDrafts", "requests: flush must be false");
  }
  return DoVerifyDrafts(args, queue);
}

Event Kernels::RebuildState(const RebuildStateArgs& args, Queue& queue) const {
  CheckShape(args.shape, "RebuildState");
  CheckBuffer(args.shape, args.request, false, "RebuildState");
  Check(!args.request.flush, "RebuildState", "request.flush must be false");
  Check(args.tokens >= 0 && args.tokens <= args.request.buffer.filled, "RebuildState",
        "tokens must lie in 0 … buffer.filled");
  CheckState(args.shape, args.target, "RebuildState");
  return DoRebuildState(args, queue);
}

Event Kernels::RotateKeys(const RotateKeysArgs& args, Queue& queue) const {
  Check(args.rows >= 0 && args.dim > 0, "RotateKeys", "rows and dim");
  Check(args.rows == 0 || (args.source != nullptr && args.target != nullptr), "RotateKeys",
        "source and target are needed");
  CheckScales(args.dtype, args.source_scales, "RotateKeys");
  Check((args.source_scales == nullptr) == (args.target_scales == nullptr), "RotateKeys",
        "scales: of both sides or of neither");
  CheckRotation(args.rotation, args.dim, "RotateKeys");
  Check(args.rows_per_position > 0 && args.rows % args.rows_per_position == 0, "RotateKeys",
        "rows_per_position does not divide rows");
  Check(memory() == nullptr || args.positions == nullptr, "RotateKeys", "positions: not on a device");
  Check(memory() == nullptr || !args.scaled, "RotateKeys", "scaled: not on a device");
  return DoRotateKeys(args, queue);
}

Event Kernels::Land(const LandArgs& args, Queue& queue) const {
  const StoredRows& source = args.source;
  CheckRows(source.units, source.scales, source.unit_tokens, source.tokens, source.heads, source.dim, "Land");
  CheckRotation(args.rotation, source.dim, "Land");
  CheckSlots(args.target, "Land");
  Check(source.dtype == args.target.dtype, "Land", "dtype: source and target differ");
  Check(source.tokens == 0 || (source.scales == nullptr) == (args.target.scales == nullptr), "Land",
        "scales: of both sides or of neither");
  Check(args.first_position >= 0, "Land", "first_position is negative");
  return DoLand(args, queue);
}

Event Kernels::Gather(const GatherArgs& args, Queue& queue) const {
  CheckRows(args.units, args.scales, args.unit_tokens, args.tokens, args.heads, args.dim, "Gather");
  CheckSlots(args.source, "Gather");
  Check(args.tokens == 0 || (args.source.scales == nullptr) == (args.scales == nullptr), "Gather",
        "scales: of both sides or of neither");
  Check(args.first_position >= 0, "Gather", "first_position is negative");
  return DoGather(args, queue);
}

Event Kernels::Checksum(const ChecksumArgs& args, Queue& queue) const {
  Check(args.units.empty() || args.unit_checksums != nullptr, "Checksum", "unit_checksums is null");
  return DoChecksum(args, queue);
}

Event Kernels::AttendLanded(const AttendArgs& args, Queue& queue) const {
  CheckAttend(args, "AttendLanded");
  return DoAttendLanded(args, queue);
}

Event Kernels::AttendUnrotated(const AttendArgs& args, Queue& queue) const {
  CheckAttend(args, "AttendUnrotated");
  return DoAttendUnrotated(args, queue);
}

Event Kernels::AttendRotatedQuery(const AttendArgs& args, Queue& queue) const {
  CheckAttend(args, "AttendRotatedQuery");
  return DoAttendRotatedQuery(args, queue);
}

}  // namespace ashlar::kernels
