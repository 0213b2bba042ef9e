// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>

#include "examples/refengine/layer_tables.h"
#include "examples/refengine/matrix.h"
#include "examples/refengine/mixers.h"
#include "examples/refengine/rows.h"
#include "proto/limits.h"

namespace ashlar::refengine {
namespace {

float Softplus(float x) {
  return x > 20 ? x : std::log1p(std::exp(x));
}
float Sigmoid(float x) {
  return 1 / (1 + std::exp(-x));
}

// Per-head pointers into a dense [heads, floats] array.
std::vector<void*> Heads(float* dense, int32_t heads, int64_t floats) {
  std::vector<void*> pointers(heads);
  for (int32_t head = 0; head < heads; ++head) pointers[head] = dense + head * floats;
  return pointers;
}

}  // namespace

bool LinearMixer::Run(int32_t layer, const Pass& pass, const float* normed, float* residual, RecurrentState& recurrent,
                      const AdvanceOptions& options) {
  Profile* const profile = options.profile;
  const ModelConfig& config = machine_.model.config();
  const LinearWeights& weights = machine_.model.weights().layers[layer].linear;
  const int64_t rows = pass.rows(), channels = config.linear.conv_channels(), values = config.linear.value_channels();
  projected_ = projected_memory_.Get(rows * columns());
  convolved_ = convolved_memory_.Get(rows * channels);
  gates_ = gates_memory_.Get(rows * config.linear.gate_channels());
  mixed_ = mixed_memory_.Get(rows * values);
  {
    const Stopwatch watch(profile, Part::kProjections);
    MatMul({.m = rows,
            .n = columns(),
            .k = config.d_model,
            .a = normed,
            .a_stride = config.d_model,
            .b = weights.input.data(),
            .b_stride = columns(),
            .c = projected_,
            .c_stride = columns()},
           machine_.workers);
  }
  {
    const Stopwatch watch(profile, Part::kConvolution);
    Convolve(layer, pass, recurrent);
    if (config.linear.gate_channels() > 0) ComputeGates(weights, rows);
    Rotate(layer, pass);
  }
  {
    const Stopwatch watch(profile, Part::kCapture);
    if (options.tape != nullptr) Record(layer, pass, *options.tape);
    Capture(layer, pass);
  }
  {
    const Stopwatch watch(profile, Part::kRecurrence);
    if (!Advance(layer, pass, recurrent, options.advancer)) return false;
  }
  {
    const Stopwatch watch(profile, Part::kNorms);
    const int32_t d_v = config.linear.d_v;
    ForRows(machine_.workers, rows, [&](int64_t row) {
      for (int32_t head = 0; head < config.linear.value_heads; ++head) {
        float* out = mixed_ + row * values + head * d_v;
        GatedRmsNorm(out, projected_ + row * columns() + channels + head * d_v, weights.out_norm.data(),
                     config.norm_epsilon, d_v, out);
      }
    });
  }
  const Stopwatch watch(profile, Part::kProjections);
  MatMul({.m = rows,
          .n = config.d_model,
          .k = values,
          .a = mixed_,
          .a_stride = values,
          .b = weights.output.data(),
          .b_stride = config.d_model,
          .c = residual,
          .c_stride = config.d_model,
          .accumulate = true},
         machine_.workers);
  return true;
}

// The convolution's input at `row` of a run, which may be up to conv_kernel − 1 rows before the run: then it is from
// the left, an interior's tail or the sequence's own window.
const float* LinearMixer::ConvInput(const TokenRun& run, int32_t layer, const RecurrentState& recurrent,
                                    int64_t row) const {
  const ModelConfig& config = machine_.model.config();
  if (row >= run.begin) return projected_ + row * columns();
  const float* left =
      run.before.empty() ? recurrent.ConvWindow(config.kind_index(layer)).data() : run.before[layer].conv_tail;
  return left + (row - run.begin + config.linear.conv_kernel - 1) * config.linear.conv_channels();
}

// The window after row `end` − 1 of a run.
void LinearMixer::CopyWindow(const TokenRun& run, int32_t layer, const RecurrentState& recurrent, int64_t end,
                             float* out) const {
  const LinearConfig& linear = machine_.model.config().linear;
  for (int64_t row = end - (linear.conv_kernel - 1); row < end; ++row, out += linear.conv_channels()) {
    std::memcpy(out, ConvInput(run, layer, recurrent, row), linear.conv_channels() * sizeof(float));
  }
}

void LinearMixer::Convolve(int32_t layer, const Pass& pass, RecurrentState& recurrent) {
  const LinearConfig& linear = machine_.model.config().linear;
  const float* weight = machine_.model.weights().layers[layer].linear.conv.data();
  const int64_t channels = linear.conv_channels();
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(linear.d_k));
  for (const TokenRun& run : pass.runs) {
    ForRows(machine_.workers, run.end - run.begin, [&](int64_t index) {
      const int64_t row = run.begin + index;
      const float* inputs[limits::kMaxConvKernel];
      for (int32_t j = 0; j < linear.conv_kernel; ++j) {
        inputs[j] = ConvInput(run, layer, recurrent, row - (linear.conv_kernel - 1) + j);
      }
      float* out = convolved_ + row * channels;
      ConvolveSilu(inputs, weight, linear.conv_kernel, channels, out);
      for (int32_t head = 0; head < linear.key_heads; ++head) {
        L2Normalize(out + head * linear.d_k, query_scale, linear.d_k);
        L2Normalize(out + linear.key_channels() + head * linear.d_k, 1.0f, linear.d_k);
      }
    });
  }
  SaveWindows(layer, pass, recurrent);
}

// Convolution windows: of snapshots and captures, and the one after the pass. The sequence's own window is read until
// all others are taken.
void LinearMixer::SaveWindows(int32_t layer, const Pass& pass, RecurrentState& recurrent) {
  const ModelConfig& config = machine_.model.config();
  const int32_t index = config.kind_index(layer);
  const size_t floats = recurrent.ConvWindow(index).size();
  float* last = window_memory_.Get(floats);
  const auto run_of = [&](int64_t row) -> const TokenRun& {
    return *std::find_if(pass.runs.begin(), pass.runs.end(), [&](const auto& run) { return row < run.end; });
  };
  const auto window_behind = [&](const PassStep& step, float* out) {
    if (step.cached.empty()) {
      CopyWindow(run_of(step.begin), layer, recurrent, step.end, out);
    } else {
      std::memcpy(out, step.cached[layer].conv_tail, floats * sizeof(float));
    }
  };
  for (const PassStep& step : pass.steps) {
    if (step.snapshot != nullptr) window_behind(step, step.snapshot->ConvWindow(index).data());
  }
  for (const CapturePart& part : pass.captures) {
    if (part.last) CopyWindow(run_of(part.begin), layer, recurrent, part.end, part.range->linear[index].conv_tail);
  }
  window_behind(pass.steps.back(), last);
  std::memcpy(recurrent.ConvWindow(index).data(), last, floats * sizeof(float));
}

void LinearMixer::ComputeGates(const LinearWeights& weights, int64_t rows) {
  const LinearConfig& linear = machine_.model.config().linear;
  const int32_t heads = linear.value_heads;
  ForRows(machine_.workers, rows, [&](int64_t row) {
    const float* b = projected_ + row * columns() + linear.conv_channels() + linear.value_channels();
    const float* a = b + heads;
    float* g = gates_ + row * 2 * heads;
    float* beta = g + heads;
    for (int32_t head = 0; head < heads; ++head) {
      g[head] = -std::exp(weights.a_log[head]) * Softplus(a[head] + weights.dt_bias[head]);
      beta[head] = Sigmoid(b[head]);
    }
  });
}

// Rotates queries and keys to their positions, if the layer does so. Angles are fp64, as in attention.
void LinearMixer::Rotate(int32_t layer, const Pass& pass) {
  const LinearConfig& linear = machine_.model.config().linear;
  const kernels::Rotation rotation = machine_.model.linear_shape(layer).rotation;
  const int64_t pairs = linear.rotary_dim / 2;
  if (pairs == 0) return;
  float* angles = angles_memory_.Get(pass.rows() * 2 * pairs);
  ForRows(machine_.workers, pass.rows(), [&](int64_t row) {
    float* cosines = angles + row * 2 * pairs;
    float* sines = cosines + pairs;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const double angle = static_cast<double>(pass.positions[row]) * rotation.frequencies[pair];
      cosines[pair] = static_cast<float>(std::cos(angle));
      sines[pair] = static_cast<float>(std::sin(angle));
    }
    float* heads = convolved_ + row * linear.conv_channels();
    for (int32_t head = 0; head < 2 * linear.key_heads; ++head) {  // queries, then keys
      RotateHalfSplit(heads + head * linear.d_k, cosines, sines, pairs);
    }
  });
}

kernels::TokenInputs LinearMixer::Inputs(int64_t begin, int64_t end) const {
  const LinearConfig& linear = machine_.model.config().linear;
  const int64_t channels = linear.conv_channels(), gates = linear.gate_channels();
  kernels::TokenInputs inputs;
  inputs.tokens = end - begin;
  inputs.q = convolved_ + begin * channels;
  inputs.k = inputs.q + linear.key_channels();
  inputs.v = inputs.k + linear.key_channels();
  if (gates > 0) {
    inputs.g = gates_ + begin * gates;
    inputs.beta = inputs.g + linear.value_heads;
  }
  inputs.q_stride = inputs.k_stride = inputs.v_stride = channels;
  inputs.g_stride = inputs.beta_stride = gates;
  return inputs;
}

void LinearMixer::Record(int32_t layer, const Pass& pass, const SpanTape& tape) const {
  const LinearConfig& linear = machine_.model.config().linear;
  const SpanRows& rows = tape.linear[machine_.model.config().kind_index(layer)];
  const auto copy = [](float* to, int64_t token, const float* from, int64_t floats) {
    std::memcpy(to + token * floats, from, floats * sizeof(float));
  };
  for (int64_t row = 0; row < pass.rows(); ++row) {
    const int64_t token = pass.positions[row] - tape.begin;
    if (token < 0 || token >= tape.tokens) continue;
    const kernels::TokenInputs inputs = Inputs(row, row + 1);
    copy(rows.keys, token, inputs.k, linear.key_channels());
    copy(rows.values, token, inputs.v, linear.value_channels());
    copy(rows.conv_inputs, token, projected_ + row * columns(), linear.conv_channels());
    if (linear.gate_channels() == 0) continue;
    copy(rows.gates, token, inputs.g, linear.value_heads);
    copy(rows.betas, token, inputs.beta, linear.value_heads);
  }
}

// A range that extends over several passes is captured part by part: the parts' tuples compose to the range's.
void LinearMixer::Capture(int32_t layer, const Pass& pass) {
  const ModelConfig& config = machine_.model.config();
  const LinearConfig& linear = config.linear;
  const int64_t transition_floats = linear.transition_floats(), state_floats = linear.state_floats();
  const int64_t transitions = linear.value_heads * transition_floats, states = linear.value_heads * state_floats;
  for (const CapturePart& part : pass.captures) {
    const TupleBuffers& buffers = part.range->linear[config.kind_index(layer)];
    float* scratch = part.first ? nullptr : capture_memory_.Get(2 * (transitions + states));
    // A later part needs its transition even if the range's own is not wanted.
    float* transition = part.first ? buffers.transition : scratch;
    float* state = part.first ? buffers.state : scratch + transitions;
    const auto transition_heads = Heads(transition, linear.value_heads, transition_floats);
    const auto state_heads = Heads(state, linear.value_heads, state_floats);
    machine_.kernels
        .Capture({.shape = machine_.model.linear_shape(layer),
                  .inputs = Inputs(part.begin, part.end),
                  .tuple = {.transition = transition != nullptr ? transition_heads.data() : nullptr,
                            .state = state_heads.data()}},
                 machine_.queue)
        .Wait();
    if (!part.first) JoinCapture(layer, buffers, transition, state, scratch + transitions + states);
  }
}

// Appends a tuple to the one in `buffers`; `earlier` is scratch memory for the latter.
void LinearMixer::JoinCapture(int32_t layer, const TupleBuffers& buffers, float* transition, float* state,
                              float* earlier) {
  const LinearConfig& linear = machine_.model.config().linear;
  const int64_t transition_floats = linear.transition_floats(), state_floats = linear.state_floats();
  const int32_t heads = linear.value_heads;
  std::vector<kernels::HeadTuple> later_heads(heads), earlier_heads(heads);
  PointAt(linear, transition, state, later_heads);
  const kernels::TupleView later{.heads = later_heads.data()};
  const auto out_state = Heads(buffers.state, heads, state_floats);
  if (buffers.transition == nullptr) {
    machine_.kernels
        .Compose({.shape = machine_.model.linear_shape(layer),
                  .interiors = {&later, 1},
                  .state = {.heads = out_state.data()}},
                 machine_.queue)
        .Wait();
    return;
  }
  float* earlier_state_memory = earlier + heads * transition_floats;
  std::memcpy(earlier, buffers.transition, heads * transition_floats * sizeof(float));
  std::memcpy(earlier_state_memory, buffers.state, heads * state_floats * sizeof(float));
  PointAt(linear, earlier, earlier_state_memory, earlier_heads);
  const kernels::TupleView tuples[] = {{.heads = earlier_heads.data()}, later};
  const auto out_transition = Heads(buffers.transition, heads, transition_floats);
  machine_.kernels
      .ComposeTransitions({.shape = machine_.model.linear_shape(layer),
                           .interiors = tuples,
                           .tuple = {.transition = out_transition.data(), .state = out_state.data()}},
                          machine_.queue)
      .Wait();
}

bool LinearMixer::Advance(int32_t layer, const Pass& pass, RecurrentState& recurrent, SeamAdvancer* advancer) {
  const ModelConfig& config = machine_.model.config();
  const LinearConfig& linear = config.linear;
  const int32_t index = config.kind_index(layer);
  const int64_t state_floats = linear.state_floats();
  const auto state = Heads(recurrent.State(index).data(), linear.value_heads, state_floats);
  std::vector<kernels::SeamStep> steps;
  std::vector<std::vector<void*>> snapshot_heads;
  std::vector<kernels::StateView> snapshots;
  snapshot_heads.reserve(pass.steps.size());
  snapshots.reserve(pass.steps.size());
  for (const PassStep& step : pass.steps) {
    kernels::SeamStep out{.begin = step.begin, .end = step.end};
    if (step.snapshot != nullptr) {
      snapshot_heads.push_back(Heads(step.snapshot->State(index).data(), linear.value_heads, state_floats));
      snapshots.push_back({.heads = snapshot_heads.back().data()});
      out.checkpoint = &snapshots.back();
    }
    if (step.checkpoint) {  // nothing to compose: it replaces the state
      for (int32_t head = 0; head < linear.value_heads; ++head) {
        std::memcpy(state[head], step.cached[layer].tuple.heads[head].state, state_floats * sizeof(float));
        if (out.checkpoint != nullptr) {
          std::memcpy(out.checkpoint->heads[head], state[head], state_floats * sizeof(float));
        }
      }
      continue;
    }
    if (!step.cached.empty()) out = {.interior = &step.cached[layer].tuple, .checkpoint = out.checkpoint};
    steps.push_back(out);
  }
  const kernels::AdvanceSeamArgs args{.shape = machine_.model.linear_shape(layer),
                                      .steps = steps,
                                      .inputs = Inputs(0, pass.rows()),
                                      .state = {.heads = state.data()},
                                      .out = mixed_,
                                      .out_stride = linear.value_channels()};
  if (advancer != nullptr) return advancer->Advance(layer, args);
  machine_.kernels.AdvanceSeam(args, machine_.queue).Wait();
  return true;
}

}  // namespace ashlar::refengine
