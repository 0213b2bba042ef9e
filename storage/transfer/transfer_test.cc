// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/transfer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "storage/testing/engine.h"

namespace ashlar::storage {
namespace {

class FitsTest : public ::testing::Test {
 protected:
  const ObjectHeader plan_ = TestPlan(1, 64);
  PublishSource source_ = TestSource(plan_, 1);
  TestPages pages_{8};
  LandTarget target_ = TestTarget(pages_, {});
};

TEST_F(FitsTest, AcceptsMatchingParts) {
  EXPECT_TRUE(Fits(source_, plan_));
  EXPECT_TRUE(Fits(target_, plan_, {.first_position = 0}));
  EXPECT_TRUE(Fits(target_, plan_, {.first_position = 8 * 16 - 60})) << "the last stored token fills the last page";
}

TEST_F(FitsTest, RefusesASourceWithAMissingPart) {
  for (size_t i = 0; i < source_.tensors.size(); ++i) {
    PublishSource without = source_;
    without.tensors.erase(without.tensors.begin() + static_cast<ptrdiff_t>(i));
    EXPECT_FALSE(Fits(without, plan_)) << "tensor " << i;
    without = source_;
    without.tensors[i].data = nullptr;
    EXPECT_FALSE(Fits(without, plan_)) << "tensor " << i;
  }
  PublishSource without = source_;
  without.rows.pop_back();
  EXPECT_FALSE(Fits(without, plan_));
}

TEST_F(FitsTest, RefusesOtherShapes) {
  const auto refused = [&](auto change) {
    PublishSource source = source_;
    LandTarget target = target_;
    change(source.rows[1]);
    change(target.rows[1]);
    return !Fits(source, plan_) && !Fits(target, plan_, {.first_position = 0});
  };
  EXPECT_TRUE(refused([](PagedRows& rows) { rows.heads = 1; }));
  EXPECT_TRUE(refused([](PagedRows& rows) { rows.heads = -2; }));
  EXPECT_TRUE(refused([](PagedRows& rows) { rows.key_dim *= 2; }));
  EXPECT_TRUE(refused([](PagedRows& rows) { rows.value_dim = 0; }));
  EXPECT_TRUE(refused([](PagedRows& rows) { rows.layer = 0; }));
  EXPECT_TRUE(refused([](PagedRows& rows) { rows.keys.base = nullptr; }));
  EXPECT_TRUE(refused([](PagedRows& rows) { rows.values.page_tokens = 0; }));
  EXPECT_TRUE(refused([](PagedRows& rows) { rows.keys.dtype = DType::kBF16; }));
  EXPECT_TRUE(refused([](PagedRows& rows) { rows.values.scales = static_cast<float*>(rows.values.base); }));
}

// Each layer may have a separate page table, which is a part of the transfer's.
TEST_F(FitsTest, AcceptsOnlyPartsOfThePageTable) {
  const auto from = [](size_t begin, LandTarget& target, const std::vector<int32_t>& table) {
    for (PagedRows& rows : target.rows) rows.keys.page_table = rows.values.page_table = table.data() + begin;
  };
  for (const size_t begin : {0, 5}) {
    LandTarget target = target_;
    from(begin, target, target.page_table);
    const LandTarget moved = std::move(target);
    EXPECT_EQ(Fits(moved, plan_, {.first_position = 64}), begin == 0) << "too few are left";
  }
  LandTarget other = target_;
  from(0, other, target_.page_table);
  EXPECT_FALSE(Fits(other, plan_, {.first_position = 0})) << "of another table";
  from(0, other, other.page_table);
  other.rows[0].keys.page_table = nullptr;
  EXPECT_FALSE(Fits(other, plan_, {.first_position = 0})) << "keys and values lie in the same pages";
}

TEST_F(FitsTest, RefusesToLandOnlySomeLayers) {
  LandTarget fewer = target_;
  fewer.rows.pop_back();
  EXPECT_FALSE(Fits(fewer, plan_, {.first_position = 0}));
}

TEST_F(FitsTest, RefusesAPageTableThatIsTooShort) {
  EXPECT_FALSE(Fits(target_, plan_, {.first_position = 8 * 16 - 59}));
  EXPECT_FALSE(Fits(target_, plan_, {.first_position = UINT64_MAX - 10})) << "positions that overflow";
  auto shorter = *source_.page_table;
  shorter.pop_back();
  source_.page_table = std::make_shared<std::vector<int32_t>>(std::move(shorter));
  EXPECT_FALSE(Fits(source_, plan_));
}

}  // namespace
}  // namespace ashlar::storage
