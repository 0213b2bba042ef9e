// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/segment_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ashlar::storage {
namespace {

Entry MakeEntry(TenantId tenant, uint8_t key) {
  Entry entry;
  entry.pool = {tenant};
  entry.header.key.bytes.fill(key);
  return entry;
}

TEST(SegmentTable, FindsWithinTheTenantOnly) {
  SegmentTable table;
  Entry mine = MakeEntry(1, 7), theirs = MakeEntry(2, 7);
  table.Insert(mine);
  EXPECT_EQ(table.Find(1, mine.header.key), &mine);
  EXPECT_EQ(table.Find(2, mine.header.key), nullptr);
  table.Insert(theirs);
  EXPECT_EQ(table.Find(1, mine.header.key), &mine);
  EXPECT_EQ(table.Find(2, mine.header.key), &theirs);
}

TEST(SegmentTable, DoesNotFindRemovedSegments) {
  SegmentTable table;
  Entry mine = MakeEntry(1, 7), theirs = MakeEntry(2, 7);
  table.Insert(mine);
  table.Insert(theirs);
  table.Remove(mine);
  EXPECT_EQ(table.Find(1, mine.header.key), nullptr);
  EXPECT_EQ(table.Find(2, mine.header.key), &theirs);
}

TEST(SegmentTable, SeparatesShards) {
  SegmentTable table;
  Entry whole = MakeEntry(1, 7), first = MakeEntry(1, 7), second = MakeEntry(1, 7), of_four = MakeEntry(1, 7);
  first.header.shard = {.rank = 0, .size = 2};
  second.header.shard = {.rank = 1, .size = 2};
  of_four.header.shard = {.rank = 1, .size = 4};
  const Key& key = whole.header.key;
  for (Entry* entry : {&second, &of_four, &first}) table.Insert(*entry);
  EXPECT_EQ(table.Find(1, key), nullptr);
  table.Insert(whole);
  EXPECT_EQ(table.Find(1, key), &whole);
  EXPECT_EQ(table.Find(1, key, {.rank = 1, .size = 2}), &second);
  EXPECT_EQ(table.Find(1, key, {.rank = 0, .size = 4}), nullptr);
  EXPECT_EQ(table.Find(2, key, {.rank = 1, .size = 2}), nullptr);
  EXPECT_THAT(table.Bundle(1, key, 2), testing::ElementsAre(&second, &first));
  EXPECT_THAT(table.All(1, key), testing::ElementsAre(&whole, &second, &of_four, &first));
  table.Remove(second);
  EXPECT_THAT(table.Bundle(1, key, 2), testing::ElementsAre(&first));
  for (Entry* entry : {&first, &of_four, &whole}) table.Remove(*entry);
  EXPECT_TRUE(table.All(1, key).empty());
}

}  // namespace
}  // namespace ashlar::storage
