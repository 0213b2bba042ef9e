// SPDX-License-Identifier: Apache-2.0
// Invalid arguments end the program with the field's name, on every back end.
#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include "kernels/testing/backends.h"

namespace ashlar::kernels::testing {
namespace {

class ArgumentsDeathTest : public ::testing::Test {
 protected:
  ArgumentsDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  Runner runner_{Reference()};
  float number_ = 0;
  void* pointers_[1] = {&number_};
  const void* units_[1] = {&number_};
  const double frequency_ = 1;
  const LinearShape shape_ = {.heads = 1, .key_heads = 1, .d_k = 1, .d_v = 1};
};

TEST_F(ArgumentsDeathTest, NameTheShape) {
  ComposeArgs args = {.shape = shape_, .state = {.heads = pointers_}};
  args.shape.heads = 0;
  EXPECT_DEATH(runner_.Run(args), "Compose: shape.heads");
  args.shape = {.heads = 3, .key_heads = 2, .d_k = 1, .d_v = 1};
  EXPECT_DEATH(runner_.Run(args), "Compose: shape.key_heads");
  args.shape = {.heads = 1, .key_heads = 1, .d_k = kMaxHeadDim + 1, .d_v = 1};
  EXPECT_DEATH(runner_.Run(args), "Compose: shape.d_k");
  EXPECT_DEATH(runner_.Run(ComposeArgs{.shape = shape_}), "Compose: state");
  args.shape = shape_;
  args.shape.decay_table = &number_;
  EXPECT_DEATH(runner_.Run(args), "Compose: shape.decay_table");
  args.shape = shape_;
  void* const no_head[] = {nullptr};
  args.state.heads = no_head;
  EXPECT_DEATH(runner_.Run(args), "Compose: state: a head is null");
  EXPECT_DEATH(runner_.Run(CaptureArgs{.shape = shape_, .tuple = {.state = no_head}}), "Capture: tuple.state: a head");
  EXPECT_DEATH(runner_.Run(CaptureArgs{.shape = shape_, .tuple = {.transition = no_head, .state = pointers_}}),
               "Capture: tuple.transition: a head");
  args.shape = {.family = Family::kGla, .heads = 1, .key_heads = 1, .d_k = 2, .d_v = 1};
  args.state.heads = pointers_;
  args.shape.rotation = {.style = RopeStyle::kHalfSplit, .rotary_dim = 2, .frequencies = &frequency_};
  EXPECT_DEATH(runner_.Run(args), "Compose: shape.rotation");
}

TEST_F(ArgumentsDeathTest, NameTheDtypesAndForms) {
  ComposeArgs args = {.shape = shape_, .state = {.heads = pointers_, .dtype = DType::kF16}};
  EXPECT_DEATH(runner_.Run(args), "Compose: state.exponents");
  args.state.dtype = DType::kF8E4M3;
  EXPECT_DEATH(runner_.Run(args), "Compose: state.dtype");
  args.state.dtype = DType::kF32;
  HeadTuple head = {.form = TransitionForm::kScalar, .transition = &number_, .state = &number_};
  const TupleView interior = {.heads = &head};
  args.interiors = {&interior, 1};
  EXPECT_DEATH(runner_.Run(args), "Compose: interiors: a form that the family does not have");
  head.form = TransitionForm::kLowRank;
  EXPECT_DEATH(runner_.Run(args), "Compose: interiors: rank");
  head.form = TransitionForm::kDense;
  head.transition = nullptr;
  EXPECT_DEATH(runner_.Run(args), "Compose: interiors: a tuple without pointers");
  EXPECT_DEATH(runner_.Run(ComposeTransitionsArgs{.shape = shape_, .tuple = {.state = pointers_}}),
               "ComposeTransitions: tuple.transition");
}

TEST_F(ArgumentsDeathTest, NameWhatAPromptLacks) {
  const float zero = 0;
  const TokenInputs inputs = {.tokens = 1, .k = &zero, .v = &zero, .g = &zero, .beta = &zero};
  AdvanceSeamArgs args = {.shape = shape_, .inputs = inputs, .state = {.heads = pointers_}, .out = &number_};
  EXPECT_DEATH(runner_.Run(args), "AdvanceSeam: inputs.q");
  args.out = nullptr;
  const SeamStep beyond = {.begin = 0, .end = 2};
  args.steps = {&beyond, 1};
  EXPECT_DEATH(runner_.Run(args), "AdvanceSeam: steps");
}

TEST_F(ArgumentsDeathTest, NameWhatALandingLacks) {
  const int32_t page = 0;
  LandArgs args = {.source = {.units = units_, .unit_tokens = 1, .tokens = 1, .heads = 1, .dim = 1},
                   .target = {.base = &number_, .page_tokens = 1, .page_table = &page}};
  args.rotation = {.style = RopeStyle::kHalfSplit, .rotary_dim = 2};
  EXPECT_DEATH(runner_.Run(args), "Land: rotation.rotary_dim");
  args.rotation.style = static_cast<RopeStyle>(7);
  EXPECT_DEATH(runner_.Run(args), "Land: rotation.style");
  args.rotation = {};
  const void* const no_unit[] = {nullptr};
  args.source.units = no_unit;
  EXPECT_DEATH(runner_.Run(args), "Land: rows: a unit is null");
  args.source.units = units_;
  args.target.page_table = nullptr;
  EXPECT_DEATH(runner_.Run(args), "Land: paged slots");
  args.target.page_table = &page;
  args.first_position = -1;
  EXPECT_DEATH(runner_.Run(args), "Land: first_position");
}

TEST_F(ArgumentsDeathTest, NameTypesAndScalesThatDoNotFit) {
  const int32_t page = 0;
  LandArgs land = {.source = {.units = units_, .unit_tokens = 1, .tokens = 1, .heads = 1, .dim = 1},
                   .target = {.base = &number_, .page_tokens = 1, .page_table = &page}};
  land.target.dtype = DType::kBF16;
  EXPECT_DEATH(runner_.Run(land), "Land: dtype: source and target differ");
  land.target.scales = &number_;
  EXPECT_DEATH(runner_.Run(land), "Land: scales: for 8-bit types alone");
  land.source.dtype = land.target.dtype = DType::kF8E4M3;
  EXPECT_DEATH(runner_.Run(land), "Land: scales: of both sides");
  RotateKeysArgs rotate = {.rows = 1, .dim = 1, .source = &number_, .target = &number_, .source_scales = &number_};
  EXPECT_DEATH(runner_.Run(rotate), "RotateKeys: scales: for 8-bit types alone");
  rotate.dtype = DType::kF8E5M2;
  EXPECT_DEATH(runner_.Run(rotate), "RotateKeys: scales: of both sides");
}

TEST_F(ArgumentsDeathTest, NameWhatAttentionLacks) {
  const int32_t page = 0;
  const int64_t position = 0;
  const PagedSlots slots = {.base = &number_, .page_tokens = 1, .page_table = &page};
  KeySpan span = {.keys = slots, .values = slots, .tokens = 1};
  const AttendArgs right = {.shape = {.query_heads = 2, .kv_heads = 1, .key_dim = 1, .value_dim = 1},
                            .spans = {&span, 1},
                            .tokens = 1,
                            .q = &number_,
                            .positions = &position,
                            .out = &number_};
  const auto expect = [&](auto change, const char* error) {
    AttendArgs args = right;
    change(args);
    EXPECT_DEATH(runner_.Run(&Kernels::AttendUnrotated, args), error);
  };
  expect([](AttendArgs& a) { a.shape.kv_heads = 3; }, "AttendUnrotated: shape.kv_heads must divide");
  expect(
      [](AttendArgs& a) {
        a.shape = {AttentionKind::kMla, 2, 2, 1, 1};
      },
      "shape.kv_heads: latent attention has one");
  expect([](AttendArgs& a) { a.shape.key_dim = kMaxQueryDim + 1; }, "AttendUnrotated: shape: key_dim");
  expect([](AttendArgs& a) { a.rotation = {RopeStyle::kInterleaved, 2}; }, "AttendUnrotated: rotation.rotary_dim");
  expect([](AttendArgs& a) { a.positions = nullptr; }, "AttendUnrotated: q, positions and out");
  expect([](AttendArgs& a) { a.merge = true; }, "AttendUnrotated: lse");
  span.values.page_table = nullptr;
  expect([](AttendArgs&) {}, "AttendUnrotated: paged slots");
}

TEST(Backends, HaveNames) {
  ASSERT_FALSE(Available().empty());
  EXPECT_EQ(Available().front(), &Reference());
  for (const Kernels* kernels : Available()) EXPECT_FALSE(kernels->name().empty());
}

}  // namespace
}  // namespace ashlar::kernels::testing
