// SPDX-License-Identifier: Apache-2.0
#include "client/engine/token_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace ashlar::engine {
namespace {

TEST(ReadyRows, NormalisesAndScalesLikeFp64) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::normal_distribution<float> number;
  const kernels::LinearShape shape{.heads = 6, .key_heads = 3, .d_k = 37, .d_v = 4};
  constexpr uint64_t kTokens = 5;
  constexpr int64_t kStride = 3 * 37 + 11;
  std::vector<float> q(kTokens * kStride), k(kTokens * kStride);
  for (float& x : q) x = 3 * number(random);
  for (float& x : k) x = 0.01f * number(random);
  for (const float epsilon : {0.0f, 1e-6f, 0.5f}) {
    for (const float scale : {0.0f, 0.25f}) {
      const ReadyRows ready(shape, {.tokens = kTokens,
                                    .q = q.data(),
                                    .k = k.data(),
                                    .q_stride = kStride,
                                    .k_stride = kStride,
                                    .norm_epsilon = epsilon,
                                    .q_scale = scale});
      const auto expect = [&](const std::vector<float>& given, const float* rows, int64_t stride, double factor) {
        for (int64_t t = 0; t < static_cast<int64_t>(kTokens); ++t) {
          for (int64_t h = 0; h < 3; ++h) {
            double sum = epsilon;
            for (int64_t i = 0; i < 37; ++i) sum += std::pow(double{given[t * kStride + h * 37 + i]}, 2);
            const double norm = epsilon > 0 ? 1 / std::sqrt(sum) : 1;
            for (int64_t i = 0; i < 37; ++i) {
              const double exact = given[t * kStride + h * 37 + i] * norm * factor;
              ASSERT_NEAR(rows[t * stride + h * 37 + i], exact, 1e-6 * std::abs(exact));
            }
          }
        }
      };
      expect(q, ready.rows().q, ready.rows().q_stride, scale == 0 ? 1 : scale);
      expect(k, ready.rows().k, ready.rows().k_stride, 1);
      EXPECT_EQ(ready.rows().k == k.data(), epsilon == 0) << "nothing is copied that stays as it is";
    }
  }
  const ReadyRows none(shape, {.tokens = 0, .norm_epsilon = 1e-6f});
  EXPECT_EQ(none.rows().k, nullptr);
}

TEST(ReadyRows, AreConsecutiveWithoutStride) {
  const kernels::LinearShape shape{.family = Family::kGdn, .heads = 6, .key_heads = 3, .d_k = 5, .d_v = 4};
  const float rows[1] = {};
  const TokenRows given{.tokens = 9, .q = rows, .k = rows, .v = rows, .g = rows, .beta = rows, .v_stride = -50};
  const ReadyRows ready(shape, given);
  EXPECT_EQ(ready.rows().q_stride, 15);
  EXPECT_EQ(ready.rows().k_stride, 15);
  EXPECT_EQ(ready.rows().v_stride, -50);
  EXPECT_EQ(ready.rows().g_stride, 6);
  EXPECT_EQ(ready.rows().beta_stride, 6);
}

}  // namespace
}  // namespace ashlar::engine
