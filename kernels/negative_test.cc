// SPDX-License-Identifier: Apache-2.0
// Faults that implementations of HYPIC have had or could have. Each must give an error far above the harness's
// tolerance; otherwise the harness would pass an implementation that has the fault. Faults of convolution tails are in
// examples/refengine/composition_test.cc, beside the convolution.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/testing/backends.h"
#include "kernels/testing/linear_inputs.h"
#include "kernels/testing/print.h"

namespace ashlar::kernels::testing {
namespace {

constexpr Dtypes kHalfTuples = {DType::kF16, DType::kF16, DType::kF32};

// A prompt assembled from tuples, into which the tests below inject faults.
struct FaultyPrompt {
  explicit FaultyPrompt(const Prompt& prompt)
      : shape(prompt.shape), tuples(prompt.tuples), run_twice(prompt.parts.size(), false) {}

  LinearShape shape;
  std::vector<double> frequencies;  // of `shape`, if a fault changes them
  std::vector<Tuple> tuples;        // of the prompt's interiors, in order
  std::vector<bool> run_twice;      // for each of the prompt's parts
};

// Assembles the prompt of `faulty` and returns, for the head with the smallest error, the error against one full pass:
// of the final state or of the outputs, whichever is larger.
double LeastError(const Prompt& prompt, const FullPass& full, const FaultyPrompt& faulty) {
  const std::vector<TupleView> views = Views(faulty.tuples);
  const std::vector<SeamStep> steps = prompt.Steps(views);
  const int64_t stride = int64_t{prompt.shape.heads} * prompt.shape.d_v;
  States state = prompt.initial;
  std::vector<float> out = full.out;
  Runner runner(Reference());
  for (size_t i = 0; i < steps.size(); ++i) {
    for (int times = faulty.run_twice[i] ? 2 : 1; times > 0; --times) {
      runner.Run(AdvanceSeamArgs{.shape = faulty.shape,
                                 .steps = {&steps[i], 1},
                                 .inputs = prompt.tokens.View(),
                                 .state = state.View(),
                                 .out = out.data(),
                                 .out_stride = stride});
    }
  }
  double least = std::numeric_limits<double>::infinity();
  for (int32_t h = 0; h < prompt.shape.heads; ++h) {
    std::vector<float> actual, expected;
    for (int64_t t = 0; t < prompt.tokens.count; ++t) {
      const int64_t at = t * stride + int64_t{h} * prompt.shape.d_v;
      actual.insert(actual.end(), out.begin() + at, out.begin() + at + prompt.shape.d_v);
      expected.insert(expected.end(), full.out.begin() + at, full.out.begin() + at + prompt.shape.d_v);
    }
    const double state_error = RelativeError(state.Values(h), full.state.Values(h));
    least = std::min(least, std::max(state_error, RelativeError(actual, expected)));
  }
  return least;
}

using Change = std::function<void(const Prompt&, FaultyPrompt&)>;

// Changes the numbers of every head's transition.
Change ForTransitions(std::function<void(const LinearShape&, std::vector<double>&)> change) {
  return [change](const Prompt& prompt, FaultyPrompt& faulty) {
    for (Tuple& tuple : faulty.tuples) {
      for (int32_t h = 0; h < prompt.shape.heads; ++h) {
        std::vector<double> transition = tuple.Transition(h);
        change(prompt.shape, transition);
        tuple.SetTransition(h, transition);
      }
    }
  };
}

Change ForHeads(std::function<void(Tuple&, int32_t)> change) {
  return [change](const Prompt& prompt, FaultyPrompt& faulty) {
    for (Tuple& tuple : faulty.tuples) {
      for (int32_t h = 0; h < prompt.shape.heads; ++h) change(tuple, h);
    }
  };
}

// T = I, whose logarithms are zero.
void Omit(const LinearShape& shape, std::vector<double>& transition) {
  const bool dense = NaturalForm(shape.family) == TransitionForm::kDense;
  for (size_t i = 0; i < transition.size(); ++i) transition[i] = dense && i % (shape.d_k + 1) == 0 ? 1 : 0;
}

void Transpose(const LinearShape& shape, std::vector<double>& transition) {
  for (int32_t i = 0; i < shape.d_k; ++i) {
    for (int32_t j = 0; j < i; ++j) std::swap(transition[i * shape.d_k + j], transition[j * shape.d_k + i]);
  }
}

// The incoming state is multiplied by T² instead of T.
void ApplyTwice(const LinearShape& shape, std::vector<double>& transition) {
  if (NaturalForm(shape.family) != TransitionForm::kDense) {
    for (double& logarithm : transition) logarithm *= 2;
    return;
  }
  const std::vector<double> once = transition;
  for (int32_t i = 0; i < shape.d_k; ++i) {
    for (int32_t j = 0; j < shape.d_k; ++j) {
      double sum = 0;
      for (int32_t m = 0; m < shape.d_k; ++m) sum += once[i * shape.d_k + m] * once[m * shape.d_k + j];
      transition[i * shape.d_k + j] = sum;
    }
  }
}

void TakeExponential(const LinearShape&, std::vector<double>& transition) {
  for (double& logarithm : transition) logarithm = std::exp(logarithm);
}

// The fault of HYPIC's published code: the tuple covers the segment's head, and the head is run again as a seam.
void StartTuplesAtToken0(const Prompt& prompt, FaultyPrompt& faulty) {
  Runner reference(Reference());
  auto tuple = faulty.tuples.begin();
  for (size_t i = 1; i < prompt.parts.size(); ++i) {
    if (!prompt.parts[i].interior) continue;
    // For tokens that are already rotated: at position 0, nothing rotates them further.
    *tuple++ = Capture(reference, prompt.shape, prompt.tokens.View(prompt.parts[i - 1].begin, prompt.parts[i].end));
  }
}

void RunSeamsTwice(const Prompt& prompt, FaultyPrompt& faulty) {
  for (size_t i = 0; i < prompt.parts.size(); ++i) faulty.run_twice[i] = !prompt.parts[i].interior;
}

void TurnAtAnotherBase(const Prompt& prompt, FaultyPrompt& faulty) {
  const Rotation& rotation = prompt.shape.rotation;
  for (int32_t i = 0; i < rotation.rotary_dim / 2; ++i) {
    faulty.frequencies.push_back(std::pow(5e5, -2.0 * i / rotation.rotary_dim));
  }
  faulty.shape.rotation.frequencies = faulty.frequencies.data();
}

void TurnNothing(const Prompt&, FaultyPrompt& faulty) {
  for (Tuple& tuple : faulty.tuples) tuple.position = 0;
}

void KeepFactors(const Prompt& prompt, FaultyPrompt& faulty) {
  auto tuple = faulty.tuples.begin();
  for (const Prompt::Part& part : prompt.parts) {
    if (part.interior) *tuple++ = CaptureFactors(prompt.shape, prompt.isolated, part.begin, part.end);
  }
}

void LoseDiagonal(Tuple& tuple, int32_t head) {
  Factors factors = tuple.LowRank(head);
  std::ranges::fill(factors.d, 0.0);
  tuple.MakeLowRank(head, factors);
}

void SwapFactors(Tuple& tuple, int32_t head) {
  Factors factors = tuple.LowRank(head);
  std::swap(factors.a, factors.b);
  tuple.MakeLowRank(head, factors);
}

void KeepInHalf(const Prompt&, FaultyPrompt& faulty) {
  faulty.tuples = Rounded(faulty.tuples, kHalfTuples);
}

void TransposeState(Tuple& tuple, int32_t head) {
  const LinearShape& shape = tuple.shape();
  const std::vector<double> state = tuple.states().Values(head);
  std::vector<double> transposed(state.size());
  for (int32_t i = 0; i < shape.d_k; ++i) {
    for (int32_t j = 0; j < shape.d_v; ++j) transposed[j * shape.d_k + i] = state[i * shape.d_v + j];
  }
  tuple.states().Set(head, transposed);
}

bool Any(Family) {
  return true;
}
bool IsDense(Family family) {
  return NaturalForm(family) == TransitionForm::kDense;
}
bool IsLogarithm(Family family) {
  return !IsDense(family);
}
bool Turns(Family family) {
  return family == Family::kLightning;
}

struct Fault {
  const char* name;
  bool (*applies)(Family);
  Change spoil;
  Change prepare;   // the form of stored tuples, if not fp32 in the natural form
  Dtypes dtypes{};  // types of tuples stored in that form
};

std::ostream& operator<<(std::ostream& out, const Fault& fault) {
  return out << fault.name;
}

std::vector<Fault> Faults() {
  const auto zero = [](Tuple& tuple, int32_t head) { tuple.MakeZero(head); };
  const auto ignore_exponent = [](Tuple& tuple, int32_t head) { tuple.states().SetExponent(head, 0); };
  return {
      {"TransitionOmitted", Any, ForTransitions(Omit)},
      {"TransitionReadAsZero", Any, ForHeads(zero)},
      {"TransitionTransposed", IsDense, ForTransitions(Transpose)},
      {"TransitionAppliedTwice", Any, ForTransitions(ApplyTwice)},
      {"LogarithmTakenForDecay", IsLogarithm, ForTransitions(TakeExponential)},
      {"DiagonalOfLowRankLost", IsDense, ForHeads(LoseDiagonal), KeepFactors},
      {"FactorsOfLowRankSwapped", IsDense, ForHeads(SwapFactors), KeepFactors},
      {"ExponentOfStateIgnored", IsLogarithm, ForHeads(ignore_exponent), KeepInHalf, kHalfTuples},
      {"StateInTheOtherOrder", Any, ForHeads(TransposeState)},
      {"TupleStartedAtToken0", Any, StartTuplesAtToken0},
      {"SeamRunTwice", Any, RunSeamsTwice},
      {"StateTurnedAtAnotherBase", Turns, TurnAtAnotherBase},
      {"StateNotTurned", Turns, TurnNothing},
  };
}

std::vector<std::tuple<Fault, Family, StateOrder>> Cases() {
  std::vector<std::tuple<Fault, Family, StateOrder>> cases;
  for (const Fault& fault : Faults()) {
    for (const Family family : kFamilies) {
      if (!fault.applies(family)) continue;
      for (const StateOrder order : {StateOrder::kKeyFirst, StateOrder::kValueFirst}) {
        cases.emplace_back(fault, family, order);
      }
    }
  }
  return cases;
}

// Fast decay hides faults: some are then smaller than rounding. Families that do not erase must decay, otherwise their
// transitions are the identity; their states are large enough for exponents.
std::vector<Character> CharactersFor(Family family) {
  if (!Erases(family)) return {{Keys::kRandom, Decay::kMedium, 1e6}, {Keys::kCorrelated, Decay::kMedium, 1e6}};
  return {{Keys::kRandom, Decay::kSlow},
          {Keys::kCorrelated, Decay::kMedium},
          {Keys::kRandom, Decay::kNone},
          kPersistentSubspace};
}

class FaultTest : public ::testing::TestWithParam<std::tuple<Fault, Family, StateOrder>> {};

TEST_P(FaultTest, IsVisible) {
  const auto& [fault, family, order] = GetParam();
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  const LinearShape dims = {.family = family, .heads = 4, .key_heads = 2, .d_k = 24, .d_v = 20, .order = order};
  for (const Character character : CharactersFor(family)) {
    const Layer layer(random, dims, character);
    SCOPED_TRACE(::testing::Message() << layer);
    const Prompt prompt(random, layer, {.interiors = 6, .last_run = 30});
    FaultyPrompt faulty(prompt);
    if (fault.prepare) fault.prepare(prompt, faulty);
    const double tolerance = Tolerance(fault.dtypes, 6);
    const FullPass full(prompt);
    EXPECT_LE(LeastError(prompt, full, faulty), tolerance);
    fault.spoil(prompt, faulty);
    const double error = LeastError(prompt, full, faulty);
    EXPECT_GE(error, 10 * tolerance);
    EXPECT_TRUE(std::isfinite(error)) << "what is not finite would show in any test";
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, FaultTest, ::testing::ValuesIn(Cases()), [](const auto& instance) {
  return std::string(std::get<0>(instance.param).name) + "_" + Name(std::get<1>(instance.param)) + "_" +
         Name(std::get<2>(instance.param));
});

// The erase must not come before the decay, nor may the decay affect the new write: both would change every state.
TEST(RecurrenceTest, OrderOfDecayAndEraseIsVisible) {
  const LinearShape shape = {.heads = 1, .key_heads = 1, .d_k = 1, .d_v = 1};
  const float k = 1, v = 1, beta = 0.5f, g = std::log(0.5f);
  float state = 8;
  void* const heads[] = {&state};
  const SeamStep run = {.begin = 0, .end = 1};
  Runner(Reference())
      .Run(AdvanceSeamArgs{.shape = shape,
                           .steps = {&run, 1},
                           .inputs = {.tokens = 1, .k = &k, .v = &v, .g = &g, .beta = &beta},
                           .state = {.heads = heads}});
  EXPECT_FLOAT_EQ(state, 8 * 0.5f * 0.5f + 0.5f);
}

}  // namespace
}  // namespace ashlar::kernels::testing
