#include "storage/index/segment_table.h"

#include <gtest/gtest.h>

namespace ashlar::storage {
namespace {

Entry MakeEntry(TenantId tenant, uint8_t key) {
  Entry entry{.group = {tenant}};
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

TEST(SegmentTable, FindsNothingThatWasRemoved) {
  SegmentTable table;
  Entry mine = MakeEntry(1, 7), theirs = MakeEntry(2, 7);
  table.Insert(mine);
  table.Insert(theirs);
  table.Remove(mine);
  EXPECT_EQ(table.Find(1, mine.header.key), nullptr);
  EXPECT_EQ(table.Find(2, mine.header.key), &theirs);
}

}  // namespace
}  // namespace ashlar::storage
