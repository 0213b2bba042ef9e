// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/model_registry.h"

#include <gtest/gtest.h>

#include <memory>

namespace ashlar::daemon {
namespace {

std::shared_ptr<const Model> MakeModel(uint8_t ns, size_t frequencies = 0) {
  AttentionLayer layer;
  layer.rope.frequencies.resize(frequencies);
  Layout layout;
  layout.layers = {layer};
  auto model = std::make_shared<Model>(std::make_shared<const Layout>(std::move(layout)));
  model->ns.bytes.fill(ns);
  return model;
}

TEST(ModelRegistry, FindsWithinTheTenantTheLastOpenedFirst) {
  ModelRegistry registry;
  registry.Remember(1, MakeModel(7));
  registry.Remember(1, MakeModel(8));
  registry.Remember(1, MakeModel(7));
  EXPECT_EQ(registry.Find(1, MakeModel(7)->ns)->ns, MakeModel(7)->ns);
  EXPECT_EQ(registry.Find(2, MakeModel(7)->ns), nullptr);
  EXPECT_EQ(registry.Find(1, MakeModel(9)->ns), nullptr);
  const auto all = registry.List(1);
  ASSERT_EQ(all.size(), 2u) << "a model that is opened twice is one";
  EXPECT_EQ(all[0]->ns, MakeModel(7)->ns);
  EXPECT_EQ(registry.List(1, "\x08\x08").size(), 1u);
  EXPECT_TRUE(registry.List(2).empty());
}

TEST(ModelRegistry, ModelsAndLayoutsAreBounded) {
  ModelRegistry registry;
  for (size_t i = 0; i <= ModelRegistry::kModels; ++i) registry.Remember(1, MakeModel(static_cast<uint8_t>(i)));
  EXPECT_EQ(registry.List(1).size(), ModelRegistry::kModels);
  EXPECT_EQ(registry.Find(1, MakeModel(0)->ns), nullptr) << "the one that was opened longest ago";
  EXPECT_NE(registry.Find(1, MakeModel(1)->ns), nullptr);
  constexpr size_t kRest = 64 << 10;  // bytes of the layouts besides their tables
  const size_t half = (ModelRegistry::kLayoutBytes - 64 * kRest) / sizeof(double) / 2;
  registry.Remember(1, MakeModel(100, half));
  registry.Remember(1, MakeModel(101, half));
  EXPECT_EQ(registry.List(1).size(), ModelRegistry::kModels) << "both fit";
  registry.Remember(1, MakeModel(102, half));
  EXPECT_EQ(registry.List(1).size(), 2u);
  EXPECT_EQ(registry.Find(1, MakeModel(100)->ns), nullptr);
  registry.Remember(2, MakeModel(1));
  registry.Erase(1);
  EXPECT_TRUE(registry.List(1).empty());
  EXPECT_EQ(registry.List(2).size(), 1u);
}

}  // namespace
}  // namespace ashlar::daemon
