// SPDX-License-Identifier: Apache-2.0
#include "client/engine/layer_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "client/engine/status.h"
#include "client/engine/tensors.h"
#include "client/engine/token_rows.h"
#include "kernels/adaptive.h"

namespace ashlar::engine {
namespace {

// Runs up to `end`, cut at copies' positions.
void CutRun(uint64_t begin, uint64_t end, std::span<const StateCopy>& copies, std::vector<ChainPiece>& pieces) {
  while (begin < end) {
    const bool cut = !copies.empty() && copies.front().position <= end;
    const uint64_t until = cut ? copies.front().position : end;
    pieces.push_back({.tokens = until - begin, .copy = cut ? &copies.front().state : nullptr});
    if (cut) copies = copies.subspan(1);
    begin = until;
  }
}

}  // namespace

Status CutChain(std::span<const Step> steps, uint64_t prompt_tokens, const LayerAdvance& advance,
                std::vector<ChainPiece>& pieces) {
  if (advance.end < advance.begin)
    return Invalid("advance.end: ", advance.end, "; expected at least advance.begin, ", advance.begin);
  std::span<const StateCopy> copies(advance.copies, advance.copy_count);
  for (size_t i = 0; i < copies.size(); ++i) {
    const uint64_t before = i == 0 ? advance.begin : copies[i - 1].position;
    if (copies[i].position <= before || copies[i].position > advance.end) {
      return Invalid("advance.copies[", i, "].position: ", copies[i].position, "; expected a position in (", before,
                     ", ", advance.end, "]");
    }
    const std::string field = absl::StrCat("advance.copies[", i, "].state");
    if (Status status = CheckState(copies[i].state, field); !status.ok()) return status;
  }
  uint64_t computed = 0;
  for (uint32_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    const uint64_t begin = std::max(step.begin, advance.begin), end = std::min(step.end, advance.end);
    if (begin >= end) continue;
    if (step.kind == StepKind::kCompute) {
      CutRun(begin, end, copies, pieces);
      computed += end - begin;
      continue;
    }
    if (begin != step.begin || end != step.end) {
      return Invalid("advance: [", advance.begin, ", ", advance.end, ") cuts steps[", i, "], which is cached");
    }
    if (!copies.empty() && copies.front().position < end) {
      return Invalid("advance.copies[", &copies.front() - advance.copies, "].position: ", copies.front().position,
                     " is inside cached steps[", i, "] [", begin, ", ", end,
                     "); expected a position outside cached steps");
    }
    const bool copied = !copies.empty() && copies.front().position == end;
    pieces.push_back({.cached = &step, .step = i, .copy = copied ? &copies.front().state : nullptr});
    if (copied) copies = copies.subspan(1);
  }
  const uint64_t behind = std::max(advance.begin, prompt_tokens);
  if (advance.end > behind) {
    CutRun(behind, advance.end, copies, pieces);
    computed += advance.end - behind;
  }
  if (computed != advance.inputs.tokens) {
    return Invalid("advance.inputs.tokens: ", advance.inputs.tokens, "; expected ", computed,
                   ", the computed tokens of [", advance.begin, ", ", advance.end, ")");
  }
  return {};
}

Status CheckRows(const kernels::LinearShape& shape, const TokenRows& rows, bool outputs, const std::string& field) {
  if (!(rows.norm_epsilon >= 0) || std::isinf(rows.norm_epsilon))
    return Invalid(field, ".norm_epsilon: ", rows.norm_epsilon, "; expected a finite number, 0 or more");
  if (!std::isfinite(rows.q_scale)) return Invalid(field, ".q_scale: ", rows.q_scale, "; expected a finite number");
  if (rows.tokens == 0) return {};
  if (rows.k == nullptr) return Invalid(field, ".k: null");
  if (rows.v == nullptr) return Invalid(field, ".v: null");
  if (rows.q == nullptr && outputs) return Invalid(field, ".q: null");
  if ((rows.g == nullptr) != (kernels::GateWidth(shape) == 0)) {
    return Invalid(field, rows.g == nullptr ? ".g: null" : ".g: the layer's family has no gates; expected null");
  }
  if ((rows.beta == nullptr) != (kernels::BetaWidth(shape) == 0)) {
    return Invalid(field,
                   rows.beta == nullptr ? ".beta: null" : ".beta: the layer's family has no beta; expected null");
  }
  const RowWidths widths(shape);
  const auto check = [&](const float* given, int64_t stride, int64_t width, const char* name) {
    return given == nullptr ? Status() : CheckRowStride(rows.tokens, stride, width, field + name);
  };
  if (Status status = check(rows.q, rows.q_stride, widths.keys, ".q_stride"); !status.ok()) return status;
  if (Status status = check(rows.k, rows.k_stride, widths.keys, ".k_stride"); !status.ok()) return status;
  if (Status status = check(rows.v, rows.v_stride, widths.values, ".v_stride"); !status.ok()) return status;
  if (Status status = check(rows.g, rows.g_stride, widths.gates, ".g_stride"); !status.ok()) return status;
  return check(rows.beta, rows.beta_stride, widths.betas, ".beta_stride");
}

Status CheckRowStride(uint64_t tokens, int64_t stride, int64_t width, const std::string& field) {
  if (stride == 0 || tokens < 2) return {};
  if (stride < -kMostStride || stride > kMostStride)
    return Invalid(field, ": ", stride, " floats; expected -", kMostStride, " to ", kMostStride);
  if (stride <= -width || stride >= width) return {};
  return Invalid(field, ": ", stride, " floats; expected at least ", width, ", the width of a token's row");
}

Status CheckState(const State& state, const std::string& field) {
  if (state.data == nullptr) return Invalid(field, ".data: null");
  if (state.dtype != DType::kF32 && state.dtype != DType::kF16 && state.dtype != DType::kBF16) {
    return Invalid(field, ".dtype: ", static_cast<int>(state.dtype), "; expected f32, f16 or bf16");
  }
  if (state.head_stride < 0) return Invalid(field, ".head_stride: ", state.head_stride, "; expected 0 or more");
  const bool scaled = state.dtype == DType::kF16;
  return scaled == (state.exponents != nullptr)
             ? Status()
             : Invalid(field, ".exponents: required for f16; expected null for other types");
}

Status CheckAlone(const LinearLayer& layer, const AloneLayer& alone) {
  if (Status status = CheckState(alone.state, "alone.state"); !status.ok()) return status;
  // The state is published unchanged, so its bytes must have the layer's type.
  if (alone.state.dtype != layer.state_dtype) {
    return Invalid("alone.state.dtype: ", static_cast<int>(alone.state.dtype), "; expected the layer's state_dtype, ",
                   static_cast<int>(layer.state_dtype));
  }
  const kernels::LinearShape shape = kernels::ShapeOf(layer);
  if (Status status = CheckHeadStride(alone.state, shape, "alone.state"); !status.ok()) return status;
  if (Status status = CheckRows(shape, alone.inputs, alone.out != nullptr, "alone.inputs"); !status.ok()) return status;
  if (Status status = CheckOutStride(shape, alone, "alone"); !status.ok()) return status;
  if (alone.run == nullptr) return Invalid("alone.run: null");
  const Run& run = *alone.run;
  if (run.token_count != alone.inputs.tokens) {
    return Invalid("alone.inputs.tokens: ", alone.inputs.tokens, "; the run has ", run.token_count);
  }
  if (run.capture_begin > run.capture_end || run.capture_end > run.token_count) {
    return Invalid("alone.run.capture_end: [", run.capture_begin, ", ", run.capture_end,
                   "); expected capture_begin <= capture_end <= ", run.token_count);
  }
  if (alone.decay != nullptr && layer.transition != TransitionForm::kDense) {
    return Invalid("alone.decay: expected null; this family's transitions are decays already");
  }
  return run.transition && alone.transition == nullptr ? Invalid("alone.transition: null") : Status();
}

kernels::TokenInputs InputsOf(const TokenRows& rows) {
  return {.tokens = static_cast<int64_t>(rows.tokens),
          .q = rows.q,
          .k = rows.k,
          .v = rows.v,
          .g = rows.g,
          .beta = rows.beta,
          .q_stride = rows.q_stride,
          .k_stride = rows.k_stride,
          .v_stride = rows.v_stride,
          .g_stride = rows.g_stride,
          .beta_stride = rows.beta_stride};
}

uint64_t HeadStride(const State& state, const kernels::LinearShape& shape) {
  return state.head_stride > 0 ? static_cast<uint64_t>(state.head_stride) : uint64_t(shape.d_k) * shape.d_v;
}

Status CheckHeadStride(const State& state, const kernels::LinearShape& shape, const std::string& field) {
  if (state.head_stride > kMostStride)
    return Invalid(field, ".head_stride: ", state.head_stride, "; expected at most ", kMostStride);
  if (HeadStride(state, shape) >= uint64_t(shape.d_k) * shape.d_v) return {};
  return Invalid(field, ".head_stride: ", state.head_stride, " elements; expected at least ", shape.d_k * shape.d_v,
                 ", the size of a head");
}

std::vector<void*> HeadsOf(const State& state, const kernels::LinearShape& shape) {
  const uint64_t bytes = HeadStride(state, shape) * ElementBytes(state.dtype);
  std::vector<void*> heads;
  for (int32_t head = 0; head < shape.heads; ++head)
    heads.push_back(static_cast<std::byte*>(state.data) + head * bytes);
  return heads;
}

void AdvanceHere(const kernels::LinearShape& shape, const LayerAdvance& advance, std::span<const ChainPiece> pieces,
                 std::span<const kernels::TupleView> views, kernels::Queue& queue) {
  std::vector<std::vector<void*>> copy_heads;
  std::vector<kernels::StateView> copies;
  copy_heads.reserve(pieces.size());
  copies.reserve(pieces.size());
  const auto view = [&](const State& state) {
    copy_heads.push_back(HeadsOf(state, shape));
    return kernels::StateView{copy_heads.back().data(), state.dtype, state.exponents};
  };
  std::vector<kernels::SeamStep> steps;
  int64_t token = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    kernels::SeamStep step;
    if (pieces[i].cached != nullptr) {
      step.interior = &views[i];
    } else {
      step.begin = token;
      step.end = token += static_cast<int64_t>(pieces[i].tokens);
    }
    if (pieces[i].copy != nullptr) step.checkpoint = &copies.emplace_back(view(*pieces[i].copy));
    steps.push_back(step);
  }
  std::vector<void*> heads = HeadsOf(advance.state, shape);
  kernels::Host()
      .AdvanceSeam({.shape = shape,
                    .steps = steps,
                    .inputs = InputsOf(advance.inputs),
                    .state = {heads.data(), advance.state.dtype, advance.state.exponents},
                    .out = advance.out,
                    .out_stride = advance.out_stride},
                   queue)
      .Wait();
}

void ComputeAlone(const kernels::LinearShape& shape, const AloneLayer& alone, kernels::Queue& queue) {
  const bool captures = alone.run->transition;
  std::vector<void*> heads = HeadsOf(alone.state, shape);
  const kernels::StateView end{heads.data(), alone.state.dtype, alone.state.exponents};
  const auto zero = [&] {
    const uint64_t bytes = uint64_t(shape.d_k) * shape.d_v * ElementBytes(end.dtype);
    for (void* const head : heads) std::memset(head, 0, bytes);
    if (alone.state.exponents != nullptr) std::fill_n(alone.state.exponents, shape.heads, 0);
  };
  if (alone.out != nullptr || !captures) {
    zero();
    const kernels::SeamStep run{.begin = 0, .end = static_cast<int64_t>(alone.inputs.tokens)};
    kernels::Host()
        .AdvanceSeam({.shape = shape,
                      .steps = {&run, 1},
                      .inputs = InputsOf(alone.inputs),
                      .state = end,
                      .out = alone.out,
                      .out_stride = alone.out_stride},
                     queue)
        .Wait();
  }
  if (!captures) return;
  kernels::TokenInputs interior = InputsOf(alone.inputs);
  const auto skip = [first = static_cast<int64_t>(alone.run->capture_begin)](const float*& rows, int64_t stride) {
    if (rows != nullptr) rows += first * stride;
  };
  skip(interior.q, interior.q_stride);
  skip(interior.k, interior.k_stride);
  skip(interior.v, interior.v_stride);
  skip(interior.g, interior.g_stride);
  skip(interior.beta, interior.beta_stride);
  interior.tokens = static_cast<int64_t>(alone.run->capture_end - alone.run->capture_begin);
  const auto form = NaturalForm(shape.family);
  const int64_t numbers = kernels::TransitionBytes(shape, form, 0, DType::kF32) / int64_t{sizeof(float)};
  std::vector<void*> transitions;
  for (int32_t head = 0; head < shape.heads; ++head) transitions.push_back(alone.transition + head * numbers);
  kernels::Host()
      .Capture({.shape = shape,
                .inputs = interior,
                .tuple = {.transition = transitions.data(),
                          .state = heads.data(),
                          .state_dtype = end.dtype,
                          .state_exponents = alone.state.exponents},
                .decay = alone.decay},
               queue)
      .Wait();
}

}  // namespace ashlar::engine
