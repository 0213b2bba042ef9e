#include "storage/index/segment_table.h"

#include <gtest/gtest.h>

namespace ashlar::storage {
namespace {

Entry MakeEntry(TenantId tenant, uint8_t key) {
  Entry entry{.tenant = tenant};
  entry.header.key.bytes.fill(key);
  return entry;
}

TEST(SegmentTable, FindsWithinTheTenantOnly) {
  SegmentTable table(8);
  Entry mine = MakeEntry(1, 7), theirs = MakeEntry(2, 7);
  table.Insert(mine);
  EXPECT_EQ(table.Find(1, mine.header.key), &mine);
  EXPECT_EQ(table.Find(2, mine.header.key), nullptr);
  table.Insert(theirs);
  EXPECT_EQ(table.Find(1, mine.header.key), &mine);
  EXPECT_EQ(table.Find(2, mine.header.key), &theirs);
}

TEST(SegmentTable, RemembersWhyAKeyIsGone) {
  SegmentTable table(8);
  Entry entry = MakeEntry(1, 7);
  EXPECT_EQ(table.WhyGone(1, entry.header.key), MissReason::kNeverSeen);
  for (const MissReason why : {MissReason::kEvicted, MissReason::kChecksumFailed, MissReason::kAbandoned}) {
    table.Insert(entry);
    EXPECT_EQ(table.WhyGone(1, entry.header.key), MissReason::kNeverSeen) << "it is not gone now";
    table.Remove(entry, why);
    EXPECT_EQ(table.Find(1, entry.header.key), nullptr);
    EXPECT_EQ(table.WhyGone(1, entry.header.key), why);
    EXPECT_EQ(table.WhyGone(2, entry.header.key), MissReason::kNeverSeen);
  }
}

TEST(SegmentTable, ForgetsTheOldestGhostsFirst) {
  SegmentTable table(2);
  Entry entries[] = {MakeEntry(1, 1), MakeEntry(1, 2), MakeEntry(1, 3)};
  for (Entry& entry : entries) {
    table.Insert(entry);
    table.Remove(entry, MissReason::kEvicted);
  }
  EXPECT_EQ(table.WhyGone(1, entries[0].header.key), MissReason::kNeverSeen);
  EXPECT_EQ(table.WhyGone(1, entries[1].header.key), MissReason::kEvicted);
  EXPECT_EQ(table.WhyGone(1, entries[2].header.key), MissReason::kEvicted);

  SegmentTable forgetful(0);
  forgetful.Insert(entries[0]);
  forgetful.Remove(entries[0], MissReason::kEvicted);
  EXPECT_EQ(forgetful.WhyGone(1, entries[0].header.key), MissReason::kNeverSeen);
}

}  // namespace
}  // namespace ashlar::storage
