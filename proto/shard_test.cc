// SPDX-License-Identifier: Apache-2.0
#include "proto/shard.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <random>

#include "proto/object.h"
#include "proto/testing/sample_layouts.h"

namespace ashlar {
namespace {

// Layer 0: mamba2 with a convolution over its keys, queries and values; layer 1: gqa.
Layout Whole() {
  LinearLayer linear{.family = Family::kMamba2,
                     .key_heads = 2,
                     .value_heads = 8,
                     .d_k = 4,
                     .d_v = 6,
                     .transition = TransitionForm::kScalar,
                     .conv_channels = 2 * 2 * 4 + 8 * 6,
                     .conv_kernel = 4};
  linear.decay_table.resize(8);
  std::iota(linear.decay_table.begin(), linear.decay_table.end(), 1.0f);
  const AttentionLayer attention{.kv_heads = 4, .key_dim = 16, .value_dim = 16};
  return {.page_tokens = 16, .head = 8, .tail = 4, .layers = {linear, attention}};
}

TEST(Shard, TheWholeModelIsItself) {
  std::mt19937_64 random(testing::UnitTest::GetInstance()->random_seed());
  const Layout layout = RandomLayout(random);
  EXPECT_EQ(*ShardLayout(layout, {}), layout);
}

TEST(Shard, HasItsHeadsOfEveryLayer) {
  const Layout whole = Whole();
  ASSERT_TRUE(Validate(whole).ok());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto shard = ShardLayout(whole, {.rank = rank, .size = 2});
    ASSERT_TRUE(shard.ok()) << shard.status();
    EXPECT_TRUE(Validate(*shard).ok()) << Validate(*shard);
    const auto& linear = std::get<LinearLayer>(shard->layers[0]);
    EXPECT_EQ(linear.key_heads, 1u);
    EXPECT_EQ(linear.value_heads, 4u);
    EXPECT_EQ(linear.conv_channels, 2u * 4 + 4 * 6);
    EXPECT_EQ(linear.decay_table, (rank == 0 ? std::vector<float>{1, 2, 3, 4} : std::vector<float>{5, 6, 7, 8}));
    EXPECT_EQ(std::get<AttentionLayer>(shard->layers[1]).kv_heads, 2u);
    EXPECT_EQ(shard->head, whole.head);
  }
}

TEST(Shard, HasItsPartOfOpaqueBytes) {
  Layout whole = Whole();
  whole.layers.push_back(OpaqueLayer{.token_bytes = 48, .state_bytes = 100});
  const auto shard = ShardLayout(whole, {.rank = 1, .size = 4});
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_EQ(std::get<OpaqueLayer>(shard->layers[2]), (OpaqueLayer{.token_bytes = 12, .state_bytes = 25}));
  const auto refused = ShardLayout(whole, {.rank = 0, .size = 8});
  EXPECT_EQ(refused.status().message(),
            "layout.layers[2].state_bytes: 100 is not divisible by 8 tensor-parallel shards");
}

TEST(Shard, FewerHeadsThanShardsAreShared) {
  const auto shard = ShardLayout(Whole(), {.rank = 7, .size = 8});
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_TRUE(Validate(*shard).ok());
  const auto& linear = std::get<LinearLayer>(shard->layers[0]);
  EXPECT_EQ(linear.key_heads, 1u);
  EXPECT_EQ(linear.value_heads, 1u);
  EXPECT_EQ(linear.conv_channels, 2u * 4 + 6);  // each has the key heads' channels
  EXPECT_EQ(std::get<AttentionLayer>(shard->layers[1]).kv_heads, 1u);
}

TEST(Shard, EveryShardHasTheLatent) {
  Layout whole = Whole();
  whole.layers[1] = AttentionLayer{.kind = AttentionKind::kMla, .kv_heads = 1, .key_dim = 32, .value_dim = 8};
  const auto shard = ShardLayout(whole, {.rank = 1, .size = 2});
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_EQ(shard->layers[1], whole.layers[1]);
}

TEST(Shard, AConvolutionOverAnythingElseIsDividedEvenly) {
  Layout whole = Whole();
  std::get<LinearLayer>(whole.layers[0]).conv_channels = 10;
  EXPECT_EQ(std::get<LinearLayer>(ShardLayout(whole, {.rank = 0, .size = 2})->layers[0]).conv_channels, 5u);
}

TEST(Shard, HeadsThatDoNotDivideAreRefusedByName) {
  const auto message = [](uint32_t size, const std::function<void(LinearLayer&, AttentionLayer&)>& change) {
    Layout whole = Whole();
    change(std::get<LinearLayer>(whole.layers[0]), std::get<AttentionLayer>(whole.layers[1]));
    const auto shard = ShardLayout(whole, {.rank = 0, .size = size});
    EXPECT_EQ(shard.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(shard.status().message());
  };
  const auto nothing = [](LinearLayer&, AttentionLayer&) {};
  EXPECT_EQ(message(3, nothing), "layout.layers[0].key_heads: 2 is not divisible by 3 tensor-parallel shards");
  EXPECT_EQ(message(16, nothing), "layout.layers[0].value_heads: 8 is not divisible by 16 tensor-parallel shards");
  EXPECT_EQ(message(4, [](LinearLayer&, AttentionLayer& attention) { attention.kv_heads = 6; }),
            "layout.layers[1].kv_heads: 6 is not divisible by 4 tensor-parallel shards");
  EXPECT_EQ(message(2, [](LinearLayer& linear, AttentionLayer&) { linear.conv_channels = 9; }),
            "layout.layers[0].conv_channels: 9 is not divisible by 2 tensor-parallel shards");
}

TEST(Shard, TravelsInTheHeader) {
  const Layout layout = *ShardLayout(Whole(), {.rank = 3, .size = 4});
  ObjectHeader header = *PlanObject(layout, {}, {}, ObjectKind::kSegment, 64);
  header.shard = {.rank = 3, .size = 4};
  EXPECT_EQ(*DecodeHeader(EncodeHeader(header)), header);
  header.shard = {.rank = 255, .size = 256};
  EXPECT_EQ(*DecodeHeader(EncodeHeader(header)), header);
  header.shard = {.rank = 4, .size = 4};
  EXPECT_EQ(DecodeHeader(EncodeHeader(header)).status().message(), "object header: tensor-parallel rank out of range");
}

}  // namespace
}  // namespace ashlar
