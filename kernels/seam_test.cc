// SPDX-License-Identifier: Apache-2.0
// Advancing linear layers through interiors and runs: every back end against the reference and against one pass over
// all tokens, over families, orders, dtypes and forms.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/testing/linear_fixture.h"

namespace ashlar::kernels::testing {
namespace {

// Outputs of AdvanceSeam with gaps between tokens, and the expected values: rows outside runs are not changed.
struct Outputs {
  Outputs(const Prompt& prompt, int64_t gap)
      : width(int64_t{prompt.shape.heads} * prompt.shape.d_v),
        stride(width + gap),
        values(prompt.tokens.count * stride, kUntouched) {}

  void ExpectEqual(const Prompt& prompt, const std::vector<float>& full, double tolerance) const {
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
      EXPECT_LE(RelativeError(actual, expected), tolerance) << "head " << h;
    }
  }

  static constexpr float kUntouched = 1234.5f;
  const int64_t width, stride;
  std::vector<float> values;
};

class SeamTest : public LinearFixture {
 protected:
  // Advances through the prompt with `tuples` for its interiors and the running state in `dtypes`.
  void ExpectAdvancesLike(const FullPass& full, const Prompt& prompt, const std::vector<Tuple>& tuples,
                          Dtypes dtypes = {}) {
    const Tokens inputs = prompt.RunInputs();
    const std::vector<TupleView> views = Views(tuples);
    const double tolerance = Tolerance(dtypes, static_cast<int64_t>(tuples.size()));
    Outputs outputs(prompt, random_.Integer(0, 3));
    States state = prompt.initial.Rounded(prompt.shape, dtypes.running);
    AdvanceSeamArgs args = {.shape = prompt.shape, .inputs = inputs.View()};
    const std::vector<SeamStep> steps = prompt.Steps(views);
    args.steps = steps;
    args.state = state.View();
    args.out = outputs.values.data();
    args.out_stride = outputs.stride;
    runner_.Run(args);
    EXPECT_LE(RelativeError(state, full.state), tolerance);
    outputs.ExpectEqual(prompt, full.out, tolerance);

    States without_outputs = prompt.initial.Rounded(prompt.shape, dtypes.running);
    args.inputs.q = nullptr;
    args.state = without_outputs.View();
    args.out = nullptr;
    runner_.Run(args);
    EXPECT_LE(RelativeError(without_outputs, full.state), tolerance);
  }
};

TEST_P(SeamTest, AdvancesLikeOnePass) {
  for (const int interiors : {0, 1, 4, 16}) {
    for (const Character character : kCharacters) {
      const Layer layer = Draw(interiors > 4 ? 24 : 48, character);
      SCOPED_TRACE(::testing::Message() << layer << ", interiors " << interiors);
      const Prompt prompt(random_, layer, {.interiors = interiors});
      ExpectAdvancesLike(FullPass(prompt), prompt, prompt.tuples);
    }
  }
}

TEST_P(SeamTest, AdvancesInEveryDtype) {
  for (const Character character : {Character{}, kPersistentSubspace}) {
    const Layer layer = Draw({.heads = 4, .key_heads = 2, .d_k = 24, .d_v = 20}, character);
    const Prompt prompt(random_, layer, {.interiors = 6, .last_run = 20});
    const FullPass full(prompt);
    for (const Dtypes dtypes : kDtypes) {
      SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes);
      ExpectAdvancesLike(full, prompt, Rounded(prompt.tuples, dtypes), dtypes);
    }
  }
}

class SeamsOfLowRank : public SeamTest {};
TEST_P(SeamsOfLowRank, AdvancesThroughFactors) {
  const Layer layer = Draw({.heads = 6, .key_heads = 2, .d_k = 24, .d_v = 20}, {Keys::kCorrelated, Decay::kSlow});
  const Prompt prompt(random_, layer, {.interiors = 6});
  std::vector<Tuple> tuples;
  for (const Prompt::Part& part : prompt.parts) {
    if (part.interior) tuples.push_back(CaptureFactors(prompt.shape, prompt.isolated, part.begin, part.end));
  }
  ExpectAdvancesLike(FullPass(prompt), prompt, tuples);
}

TEST_P(SeamTest, AdvancesUnevenShapes) {
  for (const LinearShape& dims : {LinearShape{.heads = 1, .key_heads = 1, .d_k = 1, .d_v = 5},
                                  LinearShape{.heads = 3, .key_heads = 1, .d_k = 40, .d_v = 130},
                                  LinearShape{.heads = 14, .key_heads = 2, .d_k = 24, .d_v = 40}}) {
    const Layer layer = Draw(dims, {Keys::kCorrelated, Decay::kByHead});
    SCOPED_TRACE(::testing::Message() << layer);
    const Prompt prompt(random_, layer, {.interiors = 2, .run = 20, .interior = 3});
    ExpectAdvancesLike(FullPass(prompt), prompt, prompt.tuples);
  }
}

// One, two … tokens per call: few are advanced in place, more in chunks.
TEST_P(SeamTest, DecodesLikeOnePass) {
  const Layer layer = Draw(40, {});
  SCOPED_TRACE(::testing::Message() << layer);
  const Prompt prompt(random_, layer, {.last_run = 40});
  const FullPass full(prompt);
  Outputs outputs(prompt, 0);
  States state = prompt.initial;
  for (int64_t begin = 0, count = 1; begin < prompt.tokens.count; begin += count++) {
    const SeamStep run{.begin = begin, .end = std::min(begin + count, prompt.tokens.count)};
    runner_.Run(AdvanceSeamArgs{.shape = prompt.shape,
                                .steps = {&run, 1},
                                .inputs = prompt.tokens.View(),
                                .state = state.View(),
                                .out = outputs.values.data(),
                                .out_stride = outputs.stride});
  }
  EXPECT_LE(RelativeError(state, full.state), kTolerance);
  outputs.ExpectEqual(prompt, full.out, kTolerance);
}

TEST_P(SeamTest, KeepsCheckpoints) {
  const Layer layer = Draw(40, {Keys::kRandom, Decay::kSlow});
  const LinearShape shape = layer.shape();
  const Prompt prompt(random_, layer, {.interiors = 5});
  const std::vector<TupleView> views = Views(prompt.tuples);
  std::vector<SeamStep> steps = prompt.Steps(views);
  const Tokens inputs = prompt.RunInputs();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto advance = [&](Runner& runner, std::vector<States>& kept) {
      std::vector<StateView> checkpoints;
      for (States& state : kept) checkpoints.push_back(state.View());
      for (size_t i = 0; i < steps.size(); i += 2) steps[i].checkpoint = &checkpoints[i];
      States state = prompt.initial;
      runner.Run(AdvanceSeamArgs{.shape = shape, .steps = steps, .inputs = inputs.View(), .state = state.View()});
      return state;
    };
    std::vector<States> kept(steps.size(), States(shape, dtype)), expected = kept;
    const States state = advance(runner_, kept), reference_state = advance(reference_, expected);
    const double tolerance = Tolerance(dtype, 0);
    for (size_t i = 0; i < steps.size(); ++i) EXPECT_LE(RelativeError(kept[i], expected[i]), tolerance) << i;
    // The last step's checkpoint is the final state rounded once, and a prompt may be resumed from any of them.
    ASSERT_EQ(steps.size() % 2, 1u);
    EXPECT_EQ(RelativeError(kept.back(), state.Rounded(shape, dtype)), 0);
    for (SeamStep& step : steps) step.checkpoint = nullptr;
    States resumed = kept[4];
    runner_.Run(AdvanceSeamArgs{
        .shape = shape, .steps = std::span(steps).subspan(5), .inputs = inputs.View(), .state = resumed.View()});
    EXPECT_LE(RelativeError(resumed, reference_state), 2 * tolerance);
  }
}

// Expects NaN wherever the reference has NaN, because a fault must not be read as a number. Results whose reference is
// not NaN must be right.
void ExpectNanStays(const std::vector<double>& actual, const std::vector<double>& expected, const std::string& what) {
  const auto is_nan = [](double x) { return std::isnan(x); };
  if (std::ranges::none_of(expected, is_nan)) {
    EXPECT_LE(RelativeError(actual, expected), kTolerance) << what;
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(is_nan(actual[i]) || !is_nan(expected[i])) << what << ", number " << i;
  }
}

// One number of the inputs, of a tuple or of the initial state is NaN, as after corruption: everything that the
// recurrence computes from it is NaN, in runs long enough for chunks.
TEST_P(SeamTest, NanInGivesNanOut) {
  const Layer layer = Draw({.heads = 4, .key_heads = 2, .d_k = 19, .d_v = 21}, {Keys::kRandom, Decay::kSlow});
  const LinearShape shape = layer.shape();
  constexpr int64_t kTokens = 75, kHalf = 40;
  const Tokens clean = RandomTokens(random_, layer, kTokens);
  const Tuple clean_tuple = Capture(reference_, shape, clean.View(0, 9));
  const States clean_state = RandomState(random_, layer);
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const int64_t t = random_.Integer(0, kTokens - 1), head = random_.Integer(0, shape.heads - 1);
  const int64_t at = random_.Integer(0, shape.d_k - 1), key = head / 2 * shape.d_k + at;
  for (const std::string what : {"q", "k", "v", "g", "beta", "T", "S", "state"}) {
    SCOPED_TRACE(what + ", token " + std::to_string(t) + ", head " + std::to_string(head));
    Tokens tokens = clean;
    Tuple tuple = clean_tuple;
    States initial = clean_state;
    std::vector<double> transition = tuple.Transition(head);
    if (what == "q") tokens.q[t * tokens.q_stride + key] = kNan;
    if (what == "k") tokens.k[t * tokens.k_stride + key] = kNan;
    if (what == "v") tokens.v[t * tokens.v_stride + head * shape.d_v + at] = kNan;
    if (what == "g" && GateWidth(shape) == 0) continue;
    if (what == "g") tokens.g[t * tokens.g_stride + head * GateWidth(shape) + at % GateWidth(shape)] = kNan;
    if (what == "beta" && BetaWidth(shape) == 0) continue;
    if (what == "beta") tokens.beta[t * tokens.beta_stride + head * BetaWidth(shape) + at % BetaWidth(shape)] = kNan;
    if (what == "T") transition[at % transition.size()] = kNan;
    tuple.SetTransition(head, transition);
    if (what == "S") tuple.states().SetElement(head, at, kNan);
    if (what == "state") initial.SetElement(head, at, kNan);

    const TupleView interior = tuple.View();
    const SeamStep steps[] = {{.begin = 0, .end = kHalf}, {.interior = &interior}, {.begin = kHalf, .end = kTokens}};
    const auto advance = [&](Runner& runner, States& state) {
      const int64_t token_floats = int64_t{shape.heads} * shape.d_v;
      std::vector<float> out(kTokens * token_floats);
      runner.Run(AdvanceSeamArgs{.shape = shape,
                                 .steps = steps,
                                 .inputs = tokens.View(),
                                 .state = state.View(),
                                 .out = out.data(),
                                 .out_stride = token_floats});
      std::vector<std::vector<double>> by_head(shape.heads);
      for (int64_t i = 0; i < kTokens * token_floats; ++i) by_head[i % token_floats / shape.d_v].push_back(out[i]);
      return by_head;
    };
    States state = initial, expected_state = initial;
    const auto out = advance(runner_, state), expected_out = advance(reference_, expected_state);
    const Tuple captured = Capture(runner_, shape, tokens.View()), expected = Capture(reference_, shape, tokens.View());
    for (int32_t h = 0; h < shape.heads; ++h) {
      const std::string name = "head " + std::to_string(h);
      ExpectNanStays(state.Values(h), expected_state.Values(h), name + ", state");
      ExpectNanStays(out[h], expected_out[h], name + ", outputs");
      ExpectNanStays(captured.Transition(h), expected.Transition(h), name + ", transition");
      ExpectNanStays(captured.states().Values(h), expected.states().Values(h), name + ", end state");
    }
    const std::vector<double> reached = what == "q" ? expected_out[head] : expected_state.Values(head);
    EXPECT_TRUE(std::ranges::any_of(reached, [](double x) { return std::isnan(x); }));
  }
}

// Workers do not affect results, which are equal bit by bit.
TEST_P(SeamTest, ResultsDoNotDependOnWorkers) {
  const Layer layer = Draw(40, {});
  const Prompt prompt(random_, layer, {.interiors = 4});
  const Tokens inputs = prompt.RunInputs();
  const std::vector<TupleView> views = Views(prompt.tuples);
  const std::vector<SeamStep> steps = prompt.Steps(views);
  Runner alone({&kernels(), false});
  States a = prompt.initial, b = prompt.initial;
  for (auto [runner, state] : {std::pair(&alone, &a), std::pair(&runner_, &b)}) {
    runner->Run(
        AdvanceSeamArgs{.shape = prompt.shape, .steps = steps, .inputs = inputs.View(), .state = state->View()});
  }
  EXPECT_EQ(RelativeError(a, b), 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, SeamTest, OverFamilies(Backends()), NameOf);
INSTANTIATE_TEST_SUITE_P(Backends, SeamsOfLowRank, OverFamilies(Backends(), FamiliesThat(kErasing)), NameOf);

}  // namespace
}  // namespace ashlar::kernels::testing
