// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/extent_allocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;

TEST(ExtentAllocator, TakesBestFittingRun) {
  ExtentAllocator allocator;
  allocator.AddArena(0, 16);
  const auto all = allocator.Take(16);
  allocator.Give({0, 0, 6});
  allocator.Give({0, 8, 3});
  allocator.Give({0, 13, 3});
  EXPECT_THAT(allocator.Take(3), ElementsAre(ExtentRun{0, 8, 3}));
  EXPECT_THAT(allocator.Take(4), ElementsAre(ExtentRun{0, 0, 4}));
  EXPECT_EQ(allocator.free_extents(), 5u);
}

TEST(ExtentAllocator, WorksFromFragmentsLongestFirst) {
  ExtentAllocator allocator;
  allocator.AddArena(0, 8);
  allocator.AddArena(3, 8);
  (void)allocator.Take(16);
  allocator.Give({0, 1, 1});
  allocator.Give({0, 4, 2});
  allocator.Give({3, 0, 3});
  EXPECT_THAT(allocator.Take(6), ElementsAre(ExtentRun{3, 0, 3}, ExtentRun{0, 4, 2}, ExtentRun{0, 1, 1}));
  EXPECT_EQ(allocator.free_extents(), 0u);
}

TEST(ExtentAllocator, JoinsNeighboursButNotArenas) {
  ExtentAllocator allocator;
  allocator.AddArena(0, 4);
  allocator.AddArena(1, 4);
  (void)allocator.Take(8);
  allocator.Give({0, 0, 1});
  allocator.Give({0, 2, 2});
  allocator.Give({1, 0, 1});
  allocator.Give({0, 1, 1});
  EXPECT_THAT(allocator.Take(4), ElementsAre(ExtentRun{0, 0, 4}));
  EXPECT_THAT(allocator.Take(1), ElementsAre(ExtentRun{1, 0, 1}));
}

TEST(ExtentAllocator, TakeRunTakesExactExtents) {
  ExtentAllocator allocator;
  allocator.AddArena(0, 16);
  allocator.AddArena(1, 4);
  EXPECT_TRUE(allocator.TakeRun({0, 4, 3}));
  EXPECT_TRUE(allocator.TakeRun({0, 0, 1}));
  EXPECT_TRUE(allocator.TakeRun({0, 15, 1}));
  EXPECT_TRUE(allocator.TakeRun({1, 0, 4}));
  const uint64_t left = allocator.free_extents();
  EXPECT_EQ(left, 11u);
  EXPECT_FALSE(allocator.TakeRun({0, 3, 2}));
  EXPECT_FALSE(allocator.TakeRun({0, 6, 1}));
  EXPECT_FALSE(allocator.TakeRun({0, 14, 2}));
  EXPECT_FALSE(allocator.TakeRun({0, 20, 1}));
  EXPECT_FALSE(allocator.TakeRun({1, 3, 1}));
  EXPECT_FALSE(allocator.TakeRun({2, 0, 1}));
  EXPECT_EQ(allocator.free_extents(), left);
  EXPECT_THAT(allocator.Take(11), ElementsAre(ExtentRun{0, 7, 8}, ExtentRun{0, 1, 3}));
}

TEST(ExtentAllocatorDeathTest, RefusesToFreeAnExtentTwice) {
  ExtentAllocator allocator;
  allocator.AddArena(0, 8);
  (void)allocator.Take(8);
  allocator.Give({0, 2, 3});
  EXPECT_DEATH(allocator.Give({0, 4, 2}), "extent freed twice");
  EXPECT_DEATH(allocator.Give({0, 0, 3}), "extent freed twice");
  EXPECT_DEATH(allocator.Give({0, 2, 1}), "extent freed twice");
}

TEST(ExtentAllocator, NeverHandsOutAnExtentTwice) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  ExtentAllocator allocator;
  for (uint32_t arena = 0; arena < 4; ++arena) allocator.AddArena(arena, 32);
  std::set<std::pair<uint32_t, uint32_t>> taken;
  std::vector<std::vector<ExtentRun>> slots;
  for (int step = 0; step < 3000; ++step) {
    if (random() % 2 == 0) {
      const uint64_t extents = random() % (std::min<uint64_t>(allocator.free_extents(), 20) + 1);
      slots.push_back(allocator.Take(extents));
      uint64_t got = 0;
      for (const ExtentRun& run : slots.back()) {
        got += run.count;
        ASSERT_LE(run.first + run.count, 32u);
        for (uint32_t i = 0; i < run.count; ++i) ASSERT_TRUE(taken.emplace(run.arena, run.first + i).second);
      }
      ASSERT_EQ(got, extents);
    } else if (!slots.empty()) {
      std::swap(slots[random() % slots.size()], slots.back());
      for (const ExtentRun& run : slots.back()) {
        for (uint32_t i = 0; i < run.count; ++i) taken.erase({run.arena, run.first + i});
        allocator.Give(run);
      }
      slots.pop_back();
    }
    ASSERT_EQ(allocator.free_extents(), 4 * 32 - taken.size());
  }
}

}  // namespace
}  // namespace ashlar::storage
