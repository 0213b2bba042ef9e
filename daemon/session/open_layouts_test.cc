// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/open_layouts.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/session/pages.h"
#include "daemon/testing/test_engine.h"

namespace ashlar::daemon {
namespace {

std::shared_ptr<Budget> BudgetOf(uint64_t bytes) {
  return std::make_shared<Budget>("a tenant", "bytes of models", bytes);
}

// A layout whose tables take `heads` × 256 KiB.
Layout WithTables(uint32_t heads) {
  Layout layout{.page_tokens = 16, .head = 0, .tail = 0, .layers = {}};
  LinearLayer layer{.family = Family::kMamba1, .key_heads = heads, .value_heads = heads, .d_k = 256, .d_v = 256};
  layer.decay_table.assign(size_t{heads} * 256 * 256, -1.0F);
  layer.transition = TransitionForm::kElementwise;
  layout.layers.push_back(layer);
  return layout;
}

v1::OpenModelRequest RequestOf(const Layout& layout, uint32_t rank = 0, uint32_t size = 1) {
  v1::OpenModelRequest request;
  request.set_identity(EncodeIdentity(SmallIdentity()));
  request.set_layout(EncodeLayout(layout));
  request.mutable_shard()->set_tensor_parallel_rank(rank);
  request.mutable_shard()->set_tensor_parallel_size(size);
  request.mutable_prefixes();
  return request;
}

TEST(OpenLayouts, AreSharedWhileInUse) {
  OpenLayouts layouts;
  const NamespaceId ns = MakeNamespace("t", SmallIdentity(), SmallLayout());
  auto charge = std::make_shared<int>();
  std::weak_ptr<int> charged = charge;
  auto first = layouts.Share(ns, {}, SmallLayout(), std::move(charge));
  EXPECT_EQ(layouts.Find(ns, {}), first);
  EXPECT_EQ(layouts.Find(ns, {.rank = 1, .size = 2}), nullptr);
  EXPECT_EQ(layouts.Share(ns, {}, SmallLayout(), nullptr), first) << "two came at once";
  first = nullptr;
  EXPECT_EQ(layouts.Find(ns, {}), nullptr);
  EXPECT_TRUE(charged.expired());
  layouts.Share({}, {}, SmallLayout(), nullptr);
  EXPECT_EQ(layouts.size(), 1u) << "a layout without holders is removed";
}

TEST(OpenLayouts, ChargesTablesOncePerModel) {
  constexpr uint64_t kTables = uint64_t{4} * 256 * 1024;
  OpenLayouts layouts;
  const auto budget = BudgetOf(64 << 20);
  const v1::OpenModelRequest request = RequestOf(WithTables(4));
  std::vector<std::shared_ptr<const Model>> models;
  for (int i = 0; i < 5; ++i) models.push_back(*Model::Open("t", request, layouts, budget));
  EXPECT_EQ(&models[0]->layout, &models[4]->layout);
  EXPECT_EQ(models[0]->prefixes->layout.get(), &models[0]->layout);
  EXPECT_GE(budget->taken(), kTables);
  EXPECT_LT(budget->taken(), kTables + (64 << 10));
  models.push_back(*Model::Open("t", RequestOf(WithTables(4), 1, 2), layouts, budget));
  EXPECT_GE(budget->taken(), kTables + kTables / 2);
  EXPECT_LT(budget->taken(), kTables + kTables / 2 + (64 << 10)) << "a shard's part alone";
  models.clear();
  EXPECT_EQ(budget->taken(), 0u);
}

// Tenants do not share models, even equal ones.
TEST(OpenLayouts, AreNotSharedBetweenTenants) {
  OpenLayouts layouts;
  const v1::OpenModelRequest request = RequestOf(SmallLayout());
  const auto model = *Model::Open("t", request, layouts, BudgetOf(1 << 20));
  const auto other = *Model::Open("u", request, layouts, BudgetOf(1 << 20));
  EXPECT_NE(&model->layout, &other->layout);
  EXPECT_EQ(model->ns, MakeNamespace("t", SmallIdentity(), SmallLayout()));
}

TEST(OpenLayouts, BeyondTheBudgetAreRefusedAndChargeNothing) {
  OpenLayouts layouts;
  const v1::OpenModelRequest request = RequestOf(WithTables(4));
  for (const uint64_t bytes : {uint64_t{1} << 20, uint64_t{5} << 19}) {  // not to be read; read, but not to be kept
    const auto budget = BudgetOf(bytes);
    const absl::Status refused = Model::Open("t", request, layouts, budget).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(refused.message(), absl::StrCat("layout: a tenant has at most ", bytes, " bytes of models"));
    EXPECT_EQ(budget->taken(), 0u);
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// The charge equals the heap's bytes.
TEST(OpenLayouts, AreCharged) {
  Layout many = SmallLayout();
  while (many.layers.size() < 1024) many.layers.push_back(many.layers[many.layers.size() % 2]);
  for (const Layout& layout : {SmallLayout(), many, WithTables(3)}) {
    OpenLayouts layouts;
    const auto budget = BudgetOf(64 << 20);
    std::vector<std::shared_ptr<const Model>> models;
    std::vector<v1::OpenModelRequest> requests(20, RequestOf(layout));
    for (size_t i = 0; i < requests.size(); ++i) {
      Identity identity = SmallIdentity();
      identity.lora = std::to_string(i);
      requests[i].set_identity(EncodeIdentity(identity));
    }
    models.reserve(requests.size());
    {
      const auto first = Model::Open("t", requests[0], layouts, budget);
    }  // the libraries build their tables on first use
    const struct mallinfo2 before = mallinfo2();
    for (const v1::OpenModelRequest& request : requests) models.push_back(*Model::Open("t", request, layouts, budget));
    const struct mallinfo2 after = mallinfo2();
    const uint64_t taken = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd;
    EXPECT_GE(budget->taken(), taken) << layout.layers.size();
    EXPECT_LE(budget->taken(), taken + taken / 4 + 20 * 1024);
  }
}
#endif

}  // namespace
}  // namespace ashlar::daemon
