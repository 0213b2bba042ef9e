// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/compute_cost.h"

#include <gtest/gtest.h>

#include "proto/prefix.h"

namespace ashlar::storage {
namespace {

// The published shapes of Llama-3.1-8B, and of Qwen3-Next-80B with its three billion active parameters.
Layout Llama() {
  const AttentionLayer attention{.kv_heads = 8, .key_dim = 128, .value_dim = 128, .dtype = DType::kBF16};
  return {.page_tokens = 16, .layers = std::vector<Layer>(32, attention)};
}
Layout Qwen() {
  const AttentionLayer attention{.kv_heads = 2, .key_dim = 256, .value_dim = 256, .dtype = DType::kBF16};
  const LinearLayer linear{
      .key_heads = 16, .value_heads = 32, .d_k = 128, .d_v = 128, .conv_channels = 8192, .conv_kernel = 4};
  Layout layout{.page_tokens = 16, .head = 3};
  for (int layer = 0; layer < 48; ++layer) {
    layout.layers.push_back(layer % 4 == 3 ? Layer(attention) : Layer(linear));
  }
  return layout;
}

TEST(ComputeCost, UsesTheDeclaredCost) {
  const ComputeCost cost = CostOf({.flops_per_token = 7, .flops_per_square = 0}, Llama(), {});
  EXPECT_EQ(cost.flops_per_token, 7);
  EXPECT_EQ(cost.flops_per_square, 0);
  EXPECT_EQ((ComputeCost{.flops_per_token = 7, .flops_per_square = 2}.Flops(10, 20)), 70 + 2 * 300);
}

TEST(ComputeCost, EstimateIsNearPublishedModels) {
  const ComputeCost llama = CostOf({}, Llama(), {}), qwen = CostOf({}, Qwen(), {});
  EXPECT_GT(llama.flops_per_token, 1.6e10 / 3);
  EXPECT_LT(llama.flops_per_token, 1.6e10 * 3);
  EXPECT_EQ(llama.flops_per_square, 2.0 * 32 * 4096) << "all layers attend";
  EXPECT_GT(qwen.flops_per_token, 6e9 / 3);
  EXPECT_LT(qwen.flops_per_token, 6e9 * 3);
  EXPECT_EQ(qwen.flops_per_square, 2.0 * 12 * 2048) << "linear layers cost the same at every depth";
}

TEST(ComputeCost, OpaqueLayersCountWithTheWidthOfOtherLayers) {
  Layout layout = Llama();
  const ComputeCost without = CostOf({}, layout, {});
  layout.layers.push_back(OpaqueLayer{.token_bytes = 1 << 16, .state_bytes = 1 << 20});
  const ComputeCost with = CostOf({}, layout, {});
  EXPECT_DOUBLE_EQ(with.flops_per_token, without.flops_per_token * 33 / 32);
  EXPECT_EQ(with.flops_per_square, without.flops_per_square);
}

// Otherwise a model with opaque layers would lose its objects to every other model.
TEST(ComputeCost, OpaqueLayersAloneHaveAUsualWidth) {
  const Layout layout{.page_tokens = 16, .layers = std::vector<Layer>(32, OpaqueLayer{.state_bytes = 1 << 16})};
  const ComputeCost cost = CostOf({}, layout, {});
  EXPECT_DOUBLE_EQ(cost.flops_per_token, 32 * 24.0 * 4096 * 4096);
  EXPECT_EQ(cost.flops_per_square, 0);
  const uint32_t block = PrefixBlockTokens(layout);
  const ObjectHeader checkpoint = *PlanPrefixCheckpoint(layout, {}, {}, block, 10 * block);
  EXPECT_NEAR(EstimateSavedFlops(checkpoint) / cost.Flops(10 * block), 1, 1e-9) << "as a restart finds it";
}

TEST(ComputeCost, EstimateOfAShardIsTheWholeModels) {
  const TensorShard shard{.rank = 1, .size = 2};
  const ComputeCost whole = CostOf({}, Qwen(), {}), part = CostOf({}, *ShardLayout(Qwen(), shard), shard);
  EXPECT_EQ(part.flops_per_token, whole.flops_per_token);
  EXPECT_EQ(part.flops_per_square, whole.flops_per_square);
}

// A restart finds only headers. Estimates from them are close to those from the layout.
TEST(ComputeCost, EstimatesFromHeadersMatchTheLayout) {
  const uint32_t block = PrefixBlockTokens(Qwen());
  const ComputeCost cost = CostOf({}, Qwen(), {});
  const ObjectHeader rows = *PlanPrefixBlock(Qwen(), {}, {}, block, 10 * block);
  EXPECT_NEAR(EstimateSavedFlops(rows) / cost.Flops(9 * block, 10 * block), 1, 0.1) << "of its own tokens";
  const ObjectHeader checkpoint = *PlanPrefixCheckpoint(Qwen(), {}, {}, block, 10 * block + 7);
  EXPECT_NEAR(EstimateSavedFlops(checkpoint) / cost.Flops(10 * block + 7), 1, 0.1);
  const ObjectHeader segment = *PlanObject(Qwen(), {}, {}, ObjectKind::kSegment, 500);
  EXPECT_NEAR(EstimateSavedFlops(segment) / cost.Flops(500), 1, 0.1);
  const ObjectHeader states = *PlanPrefixCheckpoint(Qwen(), {}, {}, block, 10 * block);
  EXPECT_NEAR(EstimateSavedFlops(states) / cost.Flops(10 * block), 4, 1) << "only the linear layers can be seen";
  EXPECT_EQ(EstimateSavedFlops({}), 0);
}

}  // namespace
}  // namespace ashlar::storage
