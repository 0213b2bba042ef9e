// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/decode_batch.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <random>

namespace ashlar::bench {
namespace {

using kernels::BufferedRequest;
using kernels::Kernels;
using kernels::Queue;
using kernels::SeamStep;
using kernels::StateView;
using kernels::TokenInputs;

constexpr int32_t kPageTokens = 16;

std::vector<float> Floats(size_t count, float size) {
  std::vector<float> out(count);
  Numbers numbers;
  FillElements(DType::kF32, reinterpret_cast<std::byte*>(out.data()), count, size, numbers);
  return out;
}

// All in [low, 0].
std::vector<float> LogDecays(size_t count, float low) {
  std::vector<float> out = Floats(count, low);
  for (float& number : out) number = -std::fabs(number);
  return out;
}

}  // namespace

DecodeBatch::DecodeBatch(const Options& options)
    : options_(options),
      shape_{.family = options.family,
             .heads = options.heads,
             .key_heads = options.key_heads,
             .d_k = options.dim,
             .d_v = options.dim,
             .order = options.order} {
  if (NaturalForm(shape_.family) == TransitionForm::kScalar) {
    table_ = LogDecays(static_cast<size_t>(shape_.heads), 0.05f);
    shape_.decay_table = table_.data();
  }
  const auto heads = static_cast<size_t>(shape_.heads), dim = static_cast<size_t>(options.dim);
  const auto tokens = static_cast<size_t>(options.requests) * kernels::kMaxDrafts;
  const float key_size = 1.5f / std::sqrt(static_cast<float>(dim));  // about unit length
  q_ = Floats(tokens * static_cast<size_t>(shape_.key_heads) * dim, key_size);
  k_ = Floats(tokens * static_cast<size_t>(shape_.key_heads) * dim, key_size);
  v_ = Floats(tokens * heads * dim, 1);
  g_ = LogDecays(tokens * heads * static_cast<size_t>(kernels::GateWidth(shape_)), 0.05f);
  beta_ = Floats(tokens * heads * static_cast<size_t>(kernels::BetaWidth(shape_)), 0.9f);
  for (float& number : beta_) number = std::fabs(number);
  out_.resize(tokens * heads * dim);

  const size_t numbers_each = heads * dim * dim, state_bytes = numbers_each * ElementBytes(options.state);
  const auto saved = static_cast<size_t>(options.requests * options.saved_states);
  const auto own = static_cast<size_t>(options.requests * options.layers);
  states_ = Buffer((own + saved) * state_bytes);
  Numbers numbers;
  FillElements(options.state, states_.memory.get(), (own + saved) * numbers_each, 0.5f, numbers);
  requests_.resize(own);
  saved_.resize(saved);
  for (size_t i = 0; i < own + saved; ++i) {
    (i < own ? requests_[i] : saved_[i - own]).state = HeadsAt(states_.memory.get() + i * state_bytes, options.state);
  }
  if (options.rounded) {
    const size_t rounded_bytes = numbers_each * ElementBytes(*options.rounded);
    rounded_ = Buffer(own * rounded_bytes);
    FillElements(*options.rounded, rounded_.memory.get(), own * numbers_each, 0.5f, numbers);
    for (size_t i = 0; i < own; ++i) {
      requests_[i].rounded = HeadsAt(rounded_.memory.get() + i * rounded_bytes, *options.rounded);
    }
  }
  const int32_t pages = (options.slots + kPageTokens - 1) / kPageTokens;
  std::vector<int32_t> order(requests_.size() * static_cast<size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  for (size_t r = 0; r < requests_.size(); ++r) {
    requests_[r].page_table.assign(order.begin() + static_cast<int64_t>(r) * pages,
                                   order.begin() + static_cast<int64_t>(r + 1) * pages);
  }
  const size_t rows = order.size() * kPageTokens, element = ElementBytes(options.buffer);
  const size_t key_floats = rows * static_cast<size_t>(shape_.key_heads) * dim, write_floats = rows * heads * dim;
  keys_ = Buffer(key_floats * element);
  writes_ = Buffer(write_floats * element);
  FillElements(options.buffer, keys_.memory.get(), key_floats, key_size, numbers);
  FillElements(options.buffer, writes_.memory.get(), write_floats, 0.5f, numbers);
  gates_ = LogDecays(rows * heads * static_cast<size_t>(kernels::SlotGateWidth(shape_)), 0.05f);
  views_.resize(static_cast<size_t>(options.requests));
}

DecodeBatch::Heads DecodeBatch::HeadsAt(std::byte* states, DType dtype) const {
  Heads heads;
  const size_t head_bytes = static_cast<size_t>(shape_.d_k * shape_.d_v) * ElementBytes(dtype);
  for (int32_t h = 0; h < shape_.heads; ++h) heads.heads.push_back(states + static_cast<size_t>(h) * head_bytes);
  heads.exponents.assign(static_cast<size_t>(shape_.heads), 0);
  return heads;
}

StateView DecodeBatch::StateOf(Request& request) const {
  Heads& state = request.state;
  return {state.heads.data(), options_.state, options_.state == DType::kF16 ? state.exponents.data() : nullptr};
}

StateView DecodeBatch::RoundedOf(Request& request) const {
  if (!options_.rounded) return {};
  Heads& state = request.rounded;
  return {state.heads.data(), *options_.rounded, *options_.rounded == DType::kF16 ? state.exponents.data() : nullptr};
}

BufferedRequest DecodeBatch::View(int32_t layer, int32_t request, int32_t filled, bool flush) {
  Request& view = requests_[static_cast<size_t>(layer * options_.requests + request)];
  const bool recurrent = filled == 0 && flush;
  return {.state = StateOf(view),
          .rounded = recurrent ? StateView{} : RoundedOf(view),
          .buffer = {.keys = keys_.memory.get(),
                     .writes = writes_.memory.get(),
                     .gates = gates_.data(),
                     .dtype = options_.buffer,
                     .page_tokens = kPageTokens,
                     .page_table = view.page_table.data(),
                     .filled = filled},
          .flush = flush};
}

std::vector<BufferedRequest>& DecodeBatch::Views(int32_t layer, int32_t filled, bool flush) {
  for (int32_t r = 0; r < options_.requests; ++r) views_[static_cast<size_t>(r)] = View(layer, r, filled, flush);
  return views_;
}

TokenInputs DecodeBatch::Inputs(int64_t first, int64_t tokens) const {
  const int64_t keys = int64_t{shape_.key_heads} * shape_.d_k, values = int64_t{shape_.heads} * shape_.d_v;
  const int64_t gates = int64_t{shape_.heads} * GateWidth(shape_), betas = int64_t{shape_.heads} * BetaWidth(shape_);
  return {.tokens = tokens,
          .q = q_.data() + first * keys,
          .k = k_.data() + first * keys,
          .v = v_.data() + first * values,
          .g = g_.empty() ? nullptr : g_.data() + first * gates,
          .beta = beta_.empty() ? nullptr : beta_.data() + first * betas,
          .q_stride = keys,
          .k_stride = keys,
          .v_stride = values,
          .g_stride = gates,
          .beta_stride = betas};
}

std::span<std::byte> DecodeBatch::States() {
  const auto numbers = size_t{1} * static_cast<size_t>(options_.requests * options_.layers) *
                       static_cast<size_t>(shape_.heads) * static_cast<size_t>(shape_.d_k * shape_.d_v);
  return {states_.memory.get(), numbers * ElementBytes(options_.state)};
}

void DecodeBatch::Decode(const Kernels& kernels, Queue& queue, int32_t layer, int32_t filled, bool flush) {
  kernels
      .DecodeBuffered({.shape = shape_,
                       .requests = Views(layer, filled, flush),
                       .inputs = Inputs(0, options_.requests),
                       .out = out_.data(),
                       .out_stride = int64_t{shape_.heads} * shape_.d_v},
                      queue)
      .Wait();
}

void DecodeBatch::Advance(const Kernels& kernels, Queue& queue, int32_t layer) {
  const SeamStep run{.begin = 0, .end = 1};
  for (int32_t r = 0; r < options_.requests; ++r) {
    kernels
        .AdvanceSeam({.shape = shape_,
                      .steps = {&run, 1},
                      .inputs = Inputs(r, 1),
                      .state = View(layer, r, 0, false).state,
                      .out = out_.data(),
                      .out_stride = int64_t{shape_.heads} * shape_.d_v},
                     queue)
        .Wait();
  }
}

void DecodeBatch::Verify(const Kernels& kernels, Queue& queue, int32_t layer, int32_t filled, int32_t drafts) {
  kernels
      .VerifyDrafts({.shape = shape_,
                     .requests = Views(layer, filled, false),
                     .drafts = drafts,
                     .inputs = Inputs(0, int64_t{options_.requests} * drafts),
                     .out = out_.data(),
                     .out_stride = int64_t{shape_.heads} * shape_.d_v},
                    queue)
      .Wait();
}

void DecodeBatch::AdvanceSaving(const Kernels& kernels, Queue& queue, int32_t layer, int32_t drafts) {
  for (int32_t r = 0; r < options_.requests; ++r) {
    StateView checkpoints[kernels::kMaxDrafts];
    SeamStep steps[kernels::kMaxDrafts];
    for (int32_t t = 0; t < drafts; ++t) {
      steps[t] = {.begin = t, .end = t + 1};
      if (t + 1 == drafts) break;
      checkpoints[t] = StateOf(saved_[static_cast<size_t>(t * options_.requests + r)]);
      steps[t].checkpoint = &checkpoints[t];
    }
    kernels
        .AdvanceSeam({.shape = shape_,
                      .steps = {steps, static_cast<size_t>(drafts)},
                      .inputs = Inputs(int64_t{r} * drafts, drafts),
                      .state = View(layer, r, 0, false).state,
                      .out = out_.data(),
                      .out_stride = int64_t{shape_.heads} * shape_.d_v},
                     queue)
        .Wait();
  }
}

void DecodeBatch::DecodeSaving(const Kernels& kernels, Queue& queue, int32_t layer, int32_t drafts) {
  for (int32_t r = 0; r < options_.requests; ++r) {
    BufferedRequest request = View(layer, r, 0, true);
    for (int32_t t = 0; t < drafts; ++t) {
      if (t > 0) {
        const StateView copy = StateOf(saved_[static_cast<size_t>((t - 1) * options_.requests + r)]);
        BufferedRequest from = request;
        from.flush = false;
        kernels.RebuildState({.shape = shape_, .request = from, .tokens = 0, .target = copy}, queue).Wait();
        request.state = copy;
      }
      kernels
          .DecodeBuffered({.shape = shape_,
                           .requests = {&request, 1},
                           .inputs = Inputs(int64_t{r} * drafts + t, 1),
                           .out = out_.data(),
                           .out_stride = int64_t{shape_.heads} * shape_.d_v},
                          queue)
          .Wait();
    }
  }
}

void DecodeBatch::Rebuild(const Kernels& kernels, Queue& queue, int32_t layer, int32_t tokens) {
  for (int32_t r = 0; r < options_.requests; ++r) {
    const BufferedRequest request = View(layer, r, tokens, false);
    kernels.RebuildState({.shape = shape_, .request = request, .tokens = tokens, .target = request.state}, queue)
        .Wait();
  }
}

}  // namespace ashlar::bench
