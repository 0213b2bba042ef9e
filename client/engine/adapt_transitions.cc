// SPDX-License-Identifier: Apache-2.0
#include "client/engine/adapt_transitions.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/adaptive.h"
#include "kernels/convert.h"
#include "kernels/layer_shape.h"
#include "proto/tuple_parts.h"

namespace ashlar {
namespace {

// The state of one layer while its transitions are adapted, read before anything is written over them.
struct AdaptedLayer {
  const LinearLayer* linear = nullptr;
  DenseTransitions memory;
  std::vector<kernels::AdaptedHead> heads;
  std::vector<std::vector<std::byte>> factors;  // factors of low-rank heads
  uint64_t saved_bytes = 0;

  uint64_t UnitBytes(TransitionForm form, uint32_t rank = 0) const {
    return TransitionBytes(TupleShapeOf(*linear), linear->state_dtype, form, rank);
  }
  void KeepDense() {
    heads.assign(linear->value_heads, {});
    saved_bytes = 0;
  }
};

AdaptedLayer Adapt(const LinearLayer& linear, const DenseTransitions& memory, uint64_t tokens, double epsilon,
                   kernels::Workers* workers) {
  AdaptedLayer layer{.linear = &linear, .memory = memory};
  layer.factors.resize(linear.value_heads);
  layer.KeepDense();
  if (epsilon <= 0) return layer;
  const uint64_t dense = layer.UnitBytes(TransitionForm::kDense), numbers = uint64_t{linear.d_k} * linear.d_k;
  std::vector<std::byte> scratch(linear.value_heads * dense);
  const std::vector<float> none(linear.d_k, 1.0f);
  std::vector<const float*> from, decay;
  std::vector<void*> to;
  for (uint32_t head = 0; head < linear.value_heads; ++head) {
    from.push_back(memory.computed + head * numbers);
    to.push_back(scratch.data() + head * dense);
    if (linear.family == Family::kDeltanet) {
      decay.push_back(none.data());
    } else if (memory.decay != nullptr) {
      decay.push_back(memory.decay + head * linear.d_k);
    }
  }
  kernels::AdaptTransitions({.shape = kernels::ShapeOf(linear),
                             .transition = from.data(),
                             .decay = decay.empty() ? nullptr : decay.data(),
                             .tokens = static_cast<int64_t>(tokens),
                             .epsilon = epsilon,
                             .dtype = TransitionType(linear.state_dtype),
                             .search = linear.family == Family::kKda},
                            workers, layer.heads, to.data());
  for (uint32_t head = 0; head < linear.value_heads; ++head) {
    const kernels::AdaptedHead& adapted = layer.heads[head];
    const TransitionForm form = adapted.form;
    const uint64_t bytes = layer.UnitBytes(form, static_cast<uint32_t>(adapted.rank));
    layer.saved_bytes += dense - bytes;
    if (form != TransitionForm::kLowRank) continue;
    const std::byte* const factors = scratch.data() + head * dense;
    layer.factors[head].assign(factors, factors + bytes);
  }
  return layer;
}

// Places heads of one form and rank consecutively. A run's units begin where its first head's dense transition would
// begin.
void AppendRuns(const AdaptedLayer& layer, std::vector<PublishParts::Run>& runs) {
  const uint64_t dense = layer.UnitBytes(TransitionForm::kDense);
  for (uint32_t head = 0; head < layer.linear->value_heads; ++head) {
    const TransitionForm form = layer.heads[head].form;
    const auto rank = static_cast<uint32_t>(layer.heads[head].rank);
    if (head > 0 && runs.back().heads.form == form && runs.back().heads.rank == rank) {
      ++runs.back().heads.heads;
      continue;
    }
    runs.push_back({.heads = {layer.memory.layer, head, 1, form, rank}});
    if (form != TransitionForm::kZero) runs.back().units = layer.memory.stored + head * dense;
  }
}

std::vector<PublishParts::Run> RunsOf(std::span<const AdaptedLayer> layers) {
  std::vector<PublishParts::Run> runs;
  for (const AdaptedLayer& layer : layers) AppendRuns(layer, runs);
  return runs;
}

bool Fits(const ObjectHeader& plan, std::span<const PublishParts::Run> runs) {
  std::vector<TransitionRun> heads;
  for (const PublishParts::Run& run : runs) heads.push_back(run.heads);
  return PlanForms(plan, heads).ok();
}

void WriteDense(const AdaptedLayer& layer, uint32_t head) {
  const uint64_t numbers = uint64_t{layer.linear->d_k} * layer.linear->d_k;
  const DType dtype = TransitionType(layer.linear->state_dtype);
  const float* const from = layer.memory.computed + head * numbers;
  std::byte* const to = layer.memory.stored + head * layer.UnitBytes(TransitionForm::kDense);
  if (reinterpret_cast<const std::byte*>(from) == to) return;
  kernels::WriteElements(dtype, to, from, numbers);
}

void Write(const AdaptedLayer& layer) {
  std::byte* next = nullptr;  // after the previous head of its run
  for (uint32_t head = 0; head < layer.linear->value_heads; ++head) {
    const kernels::AdaptedHead& adapted = layer.heads[head];
    if (adapted.form == TransitionForm::kDense) WriteDense(layer, head);
    if (adapted.form != TransitionForm::kLowRank) continue;
    const bool begins =
        head == 0 || layer.heads[head - 1].form != adapted.form || layer.heads[head - 1].rank != adapted.rank;
    if (begins) next = layer.memory.stored + head * layer.UnitBytes(TransitionForm::kDense);
    next = std::ranges::copy(layer.factors[head], next).out;
  }
}

}  // namespace

std::vector<PublishParts::Run> AdaptTransitions(const Layout& layout, uint64_t tokens,
                                                std::span<const DenseTransitions> layers, double epsilon,
                                                kernels::Workers* workers) {
  const absl::StatusOr<ObjectHeader> plan = PlanObject(layout, {}, {}, ObjectKind::kSegment, tokens);
  if (!plan.ok()) return {};  // not a segment
  std::vector<AdaptedLayer> adapted;
  for (const DenseTransitions& memory : layers) {
    const auto& linear = std::get<LinearLayer>(layout.layers.at(memory.layer));
    adapted.push_back(Adapt(linear, memory, plan->stored_tokens, epsilon, workers));
  }
  std::vector<AdaptedLayer*> by_gain;
  for (AdaptedLayer& layer : adapted) by_gain.push_back(&layer);
  std::ranges::sort(by_gain, {}, &AdaptedLayer::saved_bytes);
  std::vector<PublishParts::Run> runs = RunsOf(adapted);
  for (auto least = by_gain.begin(); least != by_gain.end() && !Fits(*plan, runs); ++least) {
    (*least)->KeepDense();
    runs = RunsOf(adapted);
  }
  for (const AdaptedLayer& layer : adapted) Write(layer);
  return runs;
}

}  // namespace ashlar
