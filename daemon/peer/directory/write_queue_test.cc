// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/write_queue.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

EntryId IdOf(uint8_t number) {
  EntryId id;
  id.key[0] = number;
  return id;
}
DirectoryWrite WriteOf(uint8_t number, double worth, uint64_t bytes = 1) {
  return {IdOf(number), Holding{.bytes = bytes}, worth};
}
std::string Said(const std::vector<DirectoryWrite>& writes) {
  std::string said;
  for (const DirectoryWrite& write : writes) {
    absl::StrAppend(&said, write.holding.has_value() ? "+" : "-", static_cast<int>(write.id.key[0]));
  }
  return said;
}

TEST(WriteQueue, WithdrawalsFirstThenHighestWorth) {
  WriteQueue queue(10);
  for (const auto& [number, worth] : {std::pair(1, 5.), {2, 7.}, {3, 5.}}) queue.Announce(WriteOf(number, worth));
  queue.Withdraw(IdOf(9));
  queue.Withdraw(IdOf(8));
  EXPECT_EQ(Said(queue.Take(3)), "-9-8+2");
  EXPECT_EQ(Said(queue.Take(9)), "+1+3");
  EXPECT_EQ(queue.size(), 0u);
}

TEST(WriteQueue, TheLatestWriteOfAnObjectWins) {
  WriteQueue queue(10);
  queue.Announce(WriteOf(1, 1, 100));
  queue.Announce(WriteOf(1, 1, 200));
  queue.Announce(WriteOf(2, 1));
  queue.Withdraw(IdOf(2));
  queue.Withdraw(IdOf(3));
  queue.Announce(WriteOf(3, 9));
  const auto writes = queue.Take(10);
  EXPECT_EQ(Said(writes), "-2+3+1");
  EXPECT_EQ(writes[2].holding->bytes, 200u);
}

TEST(WriteQueue, ReturnedWritesYieldToLaterOnes) {
  WriteQueue queue(3);
  queue.Announce(WriteOf(1, 1));
  queue.Announce(WriteOf(2, 2));
  queue.Withdraw(IdOf(3));
  const auto taken = queue.Take(3);
  queue.Withdraw(IdOf(1));
  queue.Announce(WriteOf(3, 3));
  queue.Return(taken);
  EXPECT_EQ(Said(queue.Take(9)), "-1+3+2");
}

TEST(WriteQueue, RemembersDroppedAnnouncements) {
  WriteQueue queue(2);
  for (const auto& [number, worth] : {std::pair(1, 1.), {2, 2.}}) queue.Announce(WriteOf(number, worth));
  EXPECT_FALSE(queue.Announce(WriteOf(3, 1)));
  EXPECT_FALSE(queue.WasDisplaced(IdOf(3))) << "it was never taken";
  EXPECT_TRUE(queue.Announce(WriteOf(4, 4)));
  EXPECT_TRUE(queue.WasDisplaced(IdOf(1)));
  EXPECT_FALSE(queue.WasDisplaced(IdOf(2)));
  const auto taken = queue.Take(1);
  EXPECT_EQ(Said(taken), "+4");
  EXPECT_TRUE(queue.Announce(WriteOf(1, 1)));
  EXPECT_FALSE(queue.WasDisplaced(IdOf(1)));
  EXPECT_TRUE(queue.Announce(WriteOf(5, 5)));
  EXPECT_TRUE(queue.Announce(WriteOf(6, 6)));
  queue.Return(taken);  // 4 was not sent
  EXPECT_TRUE(queue.WasDisplaced(IdOf(1)) && queue.WasDisplaced(IdOf(2)) && queue.WasDisplaced(IdOf(4)));
  queue.Withdraw(IdOf(4));
  EXPECT_FALSE(queue.WasDisplaced(IdOf(4)));
}

// For any calls, limits are kept. What was taken last for an object is its latest write, unless that was dropped. A
// withdrawal waits until it is taken or its object is announced.
TEST(WriteQueue, RandomCallsKeepTheBoundsAndTheLatestWrites) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  WriteQueue queue(8);
  std::map<uint8_t, std::optional<uint64_t>> last;  // bytes of the latest write; none: withdrawn
  std::set<uint8_t> withdrawn;                      // objects with a queued withdrawal
  for (uint64_t step = 1; step < 50000; ++step) {
    const auto number = static_cast<uint8_t>(random() % 24);
    switch (random() % 4) {
      case 0:
        if (queue.Announce(WriteOf(number, static_cast<double>(random() % 5), step))) {
          last[number] = step;
          withdrawn.erase(number);
        }
        break;
      case 1:
        if (queue.Withdraw(IdOf(number))) {
          last[number] = std::nullopt;
          withdrawn.insert(number);
        }
        break;
      default:
        if (step / 100 % 2 == 0) break;  // no writer takes for a while, and the queue fills up
        for (const DirectoryWrite& write : queue.Take(random() % 5)) {
          const auto found = last.find(write.id.key[0]);
          ASSERT_NE(found, last.end());
          ASSERT_EQ(write.holding.has_value(), found->second.has_value()) << step;
          ASSERT_EQ(write.holding.has_value() ? write.holding->bytes : 0, found->second.value_or(0)) << step;
          if (write.holding.has_value()) continue;
          ASSERT_EQ(withdrawn.erase(write.id.key[0]), 1u) << step;
        }
    }
    ASSERT_LE(queue.announcements(), 8u);
    ASSERT_LE(queue.withdrawals(), 8u);
    ASSERT_EQ(queue.withdrawals(), withdrawn.size()) << "one was lost in step " << step;
    ASSERT_EQ(queue.RemainingCapacity(), 8 - queue.announcements());
  }
  EXPECT_GT(queue.dropped_announcements(), 0u);
  EXPECT_GT(queue.dropped_withdrawals(), 0u);
}

}  // namespace
}  // namespace ashlar::daemon
