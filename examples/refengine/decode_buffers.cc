// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/decode_buffers.h"

#include <limits>
#include <memory>
#include <optional>

#include "kernels/decoding_costs.h"

namespace ashlar::refengine {
namespace {

constexpr int32_t kOnlyPage[] = {0};

}  // namespace

DecodeBuffers::DecodeBuffers(const Model& model, const kernels::Kernels& kernels, const DecodeBuffering& buffering)
    : model_(model),
      kernels_(kernels),
      buffering_(buffering),
      layers_(static_cast<size_t>(model.config().linear_layers())) {
  const LinearConfig& linear = model.config().linear;
  const auto slots = static_cast<size_t>(buffering.capacity), heads = static_cast<size_t>(linear.value_heads);
  const auto state = static_cast<size_t>(linear.state_floats());
  for (Layer& layer : layers_) {
    layer.keys.resize(slots * static_cast<size_t>(linear.key_channels()) * ElementBytes(buffering.dtype));
    layer.writes.resize(slots * static_cast<size_t>(linear.value_channels()) * ElementBytes(buffering.dtype));
    layer.gates.resize(slots * heads);
    if (!buffering.copies) continue;
    layer.copies.resize(heads * state * ElementBytes(DType::kF16));
    layer.exponents.resize(heads);
    for (size_t head = 0; head < heads; ++head) {
      layer.copy_heads.push_back(layer.copies.data() + head * state * ElementBytes(DType::kF16));
    }
  }
}

kernels::BufferedRequest DecodeBuffers::RequestOf(Layer& layer, const kernels::StateView& state, bool flush) {
  kernels::BufferedRequest request = {.state = state};
  if (buffering_.copies) {
    request.rounded = {.heads = layer.copy_heads.data(), .dtype = DType::kF16, .exponents = layer.exponents.data()};
  }
  request.buffer = {.keys = layer.keys.data(),
                    .writes = layer.writes.data(),
                    .gates = layer.gates.data(),
                    .dtype = buffering_.dtype,
                    .page_tokens = buffering_.capacity,
                    .page_table = kOnlyPage,
                    .filled = filled_};
  request.flush = flush;
  return request;
}

bool DecodeBuffers::Advance(int32_t layer, const kernels::AdvanceSeamArgs& args) {
  Layer& own = layers_[static_cast<size_t>(model_.config().kind_index(layer))];
  const kernels::BufferedRequest request = RequestOf(own, args.state, Flushes());
  if (buffering_.copies && !copied_) {
    kernels_.RebuildState({.shape = args.shape, .request = request, .tokens = 0, .target = request.rounded}, *queue_)
        .Wait();
  }
  kernels_
      .DecodeBuffered({.shape = args.shape,
                       .requests = {&request, 1},
                       .inputs = args.inputs,
                       .out = args.out,
                       .out_stride = args.out_stride},
                      *queue_)
      .Wait();
  return true;
}

void DecodeBuffers::TokenDone() {
  copied_ = true;
  filled_ = Flushes() ? 0 : filled_ + 1;
}

void DecodeBuffers::Settle(RecurrentState& states) {
  if (filled_ == 0) return;
  const ModelConfig& config = model_.config();
  const int64_t floats = config.linear.state_floats();
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    const int32_t index = config.kind_index(layer);
    std::vector<void*> heads;
    for (int32_t head = 0; head < config.linear.value_heads; ++head) {
      heads.push_back(states.State(index).data() + head * floats);
    }
    const kernels::StateView state = {.heads = heads.data()};
    kernels_
        .RebuildState({.shape = model_.linear_shape(layer),
                       .request = RequestOf(layers_[static_cast<size_t>(index)], state, false),
                       .tokens = filled_,
                       .target = state},
                      *queue_)
        .Wait();
  }
  Erase();
}

void DecodeBuffers::Erase() {
  filled_ = 0;
  copied_ = false;
}

DecodeBuffering MeasuredBuffering(const Model& model, const kernels::Kernels& kernels, kernels::Workers& workers,
                                  int32_t sequences, bool may_round) {
  const std::unique_ptr<kernels::Queue> queue = kernels.MakeQueue(&workers);
  int32_t linear = 0;
  while (model.config().is_attention(linear)) ++linear;
  DecodeBuffering best;
  double least = std::numeric_limits<double>::infinity();
  for (const DecodeBuffering& way :
       {DecodeBuffering{.dtype = DType::kF32}, DecodeBuffering{.dtype = DType::kF16, .copies = true}}) {
    if (way.copies && !may_round) continue;
    const kernels::DecodeTrial trial = {.shape = model.linear_shape(linear),
                                        .buffer = way.dtype,
                                        .rounded = way.copies ? std::optional(DType::kF16) : std::nullopt,
                                        .layers = model.config().linear_layers() * sequences};
    const kernels::DecodeChoice choice =
        kernels::ChooseDecoding(kernels::MeasureDecoding(kernels, *queue, trial), std::nullopt);
    if (choice.cost >= least) continue;
    const bool buffers = choice.form == kernels::DecodeForm::kChunkwise;
    best = {choice.capacity, buffers ? way.dtype : DType::kF32, buffers && way.copies};
    least = choice.cost;
  }
  return best;
}

}  // namespace ashlar::refengine
