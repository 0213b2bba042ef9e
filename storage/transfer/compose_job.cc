#include "storage/transfer/compose_job.h"

#include <utility>

#include "storage/transfer/part_check.h"
#include "storage/transfer/tuple_table.h"

namespace ashlar::storage {
namespace {

// The states of all heads as kernels take them. Views point into it.
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

}  // namespace

ComposeJob::ComposeJob(const kernels::Kernels& kernels, kernels::Workers& workers, const Tier& tier,
                       std::vector<ComposeSource> sources, Composition composition, CancelFlag cancel)
    : kernels_(kernels), workers_(workers), composition_(std::move(composition)), cancel_(std::move(cancel)) {
  sources_.reserve(sources.size());
  for (ComposeSource& source : sources) {
    const Slot& slot = *source.slot;
    sources_.push_back({std::move(source), ObjectBytes(tier, slot)});
  }
}

void ComposeJob::Run(const std::function<bool()>& should_yield) {
  while (!finished()) {
    cancelled_ = cancel_.cancelled();
    if (cancelled_) return;
    if (verified_ < composition_.layers.size()) {
      VerifyLayer(verified_);
      if (!cancelled_) ++verified_;
    } else {
      Advance(composition_.layers[advanced_++]);
    }
    if (should_yield()) return;
  }
}

std::vector<bool> ComposeJob::corrupt() const {
  std::vector<bool> corrupt;
  for (const Source& source : sources_) corrupt.push_back(found_corrupt() && corrupt_.contains(source.object.header));
  return corrupt;
}

// However often a composition repeats an object, it is verified once.
void ComposeJob::VerifyLayer(size_t layer) {
  std::vector<PartCheck> checks;
  std::vector<const ObjectHeader*> owners;  // of `checks`
  absl::flat_hash_set<const ObjectHeader*> seen = corrupt_;
  for (const Source& source : sources_) {
    const ObjectHeader* const header = source.object.header;
    if (source.object.verified[layer] || !seen.insert(header).second) continue;
    for (const Part& part : header->Layer(composition_.layers[layer].layer)) {
      if (part.Empty()) continue;
      checks.emplace_back(source.bytes, part);
      owners.push_back(header);
    }
  }
  cancelled_ = !RunChecks(kernels_, workers_, checks, cancel_);
  if (cancelled_) return;
  for (size_t i = 0; i < checks.size(); ++i) {
    if (!checks[i].Holds()) corrupt_.insert(owners[i]);
  }
}

void ComposeJob::Advance(const Composition::Layer& layer) const {
  TupleTable tuples(layer.layer, layer.shape, sources_.size());
  for (size_t i = 0; i < sources_.size(); ++i) {
    tuples.Add(*sources_[i].object.header, sources_[i].bytes, composition_.interiors[i].first_position);
  }
  const StateHeads state(layer.shape, layer.state);
  const auto queue = kernels_.MakeQueue(&workers_);
  if (layer.steps.empty()) {
    kernels_.Compose({.shape = layer.shape, .interiors = tuples.views(), .state = state.view()}, *queue).Wait();
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
      out.interior = &tuples.views()[*step.interior];
    } else {
      out.begin = step.begin;
      out.end = step.end;
    }
    if (!step.checkpoint.has_value()) continue;
    checkpoint_heads.emplace_back(layer.shape, *step.checkpoint);
    checkpoints.push_back(checkpoint_heads.back().view());
    out.checkpoint = &checkpoints.back();
  }
  kernels_
      .AdvanceSeam({.shape = layer.shape,
                    .steps = steps,
                    .inputs = layer.inputs,
                    .state = state.view(),
                    .out = layer.out,
                    .out_stride = layer.out_stride},
                   *queue)
      .Wait();
}

}  // namespace ashlar::storage
