#include "examples/rag/daemon_advancer.h"

#include <cstring>
#include <utility>

namespace ashlar::rag {
namespace {

constexpr uint64_t kAlignment = 64;
// A pass has that many computed tokens at most.
constexpr int64_t kPassTokens = refengine::EngineOptions{}.pass_tokens;

uint64_t Align(uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The state, and tokens' inputs and outputs; snapshots as far as a short pass leaves room.
uint64_t RequiredBytes(const refengine::LinearConfig& linear) {
  const auto floats = [](int64_t count) { return Align(static_cast<uint64_t>(count) * sizeof(float)); };
  return floats(linear.value_heads * linear.state_floats()) + 2 * floats(kPassTokens * linear.key_channels()) +
         2 * floats(kPassTokens * linear.value_channels()) + floats(kPassTokens * linear.gate_channels()) +
         2 * kAlignment;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DaemonAdvancer>> DaemonAdvancer::Make(Client& client, const Model& model,
                                                                     const refengine::ModelConfig& config) {
  absl::StatusOr<Region> region = client.HostRegion(RequiredBytes(config.linear));
  if (!region.ok()) return region.status();
  return std::unique_ptr<DaemonAdvancer>(new DaemonAdvancer(model, config, *std::move(region)));
}

bool DaemonAdvancer::Begin(const Match& match, std::span<const std::vector<refengine::CachedLayer>> layers) {
  if (doubtful_.has_value() && !doubtful_->quiet()) return false;
  doubtful_.reset();
  match_ = &match;
  layers_ = layers;
  lost_.clear();
  return true;
}

uint64_t DaemonAdvancer::StateBytes() const {
  return static_cast<uint64_t>(config_.linear.state_floats()) * sizeof(float);
}

std::byte* DaemonAdvancer::Take(uint64_t bytes) {
  if (Align(bytes) > region_.size() - used_) return nullptr;
  std::byte* const taken = region_.data() + used_;
  used_ += Align(bytes);
  return taken;
}

float* DaemonAdvancer::CopyToDevice(const float* rows, int64_t stride, int64_t tokens, int64_t width) {
  auto* copy = reinterpret_cast<float*>(Take(static_cast<uint64_t>(tokens * width) * sizeof(float)));
  for (int64_t t = 0; copy != nullptr && t < tokens; ++t) {
    std::memcpy(copy + t * width, rows + t * stride, static_cast<size_t>(width) * sizeof(float));
  }
  return copy;
}

bool DaemonAdvancer::CopyTokens(const kernels::LinearShape& shape, const kernels::TokenInputs& inputs,
                                kernels::TokenInputs& out) {
  const refengine::LinearConfig& linear = config_.linear;
  const int64_t keys = linear.key_channels(), values = linear.value_channels();
  const int64_t gates = shape.heads * kernels::GateWidth(shape), betas = shape.heads * kernels::BetaWidth(shape);
  out.tokens = inputs.tokens;
  if (inputs.tokens == 0) return true;
  out.q = CopyToDevice(inputs.q, inputs.q_stride, inputs.tokens, keys);
  out.k = CopyToDevice(inputs.k, inputs.k_stride, inputs.tokens, keys);
  out.v = CopyToDevice(inputs.v, inputs.v_stride, inputs.tokens, values);
  if (inputs.g != nullptr) out.g = CopyToDevice(inputs.g, inputs.g_stride, inputs.tokens, gates);
  if (inputs.beta != nullptr) out.beta = CopyToDevice(inputs.beta, inputs.beta_stride, inputs.tokens, betas);
  out.q_stride = out.k_stride = keys;
  out.v_stride = values;
  out.g_stride = gates;
  out.beta_stride = betas;
  return out.q != nullptr && out.k != nullptr && out.v != nullptr && (out.g != nullptr) == (inputs.g != nullptr) &&
         (out.beta != nullptr) == (inputs.beta != nullptr);
}

bool DaemonAdvancer::CopyState(const kernels::StateView& state, std::byte*& out) {
  const auto heads = static_cast<uint64_t>(config_.linear.value_heads);
  out = Take(heads * StateBytes());
  for (uint64_t head = 0; out != nullptr && head < heads; ++head) {
    std::memcpy(out + head * StateBytes(), state.heads[head], StateBytes());
  }
  return out != nullptr;
}

void DaemonAdvancer::CopyStateOut(const std::byte* from, const kernels::StateView& state) const {
  for (int32_t head = 0; head < config_.linear.value_heads; ++head) {
    std::memcpy(state.heads[head], from + static_cast<uint64_t>(head) * StateBytes(), StateBytes());
  }
}

std::optional<AdvanceStep> DaemonAdvancer::Describe(int32_t layer, const kernels::SeamStep& step) {
  AdvanceStep out{.begin = step.begin, .end = step.end};
  if (step.interior != nullptr) {
    for (uint32_t i = 0; i < layers_.size() && !out.segment.has_value(); ++i) {
      if (layers_[i].empty() || step.interior != &layers_[i][static_cast<size_t>(layer)].tuple) continue;
      out.segment = LandSegment{i, match_->segments()[i].start};
    }
    if (!out.segment.has_value()) return std::nullopt;
  }
  if (step.checkpoint == nullptr) return out;
  out.checkpoint.data = Take(static_cast<uint64_t>(config_.linear.value_heads) * StateBytes());
  return out.checkpoint.data == nullptr ? std::nullopt : std::optional(out);
}

bool DaemonAdvancer::Advance(int32_t layer, const kernels::AdvanceSeamArgs& args) {
  used_ = 0;
  const int64_t values = config_.linear.value_channels(), tokens = args.inputs.tokens;
  LayerAdvance asked{.layer = static_cast<uint32_t>(layer), .region = region_};
  if (!CopyState(args.state, asked.state.data) || !CopyTokens(args.shape, args.inputs, asked.inputs)) return false;
  if (tokens > 0) {
    asked.out = reinterpret_cast<float*>(Take(static_cast<uint64_t>(tokens * values) * sizeof(float)));
    asked.out_stride = values;
    if (asked.out == nullptr) return false;
  }
  std::vector<AdvanceStep> steps;
  for (const kernels::SeamStep& step : args.steps) {
    const std::optional<AdvanceStep> described = Describe(layer, step);
    if (!described.has_value()) return false;
    steps.push_back(*described);
  }
  if (steps.empty()) return true;  // a pass that only takes a checkpoint over
  asked.steps = steps;

  Composition composition = model_.Advance(match_, asked);
  if (composition.reason() != MissReason::kNone) {
    size_t segment = 0;
    for (const AdvanceStep& step : steps) {
      if (!step.segment.has_value()) continue;
      const MissReason reason = composition.segments()[segment++];
      const bool gone = reason == MissReason::kChecksumFailed || reason == MissReason::kLeaseLost;
      if (gone) lost_.push_back(step.segment->segment);
    }
    doubtful_ = std::move(composition);
    return false;
  }
  CopyStateOut(asked.state.data, args.state);
  for (size_t i = 0; i < steps.size(); ++i) {
    if (args.steps[i].checkpoint != nullptr) CopyStateOut(steps[i].checkpoint.data, *args.steps[i].checkpoint);
    if (steps[i].segment.has_value()) continue;
    for (int64_t t = steps[i].begin; t < steps[i].end; ++t) {
      std::memcpy(args.out + t * args.out_stride, asked.out + t * values, static_cast<size_t>(values) * sizeof(float));
    }
  }
  ++advances_;
  return true;
}

}  // namespace ashlar::rag
