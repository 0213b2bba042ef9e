// SPDX-License-Identifier: Apache-2.0
// Advances a layer by the daemon's composition service: copies inputs into memory that the daemon maps, and copies
// results back once they are complete.
#include <algorithm>
#include <cstring>
#include <utility>

#include "client/engine/layer_run.h"
#include "client/engine/token_rows.h"
#include "proto/limits.h"

namespace ashlar::engine {
uint64_t DaemonAdvance::StateBytes(const State& state) const {
  return uint64_t{layer_.value_heads} * layer_.d_k * layer_.d_v * ElementBytes(state.dtype);
}

uint64_t DaemonAdvance::StagedBytes(std::span<const ChainPiece> pieces, uint64_t tokens) const {
  const RowWidths widths(shape_);
  const auto floats = [](int64_t count) { return Staging::Align(static_cast<uint64_t>(count) * sizeof(float)); };
  const auto n = static_cast<int64_t>(tokens);
  const auto of = [&](const State& state) { return Staging::Align(StateBytes(state)) + floats(shape_.heads); };
  uint64_t bytes = of(advance_.state) + 2 * floats(n * widths.keys) + 2 * floats(n * widths.values) +
                   floats(n * widths.gates) + floats(n * widths.betas);
  for (const ChainPiece& piece : pieces) bytes += piece.copy == nullptr ? 0 : of(*piece.copy);
  return bytes;
}

float* DaemonAdvance::Stage(const float* rows, int64_t stride, uint64_t first, uint64_t tokens, int64_t width,
                            Staging::Held& held) const {
  if (rows == nullptr || width == 0) return nullptr;
  const auto bytes = static_cast<uint64_t>(width) * sizeof(float);
  auto* const copy = reinterpret_cast<float*>(held.Take(tokens * bytes));
  for (uint64_t t = 0; t < tokens; ++t) {
    std::memcpy(copy + static_cast<int64_t>(t) * width, rows + static_cast<int64_t>(first + t) * stride, bytes);
  }
  return copy;
}

RunningState DaemonAdvance::Stage(const State& state, Staging::Held& held, bool with_content) const {
  const uint64_t bytes = StateBytes(state), exponents = layer_.value_heads * sizeof(int32_t);
  RunningState copy{.data = held.Take(bytes), .dtype = state.dtype};
  if (state.exponents != nullptr) copy.exponents = reinterpret_cast<int32_t*>(held.Take(exponents));
  if (!with_content) return copy;
  const uint64_t head = bytes / layer_.value_heads, apart = HeadStride(state, shape_) * ElementBytes(state.dtype);
  for (uint64_t h = 0; h < layer_.value_heads; ++h) {
    std::memcpy(copy.data + h * head, static_cast<const std::byte*>(state.data) + h * apart, head);
  }
  if (state.exponents != nullptr) std::memcpy(copy.exponents, state.exponents, exponents);
  return copy;
}

void DaemonAdvance::CopyOut(const RunningState& from, const State& to) const {
  const uint64_t head = StateBytes(to) / layer_.value_heads;
  const uint64_t apart = HeadStride(to, shape_) * ElementBytes(to.dtype);
  for (uint64_t h = 0; h < layer_.value_heads; ++h) {
    std::memcpy(static_cast<std::byte*>(to.data) + h * apart, from.data + h * head, head);
  }
  if (to.exponents != nullptr) std::memcpy(to.exponents, from.exponents, layer_.value_heads * sizeof(int32_t));
}

kernels::TokenInputs DaemonAdvance::StageInputs(uint64_t first, uint64_t tokens, Staging::Held& held) const {
  const RowWidths widths(shape_);
  const TokenRows& rows = advance_.inputs;
  return {.tokens = static_cast<int64_t>(tokens),
          .q = Stage(rows.q, rows.q_stride, first, tokens, widths.keys, held),
          .k = Stage(rows.k, rows.k_stride, first, tokens, widths.keys, held),
          .v = Stage(rows.v, rows.v_stride, first, tokens, widths.values, held),
          .g = Stage(rows.g, rows.g_stride, first, tokens, widths.gates, held),
          .beta = Stage(rows.beta, rows.beta_stride, first, tokens, widths.betas, held),
          .q_stride = widths.keys,
          .k_stride = widths.keys,
          .v_stride = widths.values,
          .g_stride = widths.gates,
          .beta_stride = widths.betas};
}

bool DaemonAdvance::RunPart(std::span<const ChainPiece> pieces, uint64_t first_token, uint64_t tokens,
                            std::vector<uint32_t>& lost) {
  absl::StatusOr<Staging::Held> space = cache_.staging.Hold(StagedBytes(pieces, tokens));
  if (!space.ok()) return false;
  Staging::Held held = *std::move(space);
  const int64_t values = RowWidths(shape_).values;
  ashlar::LayerAdvance asked{.layer = advance_.layer, .steps = {}, .region = held.region()};
  asked.state = Stage(advance_.state, held, true);
  asked.inputs = StageInputs(first_token, tokens, held);
  asked.out_stride = values;
  // An engine that wants no outputs may omit the queries; the daemon refuses outputs without queries.
  if (tokens > 0 && advance_.out != nullptr)
    asked.out = reinterpret_cast<float*>(held.Take(tokens * static_cast<uint64_t>(values) * sizeof(float)));
  std::vector<AdvanceStep> steps;
  int64_t token = 0;
  for (const ChainPiece& piece : pieces) {
    AdvanceStep& step = steps.emplace_back();
    if (piece.cached != nullptr) {
      step.segment = LandSegment{piece.cached->segment, match_.segments()[piece.cached->segment].start};
    } else {
      step.begin = token;
      step.end = token += static_cast<int64_t>(piece.tokens);
    }
    if (piece.copy != nullptr) step.checkpoint = Stage(*piece.copy, held, false);
  }
  asked.steps = steps;

  Composition composition = cache_.model.Advance(&match_, asked);
  if (composition.reason() != MissReason::kNone) {
    size_t segment = 0;
    for (const AdvanceStep& step : steps) {
      if (!step.segment.has_value()) continue;
      const MissReason reason = composition.segments()[segment++];
      const bool gone = reason == MissReason::kChecksumFailed || reason == MissReason::kLeaseLost;
      if (gone) lost.push_back(step.segment->segment);
    }
    cache_.quarantine.Keep(std::move(composition), std::move(held));
    return false;
  }
  CopyOut(asked.state, advance_.state);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].copy != nullptr) CopyOut(steps[i].checkpoint, *pieces[i].copy);
  }
  for (uint64_t t = 0; advance_.out != nullptr && t < tokens; ++t) {
    std::memcpy(advance_.out + static_cast<int64_t>(first_token + t) * advance_.out_stride,
                asked.out + static_cast<int64_t>(t) * values, static_cast<size_t>(values) * sizeof(float));
  }
  return true;
}

bool DaemonAdvance::Run(std::span<const ChainPiece> pieces, std::vector<uint32_t>& lost) {
  std::vector<ChainPiece> part;
  uint64_t first = 0, tokens = 0;
  const auto flush = [&] {
    const bool done = part.empty() || RunPart(part, first, tokens, lost);
    first += std::exchange(tokens, 0);
    part.clear();
    return done;
  };
  for (ChainPiece piece : pieces) {
    if (part.size() >= limits::kMaxStepsPerComposition && !flush()) return false;
    while (piece.cached == nullptr && piece.tokens > limits::kMaxTokensPerComposition - tokens) {
      const uint64_t left = limits::kMaxTokensPerComposition - tokens;
      if (left > 0) part.push_back({.tokens = left});
      tokens += left;
      piece.tokens -= left;
      if (!flush()) return false;
    }
    tokens += piece.tokens;
    part.push_back(piece);
  }
  return flush();
}

}  // namespace ashlar::engine
