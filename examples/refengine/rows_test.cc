// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "examples/refengine/matrix.h"
#include "kernels/host/thread_pool.h"

namespace ashlar::refengine {
namespace {

// Lengths around every vector width, so that whole vectors and rests are both met.
constexpr int64_t kLengths[] = {1, 3, 4, 7, 8, 16, 17, 33, 70};

double Sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

class RowsTest : public testing::Test {
 protected:
  RowsTest() : seed_(std::random_device()()), trace_(__FILE__, __LINE__, ::testing::Message() << "seed " << seed_) {}

  std::vector<float> Random(int64_t count, float deviation = 2.0f) {
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return values;
  }

  uint32_t seed_;
  testing::ScopedTrace trace_;
  std::mt19937 random_{seed_};
};

TEST_F(RowsTest, Norms) {
  for (const int64_t n : kLengths) {
    const std::vector<float> x = Random(n), weight = Random(n), z = Random(n);
    std::vector<float> norm(n), gated(n), unit = x;
    RmsNorm(x.data(), weight.data(), 1e-6f, n, norm.data());
    GatedRmsNorm(x.data(), z.data(), weight.data(), 1e-6f, n, gated.data());
    L2Normalize(unit.data(), 0.5f, n);
    double square = 0;
    for (const float value : x) square += double{value} * value;
    for (int64_t i = 0; i < n; ++i) {
      const double expected = x[i] / std::sqrt(square / n + 1e-6) * weight[i];
      EXPECT_NEAR(norm[i], expected, 1e-5 * (1 + std::abs(expected)));
      EXPECT_NEAR(gated[i], expected * z[i] * Sigmoid(z[i]), 1e-5 * (1 + std::abs(expected * z[i])));
      EXPECT_NEAR(unit[i], 0.5 * x[i] / std::sqrt(square + 1e-6), 1e-6);
    }
  }
}

TEST_F(RowsTest, Activations) {
  for (const int64_t n : kLengths) {
    const std::vector<float> gate = Random(n, 10), up = Random(n);
    std::vector<float> swiglu(n), gated = up;
    SwiGlu(gate.data(), up.data(), n, swiglu.data());
    SigmoidGate(gated.data(), gate.data(), 3.0f, n);
    for (int64_t i = 0; i < n; ++i) {
      const double sigmoid = Sigmoid(gate[i]);
      EXPECT_NEAR(swiglu[i], gate[i] * sigmoid * up[i], 1e-5 * (1 + std::abs(gate[i] * up[i])));
      EXPECT_NEAR(gated[i], 3 * up[i] * sigmoid, 1e-5 * (1 + std::abs(up[i])));
    }
  }
  // Far from 0 the exponential overflows on one side: the result is 0 or the input, never NaN.
  float extreme[] = {-200, 200}, ones[] = {1, 1};
  SwiGlu(extreme, ones, 2, extreme);
  EXPECT_NEAR(extreme[0], 0, 1e-30);
  EXPECT_EQ(extreme[1], 200);
}

TEST_F(RowsTest, Convolution) {
  for (const int64_t channels : kLengths) {
    constexpr int32_t kKernel = 4;
    const std::vector<float> inputs = Random(kKernel * channels), weight = Random(kKernel * channels);
    const float* rows[kKernel];
    for (int32_t j = 0; j < kKernel; ++j) rows[j] = inputs.data() + j * channels;
    std::vector<float> out(channels);
    ConvolveSilu(rows, weight.data(), kKernel, channels, out.data());
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int32_t j = 0; j < kKernel; ++j) sum += double{weight[j * channels + c]} * inputs[j * channels + c];
      EXPECT_NEAR(out[c], sum * Sigmoid(sum), 1e-4);
    }
  }
}

TEST_F(RowsTest, SoftmaxOverBlocksIsSoftmax) {
  for (const int64_t n : kLengths) {
    constexpr int64_t kBlock = 8;
    std::vector<float> scores = Random(n, 20);
    double expected_sum = 0;
    for (const float score : scores) expected_sum += std::exp(double{score});
    std::vector<float> weights(n);
    float max = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t first = 0; first < n; first += kBlock) {
      float block[kBlock + 2];
      const int64_t visible = std::min(kBlock, n - first);
      std::copy_n(scores.begin() + first, visible, block);
      block[visible] = block[visible + 1] = 1e9f;  // not visible
      const float rescale = OnlineSoftmax(block, visible, visible + 2, max, sum);
      EXPECT_EQ(block[visible], 0);
      EXPECT_EQ(block[visible + 1], 0);
      for (int64_t i = 0; i < first; ++i) weights[i] *= rescale;
      std::copy_n(block, visible, weights.begin() + first);
    }
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_NEAR(weights[i] / sum, std::exp(double{scores[i]}) / expected_sum, 1e-5);
    }
  }
}

TEST_F(RowsTest, AnInvisibleBlockChangesNothing) {
  float scores[] = {1, 2, 3}, max = 4, sum = 5;
  EXPECT_EQ(OnlineSoftmax(scores, 0, 3, max, sum), 1);
  EXPECT_EQ(max, 4);
  EXPECT_EQ(sum, 5);
  EXPECT_EQ(scores[0], 0);
}

TEST_F(RowsTest, MatrixProducts) {
  kernels::ThreadPool threads(3);
  for (const auto [m, n, k] :
       {std::array<int64_t, 3>{1, 5, 7}, {1, 90, 64}, {37, 19, 23}, {90, 33, 130}, {20, 400, 50}}) {
    for (const bool transposed : {false, true}) {
      const int64_t a_stride = k + 3, b_stride = (transposed ? k : n) + 5, c_stride = n + 2;
      const std::vector<float> a = Random(m * a_stride), b = Random((transposed ? n : k) * b_stride);
      const std::vector<float> before = Random(m * c_stride);
      std::vector<float> serial = before, parallel = before;
      MatMulArgs args{.m = m,
                      .n = n,
                      .k = k,
                      .a = a.data(),
                      .a_stride = a_stride,
                      .b = b.data(),
                      .b_stride = b_stride,
                      .b_transposed = transposed,
                      .c = serial.data(),
                      .c_stride = c_stride,
                      .scale = 0.5f,
                      .accumulate = true};
      MatMul(args);
      args.c = parallel.data();
      MatMul(args, threads);
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < c_stride; ++j) {
          double expected = before[i * c_stride + j];
          for (int64_t x = 0; j < n && x < k; ++x) {
            expected += 0.5 * a[i * a_stride + x] * b[transposed ? j * b_stride + x : x * b_stride + j];
          }
          ASSERT_NEAR(serial[i * c_stride + j], expected, 1e-3) << i << ", " << j;
          ASSERT_NEAR(parallel[i * c_stride + j], expected, 1e-3) << i << ", " << j;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ashlar::refengine
