// SPDX-License-Identifier: Apache-2.0
// Linear layers on the host back end at each compiled vector width that this machine supports, without a matrix unit,
// as on other CPUs.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <numeric>

#include "kernels/host/simd/tiles.h"
#include "kernels/testing/linear_fixture.h"

namespace ashlar::kernels::testing {
namespace {

class TargetsTest : public ::testing::TestWithParam<std::tuple<int64_t, Family, StateOrder>> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(std::get<0>(GetParam()));
    host::AllowTiles(false);
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    host::AllowTiles(true);
  }

  Layer Draw(int32_t largest_dim, Character character) {
    return RandomLayer(random_, family_, order_, largest_dim, character);
  }

  const Family family_ = std::get<1>(GetParam());
  const StateOrder order_ = std::get<2>(GetParam());
  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner host_{Host()}, reference_{Reference()};
};

TEST_P(TargetsTest, CapturesTuples) {
  for (const int32_t largest_dim : {5, 30, 90}) {
    const Layer layer = Draw(largest_dim, {});
    const Tokens tokens = RandomTokens(random_, layer, 70);
    for (const Dtypes dtypes : kDtypes) {
      SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes);
      const Tuple expected = Capture(reference_, layer.shape(), tokens.View(), dtypes);
      const Tuple tuple = Capture(host_, layer.shape(), tokens.View(), dtypes);
      EXPECT_LE(TransitionError(tuple, expected, Tolerance(dtypes.transition, 1)), 1);
      EXPECT_LE(RelativeError(tuple.states(), expected.states()), Tolerance(dtypes.state, 1));
    }
  }
}

TEST_P(TargetsTest, AdvancesThroughInteriorsAndRuns) {
  for (const int32_t largest_dim : {5, 30, 90}) {
    const Layer layer = Draw(largest_dim, {Keys::kCorrelated, Decay::kSlow});
    SCOPED_TRACE(::testing::Message() << layer);
    const Prompt prompt(random_, layer, {.interiors = 3});
    const FullPass full(prompt);
    const Tokens inputs = prompt.RunInputs();
    const std::vector<TupleView> views = Views(prompt.tuples);
    const std::vector<SeamStep> steps = prompt.Steps(views);
    States state = prompt.initial;
    host_.Run(AdvanceSeamArgs{.shape = prompt.shape, .steps = steps, .inputs = inputs.View(), .state = state.View()});
    EXPECT_LE(RelativeError(state, full.state), kTolerance);
  }
}

TEST_P(TargetsTest, ComposesChainsAndTuples) {
  for (const int32_t largest_dim : {5, 30, 90}) {
    const Layer layer = Draw(largest_dim, {Keys::kCorrelated, Decay::kSlow});
    const Prompt prompt(random_, layer, {.interiors = 3});
    for (const Dtypes dtypes : kDtypes) {
      SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes);
      const std::vector<Tuple> tuples = Rounded(prompt.tuples, dtypes);
      const std::vector<TupleView> chain = Views(tuples);
      const States start = prompt.initial.Rounded(prompt.shape, dtypes.running);
      const double tolerance = Tolerance(dtypes, 3);
      EXPECT_LE(
          RelativeError(Compose(host_, prompt.shape, chain, start), Compose(reference_, prompt.shape, chain, start)),
          tolerance);
      const Tuple tuple = ComposeTuples(host_, prompt.shape, chain, dtypes);
      const Tuple expected = ComposeTuples(reference_, prompt.shape, chain, dtypes);
      EXPECT_LE(TransitionError(tuple, expected, tolerance), 1);
      EXPECT_LE(RelativeError(tuple.states(), expected.states()), tolerance);
    }
  }
}

// One, two … tokens per call: few are advanced in place, more in chunks.
TEST_P(TargetsTest, DecodesLikeOnePass) {
  const Layer layer = Draw(70, {});
  SCOPED_TRACE(::testing::Message() << layer);
  const LinearShape shape = layer.shape();
  const Tokens tokens = RandomTokens(random_, layer, 21);
  const States initial = RandomState(random_, layer);
  States expected = initial, state = initial;
  const int64_t token_floats = int64_t{shape.heads} * shape.d_v;
  std::vector<float> expected_out(static_cast<size_t>(tokens.count * token_floats)), out(expected_out.size());
  const auto advance = [&](Runner& runner, int64_t begin, int64_t end, States& to, std::vector<float>& outputs) {
    const SeamStep run{.begin = begin, .end = end};
    runner.Run(AdvanceSeamArgs{.shape = shape,
                               .steps = {&run, 1},
                               .inputs = tokens.View(),
                               .state = to.View(),
                               .out = outputs.data(),
                               .out_stride = token_floats});
  };
  advance(reference_, 0, tokens.count, expected, expected_out);
  int64_t begin = 0;
  for (int64_t count = 1; begin < tokens.count; begin += count++) advance(host_, begin, begin + count, state, out);
  ASSERT_EQ(begin, tokens.count);
  EXPECT_LE(RelativeError(state, expected), kTolerance);
  EXPECT_LE(RelativeError(out, expected_out), kTolerance);
}

// Only element types: a state on which nothing acts is read, widened, narrowed and written.
class TargetTypesTest : public ::testing::TestWithParam<int64_t> {
 protected:
  static constexpr int32_t kDim = 256;  // a head holds every number of 16 bits
  static constexpr LinearShape kShape = {.family = Family::kGdn, .heads = 1, .key_heads = 1, .d_k = kDim, .d_v = kDim};

  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }

  Runner host_{Host()};
};

TEST_P(TargetTypesTest, KeepsEveryNumber) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    std::vector<uint16_t> numbers(kDim * kDim);
    std::iota(numbers.begin(), numbers.end(), uint16_t{0});
    const std::vector<uint16_t> before = numbers;
    void* head = numbers.data();
    int32_t exponent = 0;
    host_.Run(AdvanceSeamArgs{
        .shape = kShape,
        .state = {.heads = &head, .dtype = dtype, .exponents = dtype == DType::kF16 ? &exponent : nullptr}});
    EXPECT_EQ(exponent, 0);
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (std::isnan(ReadElement(dtype, before.data(), static_cast<int64_t>(i)))) {
        ASSERT_TRUE(std::isnan(ReadElement(dtype, numbers.data(), static_cast<int64_t>(i)))) << i;
      } else {
        ASSERT_EQ(numbers[i], before[i]);
      }
    }
  }
}

TEST_P(TargetTypesTest, RoundsToNearestEven) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    // Sizes from below the smallest subnormal number of fp16 up to numbers that need no exponent; half of them ties.
    std::vector<float> numbers;
    for (int i = 0; i < kDim * kDim; ++i) {
      numbers.push_back(static_cast<float>(random.Uniform(-1, 1) * std::exp2(random.Integer(-27, 14))));
      if (i % 2 == 0) continue;
      const uint32_t dropped = dtype == DType::kF16 ? 13 : 16;
      const uint32_t kept = std::bit_cast<uint32_t>(numbers.back()) >> dropped << dropped;
      numbers.back() = std::bit_cast<float>(kept | 1u << (dropped - 1));
    }
    std::vector<uint16_t> rounded(numbers.size()), expected(numbers.size());
    void *head = numbers.data(), *kept = rounded.data();
    int32_t exponent = 0;
    const StateView checkpoint = {
        .heads = &kept, .dtype = dtype, .exponents = dtype == DType::kF16 ? &exponent : nullptr};
    const SeamStep nothing = {.checkpoint = &checkpoint};
    host_.Run(AdvanceSeamArgs{.shape = kShape, .steps = {&nothing, 1}, .state = {.heads = &head}});
    EXPECT_EQ(exponent, 0);
    for (size_t i = 0; i < numbers.size(); ++i) {
      WriteElement(dtype, expected.data(), static_cast<int64_t>(i), numbers[i]);
    }
    EXPECT_EQ(rounded, expected);
  }
}

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_NEON, HWY_SCALAR, HWY_EMU128}) {
    if ((hwy::SupportedTargets() & target & HWY_TARGETS) != 0) targets.push_back(target);
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(Every, TargetsTest,
                         ::testing::Combine(::testing::ValuesIn(Targets()), ::testing::ValuesIn(kFamilies),
                                            ::testing::Values(StateOrder::kKeyFirst, StateOrder::kValueFirst)),
                         [](const auto& instance) {
                           return std::string(hwy::TargetName(std::get<0>(instance.param))) + "_" +
                                  Name(std::get<1>(instance.param)) + "_" + Name(std::get<2>(instance.param));
                         });

INSTANTIATE_TEST_SUITE_P(Every, TargetTypesTest, ::testing::ValuesIn(Targets()),
                         [](const auto& instance) { return std::string(hwy::TargetName(instance.param)); });

}  // namespace
}  // namespace ashlar::kernels::testing
