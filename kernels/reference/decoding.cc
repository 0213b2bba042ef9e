// SPDX-License-Identifier: Apache-2.0
// Decoding from buffers in the simplest way: rebuilds the state in fp64 slot by slot, then continues the recurrence.
#include <cmath>
#include <vector>

#include "kernels/reference/recurrence.h"
#include "kernels/reference/reference.h"

namespace ashlar::kernels::reference {
namespace {

// Head h's part of slot j, as indices into the buffer's planes.
struct Slot {
  Slot(const LinearShape& shape, const TokenBuffer& buffer, int32_t j, int32_t h) {
    const int64_t row = SlotRow(buffer, j), key_head = h / (shape.heads / shape.key_heads);
    key = (row * shape.key_heads + key_head) * shape.d_k;
    write = (row * shape.heads + h) * shape.d_v;
    gate = (row * shape.heads + h) * SlotGateWidth(shape);
  }
  int64_t key, write, gate;
};

// The state after the first `tokens` slots after `start`.
Matrix StateAfter(const LinearShape& shape, const StateView& start, const TokenBuffer& buffer, int32_t tokens,
                  int32_t h) {
  Matrix state = start.heads == nullptr ? Matrix(shape.d_k, shape.d_v) : ReadState(shape, start, h);
  std::vector<double> write(static_cast<size_t>(shape.d_v));
  for (int32_t t = 0; t < tokens; ++t) {
    const Slot slot(shape, buffer, t, h);
    for (int32_t j = 0; j < shape.d_v; ++j) write[j] = ReadElement(buffer.dtype, buffer.writes, slot.write + j);
    for (int32_t i = 0; i < shape.d_k; ++i) {
      const double decay = std::exp(double{buffer.gates[slot.gate + (SlotGateWidth(shape) == 1 ? 0 : i)]});
      const double key = ReadElement(buffer.dtype, buffer.keys, slot.key + i);
      for (int32_t j = 0; j < shape.d_v; ++j) state(i, j) = decay * state(i, j) + key * write[j];
    }
  }
  return state;
}

void Append(const LinearShape& shape, const Token& token, const std::vector<double>& writes, int32_t t, int32_t h,
            const TokenBuffer& buffer) {
  const Slot slot(shape, buffer, t, h);
  for (int32_t i = 0; i < shape.d_k; ++i) WriteElement(buffer.dtype, buffer.keys, slot.key + i, token.k[i]);
  for (int32_t j = 0; j < shape.d_v; ++j) {
    WriteElement(buffer.dtype, buffer.writes, slot.write + j, static_cast<float>(writes[j]));
  }
  for (int32_t i = 0; i < SlotGateWidth(shape); ++i) {
    buffer.gates[slot.gate + i] = static_cast<float>(LogDecay(shape, token, h, i, 0));
  }
}

// `tokens` tokens of the inputs from `first` on, of one request.
void Decode(const LinearShape& shape, const BufferedRequest& request, const TokenInputs& inputs, int64_t first,
            int32_t tokens, float* out, int64_t out_stride) {
  std::vector<double> writes(static_cast<size_t>(shape.d_v));
  for (int32_t h = 0; h < shape.heads; ++h) {
    Matrix state = StateAfter(shape, StartOf(request), request.buffer, request.buffer.filled, h);
    for (int32_t t = 0; t < tokens; ++t) {
      const Token token(shape, inputs, first + t, h);
      Advance(shape, token, h, token.v, state, writes.data());
      ReadOut(state, token.q, out + (first + t) * out_stride + int64_t{h} * shape.d_v);
      if (!request.flush) Append(shape, token, writes, request.buffer.filled + t, h, request.buffer);
    }
    if (!request.flush) continue;
    WriteState(shape, state, h, request.state);
    if (request.rounded.heads != nullptr) WriteState(shape, state, h, request.rounded);
  }
}

}  // namespace

void DecodeBuffered(const DecodeBufferedArgs& args) {
  for (size_t r = 0; r < args.requests.size(); ++r) {
    Decode(args.shape, args.requests[r], args.inputs, static_cast<int64_t>(r), 1, args.out, args.out_stride);
  }
}

void VerifyDrafts(const VerifyDraftsArgs& args) {
  for (size_t r = 0; r < args.requests.size(); ++r) {
    Decode(args.shape, args.requests[r], args.inputs, static_cast<int64_t>(r) * args.drafts, args.drafts, args.out,
           args.out_stride);
  }
}

void RebuildState(const RebuildStateArgs& args) {
  for (int32_t h = 0; h < args.shape.heads; ++h) {
    const Matrix state = StateAfter(args.shape, args.request.state, args.request.buffer, args.tokens, h);
    WriteState(args.shape, state, h, args.target);
  }
}

}  // namespace ashlar::kernels::reference
