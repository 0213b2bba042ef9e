// SPDX-License-Identifier: Apache-2.0
#include "storage/turns.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

namespace ashlar::storage {
namespace {

constexpr int64_t kQuantum = 100;

TEST(Turns, SingleTenantIsServedDespiteDebt) {
  Turns turns(kQuantum);
  EXPECT_FALSE(turns.Next().has_value());
  turns.Activate(7);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(turns.Next(), 7u);
    turns.Charge(7, 1'000'000'000'000);
  }
  turns.Deactivate(7);
  EXPECT_FALSE(turns.Next().has_value());
}

TEST(Turns, ATenantIsServedUntilItsQuantumIsSpent) {
  Turns turns(kQuantum);
  turns.Activate(1);
  turns.Activate(2);
  std::vector<TenantId> served;
  for (int i = 0; i < 8; ++i) {
    served.push_back(*turns.Next());
    turns.Charge(served.back(), kQuantum / 2);
  }
  EXPECT_EQ(served, (std::vector<TenantId>{1, 1, 2, 2, 1, 1, 2, 2}));
}

// A tenant whose pieces cost ten times as much gets one piece for every ten of the other's.
TEST(Turns, ALargePieceIsPaidOffInLaterRounds) {
  Turns turns(kQuantum);
  turns.Activate(1);
  turns.Activate(2);
  std::map<TenantId, int64_t> pieces;
  for (int i = 0; i < 1100; ++i) {
    const TenantId tenant = *turns.Next();
    ++pieces[tenant];
    turns.Charge(tenant, tenant == 1 ? 10 * kQuantum : kQuantum);
  }
  EXPECT_NEAR(pieces[1], 100, 2);
  EXPECT_NEAR(pieces[2], 1000, 2);
}

// Serving others while the front tenant's own piece takes long.
TEST(Turns, OutOfTurnServiceMovesTenantToEnd) {
  Turns turns(kQuantum);
  for (const TenantId tenant : {1, 2, 3}) turns.Activate(tenant);
  turns.Charge(2, 1);
  EXPECT_EQ(std::vector<TenantId>(turns.waiting().begin(), turns.waiting().end()), (std::vector<TenantId>{1, 3, 2}));
}

// A tenant that waits for each piece before it requests the next gets as much as one whose queue is never empty.
TEST(TurnQueue, SinglePieceTenantGetsItsShare) {
  TurnQueue<int> queue(kQuantum);
  for (int i = 0; i < 2000; ++i) queue.Push(1, i);
  queue.Push(2, 0);
  std::map<TenantId, int> pieces;
  for (int i = 0; i < 1000; ++i) {
    const TenantId tenant = queue.Take()->first;
    ++pieces[tenant];
    queue.Charge(tenant, kQuantum);
    if (tenant == 2) queue.Push(2, i);
  }
  EXPECT_NEAR(pieces[2], 500, 1);
}

TEST(Turns, DebtOutlivesATenantsBreak) {
  Turns turns(kQuantum);
  turns.Activate(1);
  turns.Activate(2);
  ASSERT_EQ(turns.Next(), 1u);
  turns.Charge(1, 10 * kQuantum);
  turns.Deactivate(1);
  turns.Activate(1);
  for (int i = 0; i < 9; ++i) {
    ASSERT_EQ(turns.Next(), 2u) << "piece " << i;
    turns.Charge(2, kQuantum);
  }
}

// A tenant that was served while no other waited does not wait for that afterwards.
TEST(Turns, UncontendedWorkOnlyOwesItsLastPiece) {
  Turns turns(kQuantum);
  for (int i = 0; i < 1000; ++i) turns.Charge(1, kQuantum);
  turns.Activate(1);
  turns.Activate(2);
  int64_t of_two = 0;
  for (; *turns.Next() == 2; ++of_two) turns.Charge(2, kQuantum);
  EXPECT_LE(of_two, 2);
}

// While both have work, their services differ by at most a quantum and a piece of each.
TEST(Turns, EqualSharesForAnyCosts) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 50; ++round) {
    Turns turns(kQuantum);
    constexpr TenantId kTenants = 5;
    std::vector<int64_t> largest(kTenants), served(kTenants);
    for (TenantId tenant = 0; tenant < kTenants; ++tenant) {
      largest[tenant] = 1 + static_cast<int64_t>(random() % (5 * kQuantum));
      turns.Activate(tenant);
    }
    for (int i = 0; i < 2000; ++i) {
      const TenantId tenant = *turns.Next();
      const int64_t cost = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(largest[tenant]));
      served[tenant] += cost;
      turns.Charge(tenant, cost);
      for (TenantId other = 0; other < kTenants; ++other) {
        ASSERT_LE(served[tenant] - served[other], 2 * kQuantum + largest[tenant] + largest[other])
            << "tenants " << tenant << " and " << other << " after " << i;
      }
    }
  }
}

TEST(TurnQueue, KeepsTenantOrderWithRestFirst) {
  TurnQueue<std::string> queue(kQuantum);
  EXPECT_FALSE(queue.Take().has_value());
  queue.Push(1, "a");
  queue.Push(1, "b");
  queue.Push(2, "x");
  EXPECT_EQ(queue.size(), 3u);
  EXPECT_EQ(queue.size(1), 2u);
  const auto first = queue.Take();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->second, "a");
  queue.PushFront(1, "rest of a");
  queue.Charge(1, kQuantum);
  std::vector<std::string> order;
  while (const auto next = queue.Take()) {
    order.push_back(next->second);
    queue.Charge(next->first, kQuantum);
  }
  EXPECT_EQ(order, (std::vector<std::string>{"x", "rest of a", "b"}));
  EXPECT_TRUE(queue.empty());
}

TEST(TurnQueue, APausedTenantKeepsItsItems) {
  TurnQueue<std::string> queue(kQuantum);
  queue.Push(1, "a");
  queue.Push(2, "x");
  queue.Pause(1);
  queue.Push(1, "b");
  queue.Resume(3);
  EXPECT_EQ(queue.Take()->second, "x");
  EXPECT_FALSE(queue.Take().has_value());
  EXPECT_EQ(queue.size(), 2u);
  queue.Resume(1);
  EXPECT_EQ(queue.Take()->second, "a");
  EXPECT_EQ(queue.Take()->second, "b");
  queue.Pause(1);
  queue.Resume(1);
  EXPECT_FALSE(queue.Take().has_value());
}

// A thousand items of one tenant delay another tenant's single item by at most a quantum.
TEST(TurnQueue, ANewTenantWaitsForAQuantumOfEachOther) {
  TurnQueue<int> queue(kQuantum);
  for (int i = 0; i < 1000; ++i) queue.Push(1, i);
  for (int i = 0; i < 5; ++i) queue.Charge(queue.Take()->first, kQuantum / 10);
  queue.Push(2, -1);
  int64_t waited = 0;
  for (auto next = queue.Take(); next.has_value() && next->second != -1; next = queue.Take()) {
    queue.Charge(next->first, kQuantum / 10);
    waited += kQuantum / 10;
  }
  EXPECT_LE(waited, kQuantum);
}

}  // namespace
}  // namespace ashlar::storage
