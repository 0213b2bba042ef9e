// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/disk_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "storage/testing/executors.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;

class DiskQueueTest : public ::testing::Test {
 protected:
  // Notes its pieces as "a0", "a1" … and its end as "a" or "a: error".
  bool TryRun(const std::string& name, size_t pieces, size_t failing = SIZE_MAX) {
    return queue_.TryRun(/*tenant=*/1, pieces, Work(name, failing), Done(name));
  }
  DiskQueue::Work Work(const std::string& name, size_t failing = SIZE_MAX) {
    return [=, this](size_t piece) {
      story_.push_back(name + std::to_string(piece));
      return piece == failing ? absl::DataLossError("error") : absl::OkStatus();
    };
  }
  DiskQueue::Done Done(const std::string& name) {
    return [=, this](const absl::Status& s) { story_.push_back(s.ok() ? name : name + ": error"); };
  }

  ManualExecutor io_{/*capacity=*/3};
  DiskQueue queue_{io_, /*pieces_in_flight=*/2};
  std::vector<std::string> story_;
};

TEST_F(DiskQueueTest, EndsOnceAllPiecesHaveEnded) {
  ASSERT_TRUE(TryRun("a", 3));
  EXPECT_EQ(io_.pending(), 2u);
  io_.Complete(1);
  io_.CompleteAll();
  EXPECT_THAT(story_, ElementsAre("a1", "a0", "a2", "a"));
}

TEST_F(DiskQueueTest, NoPieceStartsAfterAnError) {
  ASSERT_TRUE(TryRun("a", 5, /*failing=*/1));
  io_.Complete(1);
  EXPECT_THAT(story_, ElementsAre("a1"));  // its other piece still uses the caller's memory
  io_.CompleteAll();
  EXPECT_THAT(story_, ElementsAre("a1", "a0", "a: error"));
}

TEST_F(DiskQueueTest, ALargeObjectDoesNotDelayOthers) {
  ASSERT_TRUE(TryRun("a", 4));
  ASSERT_TRUE(TryRun("b", 3));   // the executor has one piece, the others wait
  EXPECT_FALSE(TryRun("c", 1));  // the executor is full, and another call waits already
  io_.CompleteAll();
  EXPECT_THAT(story_, ElementsAre("a0", "a1", "b0", "b1", "a2", "a3", "a", "b2", "b"));
}

TEST_F(DiskQueueTest, RunNextIsNeverRefused) {
  ASSERT_TRUE(TryRun("a", 4));
  ASSERT_TRUE(TryRun("b", 2));
  queue_.RunNext(Work("c"), Done("c"));
  EXPECT_EQ(io_.pending(), 3u);
  io_.Complete(0);
  io_.Complete(2);  // c gets the free one of the three places
  EXPECT_THAT(story_, ElementsAre("a0", "c0", "c"));
  io_.CompleteAll();
  EXPECT_EQ(story_.size(), 4u + 2u + 1u + 3u);
}

}  // namespace
}  // namespace ashlar::storage
