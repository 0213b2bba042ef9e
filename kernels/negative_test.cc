// Faults that implementations of HYPIC have had or could have. Each must give an error far above the harness's
// tolerance; otherwise the harness would pass an implementation that has the fault.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/testing/backends.h"
#include "kernels/testing/linear_inputs.h"

namespace ashlar::kernels::testing {
namespace {

constexpr double kVisible = 10 * kTolerance;

// A prompt as it is set from tuples: what the faults below spoil.
struct Setting {
  std::vector<Tuple> tuples;    // of the prompt's interiors, in order
  std::vector<bool> run_twice;  // for each of the prompt's parts
};
using Fault = std::function<void(const Prompt&, Setting&)>;

// Sets the prompt as `setting` says and gives, for the head that shows it least, the error against one full pass:
// that of the final state or of the outputs, whichever shows more.
double LeastError(const Prompt& prompt, const Setting& setting) {
  std::vector<TupleView> views;
  for (const Tuple& tuple : setting.tuples) views.push_back(tuple.view());
  const std::vector<SeamStep> steps = prompt.Steps();
  const FullPass full(prompt);
  const int64_t stride = int64_t{prompt.shape.heads} * prompt.shape.d_v;
  HeadMatrices state = prompt.initial;
  std::vector<float> out = full.out;
  Runner runner(Reference());
  size_t interiors = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    SeamStep step = steps[i];
    if (step.interior != nullptr) step.interior = &views[interiors++];
    for (int times = setting.run_twice[i] ? 2 : 1; times > 0; --times) {
      runner.Run(AdvanceSeamArgs{.shape = prompt.shape,
                                 .steps = {&step, 1},
                                 .inputs = prompt.tokens.View(),
                                 .state = state.pointers(),
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
    least = std::min(least, std::max(RelativeError(state[h], full.state[h]), RelativeError(actual, expected)));
  }
  return least;
}

void OmitTransition(const Prompt& prompt, Setting& setting) {
  for (Tuple& tuple : setting.tuples) {
    for (int32_t h = 0; h < prompt.shape.heads; ++h) {
      for (size_t i = 0; i < tuple.transition[h].size(); ++i) {
        tuple.transition[h][i] = i % (prompt.shape.d_k + 1) == 0 ? 1.0f : 0.0f;
      }
    }
  }
}

void ZeroTransition(const Prompt& prompt, Setting& setting) {
  for (Tuple& tuple : setting.tuples) {
    for (int32_t h = 0; h < prompt.shape.heads; ++h) std::ranges::fill(tuple.transition[h], 0.0f);
  }
}

void TransposeTransition(const Prompt& prompt, Setting& setting) {
  const int32_t d = prompt.shape.d_k;
  for (Tuple& tuple : setting.tuples) {
    for (int32_t h = 0; h < prompt.shape.heads; ++h) {
      for (int32_t i = 0; i < d; ++i) {
        for (int32_t j = 0; j < i; ++j) std::swap(tuple.transition[h][i * d + j], tuple.transition[h][j * d + i]);
      }
    }
  }
}

// The state comes in multiplied by T² where it should be by T.
void ApplyTransitionTwice(const Prompt& prompt, Setting& setting) {
  for (Tuple& tuple : setting.tuples) {
    const Tuple once = tuple;
    const TupleView chain[] = {once.view(), once.view()};
    HeadMatrices state = once.state;
    Runner(Reference())
        .Run(ComposeTransitionsArgs{.shape = prompt.shape,
                                    .interiors = chain,
                                    .transition = tuple.transition.pointers(),
                                    .state = state.pointers()});
  }
}

// The fault of HYPIC's published code: the tuple covers the segment's head, and the head is run again as a seam.
void StartTupleAtToken0(const Prompt& prompt, Setting& setting) {
  auto tuple = setting.tuples.begin();
  for (size_t i = 1; i < prompt.parts.size(); ++i) {
    if (!prompt.parts[i].interior) continue;
    *tuple++ = CaptureByReference(prompt.shape, prompt.tokens, prompt.parts[i - 1].begin, prompt.parts[i].end);
  }
}

void RunSeamsTwice(const Prompt& prompt, Setting& setting) {
  for (size_t i = 0; i < prompt.parts.size(); ++i) setting.run_twice[i] = !prompt.parts[i].interior;
}

struct NamedFault {
  const char* name;
  Fault fault;
};

std::ostream& operator<<(std::ostream& out, const NamedFault& fault) {
  return out << fault.name;
}

class FaultTest : public ::testing::TestWithParam<std::tuple<NamedFault, StateOrder>> {};

TEST_P(FaultTest, IsVisible) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  const LinearShape shape = {.heads = 4, .key_heads = 2, .d_k = 48, .d_v = 20, .order = std::get<1>(GetParam())};
  // Heads that decay fast forgive: there some of these faults are smaller than rounding.
  const Character characters[] = {{Keys::kRandom, Decay::kSlow},
                                  {Keys::kCorrelated, Decay::kSlow},
                                  {Keys::kRandom, Decay::kNone},
                                  kPersistentSubspace};
  for (const Character character : characters) {
    SCOPED_TRACE("keys " + std::to_string(static_cast<int>(character.keys)) + ", decay " +
                 std::to_string(static_cast<int>(character.decay)));
    const Prompt prompt(random, shape, 6, character);
    Setting setting = {prompt.tuples, std::vector<bool>(prompt.parts.size(), false)};
    EXPECT_LE(LeastError(prompt, setting), kTolerance);
    std::get<0>(GetParam()).fault(prompt, setting);
    EXPECT_GE(LeastError(prompt, setting), kVisible);
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, FaultTest,
                         ::testing::Combine(::testing::Values(NamedFault{"TransitionOmitted", OmitTransition},
                                                              NamedFault{"TransitionZero", ZeroTransition},
                                                              NamedFault{"TransitionTransposed", TransposeTransition},
                                                              NamedFault{"TransitionAppliedTwice",
                                                                         ApplyTransitionTwice},
                                                              NamedFault{"TupleStartedAtToken0", StartTupleAtToken0},
                                                              NamedFault{"SeamRunTwice", RunSeamsTwice}),
                                            ::testing::Values(StateOrder::kKeyFirst, StateOrder::kValueFirst)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  (std::get<1>(info.param) == StateOrder::kKeyFirst ? "_key_first" : "_value_first");
                         });

// The erase must not come before the decay, nor the decay reach what is written: both would change every state.
TEST(RecurrenceTest, OrderOfDecayAndEraseIsVisible) {
  const LinearShape shape = {.heads = 1, .key_heads = 1, .d_k = 1, .d_v = 1};
  const float k = 1, v = 1, beta = 0.5f, g = std::log(0.5f);
  HeadMatrices state(1, 1);
  state[0][0] = 8;
  const SeamStep run = {.begin = 0, .end = 1};
  Runner(Reference())
      .Run(AdvanceSeamArgs{.shape = shape,
                           .steps = {&run, 1},
                           .inputs = {.tokens = 1, .k = &k, .v = &v, .g = &g, .beta = &beta},
                           .state = state.pointers()});
  EXPECT_FLOAT_EQ(state[0][0], 8 * 0.5f * 0.5f + 0.5f);
}

}  // namespace
}  // namespace ashlar::kernels::testing
