// SPDX-License-Identifier: Apache-2.0
#include "proto/difference.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <variant>

#include "proto/testing/sample_layouts.h"

namespace ashlar {
namespace {

TEST(Difference, NamesTheFirstFieldOfAnIdentityThatDiffers) {
  const Identity identity = ExampleIdentity();
  EXPECT_EQ(FirstDifference(identity, identity), std::nullopt);
  Identity other = identity;
  other.lora = "sha256:1";
  other.tokenizer_digest = identity.tokenizer_digest + "x";
  EXPECT_EQ(FirstDifference(identity, other),
            (Difference{"identity.tokenizer_digest", "\"" + identity.tokenizer_digest + "\"",
                        "\"" + other.tokenizer_digest + "\""}));
  other = identity;
  other.model_id = "";
  EXPECT_EQ(FirstDifference(other, identity)->field, "identity.model_id");
  EXPECT_EQ(FirstDifference(other, identity)->first, "\"\"");
}

// Layer 0 of the example is gdn with a convolution, layer 1 attention with RoPE.
TEST(Difference, NamesTheFieldOfALayout) {
  const Layout layout = ExampleLayout();
  EXPECT_EQ(FirstDifference(layout, layout), std::nullopt);
  const auto linear = [](Layout& l) -> LinearLayer& { return std::get<LinearLayer>(l.layers[0]); };
  const auto attention = [](Layout& l) -> AttentionLayer& { return std::get<AttentionLayer>(l.layers[1]); };
  const struct {
    const char* field;
    std::function<void(Layout&)> change;
    const char* second;
  } kCases[] = {
      {"layout.page_tokens", [](Layout& l) { l.page_tokens = 77; }, "77"},
      {"layout.tail", [](Layout& l) { l.tail = 99; }, "99"},
      {"layout.layers", [](Layout& l) { l.layers.pop_back(); }, "1"},
      {"layout.layers[0].type", [](Layout& l) { l.layers[0] = l.layers[1]; }, "attention"},
      {"layout.layers[0].conv_kernel", [&](Layout& l) { linear(l).conv_kernel = 9; }, "9"},
      {"layout.layers[0].conv_dtype", [&](Layout& l) { linear(l).conv_dtype = DType::kBF16; }, "3"},
      {"layout.layers[0].conv_order", [&](Layout& l) { linear(l).conv_order = TailOrder::kChannelFirst; }, "2"},
      {"layout.layers[0].decay_table", [&](Layout& l) { linear(l).decay_table.push_back(0.5f); }, "1 numbers"},
      {"layout.layers[1].scales", [&](Layout& l) { attention(l).scales = true; }, "true"},
      {"layout.layers[1].rope.scale", [&](Layout& l) { attention(l).rope.scale = 0.25; }, "0.25"},
      {"layout.layers[1].rope.frequencies[1]", [&](Layout& l) { attention(l).rope.frequencies[1] = 0.125; }, "0.125"},
      {"layout.layers[1].rope.frequencies", [&](Layout& l) { attention(l).rope.frequencies.clear(); }, "0 numbers"},
  };
  for (const auto& c : kCases) {
    Layout other = layout;
    c.change(other);
    const auto difference = FirstDifference(layout, other);
    ASSERT_TRUE(difference.has_value()) << c.field;
    EXPECT_EQ(difference->field, c.field);
    EXPECT_EQ(difference->second, c.second) << c.field;
    EXPECT_NE(difference->first, difference->second) << c.field;
    EXPECT_EQ(FirstDifference(other, layout)->field, c.field) << "either way round";
  }
}

TEST(Difference, IsEmptyOnlyForEqualLayouts) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100; ++i) {
    const Layout first = RandomLayout(random), second = RandomLayout(random);
    EXPECT_EQ(FirstDifference(first, first), std::nullopt);
    EXPECT_EQ(FirstDifference(first, second).has_value(), first != second);
  }
}

}  // namespace
}  // namespace ashlar
