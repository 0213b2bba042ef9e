// SPDX-License-Identifier: Apache-2.0
#include "client/session/landing.h"

#include <gtest/gtest.h>

namespace ashlar::internal {
namespace {

Layout LayersOf(const char* kinds) {
  Layout layout;
  for (; *kinds != 0; ++kinds) {
    if (*kinds == 'a') {
      layout.layers.push_back(AttentionLayer{});
    } else {
      layout.layers.push_back(LinearLayer{});
    }
  }
  return layout;
}

TEST(AttentionLayers, LinearLayersFinishWithTheNextAttentionLayer) {
  const AttentionLayers hybrid(LayersOf("lllalla"));
  EXPECT_EQ(hybrid.CountFor(0), 0u);
  for (const uint32_t layers : {1, 2, 3, 4}) EXPECT_EQ(hybrid.CountFor(layers), 1u) << layers;
  for (const uint32_t layers : {5, 6, 7}) EXPECT_EQ(hybrid.CountFor(layers), 2u) << layers;
}

TEST(AttentionLayers, LayersAfterTheLastAttentionLayerFinishWithTheVerdict) {
  const AttentionLayers tail(LayersOf("aal"));
  EXPECT_EQ(tail.CountFor(1), 1u);
  EXPECT_EQ(tail.CountFor(2), 2u);
  EXPECT_EQ(tail.CountFor(3), UINT32_MAX);
  EXPECT_EQ(AttentionLayers(LayersOf("ll")).CountFor(1), UINT32_MAX) << "no attention at all";
}

}  // namespace
}  // namespace ashlar::internal
