// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/linear.h"

#include <algorithm>

#include "kernels/cuda/chain.h"
#include "kernels/cuda/compose.h"
#include "kernels/cuda/decay.h"
#include "kernels/cuda/launch.h"

namespace ashlar::kernels::cuda {
namespace {

// Builds the arrays of one call's Chain: counts them first, then stages them.
class ChainBuilder {
 public:
  // `tables`: per-head pointer tables; `wide`: states written as fp16.
  ChainBuilder(const LinearShape& shape, size_t steps, size_t interiors, size_t tables, size_t wide, CudaQueue& queue)
      : shape_(shape), queue_(queue), numbers_(int64_t{shape.d_k} * shape.d_v) {
    const bool turns = shape.rotation.style != RopeStyle::kNone;
    const size_t pairs = turns ? static_cast<size_t>(shape.rotation.rotary_dim) / 2 : 0;
    const auto heads = static_cast<size_t>(shape.heads);
    queue.Begin(queue.StagedBytes<Step>(steps) + queue.StagedBytes<HeadTuple>(interiors * heads) +
                tables * queue.StagedBytes<void*>(heads) + queue.StagedBytes<double>(pairs) +
                queue.StagedBytes<Target>(wide));
    chain_ = ChainOf(shape);
    if (turns) {
      chain_.rope = shape.rotation.style;
      chain_.pairs = static_cast<int32_t>(pairs);
      chain_.frequencies = queue.Stage(shape.rotation.frequencies, pairs);
    }
    steps_ = queue.Stage<Step>(steps);
    tuples_ = queue.Stage<HeadTuple>(interiors * heads);
    chain_.steps = steps_.device;
    chain_.step_count = static_cast<int32_t>(steps);
    chain_.tuples = tuples_.device;
    if (wide == 0) return;
    narrow_ = queue.Stage<Target>(wide);
    const size_t largest_bytes = queue.StagedBytes<uint32_t>(wide * heads);
    auto* workspace = static_cast<std::byte*>(
        queue.Workspace(largest_bytes + wide * heads * static_cast<size_t>(numbers_) * sizeof(float)));
    largest_ = reinterpret_cast<uint32_t*>(workspace);
    wide_ = reinterpret_cast<float*>(workspace + largest_bytes);
    Check(cudaMemsetAsync(largest_, 0, largest_bytes, queue.stream()), "workspace");
  }

  Chain& chain() { return chain_; }

  void Add(const TupleView& interior) {
    const auto heads = static_cast<size_t>(shape_.heads);
    std::copy_n(interior.heads, heads, tuples_.host + static_cast<size_t>(interiors_) * heads);
    steps_.host[added_++] = {.interior = interiors_++,
                             .transition_dtype = interior.transition_dtype,
                             .state_dtype = interior.state_dtype,
                             .position = interior.position};
  }
  void Add(int64_t begin, int64_t end) { steps_.host[added_++] = {.begin = begin, .end = end}; }
  void KeepCheckpoint(const StateView& view) { steps_.host[added_ - 1].checkpoint = StateTarget(view); }

  void* const* Table(void* const* heads) { return queue_.Stage(heads, static_cast<size_t>(shape_.heads)); }

  void StartFrom(const StateView& view) {
    chain_.state = StateTarget(view);
    chain_.start = chain_.state.heads;
    chain_.start_dtype = view.dtype;
    chain_.start_exponents = view.exponents;
  }
  void WriteTo(const TupleTarget& tuple) {
    chain_.state = StateTarget(StateView{tuple.state, tuple.state_dtype, tuple.state_exponents});
    if (tuple.transition == nullptr) return;
    chain_.transition.heads = Table(tuple.transition);
    chain_.transition.dtype = tuple.transition_dtype;
  }

  Event Run() {
    return Run([&] { RunChain(chain_, queue_); });
  }
  template <typename Kernels>
  Event Run(Kernels&& kernels) {
    queue_.Upload();
    kernels();
    Narrow(chain_, narrow_.device, narrowed_, queue_);
    return queue_.End();
  }

 private:
  Target StateTarget(const StateView& view) {
    Target target = {.heads = Table(view.heads), .dtype = view.dtype};
    if (view.dtype != DType::kF16) return target;
    target.wide = wide_ + narrowed_ * shape_.heads * numbers_;
    target.largest = largest_ + narrowed_ * shape_.heads;
    target.exponents = view.exponents;
    narrow_.host[narrowed_++] = target;
    return target;
  }

  const LinearShape& shape_;
  CudaQueue& queue_;
  const int64_t numbers_;  // numbers of one state
  Chain chain_;
  Staged<Step> steps_;
  Staged<HeadTuple> tuples_;
  Staged<Target> narrow_;
  int32_t added_ = 0, interiors_ = 0, narrowed_ = 0;
  uint32_t* largest_ = nullptr;
  float* wide_ = nullptr;
};

size_t IsWide(DType dtype) {
  return dtype == DType::kF16 ? 1 : 0;
}

}  // namespace

Event Compose(const ComposeArgs& args, CudaQueue& queue) {
  const size_t count = args.interiors.size();
  ChainBuilder builder(args.shape, count, count, 1, IsWide(args.state.dtype), queue);
  for (const TupleView& interior : args.interiors) builder.Add(interior);
  builder.StartFrom(args.state);
  const DType dtype = args.interiors.empty() ? DType::kF32 : args.interiors.front().state_dtype;
  if (ComposeFits(args)) return builder.Run([&] { RunCompose(builder.chain(), dtype, queue); });
  if (DecayFits(args)) return builder.Run([&] { RunDecay(builder.chain(), dtype, queue); });
  return builder.Run();
}

Event ComposeTransitions(const ComposeTransitionsArgs& args, CudaQueue& queue) {
  const size_t count = args.interiors.size();
  ChainBuilder builder(args.shape, count, count, 2, IsWide(args.tuple.state_dtype), queue);
  for (const TupleView& interior : args.interiors) builder.Add(interior);
  builder.WriteTo(args.tuple);
  return builder.Run();
}

Event Capture(const CaptureArgs& args, CudaQueue& queue) {
  ChainBuilder builder(args.shape, 1, 0, 2, IsWide(args.tuple.state_dtype), queue);
  builder.chain().inputs = args.inputs;
  builder.Add(0, args.inputs.tokens);
  builder.WriteTo(args.tuple);
  return builder.Run();
}

Event AdvanceSeam(const AdvanceSeamArgs& args, CudaQueue& queue) {
  size_t interiors = 0, tables = 1, wide = IsWide(args.state.dtype);
  for (const SeamStep& step : args.steps) {
    interiors += step.interior != nullptr ? 1 : 0;
    if (step.checkpoint == nullptr) continue;
    ++tables;
    wide += IsWide(step.checkpoint->dtype);
  }
  ChainBuilder builder(args.shape, args.steps.size(), interiors, tables, wide, queue);
  builder.chain().inputs = args.inputs;
  builder.chain().out = args.out;
  builder.chain().out_stride = args.out_stride;
  for (const SeamStep& step : args.steps) {
    if (step.interior != nullptr) {
      builder.Add(*step.interior);
    } else {
      builder.Add(step.begin, step.end);
    }
    if (step.checkpoint != nullptr) builder.KeepCheckpoint(*step.checkpoint);
  }
  builder.StartFrom(args.state);
  return builder.Run();
}

}  // namespace ashlar::kernels::cuda
