// SPDX-License-Identifier: Apache-2.0
#include "storage/history/bounded_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ashlar::storage {
namespace {

// Compares the table with a list, oldest first. Under any puts, replacements and erasures the oldest entries are
// dropped first, and no others.
TEST(BoundedTable, ErasesTheOldestFirst) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  constexpr size_t kEntries = 20;
  BoundedTable<uint64_t, uint64_t> table(kEntries);
  std::vector<std::pair<uint64_t, uint64_t>> model;
  for (uint64_t step = 1; step <= 5000; ++step) {
    const uint64_t key = random() % 50;
    std::erase_if(model, [&](const auto& item) { return item.first == key; });
    if (random() % 4 == 0) {
      table.Erase(key);
    } else {
      table.Put(key, step);
      if (model.size() == kEntries) model.erase(model.begin());
      model.emplace_back(key, step);
    }
    ASSERT_EQ(table.size(), model.size());
    for (uint64_t any = 0; any < 50; ++any) {
      const auto expected = std::ranges::find(model, any, [](const auto& item) { return item.first; });
      const uint64_t* value = table.Find(any);
      ASSERT_EQ(value != nullptr, expected != model.end()) << "step " << step << " key " << any;
      if (value != nullptr) {
        ASSERT_EQ(*value, expected->second);
      }
    }
  }
}

TEST(BoundedTable, ZeroCapacityKeepsNothing) {
  BoundedTable<uint64_t, uint64_t> table(0);
  table.Put(1, 2);
  EXPECT_EQ(table.Find(1), nullptr);
  EXPECT_EQ(table.size(), 0u);
}

}  // namespace
}  // namespace ashlar::storage
