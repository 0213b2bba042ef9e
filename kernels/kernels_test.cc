// Arguments that make no sense end the program with the field's name, whatever the back end.
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
  float* pointers_[1] = {&number_};
  const LinearShape shape_ = {.heads = 1, .key_heads = 1, .d_k = 1, .d_v = 1};
};

TEST_F(ArgumentsDeathTest, NameTheShape) {
  ComposeArgs args = {.shape = shape_, .state = pointers_};
  args.shape.heads = 0;
  EXPECT_DEATH(runner_.Run(args), "Compose: shape.heads");
  args.shape = {.heads = 3, .key_heads = 2, .d_k = 1, .d_v = 1};
  EXPECT_DEATH(runner_.Run(args), "Compose: shape.key_heads");
  args.shape = {.heads = 1, .key_heads = 1, .d_k = kMaxHeadDim + 1, .d_v = 1};
  EXPECT_DEATH(runner_.Run(args), "Compose: shape.d_k");
  EXPECT_DEATH(runner_.Run(ComposeArgs{.shape = shape_}), "Compose: state");
}

TEST_F(ArgumentsDeathTest, NameWhatAPromptLacks) {
  const float zero = 0;
  const TokenInputs inputs = {.tokens = 1, .k = &zero, .v = &zero, .g = &zero, .beta = &zero};
  AdvanceSeamArgs args = {.shape = shape_, .inputs = inputs, .state = pointers_, .out = &number_};
  EXPECT_DEATH(runner_.Run(args), "AdvanceSeam: inputs.q");
  args.out = nullptr;
  const SeamStep beyond = {.begin = 0, .end = 2};
  args.steps = {&beyond, 1};
  EXPECT_DEATH(runner_.Run(args), "AdvanceSeam: steps");
}

TEST_F(ArgumentsDeathTest, NameWhatALandingLacks) {
  const int32_t page = 0;
  LandArgs args = {.source = {.units = pointers_, .unit_tokens = 1, .tokens = 1, .heads = 1, .dim = 1},
                   .target = {.base = &number_, .page_tokens = 1, .page_table = &page}};
  args.rotation = {.style = RopeStyle::kHalfSplit, .rotary_dim = 2};
  EXPECT_DEATH(runner_.Run(args), "Land: rotation.rotary_dim");
  args.rotation = {};
  args.target.page_table = nullptr;
  EXPECT_DEATH(runner_.Run(args), "Land: paged slots");
  args.target.page_table = &page;
  args.first_position = -1;
  EXPECT_DEATH(runner_.Run(args), "Land: first_position");
}

TEST(Backends, HaveNames) {
  ASSERT_FALSE(Available().empty());
  EXPECT_EQ(Available().front(), &Reference());
  for (const Kernels* kernels : Available()) EXPECT_FALSE(kernels->name().empty());
}

}  // namespace
}  // namespace ashlar::kernels::testing
