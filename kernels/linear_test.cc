// Every back end against the reference: composing, capturing and advancing linear layers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "kernels/testing/backends.h"
#include "kernels/testing/linear_inputs.h"

namespace ashlar::kernels::testing {
namespace {

// Instrumented code takes ten times as long: what only repeats in larger sizes what smaller ones show is left out then.
constexpr bool kSanitized = ASHLAR_SANITIZED != 0;

class LinearTest : public ::testing::TestWithParam<std::tuple<Backend, StateOrder>> {
 protected:
  // Odd sizes, sizes of real models, more heads than key heads.
  std::vector<LinearShape> Shapes() {
    std::vector<LinearShape> shapes = {
        {.heads = 1, .key_heads = 1, .d_k = 1, .d_v = 5},    {.heads = 3, .key_heads = 3, .d_k = 7, .d_v = 5},
        {.heads = 4, .key_heads = 2, .d_k = 16, .d_v = 24},  {.heads = 3, .key_heads = 1, .d_k = 33, .d_v = 17},
        {.heads = 2, .key_heads = 1, .d_k = 128, .d_v = 64},
    };
    for (LinearShape& shape : shapes) shape.order = order_;
    shapes.push_back(RandomShape(random_, order_, 70));
    shapes.push_back(RandomShape(random_, order_, 40));
    return shapes;
  }

  const StateOrder order_ = std::get<1>(GetParam());
  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner runner_{std::get<0>(GetParam())};
  Runner reference_{Reference()};
};

std::string Describe(const LinearShape& shape) {
  return std::to_string(shape.heads) + " heads of " + std::to_string(shape.key_heads) + ", d_k " +
         std::to_string(shape.d_k) + ", d_v " + std::to_string(shape.d_v);
}

std::string Describe(Character character) {
  return "keys " + std::to_string(static_cast<int>(character.keys)) + ", decay " +
         std::to_string(static_cast<int>(character.decay));
}

double LargestNorm(const HeadMatrices& matrices) {
  double largest = 0;
  for (int32_t h = 0; h < matrices.heads(); ++h) {
    const std::vector<float>& head = matrices[h];
    largest = std::max(largest, std::sqrt(std::inner_product(head.begin(), head.end(), head.begin(), 0.0)));
  }
  return largest;
}

TEST_P(LinearTest, CapturesTuples) {
  for (const Character character : kCharacters) {
    double largest_transition = 0;
    for (const LinearShape& shape : Shapes()) {
      const int64_t count = random_.Integer(1, kSanitized ? 66 : 150);
      SCOPED_TRACE(Describe(shape) + ", " + Describe(character) + ", tokens " + std::to_string(count));
      const Tokens tokens = RandomTokens(random_, shape, count, character);
      const Tuple expected = CaptureByReference(shape, tokens, 0, count);
      Tuple tuple(shape);
      runner_.Run(CaptureArgs{.shape = shape,
                              .inputs = tokens.View(),
                              .transition = tuple.transition.pointers(),
                              .state = tuple.state.pointers()});
      EXPECT_LE(TransitionError(tuple.transition, expected.transition), 1);
      EXPECT_LE(RelativeError(tuple.state, expected.state), kTolerance);

      Tuple state_only(shape);
      runner_.Run(CaptureArgs{.shape = shape, .inputs = tokens.View(), .state = state_only.state.pointers()});
      EXPECT_LE(RelativeError(state_only.state, expected.state), kTolerance);
      largest_transition = std::max(largest_transition, LargestNorm(expected.transition));
    }
    // Else the absolute floor of TransitionError would be all that transitions were held to.
    if (character.decay == Decay::kSlow || character.decay == Decay::kNone) {
      EXPECT_GE(largest_transition, 0.1) << Describe(character);
    }
  }
}

TEST_P(LinearTest, CapturesNothingAsTheIdentity) {
  const LinearShape shape = RandomShape(random_, order_, 20);
  Tuple tuple(shape);
  tuple.state = RandomState(random_, shape);
  runner_.Run(CaptureArgs{.shape = shape, .transition = tuple.transition.pointers(), .state = tuple.state.pointers()});
  for (int32_t h = 0; h < shape.heads; ++h) {
    for (int32_t i = 0; i < shape.d_k * shape.d_k; ++i) {
      ASSERT_EQ(tuple.transition[h][i], i % (shape.d_k + 1) == 0 ? 1.0f : 0.0f);
    }
    EXPECT_TRUE(std::ranges::all_of(tuple.state[h], [](float x) { return x == 0; }));
  }
}

TEST_P(LinearTest, ComposesChains) {
  for (const int interiors : {0, 1, 4, 16, 64}) {
    for (const Character character : {Character{}, Character{Keys::kCorrelated, Decay::kSlow}, kPersistentSubspace}) {
      const LinearShape shape = RandomShape(random_, order_, 40);
      SCOPED_TRACE(Describe(shape) + ", " + Describe(character) + ", interiors " + std::to_string(interiors));
      const Prompt prompt(random_, shape, interiors, character);
      HeadMatrices state = prompt.initial, expected = prompt.initial;
      runner_.Run(ComposeArgs{.shape = shape, .interiors = prompt.views, .state = state.pointers()});
      reference_.Run(ComposeArgs{.shape = shape, .interiors = prompt.views, .state = expected.pointers()});
      EXPECT_LE(RelativeError(state, expected), kTolerance);
    }
  }
}

TEST_P(LinearTest, ComposesEveryShape) {
  for (const LinearShape& shape : Shapes()) {
    SCOPED_TRACE(Describe(shape));
    const Prompt prompt(random_, shape, 3, {});
    HeadMatrices state = prompt.initial, expected = prompt.initial;
    runner_.Run(ComposeArgs{.shape = shape, .interiors = prompt.views, .state = state.pointers()});
    reference_.Run(ComposeArgs{.shape = shape, .interiors = prompt.views, .state = expected.pointers()});
    EXPECT_LE(RelativeError(state, expected), kTolerance);
  }
}

TEST_P(LinearTest, ComposesTuplesToOneTuple) {
  for (const int interiors : {0, 1, 2, 5, 33}) {
    for (const Character character : kCharacters) {
      const LinearShape shape = RandomShape(random_, order_, 40);
      SCOPED_TRACE(Describe(shape) + ", " + Describe(character) + ", interiors " + std::to_string(interiors));
      const Prompt prompt(random_, shape, interiors, character);
      Tuple tuple(shape), expected(shape);
      const auto args = [&](Tuple& out) {
        return ComposeTransitionsArgs{.shape = shape,
                                      .interiors = prompt.views,
                                      .transition = out.transition.pointers(),
                                      .state = out.state.pointers()};
      };
      runner_.Run(args(tuple));
      reference_.Run(args(expected));
      EXPECT_LE(TransitionError(tuple.transition, expected.transition), 1);
      EXPECT_LE(RelativeError(tuple.state, expected.state), kTolerance);
    }
  }
}

TEST_P(LinearTest, ComposingTuplesIsAssociative) {
  const LinearShape shape = RandomShape(random_, order_, 40);
  const Prompt prompt(random_, shape, 3, {Keys::kRandom, Decay::kSlow});
  const auto compose = [&](const Tuple& first, const Tuple& second) {
    const TupleView views[] = {first.view(), second.view()};
    Tuple out(shape);
    runner_.Run(ComposeTransitionsArgs{
        .shape = shape, .interiors = views, .transition = out.transition.pointers(), .state = out.state.pointers()});
    return out;
  };
  const std::vector<Tuple>& t = prompt.tuples;
  const Tuple left = compose(compose(t[0], t[1]), t[2]);
  const Tuple right = compose(t[0], compose(t[1], t[2]));
  EXPECT_LE(TransitionError(left.transition, right.transition), 1);
  EXPECT_LE(RelativeError(left.state, right.state), kTolerance);

  // One tuple for the chain does to a state what the chain does.
  HeadMatrices by_tuple = prompt.initial, by_chain = prompt.initial;
  const TupleView collapsed = left.view();
  runner_.Run(ComposeArgs{.shape = shape, .interiors = {&collapsed, 1}, .state = by_tuple.pointers()});
  runner_.Run(ComposeArgs{.shape = shape, .interiors = prompt.views, .state = by_chain.pointers()});
  EXPECT_LE(RelativeError(by_tuple, by_chain), kTolerance);
}

// HYPIC's main claim: n segments that this back end captured alone, composed, equal one pass over their concatenation.
TEST_P(LinearTest, SegmentsComposeToOnePass) {
  for (const Character character : kCharacters) {
    const LinearShape shape = RandomShape(random_, order_, 50);
    SCOPED_TRACE(Describe(shape) + ", " + Describe(character));
    const Prompt prompt(random_, shape, 6, character);
    std::vector<Tuple> tuples;
    for (const Prompt::Part& part : prompt.parts) {
      Tuple& tuple = tuples.emplace_back(shape);
      runner_.Run(CaptureArgs{.shape = shape,
                              .inputs = prompt.tokens.View(part.begin, part.end),
                              .transition = tuple.transition.pointers(),
                              .state = tuple.state.pointers()});
    }
    std::vector<TupleView> views;
    for (const Tuple& tuple : tuples) views.push_back(tuple.view());
    HeadMatrices state = prompt.initial;
    runner_.Run(ComposeArgs{.shape = shape, .interiors = views, .state = state.pointers()});
    EXPECT_LE(RelativeError(state, FullPass(prompt).state), kTolerance);
  }
}

// Outputs of AdvanceSeam with room between tokens, and what is expected there: rows outside of runs stay as they were.
struct Outputs {
  Outputs(const Prompt& prompt, int64_t gap)
      : width(int64_t{prompt.shape.heads} * prompt.shape.d_v),
        stride(width + gap),
        values(prompt.tokens.count * stride, kUntouched) {}

  void ExpectEqual(const Prompt& prompt, const std::vector<float>& full) const {
    for (const Prompt::Part& part : prompt.parts) {
      for (int64_t t = part.begin; t < part.end; ++t) {
        const float* row = values.data() + t * stride;
        ASSERT_TRUE(std::all_of(row + width, row + stride, [](float x) { return x == kUntouched; })) << t;
        if (part.interior) {
          ASSERT_TRUE(std::all_of(row, row + width, [](float x) { return x == kUntouched; })) << t;
        }
      }
    }
    // One head's outputs over all runs count together: a single output can be near zero by chance.
    for (int32_t h = 0; h < prompt.shape.heads; ++h) {
      std::vector<float> actual, expected;
      for (const Prompt::Part& part : prompt.parts) {
        for (int64_t t = part.begin; !part.interior && t < part.end; ++t) {
          const float* a = values.data() + t * stride + int64_t{h} * prompt.shape.d_v;
          const float* e = full.data() + t * width + int64_t{h} * prompt.shape.d_v;
          actual.insert(actual.end(), a, a + prompt.shape.d_v);
          expected.insert(expected.end(), e, e + prompt.shape.d_v);
        }
      }
      EXPECT_LE(RelativeError(actual, expected), kTolerance) << "head " << h;
    }
  }

  static constexpr float kUntouched = 1234.5f;
  const int64_t width, stride;
  std::vector<float> values;
};

void ExpectAdvancesLikeOnePass(Runner& runner, Random& random, const Prompt& prompt) {
  const FullPass full(prompt);
  const Tokens inputs = prompt.RunInputs();
  Outputs outputs(prompt, random.Integer(0, 3));
  HeadMatrices state = prompt.initial;
  runner.Run(AdvanceSeamArgs{.shape = prompt.shape,
                             .steps = prompt.Steps(),
                             .inputs = inputs.View(),
                             .state = state.pointers(),
                             .out = outputs.values.data(),
                             .out_stride = outputs.stride});
  EXPECT_LE(RelativeError(state, full.state), kTolerance);
  outputs.ExpectEqual(prompt, full.out);

  HeadMatrices without_outputs = prompt.initial;
  TokenInputs no_queries = inputs.View();
  no_queries.q = nullptr;
  runner.Run(AdvanceSeamArgs{
      .shape = prompt.shape, .steps = prompt.Steps(), .inputs = no_queries, .state = without_outputs.pointers()});
  EXPECT_LE(RelativeError(without_outputs, full.state), kTolerance);
}

TEST_P(LinearTest, AdvancesSeamsLikeOnePass) {
  for (const int interiors : {0, 1, 4, 16, 64}) {
    for (const Character character : kCharacters) {
      const LinearShape shape = RandomShape(random_, order_, interiors > 16 || kSanitized ? 24 : 48);
      SCOPED_TRACE(Describe(shape) + ", " + Describe(character) + ", interiors " + std::to_string(interiors));
      ExpectAdvancesLikeOnePass(runner_, random_, Prompt(random_, shape, interiors, character));
    }
  }
}

TEST_P(LinearTest, AdvancesEveryShape) {
  for (const LinearShape& shape : Shapes()) {
    SCOPED_TRACE(Describe(shape));
    ExpectAdvancesLikeOnePass(runner_, random_, Prompt(random_, shape, 2, {}));
  }
}

// Value heads in full groups and uneven remainders, and the largest dims, by themselves and together: few tokens, a
// chunk and a bit.
TEST_P(LinearTest, LargeAndUnevenShapes) {
  std::vector<LinearShape> shapes = {{.heads = 14, .key_heads = 2, .d_k = 24, .d_v = 40},
                                     {.heads = 1, .key_heads = 1, .d_k = 255, .d_v = 256},
                                     {.heads = 5, .key_heads = 1, .d_k = 256, .d_v = 15},
                                     {.heads = 5, .key_heads = 1, .d_k = 16, .d_v = 255}};
  if (!kSanitized) shapes.push_back({.heads = 5, .key_heads = 1, .d_k = 256, .d_v = 255});
  for (LinearShape shape : shapes) {
    shape.order = order_;
    SCOPED_TRACE(Describe(shape));
    constexpr int64_t kInterior = 9, kTokens = 44;
    const Tokens tokens = RandomTokens(random_, shape, kTokens, {});
    const Tuple expected = CaptureByReference(shape, tokens, 0, kInterior);
    Tuple tuple(shape);
    runner_.Run(CaptureArgs{.shape = shape,
                            .inputs = tokens.View(0, kInterior),
                            .transition = tuple.transition.pointers(),
                            .state = tuple.state.pointers()});
    EXPECT_LE(TransitionError(tuple.transition, expected.transition), 1);
    EXPECT_LE(RelativeError(tuple.state, expected.state), kTolerance);

    const HeadMatrices initial = RandomState(random_, shape);
    const TupleView interior = expected.view();
    const SeamStep steps[] = {{.interior = &interior}, {.begin = kInterior, .end = kTokens}};
    const int64_t token_floats = int64_t{shape.heads} * shape.d_v;
    const auto advance = [&](Runner& runner, HeadMatrices& state) {
      std::vector<float> out(kTokens * token_floats);
      runner.Run(AdvanceSeamArgs{.shape = shape,
                                 .steps = steps,
                                 .inputs = tokens.View(),
                                 .state = state.pointers(),
                                 .out = out.data(),
                                 .out_stride = token_floats});
      return out;
    };
    HeadMatrices state = initial, expected_state = initial;
    const std::vector<float> out = advance(runner_, state), expected_out = advance(reference_, expected_state);
    EXPECT_LE(RelativeError(state, expected_state), kTolerance);
    EXPECT_LE(RelativeError(out, expected_out), kTolerance);

    HeadMatrices composed = initial, expected_composed = initial;
    runner_.Run(ComposeArgs{.shape = shape, .interiors = {&interior, 1}, .state = composed.pointers()});
    reference_.Run(ComposeArgs{.shape = shape, .interiors = {&interior, 1}, .state = expected_composed.pointers()});
    EXPECT_LE(RelativeError(composed, expected_composed), kTolerance);
  }
}

TEST_P(LinearTest, KeepsCheckpoints) {
  const LinearShape shape = RandomShape(random_, order_, 40);
  const Prompt prompt(random_, shape, 5, {Keys::kRandom, Decay::kSlow});
  std::vector<SeamStep> steps = prompt.Steps();
  std::vector<HeadMatrices> kept(steps.size(), prompt.initial), expected = kept;
  HeadMatrices state = prompt.initial, reference_state = prompt.initial;
  const Tokens inputs = prompt.RunInputs();
  for (size_t i = 0; i < steps.size(); i += 2) steps[i].checkpoint = kept[i].pointers();
  runner_.Run(AdvanceSeamArgs{.shape = shape, .steps = steps, .inputs = inputs.View(), .state = state.pointers()});
  for (size_t i = 0; i < steps.size(); i += 2) steps[i].checkpoint = expected[i].pointers();
  reference_.Run(
      AdvanceSeamArgs{.shape = shape, .steps = steps, .inputs = inputs.View(), .state = reference_state.pointers()});
  for (size_t i = 0; i < steps.size(); ++i) EXPECT_LE(RelativeError(kept[i], expected[i]), kTolerance) << i;
  // The last step's checkpoint is the final state to the bit, and a prompt may be resumed from any of them.
  ASSERT_EQ(steps.size() % 2, 1u);
  EXPECT_EQ(RelativeError(kept.back(), state), 0);
  HeadMatrices resumed = kept[4];
  runner_.Run(AdvanceSeamArgs{
      .shape = shape, .steps = std::span(steps).subspan(5), .inputs = inputs.View(), .state = resumed.pointers()});
  EXPECT_LE(RelativeError(resumed, reference_state), kTolerance);
}

// What a fault may leave as NaN must not be read as a number: not in one value of the reference's result that is NaN.
// Heads of which the reference's result is whole are right.
void ExpectNanStays(const HeadMatrices& actual, const HeadMatrices& expected) {
  const auto is_nan = [](float x) { return std::isnan(x); };
  for (int32_t h = 0; h < expected.heads(); ++h) {
    SCOPED_TRACE("head " + std::to_string(h));
    if (std::ranges::none_of(expected[h], is_nan)) {
      EXPECT_LE(RelativeError(actual[h], expected[h]), kTolerance);
    }
    for (size_t i = 0; i < expected[h].size(); ++i) {
      if (is_nan(expected[h][i])) {
        ASSERT_TRUE(is_nan(actual[h][i])) << "number " << i;
      }
    }
  }
}

// One number of the inputs, of a tuple or of the initial state is NaN, as a corrupt one may be: it reaches all that the
// recurrence makes of it, in runs long enough for chunks.
TEST_P(LinearTest, NanInGivesNanOut) {
  const LinearShape shape = {.heads = 4, .key_heads = 2, .d_k = 19, .d_v = 21, .order = order_};
  constexpr int64_t kTokens = 75, kHalf = 40;
  const Tokens clean = RandomTokens(random_, shape, kTokens, {Keys::kRandom, Decay::kSlow});
  const Tuple clean_tuple = CaptureByReference(shape, clean, 0, 9);
  const HeadMatrices clean_state = RandomState(random_, shape);
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const int64_t t = random_.Integer(0, kTokens - 1), head = random_.Integer(0, shape.heads - 1);
  const int64_t at = random_.Integer(0, shape.d_k - 1), key = head / 2 * shape.d_k + at;
  for (const std::string what : {"q", "k", "v", "g", "beta", "T", "S", "state"}) {
    SCOPED_TRACE(what + ", token " + std::to_string(t) + ", head " + std::to_string(head));
    Tokens tokens = clean;
    Tuple tuple = clean_tuple;
    HeadMatrices initial = clean_state;
    if (what == "q") tokens.q[t * tokens.q_stride + key] = kNan;
    if (what == "k") tokens.k[t * tokens.k_stride + key] = kNan;
    if (what == "v") tokens.v[t * tokens.v_stride + head * shape.d_v + at] = kNan;
    if (what == "g") tokens.g[t * tokens.g_stride + head] = kNan;
    if (what == "beta") tokens.beta[t * tokens.beta_stride + head] = kNan;
    if (what == "T") tuple.transition[head][at] = kNan;
    if (what == "S") tuple.state[head][at] = kNan;
    if (what == "state") initial[head][at] = kNan;

    const TupleView interior = tuple.view();
    const SeamStep steps[] = {{.begin = 0, .end = kHalf}, {.interior = &interior}, {.begin = kHalf, .end = kTokens}};
    const auto advance = [&](Runner& runner, HeadMatrices& state) {
      const int64_t token_floats = int64_t{shape.heads} * shape.d_v;
      std::vector<float> out(kTokens * token_floats);
      runner.Run(AdvanceSeamArgs{.shape = shape,
                                 .steps = steps,
                                 .inputs = tokens.View(),
                                 .state = state.pointers(),
                                 .out = out.data(),
                                 .out_stride = token_floats});
      HeadMatrices by_head(shape.heads, kTokens * shape.d_v);
      for (int64_t i = 0; i < kTokens * token_floats; ++i) {
        const int64_t token = i / token_floats, h = i % token_floats / shape.d_v;
        by_head[h][token * shape.d_v + i % shape.d_v] = out[i];
      }
      return by_head;
    };
    HeadMatrices state = initial, expected_state = initial;
    const HeadMatrices out = advance(runner_, state), expected_out = advance(reference_, expected_state);
    ExpectNanStays(state, expected_state);
    ExpectNanStays(out, expected_out);
    const HeadMatrices& reached = what == "q" ? expected_out : expected_state;
    EXPECT_FALSE(std::ranges::none_of(reached[head], [](float x) { return std::isnan(x); }));

    Tuple captured(shape);
    runner_.Run(CaptureArgs{.shape = shape,
                            .inputs = tokens.View(),
                            .transition = captured.transition.pointers(),
                            .state = captured.state.pointers()});
    const Tuple expected = CaptureByReference(shape, tokens, 0, kTokens);
    ExpectNanStays(captured.transition, expected.transition);
    ExpectNanStays(captured.state, expected.state);
  }
}

// Workers change who computes, never what: results are the same to the bit.
TEST_P(LinearTest, ResultsDoNotDependOnWorkers) {
  const LinearShape shape = RandomShape(random_, order_, 40);
  const Prompt prompt(random_, shape, 4, {});
  const Tokens inputs = prompt.RunInputs();
  Runner alone({std::get<0>(GetParam()).kernels, false});
  HeadMatrices a = prompt.initial, b = prompt.initial;
  for (auto [runner, state] : {std::pair(&alone, &a), std::pair(&runner_, &b)}) {
    runner->Run(
        AdvanceSeamArgs{.shape = shape, .steps = prompt.Steps(), .inputs = inputs.View(), .state = state->pointers()});
  }
  EXPECT_EQ(RelativeError(a, b), 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, LinearTest,
                         ::testing::Combine(::testing::ValuesIn(Backends()),
                                            ::testing::Values(StateOrder::kKeyFirst, StateOrder::kValueFirst)),
                         [](const auto& info) {
                           return ::testing::PrintToString(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) == StateOrder::kKeyFirst ? "_key_first" : "_value_first");
                         });

}  // namespace
}  // namespace ashlar::kernels::testing
