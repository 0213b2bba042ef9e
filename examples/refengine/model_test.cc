// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/model.h"

#include <gtest/gtest.h>

#include "examples/refengine/flops.h"
#include "examples/refengine/kv_pages.h"
#include "examples/refengine/tokenizer.h"
#include "kernels/host/thread_pool.h"

namespace ashlar::refengine {
namespace {

TEST(ModelTest, WeightsDependOnlyOnTheSeed) {
  const Model first(TinyConfig(7)), same(TinyConfig(7)), other(TinyConfig(8));
  EXPECT_EQ(first.identity(), same.identity());
  EXPECT_NE(first.identity().weights_digest, other.identity().weights_digest);
  EXPECT_TRUE(Validate(first.identity()).ok());
}

TEST(ModelTest, DeclaresItsLayout) {
  const Model model(TinyConfig(3, 2));
  const Layout layout = model.layout(8, 4, 64);
  ASSERT_TRUE(Validate(layout).ok()) << Validate(layout);
  EXPECT_EQ(layout.head, 8u);
  EXPECT_EQ(layout.tail, 4u);
  EXPECT_EQ(layout.page_tokens, 64u);
  ASSERT_EQ(layout.layers.size(), 8u);
  const auto& linear = std::get<LinearLayer>(layout.layers[0]);
  EXPECT_EQ(linear.conv_channels, 2u * 2 * 12 + 4 * 20);
  const auto& attention = std::get<AttentionLayer>(layout.layers[3]);
  EXPECT_EQ(attention.kv_heads, 2u);
  EXPECT_EQ(attention.rope.frequencies, model.frequencies());
  EXPECT_EQ(attention.rope.frequencies[0], 1.0);
  EXPECT_TRUE(std::holds_alternative<AttentionLayer>(layout.layers[7]));
  EXPECT_TRUE(std::holds_alternative<LinearLayer>(layout.layers[6]));
}

TEST(ModelTest, RefusesWhatIsInvalid) {
  ModelConfig config = TinyConfig(1);
  config.linear.value_heads = 3;
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(Model{config}, "linear.value_heads");
  config = TinyConfig(1);
  config.attention.rotary_dim = 7;
  EXPECT_DEATH(Model{config}, "attention.rotary_dim");
}

TEST(TokenizerTest, TextIsItsBytes) {
  const std::string text = "Fuge — seam\n";
  const std::vector<int32_t> tokens = Tokenize(text);
  EXPECT_EQ(tokens.size(), text.size());
  EXPECT_EQ(tokens[0], 'F');
  EXPECT_EQ(tokens[5], 0xE2);
  EXPECT_EQ(Detokenize(tokens), text);
  EXPECT_EQ(Detokenize(std::vector<int32_t>{kBeginToken, 'a', kSeparatorToken, 'b', kEndToken}), "ab");
}

TEST(KvPagesTest, GeometryAndSlotsAgreeWithoutOverlap) {
  const ModelConfig config = TinyConfig(1, 2);
  constexpr int32_t kPageTokens = 4, kPages = 3;
  std::vector<std::byte> memory(KvPages::RequiredBytes(config, kPageTokens, kPages));
  KvPages pool(config, kPageTokens, kPages, memory);
  const std::vector<int32_t> table = {2, 0, 1};
  std::vector<bool> taken(memory.size() / sizeof(float));
  for (int32_t layer = 0; layer < config.attention_layers(); ++layer) {
    const PagedLayerGeometry geometry = pool.Geometry(layer);
    EXPECT_EQ(geometry.layer, layer == 0 ? 3u : 7u);
    for (const bool values : {false, true}) {
      const kernels::PagedSlots slots = values ? pool.Values(layer, table.data()) : pool.Keys(layer, table.data());
      for (int32_t position = 0; position < kPageTokens * kPages; ++position) {
        for (int32_t head = 0; head < config.attention.kv_heads; ++head) {
          const uint64_t offset = (values ? geometry.value_offset : geometry.key_offset) +
                                  table[position / kPageTokens] * geometry.page_stride +
                                  position % kPageTokens * geometry.token_stride + head * geometry.head_stride;
          const float* slot = static_cast<const float*>(slots.base) +
                              slots.page_table[position / kPageTokens] * slots.page_stride +
                              position % kPageTokens * slots.token_stride + head * slots.head_stride;
          ASSERT_EQ(reinterpret_cast<const std::byte*>(slot), memory.data() + offset);
          for (int32_t i = 0; i < config.attention.head_dim; ++i) {
            const uint64_t index = offset / sizeof(float) + i;
            ASSERT_LT(index, taken.size());
            ASSERT_FALSE(taken[index]);
            taken[index] = true;
          }
        }
      }
    }
  }
}

TEST(KvPagesTest, HandsOutEachPageOnce) {
  const ModelConfig config = TinyConfig(1);
  std::vector<std::byte> memory(KvPages::RequiredBytes(config, 4, 2));
  KvPages pool(config, 4, 2, memory);
  const auto first = pool.Allocate(), second = pool.Allocate();
  ASSERT_TRUE(first && second);
  EXPECT_NE(*first, *second);
  EXPECT_FALSE(pool.Allocate());
  pool.Free(*first);
  EXPECT_EQ(pool.Allocate(), first);
}

TEST(KvPagesTest, RefusesMemoryThatIsTooSmall) {
  const ModelConfig config = TinyConfig(1);
  std::vector<std::byte> memory(KvPages::RequiredBytes(config, 4, 2) - 1);
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(KvPages(config, 4, 2, memory), "memory");
}

TEST(FlopsTest, CountsMatchTheFormulas) {
  const ModelConfig config = TinyConfig(1);
  // Three tokens from position 0, computed by hand. Linear layer: q, k, v, z, b, a from 40; convolution; 80 to 40.
  const double linear = 2 * (40 * (2 * 24 + 80 + 80 + 8) + 4 * 128 + 80 * 40);
  const double attention = 2 * (40 * (64 + 64 + 32 + 32) + 64 * 40);
  const double mlp = 2 * 3 * 40 * 72;
  const Flops flops = PrefillFlops(config, 3);
  EXPECT_EQ(flops.matrices, 3 * (3 * linear + attention + 4 * mlp) + 2 * 272 * 40);
  EXPECT_EQ(flops.attention, 4 * 16 * 4 * (1 + 2 + 3));
  EXPECT_EQ(flops.recurrence, 3 * 3 * 4 * 7 * 12 * 20);
  EXPECT_EQ(flops.composition, 0);

  // An interior costs its composition, and later tokens see its keys.
  const std::vector<CachedLayer> layers(config.layers());
  const std::vector<int32_t> tokens(2);
  const Step chain[] = {Step::Compute(tokens), Step::Cached(5, layers), Step::Compute(tokens)};
  const Flops seams = ChainFlops(config, 10, chain);
  EXPECT_EQ(seams.attention, 4 * 16 * 4 * (11 + 12 + 18 + 19));
  EXPECT_EQ(seams.composition, 3 * 4 * 2 * 12 * 12 * 20);
  EXPECT_EQ(seams.matrices, 4 * (3 * linear + attention + 4 * mlp) + 2 * 272 * 40);
}

TEST(FlopsTest, ThePeakIsPlausible) {
  kernels::ThreadPool one(1);
  const double peak = FmaPeak(one);
  EXPECT_GT(peak, 1e8);
  EXPECT_LT(peak, 1e12);  // one core: chains merged by the compiler would exceed it
}

}  // namespace
}  // namespace ashlar::refengine
