// SPDX-License-Identifier: Apache-2.0
#include "kernels/decoding_costs.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

namespace ashlar::kernels {
namespace {

constexpr int32_t kFilled = 8;  // slots of the trials that read some
constexpr int kRounds = 9;

double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The states of all layers and requests, their copies, their buffers, and one token of each request.
class TrialMemory {
 public:
  explicit TrialMemory(const DecodeTrial& trial);

  int32_t layers() const { return layers_; }
  int32_t requests() const { return trial_.requests; }
  const LinearShape& shape() const { return trial_.shape; }
  std::span<const BufferedRequest> Requests(int32_t layer, int32_t filled, bool flush, bool copies, bool state);
  StateView State(size_t request) { return ViewOf(states_, trial_.state, exponents_, request); }
  TokenInputs Inputs(int64_t first, int64_t tokens) const;
  float* out(int64_t first) { return out_.data() + first * out_stride(); }
  int64_t out_stride() const { return int64_t{trial_.shape.heads} * trial_.shape.d_v; }

 private:
  struct States {
    std::vector<std::byte> bytes;
    std::vector<void*> heads;  // all requests' heads
  };
  States Make(DType dtype) const;
  StateView ViewOf(States& states, DType dtype, std::vector<int32_t>& exponents, size_t request) const {
    const size_t first = request * static_cast<size_t>(trial_.shape.heads);
    return {states.heads.data() + first, dtype, dtype == DType::kF16 ? exponents.data() + first : nullptr};
  }

  const DecodeTrial trial_;
  const int32_t layers_;
  States states_, rounded_;
  std::vector<int32_t> exponents_, rounded_exponents_;
  std::vector<std::byte> keys_, writes_;
  std::vector<float> gates_, q_, k_, v_, g_, beta_, out_;
  std::vector<int32_t> pages_;
  std::vector<BufferedRequest> views_;
};

int32_t LayersOf(const DecodeTrial& trial) {
  const int64_t layer = int64_t{trial.requests} * trial.shape.heads * trial.shape.d_k * trial.shape.d_v *
                        static_cast<int64_t>(ElementBytes(trial.state));
  return static_cast<int32_t>(std::clamp<int64_t>(kTrialBytes / layer, 1, std::max(1, trial.layers)));
}

TrialMemory::TrialMemory(const DecodeTrial& trial) : trial_(trial), layers_(LayersOf(trial)) {
  const LinearShape& shape = trial.shape;
  const auto all = static_cast<size_t>(layers_) * static_cast<size_t>(trial.requests);
  const auto tokens = static_cast<size_t>(trial.requests), heads = static_cast<size_t>(shape.heads);
  const auto key_row = static_cast<size_t>(shape.key_heads) * static_cast<size_t>(shape.d_k);
  const auto value_row = heads * static_cast<size_t>(shape.d_v);
  states_ = Make(trial.state);
  exponents_.resize(all * heads);
  if (trial.rounded) {
    rounded_ = Make(*trial.rounded);
    rounded_exponents_.resize(all * heads);
  }
  const size_t slots = all * (kFilled + 1);
  keys_.resize(slots * key_row * ElementBytes(trial.buffer));
  writes_.resize(slots * value_row * ElementBytes(trial.buffer));
  gates_.resize(slots * heads * static_cast<size_t>(SlotGateWidth(shape)));
  pages_.resize(all);
  std::iota(pages_.begin(), pages_.end(), 0);
  // Keys of unit length, and decays that avoid denormal numbers in states.
  q_.assign(tokens * key_row, 1 / std::sqrt(static_cast<float>(shape.d_k)));
  k_ = q_;
  v_.assign(tokens * value_row, 0.5F);
  g_.assign(tokens * heads * static_cast<size_t>(GateWidth(shape)), -0.01F);
  beta_.assign(tokens * heads * static_cast<size_t>(BetaWidth(shape)), 0.5F);
  out_.resize(tokens * value_row);
  views_.resize(tokens);
}

TrialMemory::States TrialMemory::Make(DType dtype) const {
  const size_t matrix = static_cast<size_t>(trial_.shape.d_k) * static_cast<size_t>(trial_.shape.d_v);
  const auto count = static_cast<size_t>(layers_) * static_cast<size_t>(trial_.requests * trial_.shape.heads);
  States states;
  states.bytes.resize(count * matrix * ElementBytes(dtype));
  for (size_t i = 0; i < count; ++i) states.heads.push_back(states.bytes.data() + i * matrix * ElementBytes(dtype));
  return states;
}

std::span<const BufferedRequest> TrialMemory::Requests(int32_t layer, int32_t filled, bool flush, bool copies,
                                                       bool state) {
  for (size_t i = 0; i < views_.size(); ++i) {
    const size_t request = static_cast<size_t>(layer) * views_.size() + i;
    views_[i] = {};
    if (state) views_[i].state = State(request);
    if (state && copies && trial_.rounded) {
      views_[i].rounded = ViewOf(rounded_, *trial_.rounded, rounded_exponents_, request);
    }
    views_[i].buffer = {.keys = keys_.data(),
                        .writes = writes_.data(),
                        .gates = gates_.data(),
                        .dtype = trial_.buffer,
                        .page_tokens = kFilled + 1,
                        .page_table = &pages_[request],
                        .filled = filled};
    views_[i].flush = flush;
  }
  return views_;
}

TokenInputs TrialMemory::Inputs(int64_t first, int64_t tokens) const {
  const LinearShape& shape = trial_.shape;
  const int64_t keys = int64_t{shape.key_heads} * shape.d_k, values = int64_t{shape.heads} * shape.d_v;
  const int64_t gates = int64_t{shape.heads} * GateWidth(shape), betas = int64_t{shape.heads} * BetaWidth(shape);
  return {.tokens = tokens,
          .q = q_.data() + first * keys,
          .k = k_.data() + first * keys,
          .v = v_.data() + first * values,
          .g = gates > 0 ? g_.data() + first * gates : nullptr,
          .beta = betas > 0 ? beta_.data() + first * betas : nullptr,
          .q_stride = keys,
          .k_stride = keys,
          .v_stride = values,
          .g_stride = gates,
          .beta_stride = betas};
}

}  // namespace

DecodeCosts MeasureDecoding(const Kernels& kernels, Queue& queue, const DecodeTrial& trial, const DecodeClock& clock) {
  TrialMemory memory(trial);
  const auto now = [&] { return clock ? clock() : SteadySeconds(); };
  const auto decode = [&](int32_t filled, bool flush, bool copies, bool state) {
    return [=, &memory, &kernels, &queue](int32_t layer) {
      kernels
          .DecodeBuffered({.shape = memory.shape(),
                           .requests = memory.Requests(layer, filled, flush, copies, state),
                           .inputs = memory.Inputs(0, memory.requests()),
                           .out = memory.out(0),
                           .out_stride = memory.out_stride()},
                          queue)
          .Wait();
    };
  };
  const auto advance = [&](int32_t layer) {
    const SeamStep step{.begin = 0, .end = 1};
    for (int32_t i = 0; i < memory.requests(); ++i) {
      kernels
          .AdvanceSeam({.shape = memory.shape(),
                        .steps = {&step, 1},
                        .inputs = memory.Inputs(i, 1),
                        .state = memory.State(static_cast<size_t>(layer * memory.requests() + i)),
                        .out = memory.out(i),
                        .out_stride = memory.out_stride()},
                       queue)
          .Wait();
    }
  };
  enum Way : uint8_t { kAdvance, kFlushed, kRead, kReadSlots, kFlush, kFlushSlots, kStateless, kWays };
  const std::array<std::function<void(int32_t)>, kWays> ways = {advance,
                                                                decode(0, true, false, true),
                                                                decode(0, false, true, true),
                                                                decode(kFilled, false, true, true),
                                                                decode(0, true, true, true),
                                                                decode(kFilled, true, true, true),
                                                                decode(0, false, false, false)};
  // Call by call, because a short measurement is less likely to be disturbed by other work.
  const auto layers = static_cast<size_t>(memory.layers());
  std::vector<double> least(kWays * layers, std::numeric_limits<double>::infinity());
  for (int round = -1; round < kRounds; ++round) {  // the first one warms
    for (size_t way = 0; way < kWays; ++way) {
      for (size_t layer = 0; layer < layers; ++layer) {
        const double begin = now();
        ways[way](static_cast<int32_t>(layer));
        double& call = least[way * layers + layer];
        if (round >= 0) call = std::min(call, now() - begin);
      }
    }
  }
  const auto mean = [&](Way way) {
    const auto begin = least.begin() + static_cast<ptrdiff_t>(way * layers);
    return std::accumulate(begin, begin + static_cast<ptrdiff_t>(layers), 0.0) / (memory.layers() * memory.requests());
  };
  const auto slot = [&](Way with, Way without) { return std::max(0.0, (mean(with) - mean(without)) / kFilled); };
  return {.advance = mean(kAdvance),
          .recurrent = mean(kFlushed),
          .read = mean(kRead),
          .flush = mean(kFlush),
          .slot = slot(kReadSlots, kRead),
          .flush_slot = slot(kFlushSlots, kFlush),
          .stateless = mean(kStateless)};
}

}  // namespace ashlar::kernels
