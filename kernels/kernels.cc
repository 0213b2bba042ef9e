// Argument checks, one place for all back ends. They abort: a bad argument here is an error of the program.
#include "kernels/kernels.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace ashlar::kernels {
namespace {

void Check(bool holds, const char* operation, const char* field) {
  if (holds) return;
  std::fprintf(stderr, "kernels: %s: %s\n", operation, field);
  std::abort();
}

void CheckShape(const LinearShape& shape, const char* operation) {
  Check(shape.heads > 0, operation, "shape.heads must be positive");
  Check(shape.key_heads > 0 && shape.heads % shape.key_heads == 0, operation,
        "shape.key_heads must divide shape.heads");
  Check(shape.d_k > 0 && shape.d_k <= kMaxHeadDim, operation, "shape.d_k must lie in 1 … kMaxHeadDim");
  Check(shape.d_v > 0 && shape.d_v <= kMaxHeadDim, operation, "shape.d_v must lie in 1 … kMaxHeadDim");
  Check(shape.order == StateOrder::kKeyFirst || shape.order == StateOrder::kValueFirst, operation,
        "shape.order is unknown");
}

void CheckInteriors(std::span<const TupleView> interiors, const char* operation) {
  for (const TupleView& interior : interiors) {
    Check(interior.transition != nullptr && interior.state != nullptr, operation,
          "interiors: a tuple without pointers");
  }
}

void CheckInputs(const TokenInputs& inputs, const char* operation) {
  Check(inputs.tokens >= 0, operation, "inputs.tokens is negative");
  const bool all = inputs.k != nullptr && inputs.v != nullptr && inputs.g != nullptr && inputs.beta != nullptr;
  Check(inputs.tokens == 0 || all, operation, "inputs: k, v, g and beta are needed");
}

void CheckRotation(const Rotation& rotation, int32_t dim, const char* operation) {
  if (rotation.style == RopeStyle::kNone) return;
  Check(rotation.rotary_dim > 0 && rotation.rotary_dim % 2 == 0 && rotation.rotary_dim <= std::min(dim, kMaxRotaryDim),
        operation, "rotation.rotary_dim must be even, at most dim and at most kMaxRotaryDim");
  Check(rotation.frequencies != nullptr, operation, "rotation.frequencies is null");
}

void CheckSlots(const PagedSlots& slots, const char* operation) {
  Check(slots.base != nullptr && slots.page_table != nullptr, operation, "paged slots: base and page_table are needed");
  Check(slots.page_tokens > 0, operation, "paged slots: page_tokens must be positive");
}

void CheckRows(const void* units, int32_t unit_tokens, int64_t tokens, int32_t heads, int32_t dim,
               const char* operation) {
  Check(tokens >= 0 && (tokens == 0 || units != nullptr), operation, "rows: units are needed");
  Check(unit_tokens > 0 && heads > 0 && dim > 0, operation, "rows: unit_tokens, heads and dim must be positive");
}

}  // namespace

Event Kernels::Compose(const ComposeArgs& args, Queue& queue) const {
  CheckShape(args.shape, "Compose");
  CheckInteriors(args.interiors, "Compose");
  Check(args.state != nullptr, "Compose", "state is null");
  return DoCompose(args, queue);
}

Event Kernels::ComposeTransitions(const ComposeTransitionsArgs& args, Queue& queue) const {
  CheckShape(args.shape, "ComposeTransitions");
  CheckInteriors(args.interiors, "ComposeTransitions");
  Check(args.transition != nullptr && args.state != nullptr, "ComposeTransitions", "transition and state are needed");
  return DoComposeTransitions(args, queue);
}

Event Kernels::Capture(const CaptureArgs& args, Queue& queue) const {
  CheckShape(args.shape, "Capture");
  CheckInputs(args.inputs, "Capture");
  Check(args.state != nullptr, "Capture", "state is null");
  return DoCapture(args, queue);
}

Event Kernels::AdvanceSeam(const AdvanceSeamArgs& args, Queue& queue) const {
  CheckShape(args.shape, "AdvanceSeam");
  CheckInputs(args.inputs, "AdvanceSeam");
  Check(args.state != nullptr, "AdvanceSeam", "state is null");
  Check(args.out == nullptr || args.inputs.tokens == 0 || args.inputs.q != nullptr, "AdvanceSeam",
        "inputs.q is needed for outputs");
  int64_t last = 0;
  for (const SeamStep& step : args.steps) {
    if (step.interior != nullptr) {
      CheckInteriors({step.interior, 1}, "AdvanceSeam");
      continue;
    }
    Check(step.begin >= last && step.end >= step.begin && step.end <= args.inputs.tokens, "AdvanceSeam",
          "steps: runs must ascend, not overlap, and lie inside the inputs");
    last = step.end;
  }
  return DoAdvanceSeam(args, queue);
}

Event Kernels::RotateKeys(const RotateKeysArgs& args, Queue& queue) const {
  Check(args.rows >= 0 && args.dim > 0, "RotateKeys", "rows and dim");
  Check(args.rows == 0 || (args.source != nullptr && args.target != nullptr), "RotateKeys",
        "source and target are needed");
  CheckRotation(args.rotation, args.dim, "RotateKeys");
  return DoRotateKeys(args, queue);
}

Event Kernels::Land(const LandArgs& args, Queue& queue) const {
  const StoredRows& source = args.source;
  CheckRows(source.units, source.unit_tokens, source.tokens, source.heads, source.dim, "Land");
  CheckRotation(args.rotation, source.dim, "Land");
  CheckSlots(args.target, "Land");
  Check(args.first_position >= 0, "Land", "first_position is negative");
  return DoLand(args, queue);
}

Event Kernels::Gather(const GatherArgs& args, Queue& queue) const {
  CheckRows(args.units, args.unit_tokens, args.tokens, args.heads, args.dim, "Gather");
  CheckSlots(args.source, "Gather");
  Check(args.first_position >= 0, "Gather", "first_position is negative");
  return DoGather(args, queue);
}

Event Kernels::Checksum(const ChecksumArgs& args, Queue& queue) const {
  Check(args.units.empty() || args.unit_checksums != nullptr, "Checksum", "unit_checksums is null");
  return DoChecksum(args, queue);
}

}  // namespace ashlar::kernels
