// SPDX-License-Identifier: Apache-2.0
#include "client/engine/layer_run.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ashlar::engine {
namespace {

TEST(CutChain, RefusesACopyOfAnUnwrittenState) {
  const Step steps[] = {{.kind = StepKind::kCompute, .begin = 0, .end = 10}};
  float number;
  int32_t exponent;
  StateCopy copy{.position = 5, .state = {.data = &number}};
  const LayerAdvance advance{
      .layer = 0, .begin = 0, .end = 10, .inputs = {.tokens = 10}, .copies = &copy, .copy_count = 1};
  const auto say = [&] {
    std::vector<ChainPiece> pieces;
    return std::string(CutChain(steps, 10, advance, pieces).message);
  };
  EXPECT_EQ(say(), "");
  copy.state.dtype = DType::kF16;
  EXPECT_EQ(say(), "advance.copies[0].state.exponents: required for f16; expected null for other types");
  copy.state.exponents = &exponent;
  EXPECT_EQ(say(), "");
  copy.state.dtype = DType::kBF16;
  EXPECT_EQ(say(), "advance.copies[0].state.exponents: required for f16; expected null for other types");
  copy.state = {.data = &number, .dtype = static_cast<DType>(99)};
  EXPECT_EQ(say(), "advance.copies[0].state.dtype: 99; expected f32, f16 or bf16");
  copy.state = {};
  EXPECT_EQ(say(), "advance.copies[0].state.data: null");
}

class CheckingAlone : public testing::Test {
 protected:
  std::string Say() const { return CheckAlone(layer_, alone_).message; }

  float rows_[1] = {};
  engine::Run run_{.token_count = 10, .capture_begin = 4, .capture_end = 7, .transition = true};
  LinearLayer layer_{
      .family = Family::kDeltanet, .key_heads = 1, .value_heads = 1, .d_k = 4, .d_v = 4, .state_dtype = DType::kBF16};
  AloneLayer alone_{.layer = 0,
                    .inputs = {.tokens = 10, .k = rows_, .v = rows_, .beta = rows_},
                    .run = &run_,
                    .state = {.data = rows_, .dtype = DType::kBF16},
                    .transition = rows_};
};

TEST_F(CheckingAlone, AcceptsARunOfTheLayersType) {
  EXPECT_EQ(Say(), "");
}

// If it were published, the state's bytes would be read as the layer's type.
TEST_F(CheckingAlone, RefusesAStateOfAnotherType) {
  alone_.state.dtype = DType::kF32;
  EXPECT_EQ(Say(), "alone.state.dtype: " + std::to_string(static_cast<int>(DType::kF32)) +
                       "; expected the layer's state_dtype, " + std::to_string(static_cast<int>(DType::kBF16)));
}

TEST_F(CheckingAlone, RefusesACaptureBeyondTheRows) {
  run_.capture_end = 11;
  EXPECT_EQ(Say(), "alone.run.capture_end: [4, 11); expected capture_begin <= capture_end <= 10");
  run_.capture_end = 3;
  EXPECT_EQ(Say(), "alone.run.capture_end: [4, 3); expected capture_begin <= capture_end <= 10");
}

TEST_F(CheckingAlone, RefusesRowsThatOverlap) {
  float out[1];
  alone_.out = out;
  alone_.inputs.q = rows_;
  TokenRows& in = alone_.inputs;
  const std::pair<int64_t*, const char*> strides[] = {{&in.q_stride, "inputs.q_stride"},
                                                      {&in.k_stride, "inputs.k_stride"},
                                                      {&in.v_stride, "inputs.v_stride"},
                                                      {&alone_.out_stride, "out_stride"}};
  for (const auto& [stride, name] : strides) {
    for (const int64_t wrong : {3, -3, 1}) {
      *stride = wrong;
      EXPECT_EQ(Say(),
                absl::StrCat("alone.", name, ": ", wrong, " floats; expected at least 4, the width of a token's row"));
    }
    for (const int64_t wrong : {int64_t{1} << 62, INT64_MIN}) {
      *stride = wrong;
      EXPECT_EQ(Say(), absl::StrCat("alone.", name, ": ", wrong, " floats; expected -1099511627776 to 1099511627776"));
    }
    for (const int64_t right : {4, -4, 9, 0}) {  // rows may be in reverse order, or be parts of wider rows
      *stride = right;
      EXPECT_EQ(Say(), "");
    }
  }
  in.beta_stride = 1;
  EXPECT_EQ(Say(), "");
  run_ = {.token_count = 1, .capture_end = 1, .transition = true};
  in.tokens = 1;
  in.k_stride = 1;
  EXPECT_EQ(Say(), "") << "one row overlaps nothing";
}

TEST_F(CheckingAlone, RefusesHeadsThatOverlapByWraparound) {
  for (const int64_t stride : {int64_t{1} << 62, INT64_MAX}) {
    alone_.state.head_stride = stride;
    EXPECT_EQ(Say(), absl::StrCat("alone.state.head_stride: ", stride, "; expected at most 1099511627776"));
  }
}

TEST_F(CheckingAlone, NamesEachFieldThatIsWrong) {
  const AloneLayer good = alone_;
  alone_.run = nullptr;
  EXPECT_EQ(Say(), "alone.run: null");
  alone_ = good;
  alone_.transition = nullptr;
  EXPECT_EQ(Say(), "alone.transition: null");
  alone_ = good;
  alone_.inputs.tokens = 9;
  EXPECT_EQ(Say(), "alone.inputs.tokens: 9; the run has 10");
  alone_ = good;
  alone_.inputs.beta = nullptr;
  EXPECT_EQ(Say(), "alone.inputs.beta: null");
}

}  // namespace
}  // namespace ashlar::engine
