// Random inputs of the linear layers: tokens of several characters, and whole prompts of interiors and runs.
#pragma once

#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/testing/random.h"

namespace ashlar::kernels::testing {

// ‖a − b‖ / ‖b‖, Frobenius, in fp64; +∞ where `a` holds a number that is not finite. Where both are so small that
// fp32 has lost digits (‖b‖ < 1e-30), the difference counts against 1e-30.
double RelativeError(std::span<const float> a, std::span<const float> b);

// Accepted error of fp32 back ends in states and outputs: flat, relative Frobenius, per head.
inline constexpr double kTolerance = 1e-5;
// A transition is a contraction whose error matters absolutely: where products of erases have left little of it,
// digits lost in the identity that it started from do not count against what is left.
inline constexpr double kTransitionFloor = 1e-6;

// One matrix a head, each in memory of its own, so that a sanitizer sees every step outside.
class HeadMatrices {
 public:
  HeadMatrices(int32_t heads, int64_t floats) : values_(heads, std::vector<float>(floats)) { Point(); }
  HeadMatrices(const HeadMatrices& other) : values_(other.values_) { Point(); }
  HeadMatrices& operator=(const HeadMatrices& other) {
    values_ = other.values_;
    Point();
    return *this;
  }

  std::vector<float>& operator[](int32_t head) { return values_[head]; }
  const std::vector<float>& operator[](int32_t head) const { return values_[head]; }
  int32_t heads() const { return static_cast<int32_t>(values_.size()); }
  float* const* pointers() { return pointers_.data(); }
  const float* const* pointers() const { return pointers_.data(); }

 private:
  void Point() {
    pointers_.clear();
    for (std::vector<float>& head : values_) pointers_.push_back(head.data());
  }

  std::vector<std::vector<float>> values_;
  std::vector<float*> pointers_;
};

// The largest error of any head.
double RelativeError(const HeadMatrices& a, const HeadMatrices& b);
// Likewise for transitions, as a multiple of what is accepted: 1 is the bound.
double TransitionError(const HeadMatrices& a, const HeadMatrices& b);

struct Tuple {
  explicit Tuple(const LinearShape& shape)
      : transition(shape.heads, int64_t{shape.d_k} * shape.d_k), state(shape.heads, int64_t{shape.d_k} * shape.d_v) {}
  TupleView view() const { return {.transition = transition.pointers(), .state = state.pointers()}; }

  HeadMatrices transition, state;
};

// What the keys of a head look like, and how it decays.
enum class Keys { kRandom, kCorrelated, kSubspace };
enum class Decay { kNone, kSlow, kFast, kByHead };  // kByHead: none, slow and fast take turns

struct Character {
  Keys keys = Keys::kRandom;
  Decay decay = Decay::kByHead;
};
// Keys confined to a few dimensions of a dense random basis, without decay: the transition is the identity on all
// others, and nothing that was ever wrong is forgotten.
inline constexpr Character kPersistentSubspace = {Keys::kSubspace, Decay::kNone};
inline constexpr Character kCharacters[] = {{Keys::kRandom, Decay::kByHead},
                                            {Keys::kRandom, Decay::kSlow},
                                            {Keys::kRandom, Decay::kFast},
                                            {Keys::kCorrelated, Decay::kByHead},
                                            kPersistentSubspace};

// Inputs of one layer. Tokens stand apart by odd strides; what lies between them is NaN and must not be read.
struct Tokens {
  // The tokens [begin, end) as inputs of their own.
  TokenInputs View(int64_t begin, int64_t end) const;
  TokenInputs View() const { return View(0, count); }
  // Makes the tokens [begin, end) NaN: cached interiors, whose inputs nobody may need.
  void Poison(int64_t begin, int64_t end);

  int64_t count = 0;
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
  std::vector<float> q, k, v, g, beta;
};

LinearShape RandomShape(Random& random, StateOrder order, int32_t largest_dim);
Tokens RandomTokens(Random& random, const LinearShape& shape, int64_t count, Character character);
HeadMatrices RandomState(Random& random, const LinearShape& shape);

// The tuple of tokens [begin, end), by the reference.
Tuple CaptureByReference(const LinearShape& shape, const Tokens& tokens, int64_t begin, int64_t end);

// A prompt: interiors with their tuples, computed runs (some empty) before, between and behind them.
struct Prompt {
  struct Part {
    bool interior;
    int64_t begin, end;
  };
  Prompt(Random& random, const LinearShape& shape, int interiors, Character character);

  // The steps for AdvanceSeam; `this` must outlive them and stay where it is.
  std::vector<SeamStep> Steps() const;
  // The inputs of the runs; every interior's are NaN.
  Tokens RunInputs() const;

  LinearShape shape;
  std::vector<Part> parts;
  Tokens tokens;              // of all parts, in order
  std::vector<Tuple> tuples;  // of the interiors, in order
  std::vector<TupleView> views;
  HeadMatrices initial;
};

// State and outputs ([tokens][heads, d_v]) of every token run through the recurrence by the reference, and nothing
// cached: what every other way of computing the prompt must give.
struct FullPass {
  FullPass(const Prompt& prompt);

  HeadMatrices state;
  std::vector<float> out;
};

}  // namespace ashlar::kernels::testing
