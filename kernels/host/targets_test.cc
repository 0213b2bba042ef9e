// The host back end as other processors run it: each vector width that was compiled and that this machine has.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include "kernels/testing/backends.h"
#include "kernels/testing/linear_inputs.h"

namespace ashlar::kernels::testing {
namespace {

class TargetsTest : public ::testing::TestWithParam<std::tuple<int64_t, StateOrder>> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(std::get<0>(GetParam())); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }

  const StateOrder order_ = std::get<1>(GetParam());
  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner host_{Host()};
};

TEST_P(TargetsTest, CapturesTuples) {
  for (const int32_t largest_dim : {5, 30, 130}) {
    const LinearShape shape = RandomShape(random_, order_, largest_dim);
    const Tokens tokens = RandomTokens(random_, shape, 70, {});
    const Tuple expected = CaptureByReference(shape, tokens, 0, tokens.count);
    Tuple tuple(shape);
    host_.Run(CaptureArgs{.shape = shape,
                          .inputs = tokens.View(),
                          .transition = tuple.transition.pointers(),
                          .state = tuple.state.pointers()});
    EXPECT_LE(TransitionError(tuple.transition, expected.transition), 1) << shape.d_k << " x " << shape.d_v;
    EXPECT_LE(RelativeError(tuple.state, expected.state), kTolerance) << shape.d_k << " x " << shape.d_v;
  }
}

TEST_P(TargetsTest, AdvancesThroughInteriorsAndRuns) {
  for (const int32_t largest_dim : {5, 30, 130}) {
    const LinearShape shape = RandomShape(random_, order_, largest_dim);
    const Prompt prompt(random_, shape, 3, {Keys::kCorrelated, Decay::kSlow});
    const FullPass full(prompt);
    HeadMatrices state = prompt.initial;
    const Tokens inputs = prompt.RunInputs();
    host_.Run(
        AdvanceSeamArgs{.shape = shape, .steps = prompt.Steps(), .inputs = inputs.View(), .state = state.pointers()});
    EXPECT_LE(RelativeError(state, full.state), kTolerance) << shape.d_k << " x " << shape.d_v;
  }
}

TEST_P(TargetsTest, ComposesChainsAndTuples) {
  for (const int32_t largest_dim : {5, 30, 130}) {
    const LinearShape shape = RandomShape(random_, order_, largest_dim);
    const Prompt prompt(random_, shape, 3, {Keys::kCorrelated, Decay::kSlow});
    HeadMatrices state = prompt.initial, expected = prompt.initial;
    Tuple tuple(shape), expected_tuple(shape);
    const auto compose = [&](Runner& runner, HeadMatrices& to, Tuple& out) {
      runner.Run(ComposeArgs{.shape = shape, .interiors = prompt.views, .state = to.pointers()});
      runner.Run(ComposeTransitionsArgs{.shape = shape,
                                        .interiors = prompt.views,
                                        .transition = out.transition.pointers(),
                                        .state = out.state.pointers()});
    };
    Runner reference(Reference());
    compose(host_, state, tuple);
    compose(reference, expected, expected_tuple);
    EXPECT_LE(RelativeError(state, expected), kTolerance) << shape.d_k << " x " << shape.d_v;
    EXPECT_LE(TransitionError(tuple.transition, expected_tuple.transition), 1) << shape.d_k << " x " << shape.d_v;
    EXPECT_LE(RelativeError(tuple.state, expected_tuple.state), kTolerance) << shape.d_k << " x " << shape.d_v;
  }
}

// One, two … tokens a call: few are advanced in place, more in chunks.
TEST_P(TargetsTest, DecodesLikeOnePass) {
  const LinearShape shape = RandomShape(random_, order_, 70);
  const Tokens tokens = RandomTokens(random_, shape, 21, {});
  const HeadMatrices initial = RandomState(random_, shape);
  HeadMatrices expected = initial, state = initial;
  const int64_t token_floats = int64_t{shape.heads} * shape.d_v;
  std::vector<float> expected_out(static_cast<size_t>(tokens.count * token_floats)), out(expected_out.size());
  const auto advance = [&](Runner& runner, int64_t begin, int64_t end, HeadMatrices& to, std::vector<float>& outputs) {
    const SeamStep run{.begin = begin, .end = end};
    runner.Run(AdvanceSeamArgs{.shape = shape,
                               .steps = {&run, 1},
                               .inputs = tokens.View(),
                               .state = to.pointers(),
                               .out = outputs.data(),
                               .out_stride = token_floats});
  };
  Runner reference(Reference());
  advance(reference, 0, tokens.count, expected, expected_out);
  int64_t begin = 0;
  for (int64_t count = 1; begin < tokens.count; begin += count++) advance(host_, begin, begin + count, state, out);
  ASSERT_EQ(begin, tokens.count);
  EXPECT_LE(RelativeError(state, expected), kTolerance);
  EXPECT_LE(RelativeError(out, expected_out), kTolerance);
}

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_NEON, HWY_SCALAR, HWY_EMU128}) {
    if ((hwy::SupportedTargets() & target & HWY_TARGETS) != 0) targets.push_back(target);
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(Every, TargetsTest,
                         ::testing::Combine(::testing::ValuesIn(Targets()),
                                            ::testing::Values(StateOrder::kKeyFirst, StateOrder::kValueFirst)),
                         [](const auto& info) {
                           return std::string(hwy::TargetName(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) == StateOrder::kKeyFirst ? "_key_first" : "_value_first");
                         });

}  // namespace
}  // namespace ashlar::kernels::testing
