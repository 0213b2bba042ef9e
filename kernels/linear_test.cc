// SPDX-License-Identifier: Apache-2.0
// Capturing and composing tuples of linear layers: every back end against the reference, over families, orders, dtypes,
// forms and shapes, and the invariants of each back end.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/testing/linear_fixture.h"

namespace ashlar::kernels::testing {
namespace {

constexpr int kChains[] = {1, 4, 16, 64, 256};

// Long chains have short interiors, to bound the time.
Lengths ChainOf(int interiors) {
  return {.interiors = interiors, .run = 0, .interior = interiors > 16 ? 2 : 14, .last_run = 0};
}

double LargestNorm(const Tuple& tuple) {
  double largest = 0;
  for (int32_t h = 0; h < tuple.shape().heads; ++h) largest = std::max(largest, Norm(tuple.Transition(h)));
  return largest;
}

// Gives some heads of the tuples the form zero and others, of erasing families, a low rank that does not come from
// tokens.
void MixForms(Random& random, std::vector<Tuple>& tuples) {
  for (Tuple& tuple : tuples) {
    const LinearShape& shape = tuple.shape();
    for (int32_t h = 0; h < shape.heads; ++h) {
      const int64_t choice = random.Integer(0, 3);
      if (choice == 0) tuple.MakeZero(h);
      if (choice < 2 || !Erases(shape.family)) continue;
      Factors factors = {.d = std::vector<double>(shape.d_k), .a = {}, .b = {}};
      for (double& value : factors.d) value = random.Integer(0, 3) == 0 ? 0 : random.Uniform(0, 1);
      const double scale = 0.5 / std::sqrt(shape.d_k);
      for (int64_t i = random.Integer(1, shape.d_k) * shape.d_k; i > 0; --i) {
        factors.a.push_back(scale * random.Normal());
        factors.b.push_back(scale * random.Normal());
      }
      tuple.MakeLowRank(h, factors);
    }
  }
}

// Against the reference.
class LinearTest : public LinearFixture {
 protected:
  void ExpectComposes(const LinearShape& shape, const std::vector<Tuple>& tuples, const States& initial,
                      Dtypes dtypes) {
    const std::vector<TupleView> views = Views(tuples);
    const States start = initial.Rounded(shape, dtypes.running);
    const auto chain = static_cast<int64_t>(tuples.size());
    EXPECT_LE(RelativeError(Compose(runner_, shape, views, start), Compose(reference_, shape, views, start)),
              Tolerance(dtypes, chain));
  }

  void ExpectComposesToOneTuple(const LinearShape& shape, const std::vector<Tuple>& tuples, Dtypes dtypes) {
    const std::vector<TupleView> views = Views(tuples);
    const double tolerance = Tolerance(dtypes, static_cast<int64_t>(tuples.size()));
    const Tuple tuple = ComposeTuples(runner_, shape, views, dtypes);
    const Tuple expected = ComposeTuples(reference_, shape, views, dtypes);
    EXPECT_LE(TransitionError(tuple, expected, tolerance), 1);
    EXPECT_LE(RelativeError(tuple.states(), expected.states()), tolerance);
  }

  // The product of the decays, if the family stores it with its transitions. A device refuses it.
  void ExpectDecays(const LinearShape& shape, const Tokens& tokens) {
    if (!Erases(family_) || std::get<Backend>(GetParam()).kernels->memory() != nullptr) return;
    const auto capture = [&](Runner& runner) {
      Tuple tuple(shape, {});
      std::vector<float> decay(static_cast<size_t>(shape.heads) * shape.d_k, -1);
      runner.Run(CaptureArgs{.shape = shape, .inputs = tokens.View(), .tuple = tuple.Target(), .decay = decay.data()});
      return decay;
    };
    const std::vector<float> decay = capture(runner_), expected = capture(reference_);
    const bool none = GateWidth(shape) == 0 || tokens.View().tokens == 0;
    for (size_t i = 0; i < decay.size(); ++i) {
      ASSERT_NEAR(decay[i], expected[i], 2e-7 * expected[i] + 1e-38);
      ASSERT_TRUE(none ? decay[i] == 1 : decay[i] >= 0 && decay[i] <= 1);
    }
  }
};

TEST_P(LinearTest, CapturesTuples) {
  for (const Character character : kCharacters) {
    const Layer layers[] = {Draw({.heads = 3, .key_heads = 3, .d_k = 7, .d_v = 5}, character),
                            Draw({.heads = 4, .key_heads = 2, .d_k = 16, .d_v = 24}, character), Draw(50, character)};
    double largest_transition = 0;
    for (const Layer& layer : layers) {
      const LinearShape shape = layer.shape();
      const int64_t count = random_.Integer(1, 150);
      const Tokens tokens = RandomTokens(random_, layer, count);
      for (const Dtypes dtypes : kDtypes) {
        SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes << ", tokens " << count);
        const Tuple expected = Capture(reference_, shape, tokens.View(), dtypes);
        const Tuple tuple = Capture(runner_, shape, tokens.View(), dtypes);
        EXPECT_LE(TransitionError(tuple, expected, Tolerance(dtypes.transition, 1)), 1);
        EXPECT_LE(RelativeError(tuple.states(), expected.states()), Tolerance(dtypes.state, 1));
        largest_transition = std::max(largest_transition, LargestNorm(expected));

        Tuple state_only(shape, dtypes);
        CaptureArgs args = {.shape = shape, .inputs = tokens.View(), .tuple = state_only.Target()};
        args.tuple.transition = nullptr;
        runner_.Run(args);
        EXPECT_LE(RelativeError(state_only.states(), expected.states()), Tolerance(dtypes.state, 1));
      }
      ExpectDecays(shape, tokens);
      ExpectDecays(shape, RandomTokens(random_, layer, 0));
    }
    // Otherwise transitions would only be compared with the absolute floor of TransitionError.
    if (Erases(family_) && (character.decay == Decay::kSlow || character.decay == Decay::kNone)) {
      EXPECT_GE(largest_transition, 0.1);
    }
  }
}

TEST_P(LinearTest, ComposesChains) {
  for (const int interiors : kChains) {
    for (const Character character : {Character{}, kPersistentSubspace}) {
      const Layer layer = Draw(interiors > 16 ? 14 : 40, character);
      const Prompt prompt(random_, layer, ChainOf(interiors));
      for (const Dtypes dtypes : kDtypes) {
        SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes << ", interiors " << interiors);
        ExpectComposes(prompt.shape, Rounded(prompt.tuples, dtypes), prompt.initial, dtypes);
      }
    }
  }
}

TEST_P(LinearTest, ComposesTuplesToOneTuple) {
  for (const int interiors : {0, 1, 2, 16, 64}) {
    for (const Character character : {Character{}, Character{Keys::kCorrelated, Decay::kSlow}, kPersistentSubspace}) {
      const Layer layer = Draw(interiors > 16 ? 14 : 40, character);
      const Prompt prompt(random_, layer, ChainOf(interiors));
      for (const Dtypes dtypes : kDtypes) {
        SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes << ", interiors " << interiors);
        ExpectComposesToOneTuple(prompt.shape, Rounded(prompt.tuples, dtypes), dtypes);
      }
    }
  }
}

TEST_P(LinearTest, ComposesEveryForm) {
  for (const Dtypes dtypes : kDtypes) {
    for (const int interiors : {1, 5, 16}) {
      const Layer layer = Draw(40, {Keys::kCorrelated, Decay::kSlow});
      SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes << ", interiors " << interiors);
      const Prompt prompt(random_, layer, ChainOf(interiors));
      std::vector<Tuple> tuples = prompt.tuples;
      MixForms(random_, tuples);
      ExpectComposes(prompt.shape, Rounded(tuples, dtypes), prompt.initial, dtypes);
      ExpectComposesToOneTuple(prompt.shape, Rounded(tuples, dtypes), dtypes);
    }
  }
}

// Sizes of real models, whose rows are whole vectors of 16 bytes, for which back ends may have separate code. Chains
// longer than what is in flight at once, every form, and more value columns than one block of a device holds.
TEST_P(LinearTest, ComposesWholeVectors) {
  for (const LinearShape& dims : {LinearShape{.heads = 3, .key_heads = 1, .d_k = 16, .d_v = 24},
                                  LinearShape{.heads = 1, .key_heads = 1, .d_k = 128, .d_v = 32},
                                  LinearShape{.heads = 1, .key_heads = 1, .d_k = 40, .d_v = 136}}) {
    const Layer layer = Draw(dims, {Keys::kCorrelated, Decay::kSlow});
    const Prompt prompt(random_, layer, ChainOf(10));
    std::vector<Tuple> tuples = prompt.tuples;
    MixForms(random_, tuples);
    for (const Dtypes dtypes : kDtypes) {
      SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes);
      ExpectComposes(prompt.shape, Rounded(tuples, dtypes), prompt.initial, dtypes);
    }
  }
}

// States of families that erase nothing exceed the range of fp16: tuples and running states carry exponents.
class LargeStates : public LinearTest {};
TEST_P(LargeStates, AreScaled) {
  const Dtypes half = {DType::kF16, DType::kF16, DType::kF16};
  const Layer layer = Draw(30, kLarge);
  SCOPED_TRACE(::testing::Message() << layer);
  const Prompt prompt(random_, layer, ChainOf(8));
  const std::vector<Tuple> tuples = Rounded(prompt.tuples, half);
  const States initial = prompt.initial.Rounded(prompt.shape, DType::kF16);
  const States state = Compose(runner_, prompt.shape, Views(tuples), initial);
  const States expected = Compose(reference_, prompt.shape, Views(tuples), initial);
  EXPECT_LE(RelativeError(state, expected), Tolerance(half, 8));
  for (int32_t h = 0; h < state.heads(); ++h) {
    EXPECT_GT(expected.exponent(h), 0);
    EXPECT_EQ(state.exponent(h), expected.exponent(h));
  }
  const Tuple captured = Capture(runner_, prompt.shape, prompt.isolated.View(), half);
  const Tuple captured_expected = Capture(reference_, prompt.shape, prompt.isolated.View(), half);
  EXPECT_LE(RelativeError(captured.states(), captured_expected.states()), Tolerance(half, 1));
  ExpectComposesToOneTuple(prompt.shape, tuples, half);
  // Scaled states can be used again.
  ExpectComposes(prompt.shape, {captured, captured_expected}, state, half);
}

// Value heads in full groups and uneven remainders, real sizes, and the largest dimensions: few tokens, and a little
// more than a chunk.
TEST_P(LinearTest, LargeAndUnevenShapes) {
  for (const LinearShape& dims : {LinearShape{.heads = 1, .key_heads = 1, .d_k = 1, .d_v = 5},
                                  LinearShape{.heads = 1, .key_heads = 1, .d_k = 128, .d_v = 64},
                                  LinearShape{.heads = 1, .key_heads = 1, .d_k = 256, .d_v = 9},
                                  LinearShape{.heads = 14, .key_heads = 2, .d_k = 24, .d_v = 40},
                                  LinearShape{.heads = 1, .key_heads = 1, .d_k = 11, .d_v = 256}}) {
    const Layer layer = Draw(dims, {});
    SCOPED_TRACE(::testing::Message() << layer);
    const LinearShape shape = layer.shape();
    const Tokens tokens = RandomTokens(random_, layer, 12);
    const Tuple expected = Capture(reference_, shape, tokens.View());
    const Tuple tuple = Capture(runner_, shape, tokens.View());
    EXPECT_LE(TransitionError(tuple, expected, kTolerance), 1);
    EXPECT_LE(RelativeError(tuple.states(), expected.states()), kTolerance);
    ExpectComposes(shape, {expected}, RandomState(random_, layer), {});
  }
}

// Properties that every back end must have, including the reference.
class LinearProperties : public LinearFixture {};

TEST_P(LinearProperties, NothingIsTheIdentity) {
  const Layer layer = Draw(20, {});
  const LinearShape shape = layer.shape();
  const Tuple captured = Capture(runner_, shape, {}), composed = ComposeTuples(runner_, shape, {});
  for (const Tuple& tuple : {captured, composed}) {
    for (int32_t h = 0; h < shape.heads; ++h) {
      const std::vector<double> transition = tuple.Transition(h), state = tuple.states().Values(h);
      for (size_t i = 0; i < transition.size(); ++i) {
        const bool one = tuple.form(h) == TransitionForm::kDense && i % (shape.d_k + 1) == 0;
        ASSERT_EQ(transition[i], one ? 1.0 : 0.0);
      }
      EXPECT_TRUE(std::ranges::all_of(state, [](double x) { return x == 0; }));
    }
  }
}

TEST_P(LinearProperties, ComposingTuplesIsAssociative) {
  const Layer layer = Draw(40, {Keys::kRandom, Decay::kSlow});
  const Prompt prompt(random_, layer, ChainOf(3));
  const auto compose = [&](const Tuple& first, const Tuple& second) {
    return ComposeTuples(runner_, prompt.shape, std::vector{first.View(), second.View()});
  };
  const std::vector<Tuple>& t = prompt.tuples;
  const Tuple left = compose(compose(t[0], t[1]), t[2]);
  const Tuple right = compose(t[0], compose(t[1], t[2]));
  EXPECT_LE(TransitionError(left, right, kTolerance), 1);
  EXPECT_LE(RelativeError(left.states(), right.states()), kTolerance);

  // One tuple for the chain has the same effect on a state as the chain.
  const TupleView collapsed = left.View();
  EXPECT_LE(RelativeError(Compose(runner_, prompt.shape, {&collapsed, 1}, prompt.initial),
                          Compose(runner_, prompt.shape, Views(t), prompt.initial)),
            kTolerance);
}

// HYPIC's main claim: n segments that this back end captured alone, composed, equal one pass over their concatenation.
TEST_P(LinearProperties, SegmentsComposeToOnePass) {
  for (const Character character : kCharacters) {
    const Layer layer = Draw({.heads = 4, .key_heads = 2, .d_k = 24, .d_v = 20}, character);
    const Prompt prompt(random_, layer, {.interiors = 6, .last_run = 20});
    const States expected = FullPass(prompt).state;
    for (const Dtypes dtypes : kDtypes) {
      SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes);
      std::vector<Tuple> tuples;
      for (const Prompt::Part& part : prompt.parts) {
        tuples.push_back(Capture(runner_, prompt.shape, prompt.isolated.View(part.begin, part.end), dtypes));
        tuples.back().position = prompt.start + part.segment;
      }
      const States start = prompt.initial.Rounded(prompt.shape, dtypes.running);
      const States state = Compose(runner_, prompt.shape, Views(tuples), start);
      EXPECT_LE(RelativeError(state, expected), Tolerance(dtypes, static_cast<int64_t>(tuples.size())));
    }
  }
}

// After a head's transition of zero the state equals the tuple's own, bit by bit in its dtype.
TEST_P(LinearProperties, ZeroErasesWhatCameBefore) {
  const Layer layer = Draw(30, {});
  Prompt prompt(random_, layer, ChainOf(3));
  const LinearShape shape = prompt.shape;
  for (int32_t h = 0; h < shape.heads; ++h) prompt.tuples[1].MakeZero(h);
  prompt.tuples[1].position = 0;
  const std::vector<TupleView> views = Views(prompt.tuples);
  EXPECT_EQ(RelativeError(Compose(runner_, shape, {views.data(), 2}, prompt.initial), prompt.tuples[1].states()), 0);

  // The chain's transition is zero: composing it makes all states equal.
  const Tuple collapsed = ComposeTuples(runner_, shape, views);
  const TupleView view = collapsed.View();
  const States other = RandomState(random_, layer);
  const States a = Compose(runner_, shape, {&view, 1}, prompt.initial), b = Compose(runner_, shape, {&view, 1}, other);
  EXPECT_EQ(RelativeError(a, b), 0);
  EXPECT_EQ(RelativeError(a, collapsed.states()), 0);
}

// A running state that is not finite, for example uninitialized memory, does not change the result.
TEST_P(LinearProperties, ZeroErasesNumbersThatAreNotFinite) {
  for (const Layer& layer : {Draw(30, {}), Draw({.heads = 4, .key_heads = 2, .d_k = 16, .d_v = 24}, {})}) {
    SCOPED_TRACE(::testing::Message() << layer);
    Prompt prompt(random_, layer, ChainOf(2));
    for (int32_t h = 0; h < prompt.shape.heads; ++h) prompt.tuples[1].MakeZero(h);
    prompt.tuples[1].position = 0;
    for (const float number : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      States start = prompt.initial;
      for (int32_t h = 0; h < start.heads(); ++h) {
        for (int64_t i = 0; i < start.count(); ++i) start.SetElement(h, i, number);
      }
      EXPECT_EQ(RelativeError(Compose(runner_, prompt.shape, Views(prompt.tuples), start), prompt.tuples[1].states()),
                0);
    }
  }
}

// A short segment's transition has the rank of its tokens. It composes in low-rank form.
class LowRank : public LinearFixture {};
TEST_P(LowRank, FactorsComposeToOnePass) {
  for (const Character character : kCharacters) {
    const Layer layer = Draw({.heads = 6, .key_heads = 2, .d_k = 24, .d_v = 20}, character);
    SCOPED_TRACE(::testing::Message() << layer);
    const Prompt prompt(random_, layer, {.interiors = 6, .interior = 10});
    std::vector<Tuple> tuples;
    for (const Prompt::Part& part : prompt.parts) {
      const bool factors = part.end > part.begin && part.end - part.begin <= prompt.shape.d_k;
      tuples.push_back(factors ? CaptureFactors(prompt.shape, prompt.isolated, part.begin, part.end)
                               : Capture(reference_, prompt.shape, prompt.isolated.View(part.begin, part.end)));
    }
    const States expected = FullPass(prompt).state;
    EXPECT_LE(RelativeError(Compose(runner_, prompt.shape, Views(tuples), prompt.initial), expected), kTolerance);
    const Tuple collapsed = ComposeTuples(runner_, prompt.shape, Views(tuples));
    const TupleView view = collapsed.View();
    EXPECT_LE(RelativeError(Compose(runner_, prompt.shape, {&view, 1}, prompt.initial), expected), kTolerance);
  }
}

// Without a candidate there is nothing to compare with the reference.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LinearTest);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LargeStates);
INSTANTIATE_TEST_SUITE_P(Candidates, LinearTest, OverFamilies(Candidates()), NameOf);
INSTANTIATE_TEST_SUITE_P(Candidates, LargeStates, OverFamilies(Candidates(), FamiliesThat(kNotErasing)), NameOf);
INSTANTIATE_TEST_SUITE_P(Backends, LinearProperties, OverFamilies(Backends()), NameOf);
INSTANTIATE_TEST_SUITE_P(Backends, LowRank, OverFamilies(Backends(), FamiliesThat(kErasing)), NameOf);

}  // namespace
}  // namespace ashlar::kernels::testing
