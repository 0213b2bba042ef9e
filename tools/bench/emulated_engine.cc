// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/emulated_engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "proto/outcome.h"

namespace ashlar::bench {
namespace {

using Watch = std::chrono::steady_clock;

constexpr uint32_t kSeam = 8;
constexpr uint32_t kHeadDim = 128, kConvKernel = 4, kLinearPerPeriod = 3;

constexpr size_t BytesOf(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}

constexpr uint32_t ConvChannels(EmulatedSize size) {
  return 3 * size.heads * kHeadDim;
}

double MillisecondsSince(Watch::time_point start) {
  return std::chrono::duration<double, std::milli>(Watch::now() - start).count();
}

std::vector<engine::Layer> Layers(EmulatedSize size, const std::vector<double>& frequencies) {
  engine::Layer linear{.kind = engine::LayerKind::kLinear};
  linear.family = Family::kGdn;
  linear.key_heads = linear.value_heads = size.heads;
  linear.d_k = linear.d_v = kHeadDim;
  linear.state_dtype = size.dtype;
  linear.conv_channels = ConvChannels(size);
  linear.conv_kernel = kConvKernel;
  engine::Layer attention{.kind = engine::LayerKind::kGqa};
  attention.rope = {.style = RopeStyle::kHalfSplit,
                    .rotary_dim = static_cast<uint32_t>(2 * frequencies.size()),
                    .frequencies = frequencies.data()};
  attention.kv_heads = 2;
  attention.key_dim = attention.value_dim = 256;
  attention.dtype = DType::kBF16;
  std::vector<engine::Layer> layers;
  for (uint32_t period = 0; period < size.periods; ++period) {
    layers.insert(layers.end(), kLinearPerPeriod, linear);
    layers.push_back(attention);
  }
  return layers;
}

uint32_t LayerCount(EmulatedSize size) {
  return size.periods * (kLinearPerPeriod + 1);
}

bool IsLinear(uint32_t layer) {
  return layer % (kLinearPerPeriod + 1) < kLinearPerPeriod;
}

std::vector<uint64_t> EqualSegments(uint64_t tokens) {
  return std::vector<uint64_t>(tokens / EmulatedEngine::kSegmentTokens, EmulatedEngine::kSegmentTokens);
}

}  // namespace

uint64_t EmulatedSize::tuple_bytes() const {
  return uint64_t{periods} * kLinearPerPeriod * heads * kHeadDim * kHeadDim * 2 * BytesOf(dtype);
}

absl::Status EmulatedEngine::Open(const tools::DaemonSockets& daemon, uint64_t pages, double tokens_per_second,
                                  EmulatedSize size) {
  size_ = size;
  const size_t values = size_t{size.heads} * kHeadDim * kHeadDim;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0, 0.05f);
  transition_.resize(values);
  for (float& value : transition_) value = normal(random);
  state_.assign(values * BytesOf(size.dtype), std::byte{0x3d});  // small positive numbers
  tail_.assign(size_t{kConvKernel - 1} * ConvChannels(size) * BytesOf(size.dtype), std::byte{0x3d});
  std::vector<double> frequencies;
  for (int i = 0; i < 32; ++i) frequencies.push_back(std::pow(1e7, -i / 32.0));
  const std::vector<engine::Layer> layers = Layers(size, frequencies);
  tensors_.clear();
  for (uint32_t layer = 0; layer < layers.size(); ++layer) {
    if (!IsLinear(layer)) continue;
    tensors_.push_back(
        {.layer = layer, .state = state_.data(), .conv_tail = tail_.data(), .transition = transition_.data()});
  }
  engine::OpenOptions options;
  options.rpc_socket = daemon.rpc_socket.c_str();
  options.session_socket = daemon.session_socket.c_str();
  options.name = "bench";
  options.timeout_ms = 60'000;
  options.model.model_id = "emulated";
  options.model.weights_digest = "none";
  options.model.dtype = "bf16";
  options.model.page_tokens = kPageTokens;
  options.model.head = options.model.tail = kSeam;
  options.model.layers = layers.data();
  options.model.layer_count = static_cast<uint32_t>(layers.size());
  options.model.tokens_per_second = tokens_per_second;
  options.memory.pages = static_cast<uint32_t>(pages);
  options.epsilon = 0;
  const engine::Status opened = engine::Cache::Open(options, &cache_);
  if (!opened.ok()) return absl::InternalError(opened.message);
  seconds_per_token_ = tokens_per_second > 0 ? 1 / tokens_per_second : 0;
  for (uint64_t page = 0; page < pages; ++page) pages_.push_back(static_cast<int32_t>(page));
  std::memset(cache_.data(), 0x3c, cache_.bytes());  // during measurements no page is touched for the first time
  return absl::OkStatus();
}

absl::Status EmulatedEngine::Fill(engine::Request& request, uint32_t& filled) {
  uint32_t missing = 0;
  const engine::Run* const runs = request.missing(&missing);
  for (; filled < missing; ++filled) {
    const std::chrono::duration<double> takes(static_cast<double>(runs[filled].token_count) * seconds_per_token_);
    std::this_thread::sleep_for(takes);
    const engine::ComputedRun computed{tensors_.data(), static_cast<uint32_t>(tensors_.size()), pages_.data(),
                                       PagesOf(runs[filled].token_count)};
    if (const engine::Status status = request.Publish(filled, computed, nullptr); !status.ok()) {
      return absl::InternalError(status.message);
    }
  }
  return absl::OkStatus();
}

absl::Status EmulatedEngine::Compose(engine::Request& request, uint64_t prompt_tokens, uint64_t computed) {
  const uint64_t width = uint64_t{size_.heads} * kHeadDim;
  const std::vector<float> rows(computed * width, 0.05f), decays(computed * size_.heads, -0.01f),
      betas(computed * size_.heads, 0.5f);
  std::vector<float> state(transition_.size()), out(computed * width);
  engine::LayerAdvance advance{.begin = 0, .end = prompt_tokens};
  advance.inputs = {.tokens = computed,
                    .q = rows.data(),
                    .k = rows.data(),
                    .v = rows.data(),
                    .g = decays.data(),
                    .beta = betas.data()};
  advance.state.data = state.data();
  advance.out = out.data();
  for (const engine::LinearTensors& linear : tensors_) {
    std::fill(state.begin(), state.end(), 0.0f);
    advance.layer = linear.layer;
    if (const engine::Status status = request.Advance(advance); !status.ok()) {
      return absl::InternalError(status.message);
    }
  }
  return absl::OkStatus();
}

void EmulatedEngine::Serve(const std::atomic<bool>& stop) {
  while (!stop) {
    engine::Request work;
    uint32_t filled = 0;
    if (cache_.ServePrefill(100, &work).ok()) Fill(work, filled).IgnoreError();
  }
}

absl::StatusOr<EmulatedEngine::Times> EmulatedEngine::Ask(std::span<const int32_t> tokens, bool parallel,
                                                          std::span<const uint64_t> lengths) {
  const Watch::time_point begin = Watch::now();
  const std::vector<uint64_t> equal = EqualSegments(tokens.size());
  if (lengths.empty()) lengths = equal;
  engine::Prompt prompt{.tokens = tokens.data(),
                        .token_count = tokens.size(),
                        .segment_lengths = lengths.data(),
                        .segment_count = lengths.size(),
                        .page_table = pages_.data(),
                        .page_count = PagesOf(tokens.size()),
                        .fill = true,
                        .cold_parallel = parallel};
  engine::Request request;
  if (const engine::Status status = cache_.Begin(&prompt, 1, &request); !status.ok()) {
    return absl::InternalError(status.message);
  }
  Times times{.elsewhere = request.segments_computed_elsewhere()};
  uint32_t filled = 0;
  do {
    if (absl::Status status = Fill(request, filled); !status.ok()) return status;
  } while (request.WaitCold(60'000).code == engine::Code::kRestart);
  const Watch::time_point combine = Watch::now();
  if (const engine::Status status = request.LookAgain(); !status.ok()) {
    return absl::InternalError(status.message);
  }
  for (uint32_t i = 0; i < request.plan().step_count; ++i) {
    const engine::Step& step = request.plan().steps[i];
    if (step.kind == engine::StepKind::kCompute) times.seam_tokens += step.end - step.begin;
  }
  for (uint32_t layer = 0; layer < LayerCount(size_); ++layer) request.WaitLayer(layer);
  times.landing_ms = MillisecondsSince(combine);
  const Watch::time_point composing = Watch::now();
  if (absl::Status status = Compose(request, tokens.size(), times.seam_tokens); !status.ok()) return status;
  times.composing_ms = MillisecondsSince(composing);
  std::this_thread::sleep_for(
      std::chrono::duration<double>(static_cast<double>(times.seam_tokens) * seconds_per_token_));
  if (const engine::Status status = request.Finish(); !status.ok()) return absl::InternalError(status.message);
  times.combine_ms = MillisecondsSince(combine);
  times.ttft_ms = MillisecondsSince(begin);
  for (uint32_t i = 0; i < request.plan().segment_count; ++i) times.hits += request.plan().segments[i].used;
  return times;
}

absl::StatusOr<EmulatedEngine::Landed> EmulatedEngine::Land(std::span<const int32_t> tokens,
                                                            std::span<const uint64_t> lengths) {
  const Watch::time_point begin = Watch::now();
  const std::vector<uint64_t> equal = EqualSegments(tokens.size());
  if (lengths.empty()) lengths = equal;
  const engine::Prompt prompt{.tokens = tokens.data(),
                              .token_count = tokens.size(),
                              .segment_lengths = lengths.data(),
                              .segment_count = lengths.size(),
                              .page_table = pages_.data(),
                              .page_count = PagesOf(tokens.size())};
  engine::Request request;
  if (const engine::Status status = cache_.Begin(&prompt, 1, &request); !status.ok()) {
    return absl::InternalError(status.message);
  }
  Landed landed;
  for (uint32_t i = 0; i < request.plan().segment_count; ++i) {
    const engine::Segment& segment = request.plan().segments[i];
    if (segment.reason != 0) landed.missed = engine::MissName(segment.reason);
    if (!segment.used) continue;
    ++landed.hits;
    ++landed.tiers.at(segment.tier);
    landed.bytes += segment.bytes;
  }
  for (uint32_t layer = 0; layer < LayerCount(size_); ++layer) request.WaitLayer(layer);
  const engine::Status finished = request.Finish();
  landed.landed_ms = MillisecondsSince(begin);
  if (!finished.ok()) return absl::UnavailableError(finished.message);
  return landed;
}

std::vector<int32_t> Prompts::Next(uint64_t tokens) {
  std::vector<int32_t> next(tokens);
  for (int32_t& token : next) token = static_cast<int32_t>(random_() % 150'000);
  return next;
}

}  // namespace ashlar::bench
