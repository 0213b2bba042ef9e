// SPDX-License-Identifier: Apache-2.0
// The general kernel of linear layers: a chain of steps, each a cached interior or a run of tokens, on a state that
// stays in registers. It does every operation of linear.h in every family, form, dtype and size; compose.h and decay.h
// are faster at what they do.
#pragma once

#include <cstdint>

#include "kernels/cuda/queue.h"
#include "kernels/linear.h"

namespace ashlar::kernels::cuda {

// The memory to which one matrix per head is written. fp16 states take their exponent from the largest number of the
// whole head, which no single block sees: such states are first written to `wide` in fp32, and Narrow converts them to
// fp16.
struct Target {
  void* const* heads = nullptr;  // null: nothing is written
  DType dtype = DType::kF32;
  float* wide = nullptr;        // fp16 states: [heads][d_k d_v]
  uint32_t* largest = nullptr;  // fp16 states: [heads], the bits of max|S|, zero at the start
  int32_t* exponents = nullptr;
};

struct Step {
  int32_t interior = -1;  // −1: a run of tokens
  DType transition_dtype = DType::kF32, state_dtype = DType::kF32;
  int64_t position = 0;
  int64_t begin = 0, end = 0;
  Target checkpoint;
};

// Pointers lead to device memory, unless they are the caller's numbers.
struct Chain {
  Family family = Family::kGdn;
  bool value_first = false;
  int32_t heads = 0, group = 1;  // value heads a key head
  int32_t d_k = 0, d_v = 0;
  const float* decay_table = nullptr;
  RopeStyle rope = RopeStyle::kNone;
  int32_t pairs = 0;
  const double* frequencies = nullptr;

  const Step* steps = nullptr;
  int32_t step_count = 0;
  const HeadTuple* tuples = nullptr;  // [interiors][heads]
  TokenInputs inputs;
  float* out = nullptr;
  int64_t out_stride = 0;

  const void* const* start = nullptr;  // null: from zero
  DType start_dtype = DType::kF32;
  const int32_t* start_exponents = nullptr;
  Target state;
  Target transition;  // dense: columns that start as the identity; otherwise logarithms; null heads: not wanted
};

// A chain without steps yet, for a layer of this shape. The caller adds the rotation.
inline Chain ChainOf(const LinearShape& shape) {
  return {.family = shape.family,
          .value_first = shape.order == StateOrder::kValueFirst,
          .heads = shape.heads,
          .group = shape.heads / shape.key_heads,
          .d_k = shape.d_k,
          .d_v = shape.d_v,
          .decay_table = shape.decay_table};
}

// Returns whether this build has machine code for the current device.
bool HasKernels();

void RunChain(const Chain& chain, CudaQueue& queue);

// Converts wide results to fp16: for each of `count` targets and every head, the exponent and the numbers.
void Narrow(const Chain& chain, const Target* targets, int32_t count, CudaQueue& queue);

}  // namespace ashlar::kernels::cuda
