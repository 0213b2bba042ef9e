// SPDX-License-Identifier: Apache-2.0
#include "proto/tuple_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "proto/testing/sample_layouts.h"

namespace ashlar {
namespace {

using ::testing::HasSubstr;

// Heads 0 and 1 dense, 2 of rank 2, 3 and 4 zero, 5 dense.
struct Example {
  LinearLayer layer{.key_heads = 2, .value_heads = 6, .d_k = 8, .d_v = 4, .state_dtype = DType::kF16};
  TupleShape shape = TupleShapeOf(layer);
  ObjectHeader header = *PlanForms(*PlanObject({.page_tokens = 1, .layers = {layer}}, {}, {}, ObjectKind::kSegment, 9),
                                   std::vector<TransitionRun>{{0, 0, 2, TransitionForm::kDense},
                                                              {0, 2, 1, TransitionForm::kLowRank, 2},
                                                              {0, 3, 2, TransitionForm::kZero},
                                                              {0, 5, 1, TransitionForm::kDense}});
};

TEST(FindTuple, LocatesEveryHead) {
  const Example example;
  const auto tuple = FindTuple(example.header, 0, example.shape);
  ASSERT_TRUE(tuple.ok()) << tuple.status();
  EXPECT_EQ(tuple->state, example.header.Find(0, PartForm::kState));
  EXPECT_EQ(tuple->exponents, example.header.Find(0, PartForm::kStateExponents));
  EXPECT_EQ(tuple->transition_dtype, DType::kF16);
  const Part* const dense = example.header.Find(0, PartForm::kTransitionDense);
  const Part* const low_rank = example.header.Find(0, PartForm::kTransitionLowRank);
  const TupleParts::Transition expected[] = {{TransitionForm::kDense, 0, dense, 0},
                                             {TransitionForm::kDense, 0, dense, 1},
                                             {TransitionForm::kLowRank, 2, low_rank, 0},
                                             {TransitionForm::kZero},
                                             {TransitionForm::kZero},
                                             {TransitionForm::kDense, 0, dense + 1, 0}};
  ASSERT_EQ(tuple->transitions.size(), std::size(expected));
  for (size_t head = 0; head < std::size(expected); ++head) {
    SCOPED_TRACE(head);
    EXPECT_EQ(tuple->transitions[head].form, expected[head].form);
    EXPECT_EQ(tuple->transitions[head].rank, expected[head].rank);
    EXPECT_EQ(tuple->transitions[head].part, expected[head].part);
    EXPECT_EQ(tuple->transitions[head].unit, expected[head].unit);
  }
}

TEST(FindTuple, ACheckpointsTransitionsAreZero) {
  const Example example;
  const ObjectHeader header =
      *PlanObject({.page_tokens = 1, .layers = {example.layer}}, {}, {}, ObjectKind::kCheckpoint, 9);
  const auto tuple = FindTuple(header, 0, example.shape);
  ASSERT_TRUE(tuple.ok());
  ASSERT_EQ(tuple->transitions.size(), 6u);
  for (const TupleParts::Transition& transition : tuple->transitions) {
    EXPECT_EQ(transition.form, TransitionForm::kZero);
    EXPECT_EQ(transition.part, nullptr);
  }
}

// For tables that decode: a misread form, or another layout's object.
TEST(FindTuple, RefusesAnotherShape) {
  struct Case {
    const char* message;
    std::function<void(Example&)> spoil;
  };
  const auto low_rank = [](Example& e) -> Part& { return e.header.parts[3]; };
  const Case cases[] = {
      {"has no state", [](Example& e) { e.shape.heads = 5; }},
      {"has no state", [](Example& e) { e.shape.d_v = 5; }},
      {"has no state", [](Example& e) { e.header.parts[2].dtype = DType::kF32; }},
      {"has no state", [](Example& e) { e.header.parts[2].layer = 1; }},
      {"has a different transition_dense", [](Example& e) { e.shape.d_k = 4, e.shape.d_v = 8; }},
      {"has a different transition_dense", [](Example& e) { e.shape.transition = TransitionForm::kDiagonal; }},
      {"has a different transition_low_rank", [&](Example& e) { low_rank(e).rank = 1; }},
      {"has a different transition_low_rank", [&](Example& e) { low_rank(e).rank = 9; }},
      {"has a different transition_diagonal", [&](Example& e) { low_rank(e).form = PartForm::kTransitionDiagonal; }},
      {"has a different transition_dense",
       [&](Example& e) { low_rank(e).form = PartForm::kTransitionDense, low_rank(e).rank = 0; }},
      {"has a different transition_low_rank",
       [](Example& e) { e.header.parts[0].form = PartForm::kTransitionLowRank, e.header.parts[0].rank = 3; }},
  };
  for (const Case& refused : cases) {
    Example example;
    ASSERT_EQ(low_rank(example).form, PartForm::kTransitionLowRank);
    refused.spoil(example);
    std::ranges::sort(example.header.parts, {}, [](const Part& part) { return std::pair(part.layer, part.form); });
    const auto tuple = FindTuple(example.header, 0, example.shape);
    EXPECT_EQ(tuple.status().code(), absl::StatusCode::kDataLoss) << refused.message;
    EXPECT_THAT(std::string(tuple.status().message()), HasSubstr(refused.message));
  }
}

}  // namespace
}  // namespace ashlar
