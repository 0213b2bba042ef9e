// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/refengine/decode_buffers.h"
#include "examples/refengine/matrix.h"
#include "examples/refengine/mixers.h"
#include "examples/refengine/pass.h"
#include "examples/refengine/rows.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::refengine {

const char* Name(Part part) {
  switch (part) {
    case Part::kEmbedding:
      return "embedding";
    case Part::kNorms:
      return "norms";
    case Part::kProjections:
      return "projections";
    case Part::kConvolution:
      return "convolution";
    case Part::kRecurrence:
      return "recurrence";
    case Part::kCapture:
      return "capture";
    case Part::kAttention:
      return "attention";
    case Part::kMlp:
      return "mlp";
    case Part::kHead:
      return "head";
  }
  return "unknown";
}

struct Engine::Impl {
  Impl(const Model& model, const kernels::Kernels& kernels, kernels::Workers& workers, EngineOptions its_options)
      : options(its_options),
        queue(kernels.MakeQueue(&workers)),
        machine{model, kernels, workers, *queue},
        linear(machine),
        attention(machine),
        mlp(machine) {}

  // False: on_layer or the advancer failed.
  bool RunPass(Sequence& sequence, RecurrentState& recurrent, const Pass& pass, const AdvanceOptions& given);
  void Embed(const Pass& pass, float* residual);
  void Normalize(const std::vector<float>& weight, int64_t rows, const float* residual, float* normed);
  // Null: the chain is not decoded from buffers.
  DecodeBuffers* BuffersFor(Sequence& sequence, std::span<const Step> chain, const AdvanceOptions& given);
  // Logits of the pass's rows from `first` on, [rows − first, vocabulary].
  void Head(int64_t first, int64_t rows, const float* residual, float* logits);

  EngineOptions options;
  std::unique_ptr<kernels::Queue> queue;
  Machine machine;
  LinearMixer linear;
  AttentionMixer attention;
  Mlp mlp;
  Scratch residual_memory, normed_memory;
};

void Engine::Impl::Embed(const Pass& pass, float* residual) {
  const int64_t d_model = machine.model.config().d_model;
  ForRows(machine.workers, pass.rows(), [&](int64_t row) {
    std::memcpy(residual + row * d_model, machine.model.weights().embedding.data() + pass.tokens[row] * d_model,
                d_model * sizeof(float));
  });
}

void Engine::Impl::Normalize(const std::vector<float>& weight, int64_t rows, const float* residual, float* normed) {
  const ModelConfig& config = machine.model.config();
  ForRows(machine.workers, rows, [&](int64_t row) {
    RmsNorm(residual + row * config.d_model, weight.data(), config.norm_epsilon, config.d_model,
            normed + row * config.d_model);
  });
}

void Engine::Impl::Head(int64_t first, int64_t rows, const float* residual, float* logits) {
  const int64_t d_model = machine.model.config().d_model;
  float* normed = normed_memory.Get(rows * d_model);
  Normalize(machine.model.weights().final_norm, rows - first, residual + first * d_model, normed);
  MatMul({.m = rows - first,
          .n = kVocabulary,
          .k = d_model,
          .a = normed,
          .a_stride = d_model,
          .b = machine.model.head().data(),
          .b_stride = d_model,
          .b_transposed = true,
          .c = logits,
          .c_stride = kVocabulary},
         machine.workers);
}

DecodeBuffers* Engine::Impl::BuffersFor(Sequence& sequence, std::span<const Step> chain, const AdvanceOptions& given) {
  const bool decodes = options.decoding.capacity > 0 && chain.size() == 1 && chain[0].tokens.size() == 1 &&
                       chain[0].snapshot == nullptr && given.captures.empty() && given.advancer == nullptr;
  if (!decodes) return nullptr;
  if (sequence.buffers_ == nullptr) {
    sequence.buffers_ = std::make_unique<DecodeBuffers>(machine.model, machine.kernels, options.decoding);
  }
  sequence.buffers_->Use(*queue);
  return sequence.buffers_.get();
}

bool Engine::Impl::RunPass(Sequence& sequence, RecurrentState& recurrent, const Pass& pass,
                           const AdvanceOptions& given) {
  const ModelConfig& config = machine.model.config();
  const int64_t rows = pass.rows();
  float* residual = residual_memory.Get(rows * config.d_model);
  float* normed = normed_memory.Get(rows * config.d_model);
  {
    const Stopwatch watch(given.profile, Part::kEmbedding);
    Embed(pass, residual);
  }
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (given.on_layer && !given.on_layer(layer)) return false;
    const LayerWeights& weights = machine.model.weights().layers[layer];
    {
      const Stopwatch watch(given.profile, Part::kNorms);
      Normalize(weights.mixer_norm, rows, residual, normed);
    }
    if (config.is_attention(layer)) {
      attention.Run(layer, pass, normed, residual, sequence, given.profile);
    } else {
      if (!linear.Run(layer, pass, normed, residual, recurrent, given)) return false;
    }
    {
      const Stopwatch watch(given.profile, Part::kNorms);
      Normalize(weights.mlp_norm, rows, residual, normed);
    }
    const Stopwatch watch(given.profile, Part::kMlp);
    mlp.Run(layer, rows, normed, residual);
  }
  const Stopwatch watch(given.profile, Part::kHead);
  if (given.all_logits != nullptr) Head(0, rows, residual, given.all_logits);
  if (given.last_logits != nullptr && rows > 0) Head(rows - 1, rows, residual, given.last_logits);
  return true;
}

Engine::Engine(const Model& model, const kernels::Kernels& kernels, kernels::Workers& workers, EngineOptions options)
    : impl_(std::make_unique<Impl>(model, kernels, workers, options)) {}
Engine::~Engine() = default;

const Model& Engine::model() const {
  return impl_->machine.model;
}

absl::Status Engine::Advance(Sequence& sequence, std::span<const Step> chain, const AdvanceOptions& options) {
  const ModelConfig& config = model().config();
  if (const absl::Status status = CheckChain(config, sequence.length(), chain, options); !status.ok()) return status;
  int64_t end = sequence.length();
  for (const Step& step : chain) end += step.count();
  if (!sequence.Reserve(end)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("chain: ", end, " tokens, but only ", sequence.pool().free_pages(), " pages are free"));
  }
  for (const Step& step : chain) {
    if (step.snapshot != nullptr) *step.snapshot = RecurrentState(config);
  }
  AdvanceOptions pass_options = options;
  DecodeBuffers* const buffers = impl_->BuffersFor(sequence, chain, options);
  if (buffers != nullptr) {
    pass_options.advancer = buffers;
  } else {
    Settle(sequence);
  }
  for (const Pass& pass : CutIntoPasses(sequence.length(), chain, options.captures, impl_->options.pass_tokens)) {
    if (!impl_->RunPass(sequence, sequence.recurrent_, pass, pass_options)) {
      return absl::CancelledError("on_layer or the advancer gave up");
    }
    if (buffers != nullptr) buffers->TokenDone();
    sequence.length_ = pass.end;
    if (pass_options.all_logits != nullptr) pass_options.all_logits += pass.rows() * kVocabulary;
  }
  return absl::OkStatus();
}

void Engine::Settle(Sequence& sequence) {
  if (sequence.buffers_ == nullptr) return;
  sequence.buffers_->Use(*impl_->queue);
  sequence.buffers_->Settle(sequence.recurrent_);
}

int32_t GreedyToken(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace ashlar::refengine
