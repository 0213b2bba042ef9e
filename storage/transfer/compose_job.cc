// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/compose_job.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "storage/transfer/part_check.h"
#include "storage/transfer/tuple_table.h"

namespace ashlar::storage {
namespace {

// All heads' states in the form for kernels. Views point into it.
class StateHeads {
 public:
  StateHeads(const kernels::LinearShape& shape, const StatePlace& place)
      : heads_(static_cast<size_t>(shape.heads)), dtype_(place.dtype), exponents_(place.exponents) {
    const size_t bytes = static_cast<size_t>(shape.d_k) * shape.d_v * ElementBytes(place.dtype);
    for (size_t head = 0; head < heads_.size(); ++head) heads_[head] = place.data + head * bytes;
  }
  kernels::StateView view() const { return {.heads = heads_.data(), .dtype = dtype_, .exponents = exponents_}; }

 private:
  std::vector<void*> heads_;
  DType dtype_;
  int32_t* exponents_;
};

// Returns how many numbers the layer's decay table has.
size_t DecayNumbers(const kernels::LinearShape& shape) {
  if (shape.decay_table == nullptr) return 0;
  const auto heads = static_cast<size_t>(shape.heads);
  return shape.family == Family::kMamba1 ? heads * static_cast<size_t>(shape.d_k) * shape.d_v : heads;
}

uint64_t StatesWithExponents(const Composition::Layer& layer) {
  const auto has = [](const StatePlace& place) { return place.dtype == DType::kF16 ? uint64_t{1} : 0; };
  uint64_t states = has(layer.state);
  for (const Composition::Step& step : layer.steps) states += step.checkpoint.has_value() ? has(*step.checkpoint) : 0;
  return states;
}

}  // namespace

uint64_t GpuPointerBytes(const Composition::Layer& layer, size_t interiors) {
  uint64_t checkpoints = 0;
  for (const Composition::Step& step : layer.steps) checkpoints += step.checkpoint.has_value() ? 1 : 0;
  return static_cast<uint64_t>(layer.shape.heads) *
         (interiors * sizeof(kernels::HeadTuple) + (1 + checkpoints) * sizeof(void*));
}

uint64_t GpuScratchBytes(const Composition::Layer& layer) {
  constexpr uint64_t kAligned = 256;
  const uint64_t states = StatesWithExponents(layer), heads = states * static_cast<uint64_t>(layer.shape.heads);
  if (states == 0) return 0;
  // One maximum per head, and the states in fp32.
  return heads * (uint64_t{1} + static_cast<uint64_t>(layer.shape.d_k) * layer.shape.d_v) * sizeof(float) + kAligned;
}

ComposeJob::ComposeJob(const kernels::Kernels& kernels, kernels::Workers& workers, GpuLane* gpu,
                       std::vector<ComposeSource> sources, Composition composition, CancelFlag cancel)
    : kernels_(kernels),
      workers_(workers),
      gpu_(gpu),
      composition_(std::move(composition)),
      cancel_(std::move(cancel)) {
  sources_.reserve(sources.size());
  for (ComposeSource& source : sources) {
    const Slot& slot = *source.slot;
    const Tier& tier = *source.tier;
    sources_.push_back({std::move(source), ObjectBytes(tier, slot)});
  }
}

void ComposeJob::Run(const std::function<bool()>& should_yield) {
  std::optional<GpuCalls> calls;
  if (gpu_ != nullptr) calls.emplace(*gpu_);
  GpuCalls* const on_gpu = calls.has_value() ? &*calls : nullptr;
  refused_ = on_gpu != nullptr && !Prepare(*on_gpu);
  while (!refused_ && !finished()) {
    cancelled_ = cancel_.cancelled();
    if (cancelled_) return;
    if (verified_ < composition_.layers.size()) {
      VerifyLayer(verified_, on_gpu);
      if (!cancelled_) ++verified_;
    } else {
      Advance(composition_.layers[advanced_++], on_gpu);
    }
    if (should_yield()) return;
  }
}

// Runs before anything is written, so that nothing is refused afterwards.
bool ComposeJob::Prepare(GpuCalls& calls) const {
  uint64_t scratch = 0, numbers = 0;
  for (const Composition::Layer& layer : composition_.layers) {
    scratch = std::max(scratch, GpuScratchBytes(layer));
    numbers = std::max<uint64_t>(numbers, DecayNumbers(layer.shape));
  }
  return calls.Reserve(scratch, numbers);
}

std::vector<bool> ComposeJob::corrupt() const {
  std::vector<bool> corrupt;
  for (const Source& source : sources_) corrupt.push_back(found_corrupt() && corrupt_.contains(source.object.header));
  return corrupt;
}

// An object that appears several times in a composition is verified once.
void ComposeJob::VerifyLayer(size_t layer, GpuCalls* calls) {
  std::vector<PartCheck> checks, on_gpu;
  std::vector<const ObjectHeader*> owners, owners_on_gpu;  // owners of the parts below
  absl::flat_hash_set<const ObjectHeader*> seen = corrupt_;
  for (const Source& source : sources_) {
    const ObjectHeader* const header = source.object.header;
    if (source.object.verified[layer] || !seen.insert(header).second) continue;
    const bool far = source.object.tier->gpu() != nullptr;
    for (const Part& part : header->Layer(composition_.layers[layer].layer)) {
      if (part.Empty()) continue;
      (far ? on_gpu : checks).emplace_back(source.bytes, part);
      (far ? owners_on_gpu : owners).push_back(header);
    }
  }
  cancelled_ = !Verify(checks, on_gpu, calls);
  if (cancelled_) return;
  for (size_t i = 0; i < checks.size(); ++i) {
    if (!checks[i].Holds()) corrupt_.insert(owners[i]);
  }
  for (size_t i = 0; i < on_gpu.size(); ++i) {
    if (!on_gpu[i].Holds()) corrupt_.insert(owners_on_gpu[i]);
  }
}

bool ComposeJob::Verify(std::span<PartCheck> checks, std::span<PartCheck> on_gpu, GpuCalls* calls) const {
  return RunChecks(kernels_, workers_, checks, cancel_) && (on_gpu.empty() || RunChecksOnGpu(*calls, on_gpu, cancel_));
}

void ComposeJob::Advance(const Composition::Layer& layer, GpuCalls* calls) const {
  TupleTable tuples(layer.layer, layer.shape, sources_.size());
  for (size_t i = 0; i < sources_.size(); ++i) {
    const ComposeSource& object = sources_[i].object;
    tuples.Add(*object.header, sources_[i].bytes, object.tier->gpu(), composition_.interiors[i].first_position);
  }
  if (calls == nullptr) {
    return Advance(layer, tuples.views(), kernels_, *kernels_.MakeQueue(&workers_), layer.shape.decay_table);
  }
  // The layout's decay table is in memory that a GPU cannot access.
  const float* const decays = calls->Stage({layer.shape.decay_table, DecayNumbers(layer.shape)});
  Advance(layer, tuples.views(), calls->kernels(), calls->queue(), decays);
}

void ComposeJob::Advance(const Composition::Layer& layer, std::span<const kernels::TupleView> tuples,
                         const kernels::Kernels& kernels, kernels::Queue& queue, const float* decays) const {
  const StateHeads state(layer.shape, layer.state);
  kernels::LinearShape shape = layer.shape;
  shape.decay_table = decays;
  if (layer.steps.empty()) {
    kernels.Compose({.shape = shape, .interiors = tuples, .state = state.view()}, queue).Wait();
    return;
  }
  std::vector<StateHeads> checkpoint_heads;
  std::vector<kernels::StateView> checkpoints;
  checkpoint_heads.reserve(layer.steps.size());
  checkpoints.reserve(layer.steps.size());
  std::vector<kernels::SeamStep> steps;
  for (const Composition::Step& step : layer.steps) {
    kernels::SeamStep& out = steps.emplace_back();
    if (step.interior.has_value()) {
      out.interior = &tuples[*step.interior];
    } else {
      out.begin = step.begin;
      out.end = step.end;
    }
    if (!step.checkpoint.has_value()) continue;
    checkpoint_heads.emplace_back(layer.shape, *step.checkpoint);
    checkpoints.push_back(checkpoint_heads.back().view());
    out.checkpoint = &checkpoints.back();
  }
  kernels
      .AdvanceSeam({.shape = shape,
                    .steps = steps,
                    .inputs = layer.inputs,
                    .state = state.view(),
                    .out = layer.out,
                    .out_stride = layer.out_stride},
                   queue)
      .Wait();
}

}  // namespace ashlar::storage
