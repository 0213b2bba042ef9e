// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/lifetimes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/testing/manual_clock.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class LifetimesTest : public ::testing::Test {
 protected:
  LifetimesTest() {
    for (ObjectId id = 1; id <= 3; ++id) {
      entries_[id - 1].id = id;
      entries_[id - 1].pool.tenant = 7;
    }
  }
  ~LifetimesTest() override {
    for (Entry& entry : entries_) lifetimes_.End(entry);
  }

  ManualClock clock_;
  Entry entries_[3];
  Lifetimes lifetimes_{clock_};
};

TEST_F(LifetimesTest, ListsExpiredObjectsTheLongestUnusedLast) {
  lifetimes_.SetTimeToLive(7, 100, {});
  for (Entry& entry : entries_) {
    lifetimes_.Used(entry);
    clock_.Advance(10);
  }
  lifetimes_.Used(entries_[0]);
  clock_.Advance(95);
  EXPECT_THAT(lifetimes_.Expired(), ElementsAre(3, 2));
  ++entries_[1].references;
  lifetimes_.Pin(entries_[2], 0);
  EXPECT_THAT(lifetimes_.Expired(), IsEmpty()) << "a referenced object and a pinned one";
  EXPECT_FALSE(lifetimes_.IsExpired(entries_[1]));
  lifetimes_.SetTimeToLive(7, 0, {});
  lifetimes_.Unpin(entries_[2]);
  EXPECT_THAT(lifetimes_.Expired(), IsEmpty());
}

TEST_F(LifetimesTest, SortsObjectsOlderThanTheTimeToLive) {
  entries_[0].last_used_at = 30;
  entries_[1].last_used_at = 10;
  entries_[2].last_used_at = 20;
  lifetimes_.SetTimeToLive(7, 100, {&entries_[0], &entries_[1], &entries_[2]});
  clock_.Advance(1000);
  EXPECT_THAT(lifetimes_.Expired(), ElementsAre(1, 3, 2));
  lifetimes_.End(entries_[2]);
  EXPECT_THAT(lifetimes_.Expired(), ElementsAre(1, 2));
}

TEST_F(LifetimesTest, ASecondPinReplacesTheFirst) {
  const Nanos now = clock_.Now();
  lifetimes_.Pin(entries_[0], now + 10);
  lifetimes_.Pin(entries_[0], now + 50);
  lifetimes_.Pin(entries_[1], 0);
  clock_.Advance(20);
  EXPECT_EQ(lifetimes_.EndedPin(), 0u);
  clock_.Advance(30);
  EXPECT_EQ(lifetimes_.EndedPin(), 1u);
  lifetimes_.Unpin(entries_[0]);
  EXPECT_EQ(lifetimes_.EndedPin(), 0u);
  EXPECT_FALSE(entries_[0].pinned);
  EXPECT_TRUE(entries_[1].pinned);
}

}  // namespace
}  // namespace ashlar::storage
