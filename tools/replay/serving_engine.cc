// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/serving_engine.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"

namespace ashlar::replay {
namespace {

constexpr uint64_t kTypicalTokens = 4096;  // the declared rate of prefill is that of such a prompt

absl::Status Failed(const char* call, const engine::Status& status) {
  return absl::InternalError(absl::StrCat(call, ": ", status.message));
}

}  // namespace

absl::Status ServingEngine::Open(const tools::DaemonSockets& daemon) {
  const storage::PrefixCosts& costs = model_.costs;
  engine::Layer layer{.kind = engine::LayerKind::kOpaque};
  layer.token_bytes = static_cast<uint32_t>(costs.page_bytes / costs.page_tokens / options_.scale / kLayers);
  layer.state_bytes = costs.checkpoint_bytes / options_.scale / kLayers;
  if (layer.token_bytes == 0 || layer.state_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat("--scale: ", options_.scale,
                                                   " leaves no bytes of a token; expected ", "at most ",
                                                   costs.page_bytes / costs.page_tokens / kLayers));
  }
  const std::vector<engine::Layer> layers(kLayers, layer);
  engine::OpenOptions options;
  options.rpc_socket = daemon.rpc_socket.c_str();
  options.session_socket = daemon.session_socket.c_str();
  options.name = "replay";
  options.timeout_ms = 60'000;  // hosting the pages takes seconds
  options.model.model_id = model_.name.c_str();
  options.model.weights_digest = "none";
  options.model.page_tokens = kPageTokens;
  options.model.layers = layers.data();
  options.model.layer_count = kLayers;
  options.model.flops_per_token = costs.flops_per_token;
  options.model.flops_per_token_squared = costs.flops_per_square;
  options.model.tokens_per_second = prefill_.TokensPerSecond(kTypicalTokens);
  options.memory.pages = static_cast<uint32_t>(PagesPerRequest() * options_.running);
  options.capture_tokens = static_cast<uint32_t>(options_.capture_tokens);
  if (const engine::Status opened = engine::Cache::Open(options, &cache_); !opened.ok()) return Failed("Open", opened);
  std::memset(cache_.data(), 0x3c, cache_.bytes());  // during the replay no page is touched for the first time
  for (uint32_t page = 0; page < options.memory.pages; ++page) pages_.push_back(static_cast<int32_t>(page));
  state_.assign(layer.state_bytes, 0x3c);
  landed_.assign(options_.running, state_);
  for (uint32_t i = 0; i < kLayers; ++i) tensors_.push_back({.layer = i, .state = state_.data()});
  cached_ = true;
  return absl::OkStatus();
}

void ServingEngine::Compute(uint64_t begin, uint64_t end) {
  Clock::time_point done;
  {
    MutexLock lock(mutex_);
    const std::chrono::duration<double> takes(prefill_.Seconds(begin, end));
    idle_at_ = std::max(idle_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
    done = idle_at_;
  }
  std::this_thread::sleep_until(done);
}

absl::StatusOr<bool> ServingEngine::Land(engine::Request& request, std::vector<uint8_t>& state) const {
  const uint64_t prefix = request.plan().prefix_tokens;
  if (prefix == 0) return true;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const engine::LayerAdvance advance{.layer = layer, .end = prefix, .state = {.data = state.data()}};
    const engine::Status advanced = request.Advance(advance);
    if (advanced.code == engine::Code::kRestart) return false;
    if (!advanced.ok()) return Failed("Advance", advanced);
  }
  return true;
}

absl::StatusOr<ServingEngine::Served> ServingEngine::Serve(size_t slot, std::span<const int32_t> tokens,
                                                           uint64_t prompt) {
  if (!cached_) {
    Compute(0, prompt);
    return Served{.first_token = Clock::now()};
  }
  const auto pages = std::span(pages_).subspan(slot * PagesPerRequest(), PagesPerRequest());
  const engine::Prompt asked{
      .tokens = tokens.data(), .token_count = prompt, .page_table = pages.data(), .page_count = pages.size()};
  engine::Request request;
  if (const engine::Status begun = cache_.Begin(&asked, 1, &request); !begun.ok()) return Failed("Begin", begun);
  for (;;) {
    const absl::StatusOr<bool> landed = Land(request, landed_[slot]);
    if (!landed.ok()) return landed.status();
    if (*landed) Compute(request.plan().cached_tokens, prompt);
    const engine::Status finished = request.Finish();
    if (finished.code == engine::Code::kRestart) continue;
    if (!finished.ok()) return Failed("Finish", finished);
    break;
  }
  const Served served{.cached_tokens = request.plan().cached_tokens, .first_token = Clock::now()};
  if (absl::Status status = Commit(request, tokens, prompt, pages); !status.ok()) return status;
  return served;
}

absl::Status ServingEngine::Commit(const engine::Request& request, std::span<const int32_t> tokens, uint64_t prompt,
                                   std::span<const int32_t> pages) {
  const auto tensors = [this](uint64_t depth) {
    return engine::Checkpoint{.depth = depth, .linear = tensors_.data(), .linear_count = kLayers};
  };
  std::vector<engine::Checkpoint> checkpoints;
  const engine::Plan& plan = request.plan();
  for (const engine::Step& step : std::span(plan.steps, plan.step_count)) {
    if (step.capture && step.end < tokens.size()) checkpoints.push_back(tensors(step.end));
  }
  checkpoints.push_back(tensors(tokens.size()));
  std::vector<uint8_t> outcomes(checkpoints.size());
  const engine::Text text{.request = &request,
                          .tokens = tokens.data(),
                          .token_count = tokens.size(),
                          .prompt_tokens = prompt,
                          .checkpoints = checkpoints.data(),
                          .checkpoint_count = static_cast<uint32_t>(checkpoints.size()),
                          .page_table = pages.data(),
                          .page_count = pages.size(),
                          .outcomes = outcomes.data()};
  const engine::Status committed = cache_.Commit(&text, 1);
  return committed.ok() ? absl::OkStatus() : Failed("Commit", committed);
}

}  // namespace ashlar::replay
