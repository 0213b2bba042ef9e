// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/device_call.h"

#include <algorithm>

namespace ashlar::kernels::testing {
namespace {

// Numbers from the first row's first to the last row's last.
int64_t Extent(int64_t rows, int64_t stride, int64_t width) {
  return rows == 0 ? 0 : (rows - 1) * stride + width;
}

size_t TransitionBytes(const LinearShape& shape, const HeadTuple& head, DType dtype) {
  const auto d_k = static_cast<size_t>(shape.d_k), d_v = static_cast<size_t>(shape.d_v);
  switch (head.form) {
    case TransitionForm::kScalar:
      return sizeof(float);
    case TransitionForm::kDiagonal:
      return d_k * sizeof(float);
    case TransitionForm::kElementwise:
      return d_v * sizeof(float);
    case TransitionForm::kDense:
      return d_k * d_k * ElementBytes(dtype);
    case TransitionForm::kLowRank:
      return d_k * sizeof(float) + 2 * static_cast<size_t>(head.rank) * d_k * ElementBytes(dtype);
    case TransitionForm::kZero:
      return 0;
  }
  return 0;
}

size_t StateBytes(const LinearShape& shape, DType dtype) {
  return static_cast<size_t>(shape.d_k) * static_cast<size_t>(shape.d_v) * ElementBytes(dtype);
}

HeadTuple Natural(const LinearShape& shape) {
  return {.form = NaturalForm(shape.family)};
}

size_t LastUnitTokens(int64_t tokens, int32_t unit_tokens) {
  return static_cast<size_t>(tokens == 0 ? 0 : (tokens - 1) % unit_tokens + 1);
}

int64_t UnitsOf(int64_t tokens, int32_t unit_tokens) {
  return (tokens + unit_tokens - 1) / unit_tokens;
}

}  // namespace

DeviceCall::~DeviceCall() {
  for (const auto& [host, copy] : copies_) memory_.Free(copy.allocation);
}

void DeviceCall::CopyBack() {
  for (const auto& [host, copy] : copies_) {
    if (copy.written) memory_.CopyToHost(const_cast<void*>(host), copy.device, copy.bytes);
  }
}

void* DeviceCall::Bytes(const void* host, size_t bytes, bool written) {
  if (host == nullptr || bytes == 0) return const_cast<void*>(host);
  Copy& copy = copies_[host];
  copy.written |= written;
  if (measuring_) {
    copy.bytes = std::max(copy.bytes, bytes);
    return const_cast<void*>(host);
  }
  if (copy.allocation == nullptr) {
    // With the same misalignment as on the host.
    const size_t offset = reinterpret_cast<uintptr_t>(host) % 16;
    copy.allocation = memory_.Allocate(copy.bytes + offset);
    copy.device = static_cast<std::byte*>(copy.allocation) + offset;
    memory_.CopyToDevice(copy.device, host, copy.bytes);
  }
  return copy.device;
}

void* const* DeviceCall::Table(const void* const* host, int64_t count, size_t bytes, size_t last_bytes, bool written) {
  if (host == nullptr) return nullptr;
  std::vector<void*>& table = tables_.emplace_back();
  for (int64_t i = 0; i < count; ++i) table.push_back(Bytes(host[i], i + 1 == count ? last_bytes : bytes, written));
  return table.data();
}

LinearShape DeviceCall::Shape(LinearShape shape) {
  const int64_t numbers =
      shape.family == Family::kMamba1 ? int64_t{shape.heads} * shape.d_k * shape.d_v : int64_t{shape.heads};
  shape.decay_table = In(shape.decay_table, numbers);
  return shape;
}

TokenInputs DeviceCall::Inputs(const LinearShape& shape, TokenInputs inputs) {
  const int64_t keys = int64_t{shape.key_heads} * shape.d_k, heads = shape.heads;
  inputs.q = In(inputs.q, Extent(inputs.tokens, inputs.q_stride, keys));
  inputs.k = In(inputs.k, Extent(inputs.tokens, inputs.k_stride, keys));
  inputs.v = In(inputs.v, Extent(inputs.tokens, inputs.v_stride, heads * shape.d_v));
  inputs.g = In(inputs.g, Extent(inputs.tokens, inputs.g_stride, heads * GateWidth(shape)));
  inputs.beta = In(inputs.beta, Extent(inputs.tokens, inputs.beta_stride, heads * BetaWidth(shape)));
  return inputs;
}

TupleView DeviceCall::Interior(const LinearShape& shape, TupleView view) {
  std::vector<HeadTuple>& heads = heads_.emplace_back(view.heads, view.heads + shape.heads);
  for (HeadTuple& head : heads) {
    head.transition = Bytes(head.transition, TransitionBytes(shape, head, view.transition_dtype), false);
    head.state = Bytes(head.state, StateBytes(shape, view.state_dtype), false);
  }
  view.heads = heads.data();
  return view;
}

std::span<const TupleView> DeviceCall::Interiors(const LinearShape& shape, std::span<const TupleView> interiors) {
  std::vector<TupleView>& views = views_.emplace_back();
  for (const TupleView& interior : interiors) views.push_back(Interior(shape, interior));
  return views;
}

StateView DeviceCall::State(const LinearShape& shape, StateView view) {
  const size_t bytes = StateBytes(shape, view.dtype);
  view.heads = Table(view.heads, shape.heads, bytes, bytes, true);
  view.exponents = InOut(view.exponents, shape.heads);
  return view;
}

TupleTarget DeviceCall::Tuple(const LinearShape& shape, TupleTarget tuple) {
  const size_t transition = TransitionBytes(shape, Natural(shape), tuple.transition_dtype);
  const size_t state = StateBytes(shape, tuple.state_dtype);
  tuple.transition = Table(tuple.transition, shape.heads, transition, transition, true);
  tuple.state = Table(tuple.state, shape.heads, state, state, true);
  tuple.state_exponents = InOut(tuple.state_exponents, shape.heads);
  return tuple;
}

BufferedRequest DeviceCall::Request(const LinearShape& shape, BufferedRequest request, int32_t new_slots) {
  TokenBuffer& buffer = request.buffer;
  int64_t rows = 0;
  for (int32_t j = 0; j < buffer.filled + new_slots; ++j) {
    rows = std::max(rows, (SlotRow(buffer, j) / buffer.page_tokens + 1) * buffer.page_tokens);
  }
  const auto bytes = static_cast<int64_t>(ElementBytes(buffer.dtype));
  const int64_t keys = rows * shape.key_heads * shape.d_k, writes = rows * shape.heads * shape.d_v;
  buffer.keys = Bytes(buffer.keys, static_cast<size_t>(keys * bytes), true);
  buffer.writes = Bytes(buffer.writes, static_cast<size_t>(writes * bytes), true);
  buffer.gates = InOut(buffer.gates, rows * shape.heads * SlotGateWidth(shape));
  if (request.state.heads != nullptr) request.state = State(shape, request.state);
  if (request.rounded.heads != nullptr) request.rounded = State(shape, request.rounded);
  return request;
}

std::span<const BufferedRequest> DeviceCall::Requests(const LinearShape& shape,
                                                      std::span<const BufferedRequest> requests, int32_t new_slots) {
  for (const BufferedRequest& request : requests) {
    requests_.push_back(Request(shape, request, request.flush ? 0 : new_slots));
  }
  return requests_;
}

PagedSlots DeviceCall::Slots(PagedSlots slots, int64_t first, int64_t tokens, int32_t heads, int32_t dim,
                             bool written) {
  int64_t numbers = 0, scales = 0;
  for (int64_t p = first; p < first + tokens; ++p) {
    const int64_t page = slots.page_table[p / slots.page_tokens], in_page = p % slots.page_tokens;
    numbers = std::max(numbers,
                       page * slots.page_stride + in_page * slots.token_stride + (heads - 1) * slots.head_stride + dim);
    scales = std::max(scales, page * slots.scale_page_stride + in_page * slots.scale_token_stride +
                                  (heads - 1) * slots.scale_head_stride + 1);
  }
  slots.base = Bytes(slots.base, static_cast<size_t>(numbers) * ElementBytes(slots.dtype), written);
  slots.scales = static_cast<float*>(Bytes(slots.scales, static_cast<size_t>(scales) * sizeof(float), written));
  return slots;
}

ComposeArgs DeviceCall::Place(ComposeArgs args) {
  args.shape = Shape(args.shape);
  args.interiors = Interiors(args.shape, args.interiors);
  args.state = State(args.shape, args.state);
  return args;
}

ComposeTransitionsArgs DeviceCall::Place(ComposeTransitionsArgs args) {
  args.shape = Shape(args.shape);
  args.interiors = Interiors(args.shape, args.interiors);
  args.tuple = Tuple(args.shape, args.tuple);
  return args;
}

CaptureArgs DeviceCall::Place(CaptureArgs args) {
  args.shape = Shape(args.shape);
  args.inputs = Inputs(args.shape, args.inputs);
  args.tuple = Tuple(args.shape, args.tuple);
  return args;
}

AdvanceSeamArgs DeviceCall::Place(AdvanceSeamArgs args) {
  args.shape = Shape(args.shape);
  args.inputs = Inputs(args.shape, args.inputs);
  for (SeamStep step : args.steps) {
    if (step.interior != nullptr) step.interior = Interiors(args.shape, {step.interior, 1}).data();
    if (step.checkpoint != nullptr) {
      step.checkpoint = &checkpoints_.emplace_back(State(args.shape, *step.checkpoint));
    }
    steps_.push_back(step);
  }
  args.steps = steps_;
  args.state = State(args.shape, args.state);
  args.out = InOut(args.out, Extent(args.inputs.tokens, args.out_stride, int64_t{args.shape.heads} * args.shape.d_v));
  return args;
}

DecodeBufferedArgs DeviceCall::Place(DecodeBufferedArgs args) {
  args.shape = Shape(args.shape);
  args.inputs = Inputs(args.shape, args.inputs);
  args.requests = Requests(args.shape, args.requests, 1);
  args.out = InOut(args.out, Extent(args.inputs.tokens, args.out_stride, int64_t{args.shape.heads} * args.shape.d_v));
  return args;
}

VerifyDraftsArgs DeviceCall::Place(VerifyDraftsArgs args) {
  args.shape = Shape(args.shape);
  args.inputs = Inputs(args.shape, args.inputs);
  args.requests = Requests(args.shape, args.requests, args.drafts);
  args.out = InOut(args.out, Extent(args.inputs.tokens, args.out_stride, int64_t{args.shape.heads} * args.shape.d_v));
  return args;
}

RebuildStateArgs DeviceCall::Place(RebuildStateArgs args) {
  args.shape = Shape(args.shape);
  args.request = Request(args.shape, args.request, 0);
  args.target = State(args.shape, args.target);
  return args;
}

RotateKeysArgs DeviceCall::Place(RotateKeysArgs args) {
  const size_t bytes = static_cast<size_t>(args.rows) * static_cast<size_t>(args.dim) * ElementBytes(args.dtype);
  args.source = Bytes(args.source, bytes, false);
  args.target = Bytes(args.target, bytes, true);
  args.source_scales = In(args.source_scales, args.rows);
  args.target_scales = InOut(args.target_scales, args.rows);
  return args;
}

LandArgs DeviceCall::Place(LandArgs args) {
  StoredRows& source = args.source;
  const int64_t units = UnitsOf(source.tokens, source.unit_tokens);
  const size_t rows = static_cast<size_t>(source.unit_tokens) * static_cast<size_t>(source.heads);
  const size_t last = LastUnitTokens(source.tokens, source.unit_tokens) * static_cast<size_t>(source.heads);
  const size_t row_bytes = static_cast<size_t>(source.dim) * ElementBytes(source.dtype);
  source.units = Table(source.units, units, rows * row_bytes, last * row_bytes, false);
  source.scales = reinterpret_cast<const float* const*>(Table(
      reinterpret_cast<const void* const*>(source.scales), units, rows * sizeof(float), last * sizeof(float), false));
  args.target = Slots(args.target, args.first_position, source.tokens, source.heads, source.dim, true);
  args.unit_checksums = InOut(args.unit_checksums, units);
  args.scale_checksums = InOut(args.scale_checksums, units);
  return args;
}

GatherArgs DeviceCall::Place(GatherArgs args) {
  const int64_t units = UnitsOf(args.tokens, args.unit_tokens);
  const size_t rows = static_cast<size_t>(args.unit_tokens) * static_cast<size_t>(args.heads);
  const size_t last = LastUnitTokens(args.tokens, args.unit_tokens) * static_cast<size_t>(args.heads);
  const size_t row_bytes = static_cast<size_t>(args.dim) * ElementBytes(args.source.dtype);
  args.units = Table(args.units, units, rows * row_bytes, last * row_bytes, true);
  args.scales = reinterpret_cast<float* const*>(const_cast<void**>(Table(
      reinterpret_cast<const void* const*>(args.scales), units, rows * sizeof(float), last * sizeof(float), true)));
  args.source = Slots(args.source, args.first_position, args.tokens, args.heads, args.dim, false);
  args.unit_checksums = InOut(args.unit_checksums, units);
  args.scale_checksums = InOut(args.scale_checksums, units);
  return args;
}

ChecksumArgs DeviceCall::Place(ChecksumArgs args) {
  const auto units = static_cast<int64_t>(args.units.size());
  const void* const* sources = Table(args.units.data(), units, args.unit_bytes, args.last_unit_bytes, false);
  args.units = {sources, args.units.size()};
  args.target = Table(args.target, units, args.unit_bytes, args.last_unit_bytes, true);
  args.unit_checksums = InOut(args.unit_checksums, units);
  return args;
}

AttendArgs DeviceCall::Place(AttendArgs args) {
  const AttentionShape& shape = args.shape;
  for (KeySpan span : args.spans) {
    if (span.tokens > 0) {
      span.keys = Slots(span.keys, span.first_slot, span.tokens, shape.kv_heads, shape.key_dim, false);
      span.values = Slots(span.values, span.first_slot, span.tokens, shape.kv_heads, shape.value_dim, false);
    }
    spans_.push_back(span);
  }
  args.spans = spans_;
  args.q = In(args.q, Extent(args.tokens, args.q_stride, int64_t{shape.query_heads} * shape.QueryDim()));
  args.positions = In(args.positions, args.tokens);
  args.out = InOut(args.out, Extent(args.tokens, args.out_stride, int64_t{shape.query_heads} * shape.OutDim()));
  args.lse = InOut(args.lse, args.tokens * shape.query_heads);
  return args;
}

}  // namespace ashlar::kernels::testing
