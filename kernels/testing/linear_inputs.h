// SPDX-License-Identifier: Apache-2.0
// Random inputs of the linear layers, all families: tokens of several characters, and whole prompts of interiors and
// runs.
#pragma once

#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/testing/backends.h"
#include "kernels/testing/errors.h"
#include "kernels/testing/names.h"
#include "kernels/testing/random.h"
#include "kernels/testing/stored.h"

namespace ashlar::kernels::testing {

// All types in which the tests store tuples and states; the first has only fp32.
inline constexpr Dtypes kDtypes[] = {{},
                                     {DType::kF16, DType::kF32, DType::kF32},
                                     {DType::kF16, DType::kF16, DType::kF16},
                                     {DType::kF16, DType::kBF16, DType::kBF16},
                                     {DType::kBF16, DType::kBF16, DType::kF32}};

// The kinds of a head's keys and of its decay.
enum class Keys { kRandom, kCorrelated, kSubspace };
enum class Decay { kNone, kSlow, kMedium, kFast, kByHead };  // kByHead: slow, fast and none take turns

struct Character {
  Keys keys = Keys::kRandom;
  Decay decay = Decay::kByHead;
  double magnitude = 1;
};
// Keys confined to a few dimensions of a dense random basis, without decay: an erasing family's transition is the
// identity on all other dimensions, and errors are never erased.
inline constexpr Character kPersistentSubspace = {Keys::kSubspace, Decay::kNone};
inline constexpr Character kCharacters[] = {{Keys::kRandom, Decay::kByHead},
                                            {Keys::kRandom, Decay::kSlow},
                                            {Keys::kRandom, Decay::kFast},
                                            {Keys::kCorrelated, Decay::kByHead},
                                            kPersistentSubspace};
// States far beyond fp16's range, for families that do not erase: their exponents are not zero.
inline constexpr Character kLarge = {Keys::kCorrelated, Decay::kSlow, 1e6};

// A layer's shape with the tables it points to. Lightning's keys turn inside the layer, half-split or interleaved.
class Layer {
 public:
  // `shape` without its tables, which are drawn.
  Layer(Random& random, LinearShape shape, Character character);

  // Valid while the layer lives and stays where it is.
  LinearShape shape() const;
  Character character() const { return character_; }

 private:
  LinearShape shape_;
  Character character_;
  std::vector<float> decay_table_;
  std::vector<double> frequencies_;
};
Layer RandomLayer(Random& random, Family family, StateOrder order, int32_t largest_dim, Character character);

std::ostream& operator<<(std::ostream& out, const Layer& layer);
std::ostream& operator<<(std::ostream& out, Dtypes dtypes);

// Inputs of one layer. Tokens are at odd strides; the gaps are NaN and must not be read.
struct Tokens {
  // The tokens [begin, end) as separate inputs.
  TokenInputs View(int64_t begin, int64_t end) const;
  TokenInputs View() const { return View(0, count); }
  // Makes the tokens [begin, end) NaN: cached interiors, whose inputs must not be needed.
  void Poison(int64_t begin, int64_t end);

  int64_t count = 0;
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
  std::vector<float> q, k, v, g, beta;  // g, beta: empty if the family has none
};
// Keys and queries are not rotated yet.
Tokens RandomTokens(Random& random, const Layer& layer, int64_t count);
// Turns queries and keys of the tokens [begin, end) as a layer with rotation has them, the first to `position`.
void Turn(const LinearShape& shape, Tokens& tokens, int64_t begin, int64_t end, int64_t position);

States RandomState(Random& random, const Layer& layer, DType dtype = DType::kF32);

// Tuples and states as a back end computes them.
Tuple Capture(Runner& runner, const LinearShape& shape, const TokenInputs& inputs, Dtypes dtypes = {});
Tuple ComposeTuples(Runner& runner, const LinearShape& shape, std::span<const TupleView> chain, Dtypes dtypes = {});
States Compose(Runner& runner, const LinearShape& shape, std::span<const TupleView> chain, const States& initial);

// The tuple of the tokens [begin, end) of an erasing family with its transition as a decay and one factor per token, by
// plain loops; fp32.
Tuple CaptureFactors(const LinearShape& shape, const Tokens& tokens, int64_t begin, int64_t end);

std::vector<Tuple> Rounded(const std::vector<Tuple>& tuples, Dtypes dtypes);
std::vector<TupleView> Views(const std::vector<Tuple>& tuples);

// Lengths of a prompt's parts, each drawn from 0 (interiors: 1) upwards.
struct Lengths {
  int interiors = 0;
  int64_t run = 9, interior = 14, last_run = 70;
};

// A prompt: interiors with their tuples, and computed runs (some empty) before, between and after them.
struct Prompt {
  struct Part {
    bool interior;
    int64_t begin, end;
    int64_t segment;  // first position of its segment, which is computed alone from position 0
  };
  Prompt(Random& random, const Layer& layer, Lengths lengths);
  Prompt(const Prompt&) = delete;

  // The steps for AdvanceSeam, interiors from `views` in order.
  std::vector<SeamStep> Steps(std::span<const TupleView> views) const;
  // The inputs of the runs; every interior's are NaN.
  Tokens RunInputs() const;

  const Layer layer;
  const LinearShape shape;  // shape of `layer`
  std::vector<Part> parts;
  int64_t start = 0;          // position of token 0
  Tokens tokens;              // tokens of all parts, in order, rotated to their positions
  Tokens isolated;            // tokens of all parts, each as in its segment's own prefill
  std::vector<Tuple> tuples;  // tuples of the interiors, in order; fp32, computed by the reference
  States initial;             // fp32
};

// State and outputs ([tokens][heads, d_v]) of the recurrence over every token by the reference, without cached parts:
// every other way of computing the prompt must give them.
struct FullPass {
  explicit FullPass(const Prompt& prompt);

  States state;
  std::vector<float> out;
};

}  // namespace ashlar::kernels::testing
