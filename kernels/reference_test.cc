// SPDX-License-Identifier: Apache-2.0
// The reference against cases small enough to be computed by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "kernels/testing/backends.h"

namespace ashlar::kernels::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::Pointwise;

const float kHalfDecay = std::log(0.5f);

// Two tokens, d_k = 2, d_v = 1: k = (1, 0), (0.6, 0.8); beta = 0.5, 1; v = 4, 2; decay 0.5, 1.
//   T_1 = 0.5 (I − 0.5 k₁k₁ᵀ)  = [[0.25, 0], [0, 0.5]]        u_1 = 0.5 · 4 · (1, 0) = (2, 0)
//   T_2 = I − k₂k₂ᵀ            = [[0.64, −0.48], [−0.48, 0.36]] u_2 = 2 · (0.6, 0.8)   = (1.2, 1.6)
//   T = T_2 T_1                = [[0.16, −0.24], [−0.12, 0.18]]
//   S = T_2 u_1 + u_2          = (1.28 + 1.2, −0.96 + 1.6)      = (2.48, 0.64)
// From S_0 = (8, 4): S_1 = (2, 2) + (2, 0) = (4, 2); S_2 = (2.56 − 0.96, −1.92 + 0.72) + u_2 = (2.8, 0.4).
// Outputs with q = (1, 1), (2, 1): 4 + 2 = 6 and 5.6 + 0.4 = 6.
struct ByHand {
  TokenInputs Inputs() const {
    return {.tokens = 2,
            .q = q,
            .k = k,
            .v = v,
            .g = g,
            .beta = beta,
            .q_stride = 2,
            .k_stride = 2,
            .v_stride = 1,
            .g_stride = 1,
            .beta_stride = 1};
  }
  const LinearShape shape = {.heads = 1, .key_heads = 1, .d_k = 2, .d_v = 1};
  const float q[4] = {1, 1, 2, 1}, k[4] = {1, 0, 0.6f, 0.8f}, v[2] = {4, 2};
  const float g[2] = {kHalfDecay, 0}, beta[2] = {0.5f, 1};
};

MATCHER(Near, "") {
  return std::abs(std::get<0>(arg) - std::get<1>(arg)) < 1e-6f;
}

TEST(ReferenceByHand, CapturesATuple) {
  const ByHand hand;
  std::vector<float> transition(4), state(2);
  void *const t[] = {transition.data()}, *const s[] = {state.data()};
  const TupleTarget tuple = {.transition = t, .state = s};
  Runner runner(Reference());
  runner.Run(CaptureArgs{.shape = hand.shape, .inputs = hand.Inputs(), .tuple = tuple});
  EXPECT_THAT(transition, Pointwise(Near(), {0.16f, -0.24f, -0.12f, 0.18f}));
  EXPECT_THAT(state, Pointwise(Near(), {2.48f, 0.64f}));

  LinearShape value_first = hand.shape;
  value_first.order = StateOrder::kValueFirst;
  runner.Run(CaptureArgs{.shape = value_first, .inputs = hand.Inputs(), .tuple = tuple});
  EXPECT_THAT(transition, Pointwise(Near(), {0.16f, -0.12f, -0.24f, 0.18f}));
}

TEST(ReferenceByHand, AdvancesARun) {
  const ByHand hand;
  std::vector<float> state = {8, 4}, out(2);
  void* const s[] = {state.data()};
  const SeamStep run = {.begin = 0, .end = 2};
  Runner(Reference())
      .Run(AdvanceSeamArgs{.shape = hand.shape,
                           .steps = {&run, 1},
                           .inputs = hand.Inputs(),
                           .state = {.heads = s},
                           .out = out.data(),
                           .out_stride = 1});
  EXPECT_THAT(state, Pointwise(Near(), {2.8f, 0.4f}));
  EXPECT_THAT(out, Pointwise(Near(), {6.0f, 6.0f}));
}

// T_1 = [[1, 2], [3, 4]], S_1 = (1, −1); T_2 = [[0, 1], [1, 0]], S_2 = (10, 20); S_0 = (5, 6).
// T_1 S_0 + S_1 = (17 + 1, 39 − 1) = (18, 38); T_2 (18, 38) + S_2 = (48, 38).
// T_2 T_1 = [[3, 4], [1, 2]]; T_2 S_1 + S_2 = (−1 + 10, 1 + 20) = (9, 21).
TEST(ReferenceByHand, ComposesFromTheLeft) {
  const LinearShape shape = {.heads = 1, .key_heads = 1, .d_k = 2, .d_v = 1};
  const float t1[] = {1, 2, 3, 4}, s1[] = {1, -1}, t2[] = {0, 1, 1, 0}, s2[] = {10, 20};
  const HeadTuple first = {.transition = t1, .state = s1}, second = {.transition = t2, .state = s2};
  const TupleView chain[] = {{.heads = &first}, {.heads = &second}};
  std::vector<float> state = {5, 6}, transition(4), end(2);
  void *const state_heads[] = {state.data()}, *const transition_heads[] = {transition.data()},
              *const end_heads[] = {end.data()};
  Runner runner(Reference());
  runner.Run(ComposeArgs{.shape = shape, .interiors = chain, .state = {.heads = state_heads}});
  EXPECT_THAT(state, ElementsAre(48, 38));
  runner.Run(ComposeTransitionsArgs{
      .shape = shape, .interiors = chain, .tuple = {.transition = transition_heads, .state = end_heads}});
  EXPECT_THAT(transition, ElementsAre(3, 4, 1, 2));
  EXPECT_THAT(end, ElementsAre(9, 21));
}

// The same in the other order: Sᵀ' = Sᵀ Tᵀ, and what is stored is Tᵀ: [[1, 3], [2, 4]].
TEST(ReferenceByHand, ComposesFromTheRight) {
  const LinearShape shape = {.heads = 1, .key_heads = 1, .d_k = 2, .d_v = 1, .order = StateOrder::kValueFirst};
  const float t1[] = {1, 3, 2, 4}, s1[] = {1, -1};
  const HeadTuple head = {.transition = t1, .state = s1};
  const TupleView interior = {.heads = &head};
  std::vector<float> state = {5, 6};
  void* const state_heads[] = {state.data()};
  Runner(Reference()).Run(ComposeArgs{.shape = shape, .interiors = {&interior, 1}, .state = {.heads = state_heads}});
  EXPECT_THAT(state, ElementsAre(18, 38));
}

// A quarter turn per position in the first pair, none in the second: (x, y) → (−y, x).
TEST(ReferenceByHand, TurnsPairs) {
  const double frequencies[] = {std::numbers::pi / 2, 0};
  const float source[] = {1, 2, 3, 4, 5};
  std::vector<float> target(5);
  RotateKeysArgs args = {.rotation = {RopeStyle::kHalfSplit, 4, frequencies},
                         .delta = 1,
                         .rows = 1,
                         .dim = 5,
                         .source = source,
                         .target = target.data()};
  Runner runner(Reference());
  runner.Run(args);
  EXPECT_THAT(target, Pointwise(Near(), {-3.0f, 2.0f, 1.0f, 4.0f, 5.0f}));
  args.rotation.style = RopeStyle::kInterleaved;
  args.delta = -1;
  runner.Run(args);
  EXPECT_THAT(target, Pointwise(Near(), {2.0f, -1.0f, 3.0f, 4.0f, 5.0f}));
}

// Three tokens of two heads of one float, pages of two tokens, the sequence's pages at 2, 0 of the pool; the segment is
// at position 1: token 0 → page 2 slot 1, token 1 → page 0 slot 0, token 2 → page 0 slot 1.
TEST(ReferenceByHand, LandsInPages) {
  const float unit0[] = {1, 2, 3, 4}, unit1[] = {5, 6};
  const void* const units[] = {unit0, unit1};
  const int32_t page_table[] = {2, 0};
  std::vector<float> pool(12);
  LandArgs args = {.source = {.units = units, .unit_tokens = 2, .tokens = 3, .heads = 2, .dim = 1},
                   .target = {.base = pool.data(),
                              .page_stride = 4,
                              .token_stride = 2,
                              .head_stride = 1,
                              .page_tokens = 2,
                              .page_table = page_table},
                   .first_position = 1};
  Runner runner(Reference());
  runner.Run(args);
  EXPECT_THAT(pool, ElementsAre(3, 4, 5, 6, 0, 0, 0, 0, 0, 0, 1, 2));

  // Heads before tokens.
  pool.assign(12, 0);
  args.target.token_stride = 1;
  args.target.head_stride = 2;
  runner.Run(args);
  EXPECT_THAT(pool, ElementsAre(3, 5, 4, 6, 0, 0, 0, 0, 0, 1, 0, 2));

  std::vector<float> gathered0(4), gathered1(2);
  void* const gathered[] = {gathered0.data(), gathered1.data()};
  runner.Run(GatherArgs{.source = args.target,
                        .first_position = 1,
                        .units = gathered,
                        .unit_tokens = 2,
                        .tokens = 3,
                        .heads = 2,
                        .dim = 1});
  EXPECT_THAT(gathered0, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(gathered1, ElementsAre(5, 6));
}

}  // namespace
}  // namespace ashlar::kernels::testing
