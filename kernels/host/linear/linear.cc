// SPDX-License-Identifier: Apache-2.0
// Drives the linear layers' operations. All four have one form: columns of X = [S | T] start from a state, pass through
// interiors and runs of tokens, and end. Columns and heads are independent, so work is split over both.
#include "kernels/host/linear/linear.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/host/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/linear/linear.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "kernels/host/linear/chain-inl.h"

#if HWY_ONCE
namespace ashlar::kernels::host {
namespace {

HWY_EXPORT(RunChain);

void Run(const Chain& chain, Workers* workers) {
  HWY_DYNAMIC_DISPATCH(RunChain)(chain, workers);
}

// Returns a view of the memory of a tuple's end state.
StateView StateOf(const TupleTarget& tuple) {
  return {.heads = tuple.state, .dtype = tuple.state_dtype, .exponents = tuple.state_exponents};
}

// One pass over the gates, a small part of the inputs: vectors would not pay.
void CaptureDecays(const CaptureArgs& args) {
  const int64_t width = GateWidth(args.shape), gates = args.shape.heads * width;
  std::vector<double> logs(static_cast<size_t>(gates));
  for (int64_t t = 0; t < args.inputs.tokens; ++t) {
    for (int64_t i = 0; i < gates; ++i) logs[static_cast<size_t>(i)] += args.inputs.g[t * args.inputs.g_stride + i];
  }
  for (int64_t h = 0; h < args.shape.heads; ++h) {
    for (int64_t i = 0; i < args.shape.d_k; ++i) {
      const double log = width == 0 ? 0 : logs[static_cast<size_t>(h * width + i % width)];
      args.decay[h * args.shape.d_k + i] = static_cast<float>(std::exp(log));
    }
  }
}

}  // namespace

void Compose(const ComposeArgs& args, Workers* workers) {
  Run({.shape = args.shape, .interiors = args.interiors, .resume = true, .state = args.state}, workers);
}

void ComposeTransitions(const ComposeTransitionsArgs& args, Workers* workers) {
  Run({.shape = args.shape,
       .interiors = args.interiors,
       .state = StateOf(args.tuple),
       .transition = args.tuple.transition,
       .transition_dtype = args.tuple.transition_dtype},
      workers);
}

void Capture(const CaptureArgs& args, Workers* workers) {
  if (args.decay != nullptr) CaptureDecays(args);
  const SeamStep run{.begin = 0, .end = args.inputs.tokens};
  Run({.shape = args.shape,
       .steps = {&run, 1},
       .inputs = args.inputs,
       .state = StateOf(args.tuple),
       .transition = args.tuple.transition,
       .transition_dtype = args.tuple.transition_dtype},
      workers);
}

void AdvanceSeam(const AdvanceSeamArgs& args, Workers* workers) {
  Run({.shape = args.shape,
       .steps = args.steps,
       .inputs = args.inputs,
       .resume = true,
       .state = args.state,
       .out = args.out,
       .out_stride = args.out_stride},
      workers);
}

}  // namespace ashlar::kernels::host
#endif
