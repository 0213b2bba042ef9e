// The drivers of the linear layers' operations. All four are one thing: columns of X = [S | T] that start somewhere,
// pass through interiors and runs of tokens, and end somewhere. Columns never meet, and neither do heads, so work is
// split over both.
#include "kernels/host/linear/linear.h"

#include <memory>

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
