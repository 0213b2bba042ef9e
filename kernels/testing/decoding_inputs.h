// SPDX-License-Identifier: Apache-2.0
// Layers, states and token buffers for the tests of decoding, with their own memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/testing/names.h"
#include "kernels/testing/random.h"

namespace ashlar::kernels::testing {

inline constexpr Family kBufferedFamilies[] = {Family::kRetnet,   Family::kLightning, Family::kMamba2, Family::kGla,
                                               Family::kDeltanet, Family::kGdn,       Family::kKda};

// ‖a − b‖ / ‖b‖; +∞ where `a` holds a number that is not finite.
double Distance(const std::vector<float>& a, const std::vector<float>& b);

// A layer and the inputs of `count` tokens. Heads decay slowly and fast in turn. The memory between two tokens' inputs
// is NaN.
struct DecodeLayer {
  DecodeLayer(Random& random, Family family, StateOrder order, int64_t count);
  DecodeLayer(DecodeLayer&&) = default;  // vectors keep their memory, to which shape.decay_table points
  TokenInputs View(int64_t begin, int64_t end) const;
  // The inputs of tokens order[0], order[1], …, one after another.
  DecodeLayer Gathered(const std::vector<int64_t>& order) const;

  LinearShape shape;
  int64_t count = 0;
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
  std::vector<float> table, q, k, v, g, beta;

 private:
  DecodeLayer() = default;
};

// A state of any dtype.
class TypedState {
 public:
  TypedState(const LinearShape& shape, DType dtype);                  // zero
  TypedState(const LinearShape& shape, DType dtype, Random& random);  // standard normal, rounded
  TypedState(const TypedState& other);
  TypedState& operator=(const TypedState& other);

  StateView View() { return {pointers_.data(), dtype_, dtype_ == DType::kF16 ? exponents_.data() : nullptr}; }
  std::vector<float> Floats() const;  // returns the values of all heads
  const std::vector<std::vector<std::byte>>& bytes() const { return heads_; }

 private:
  void Point();

  DType dtype_;
  int64_t head_floats_;
  std::vector<std::vector<std::byte>> heads_;
  std::vector<void*> pointers_;
  std::vector<int32_t> exponents_;
};

// One request's buffer with space for `slots`, in pages in random order; every number is NaN until a slot is filled.
// Entries of the page table past the last slot are far outside.
class SlotPages {
 public:
  SlotPages(Random& random, const LinearShape& shape, DType dtype, int32_t slots, int32_t page_tokens);

  TokenBuffer View(int32_t filled);
  // Makes slots starting with `begin` NaN again.
  void Poison(int32_t begin);
  // Slot j of head h: its write as floats, and its place.
  std::vector<float> Write(int32_t j, int32_t h);
  void SetWrite(int32_t j, int32_t h, const float* values);
  float* Gates(int32_t j, int32_t h);
  // All keys, writes and gates of the first `count` slots.
  std::vector<float> Floats(int32_t count);

 private:
  LinearShape shape_;
  DType dtype_;
  int32_t slots_, page_tokens_;
  std::vector<std::byte> keys_, writes_;
  std::vector<float> gates_;
  std::vector<int32_t> table_;
};

// The recurrence over tokens [begin, end) by the reference, in fp64, from a state (null: zero).
struct RecurrentPass {
  RecurrentPass(const DecodeLayer& layer, int64_t begin, int64_t end, const TypedState* initial);

  // Outputs of all tokens; the part of token `t` (0: begin) and head h.
  std::vector<float> Out(int64_t t, int32_t h) const;

  LinearShape shape;
  std::vector<float> out;
  std::vector<std::vector<float>> states;  // before the first token, after the first, …
};

// Accepted relative error (Frobenius) of outputs and states of a decoding in which a state was rounded to `state`
// `flushes` times: 0.5 u √n + u for a chain of n roundings, and the flat bound of fp32.
double DecodeTolerance(DType state, DType buffer, int flushes);

}  // namespace ashlar::kernels::testing
