// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/memory_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "proto/limits.h"
#include "storage/objects/object_bytes.h"

namespace ashlar::storage {
namespace {

using limits::kExtentBytes;
using ::testing::HasSubstr;

std::unique_ptr<MemoryTier> MakeTier(uint64_t capacity_extents, uint64_t arena_extents) {
  auto tier = MemoryTier::Make(
      {.capacity_bytes = capacity_extents * kExtentBytes, .arena_bytes = arena_extents * kExtentBytes});
  EXPECT_TRUE(tier.ok()) << tier.status();
  return *std::move(tier);
}

TEST(MemoryTier, RefusesSizesByName) {
  const auto refused = [](uint64_t capacity, uint64_t arena) {
    return MemoryTier::Make({.capacity_bytes = capacity, .arena_bytes = arena}).status();
  };
  EXPECT_THAT(refused(kExtentBytes - 1, kExtentBytes).message(), HasSubstr("dram.capacity_bytes"));
  EXPECT_THAT(refused(kExtentBytes, 0).message(), HasSubstr("dram.arena_bytes"));
  EXPECT_THAT(refused(kExtentBytes, kExtentBytes + 4096).message(), HasSubstr("dram.arena_bytes"));
  EXPECT_THAT(refused(uint64_t{1} << 50, kExtentBytes).message(), HasSubstr("dram.arena_bytes"));
}

TEST(MemoryTier, RefusesBudgetsThatExceedTheCapacity) {
  const auto tier = MakeTier(10, 4);
  EXPECT_TRUE(tier->AddTenant(1, 6 * kExtentBytes).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(tier->AddTenant(1, kExtentBytes)));
  const absl::Status refused = tier->AddTenant(2, 5 * kExtentBytes);
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(refused.message(), HasSubstr("dram_bytes"));
  EXPECT_THAT(tier->AddTenant(2, kExtentBytes - 1).message(), HasSubstr("dram_bytes"));
  EXPECT_EQ(tier->Usage(2).capacity_bytes, 0u);  // the refusals changed nothing
  EXPECT_TRUE(tier->AddTenant(2, 4 * kExtentBytes).ok());
}

TEST(MemoryTier, ReportsEveryArenaOnce) {
  const auto tier = MakeTier(100, 4);
  ASSERT_TRUE(tier->AddTenant(1, 10 * kExtentBytes).ok());
  const absl::StatusOr<Slot> before = tier->Allocate(1, 3);
  ASSERT_TRUE(before.ok());
  std::vector<std::pair<std::byte*, uint64_t>> told;
  tier->OnArena([&](const kernels::ArenaMemory& arena) { told.emplace_back(arena.data(), arena.bytes()); });
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].first, tier->Address(0, 0));
  const absl::StatusOr<Slot> after = tier->Allocate(1, 7);
  ASSERT_TRUE(after.ok());
  ASSERT_EQ(told.size(), 3u);
  EXPECT_EQ(told[2].first, tier->Address(2, 0));
  EXPECT_EQ(told[1].second + told[2].second, 6 * kExtentBytes);  // the last one is as large as the budget's rest
}

TEST(MemoryTier, HoldsNoMoreThanTheBudget) {
  const auto tier = MakeTier(100, 4);
  ASSERT_TRUE(tier->AddTenant(1, 10 * kExtentBytes + 100).ok());
  EXPECT_EQ(tier->Usage(1).capacity_bytes, 10 * kExtentBytes);
  EXPECT_EQ(tier->Usage(1).held_bytes, 0u);  // arenas are made when they are needed

  absl::StatusOr<Slot> first = tier->Allocate(1, 3);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(tier->Usage(1).held_bytes, 4 * kExtentBytes);
  absl::StatusOr<Slot> second = tier->Allocate(1, 7);
  ASSERT_TRUE(second.ok()) << "the rest of the first arena, a second and a short third one";
  EXPECT_EQ(second->Extents(), 7u);
  EXPECT_EQ(tier->Usage(1).held_bytes, 10 * kExtentBytes);
  EXPECT_EQ(tier->Usage(1).used_bytes, 10 * kExtentBytes);
  EXPECT_EQ(tier->Descriptor(1, 2)->bytes, 2 * kExtentBytes);

  EXPECT_TRUE(absl::IsResourceExhausted(tier->Allocate(1, 1).status()));
  tier->Free(*std::move(first));
  EXPECT_TRUE(absl::IsResourceExhausted(tier->Allocate(1, 4).status()));
  EXPECT_TRUE(tier->Allocate(1, 3).ok());
  EXPECT_EQ(tier->Usage().held_bytes, 10 * kExtentBytes);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // their own memory is touched, too
TEST(MemoryTier, APreparedArenaTakesNoPageFaults) {
  std::byte* const page = static_cast<std::byte*>(std::aligned_alloc(4096, 4096));
  const bool can = madvise(page, 4096, MADV_POPULATE_WRITE) == 0;
  std::free(page);
  if (!can) GTEST_SKIP() << "this kernel maps no pages ahead";
  const auto tier = MakeTier(100, 16);
  ASSERT_TRUE(tier->AddTenant(1, 16 * kExtentBytes).ok());
  const auto arena = tier->Prepare(1, kExtentBytes);
  ASSERT_NE(arena, nullptr);
  std::thread([&] { arena->MakeAhead(); }).join();
  ASSERT_TRUE(tier->Prepared(1, arena).ok());
  const auto slot = tier->Allocate(1, 16);
  ASSERT_TRUE(slot.ok());
  const std::vector<std::byte*> extents = ObjectBytes(*tier, *slot).extents();
  rusage before{}, after{};
  getrusage(RUSAGE_THREAD, &before);
  for (std::byte* const extent : extents) std::memset(extent, 1, kExtentBytes);
  getrusage(RUSAGE_THREAD, &after);
  EXPECT_LT(after.ru_minflt - before.ru_minflt, 64) << "of " << 16 * kExtentBytes / 4096 << " pages";
}
#endif

TEST(MemoryTier, PreparesArenasAheadOfNeed) {
  const auto tier = MakeTier(100, 4);
  ASSERT_TRUE(tier->AddTenant(1, 10 * kExtentBytes).ok());
  EXPECT_EQ(tier->Prepare(2, 1), nullptr) << "an unknown tenant";
  EXPECT_EQ(tier->Prepare(1, 0), nullptr) << "nothing is wanted";
  const auto first = tier->Prepare(1, 5 * kExtentBytes);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(tier->Usage(1).held_bytes, 4 * kExtentBytes) << "it counts from now on";
  EXPECT_EQ(tier->Prepare(1, 5 * kExtentBytes), nullptr) << "one at a time";
  std::thread([&] { first->Make(); }).join();
  EXPECT_TRUE(tier->Prepared(1, first).ok());
  EXPECT_TRUE(tier->Descriptor(1, 0).ok());

  const auto second = tier->Prepare(1, 5 * kExtentBytes);
  ASSERT_NE(second, nullptr);
  EXPECT_TRUE(tier->Allocate(1, 8).ok()) << "an allocation does not wait for the thread";
  EXPECT_EQ(tier->Usage(1).held_bytes, 8 * kExtentBytes);
  second->Make();
  EXPECT_TRUE(tier->Prepared(1, second).ok()) << "it has been taken";
  EXPECT_TRUE(absl::IsNotFound(tier->Descriptor(1, 2).status()));

  const auto last = tier->Prepare(1, 100 * kExtentBytes);
  ASSERT_NE(last, nullptr);
  EXPECT_TRUE(tier->Allocate(1, 2).ok());
  EXPECT_EQ(tier->Usage(1).held_bytes, 10 * kExtentBytes);
  EXPECT_EQ(tier->Prepare(1, 100 * kExtentBytes), nullptr) << "the budget is held";
}

// A test's stand-in for the thread that creates arenas.
struct Creator {
  explicit Creator(MemoryTier& its_tier) : tier(its_tier) {
    tier.CreateOn([this](TenantId tenant, const std::shared_ptr<ComingArena>& arena) {
      if (busy) return false;
      coming.emplace_back(tenant, arena);
      return true;
    });
  }
  absl::Status Create() {
    const auto [tenant, arena] = std::exchange(coming, {}).at(0);
    std::thread([&, made = arena] { made->MakeAhead(); }).join();
    return tier.Prepared(tenant, arena);
  }
  MemoryTier& tier;
  std::vector<std::pair<TenantId, std::shared_ptr<ComingArena>>> coming;
  bool busy = false;
};

TEST(MemoryTier, CallersWaitForAnArenaThatAnotherThreadCreates) {
  const auto tier = MakeTier(100, 4);
  ASSERT_TRUE(tier->AddTenant(1, 10 * kExtentBytes).ok());
  std::vector<std::pair<int, bool>> told;
  const auto tell = [&](int who) { return [&told, who](bool grown) { told.emplace_back(who, grown); }; };
  EXPECT_FALSE(tier->WhenGrown(1, 1, tell(0))) << "no thread creates arenas";
  Creator creator(*tier);
  EXPECT_FALSE(tier->WhenGrown(2, 1, tell(0))) << "an unknown tenant";
  ASSERT_TRUE(tier->WhenGrown(1, 1, tell(1)));
  ASSERT_TRUE(tier->WhenGrown(1, 6, tell(2)));
  EXPECT_EQ(creator.coming.size(), 1u) << "one at a time";
  EXPECT_TRUE(told.empty());
  EXPECT_TRUE(creator.Create().ok());
  EXPECT_THAT(told, testing::ElementsAre(std::pair(1, true), std::pair(2, true)));
  EXPECT_FALSE(tier->WhenGrown(1, 1, tell(1)));
  ASSERT_TRUE(tier->WhenGrown(1, 6, tell(3))) << "larger than one arena";
  EXPECT_TRUE(creator.Create().ok());
  EXPECT_FALSE(tier->WhenGrown(1, 6, tell(3)));
  EXPECT_EQ(tier->Usage(1).held_bytes, 8 * kExtentBytes);
  EXPECT_FALSE(tier->WhenGrown(1, 11, tell(4))) << "larger than the budget";
  EXPECT_EQ(tier->Usage(1).held_bytes, 8 * kExtentBytes);
  ASSERT_TRUE(tier->WhenGrown(1, 10, tell(4)));
  EXPECT_TRUE(creator.Create().ok());
  EXPECT_EQ(tier->Usage(1).held_bytes, 10 * kExtentBytes);
  ASSERT_TRUE(tier->Allocate(1, 1).ok());
  EXPECT_FALSE(tier->WhenGrown(1, 10, tell(4))) << "the whole budget is held";
}

TEST(MemoryTier, AllocationsStartTheNextArenaInAdvance) {
  const auto tier = MakeTier(100, 4);
  ASSERT_TRUE(tier->AddTenant(1, 12 * kExtentBytes).ok());
  Creator creator(*tier);
  creator.busy = true;
  EXPECT_TRUE(tier->Allocate(1, 1).ok()) << "the allocation creates it if no thread can";
  EXPECT_EQ(tier->Usage(1).held_bytes, 4 * kExtentBytes);
  creator.busy = false;
  EXPECT_TRUE(tier->Allocate(1, 1).ok());
  ASSERT_EQ(creator.coming.size(), 1u);
  EXPECT_EQ(tier->Usage(1).held_bytes, 8 * kExtentBytes);
  EXPECT_TRUE(tier->Allocate(1, 3).ok()) << "an allocation that cannot wait takes it";
  EXPECT_TRUE(tier->Allocate(1, 5).ok());
  EXPECT_EQ(tier->Usage(1).held_bytes, 12 * kExtentBytes);
  bool told = false;
  ASSERT_TRUE(tier->WhenGrown(1, 3, [&](bool grown) { told = grown; })) << "the thread still maps its pages";
  EXPECT_TRUE(creator.Create().ok());
  EXPECT_TRUE(told);
  EXPECT_FALSE(tier->WhenGrown(1, 3, nullptr)) << "the whole budget is held";
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // their own memory is touched, too
TEST(MemoryTier, WaitingForAnArenaTakesNoPageFaults) {
  const auto tier = MakeTier(100, 64);
  ASSERT_TRUE(tier->AddTenant(1, 64 * kExtentBytes).ok());
  Creator creator(*tier);
  rusage before{}, after{};
  getrusage(RUSAGE_THREAD, &before);
  ASSERT_TRUE(tier->WhenGrown(1, 8, [](bool) {}));
  ASSERT_TRUE(creator.Create().ok());
  ASSERT_TRUE(tier->Allocate(1, 8).ok());
  getrusage(RUSAGE_THREAD, &after);
  const auto system_us = [](const rusage& usage) { return usage.ru_stime.tv_sec * 1'000'000 + usage.ru_stime.tv_usec; };
  EXPECT_LT(after.ru_minflt - before.ru_minflt, 64) << "of " << 64 * kExtentBytes / 4096 << " pages";
  RecordProperty("system_us", std::to_string(system_us(after) - system_us(before)));
}
#endif

TEST(MemoryTier, RefusesUnknownTenants) {
  const auto tier = MakeTier(8, 4);
  EXPECT_TRUE(absl::IsResourceExhausted(tier->Allocate(7, 1).status()));
  EXPECT_EQ(tier->Usage(7).capacity_bytes, 0u);
}

TEST(MemoryTier, ShowsArenasToTheirTenantOnly) {
  const auto tier = MakeTier(16, 4);
  ASSERT_TRUE(tier->AddTenant(1, 8 * kExtentBytes).ok());
  ASSERT_TRUE(tier->AddTenant(2, 8 * kExtentBytes).ok());
  const Slot mine = *tier->Allocate(1, 1);
  const Slot theirs = *tier->Allocate(2, 1);
  ASSERT_NE(mine.runs[0].arena, theirs.runs[0].arena) << "an arena is one tenant's";

  EXPECT_TRUE(absl::IsNotFound(tier->Descriptor(1, theirs.runs[0].arena).status()));
  EXPECT_TRUE(absl::IsNotFound(tier->Descriptor(1, 99).status()));
  const auto arena = tier->Descriptor(1, mine.runs[0].arena);
  ASSERT_TRUE(arena.ok());
  EXPECT_EQ(mmap(nullptr, arena->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena->descriptor, 0), MAP_FAILED);
  EXPECT_EQ(errno, EPERM);
  void* mapped = mmap(nullptr, arena->bytes, PROT_READ, MAP_SHARED, arena->descriptor, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  std::memcpy(tier->Address(mine.runs[0].arena, mine.runs[0].first), "ashlar", 6);
  EXPECT_EQ(std::memcmp(static_cast<const std::byte*>(mapped) + mine.runs[0].first * kExtentBytes, "ashlar", 6), 0);
  munmap(mapped, arena->bytes);
}

// Budgets may exceed the machine's memory. Missing memory then counts as missing space, and nothing is lost.
TEST(MemoryTier, NoSpaceWithoutMemoryForArena) {
  constexpr uint64_t kBytes = uint64_t{1} << 45;
  const auto tier = *MemoryTier::Make({.capacity_bytes = kBytes, .arena_bytes = kBytes});
  ASSERT_TRUE(tier->AddTenant(1, kBytes).ok());
  const absl::Status refused = tier->Allocate(1, 1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(tier->Usage(1).held_bytes, 0u);
  EXPECT_EQ(tier->Usage(1).used_bytes, 0u);
  EXPECT_TRUE(absl::IsNotFound(tier->Descriptor(1, 0).status()));
}

TEST(MemoryTier, TenantsNeverShareOrExceed) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto tier = MakeTier(64, 5);
  const uint64_t budgets[] = {7, 23, 34};
  for (TenantId t = 0; t < 3; ++t) ASSERT_TRUE(tier->AddTenant(t, budgets[t] * kExtentBytes).ok());
  std::vector<Slot> slots;
  std::set<std::byte*> addresses;
  uint64_t used[3] = {};
  for (int step = 0; step < 2000; ++step) {
    if (random() % 5 < 3) {
      const auto tenant = static_cast<TenantId>(random() % 3);
      const uint64_t extents = 1 + random() % 8;
      absl::StatusOr<Slot> slot = tier->Allocate(tenant, extents);
      ASSERT_EQ(slot.ok(), used[tenant] + extents <= budgets[tenant]);
      if (!slot.ok()) continue;
      used[tenant] += extents;
      for (const ExtentRun& run : slot->runs) {
        ASSERT_TRUE(tier->Descriptor(tenant, run.arena).ok());
        for (uint32_t i = 0; i < run.count; ++i) {
          ASSERT_TRUE(addresses.insert(tier->Address(run.arena, run.first + i)).second);
        }
      }
      slots.push_back(*std::move(slot));
    } else if (!slots.empty()) {
      std::swap(slots[random() % slots.size()], slots.back());
      used[slots.back().tenant] -= slots.back().Extents();
      for (const ExtentRun& run : slots.back().runs) {
        for (uint32_t i = 0; i < run.count; ++i) addresses.erase(tier->Address(run.arena, run.first + i));
      }
      tier->Free(std::move(slots.back()));
      slots.pop_back();
    }
    for (TenantId t = 0; t < 3; ++t) {
      const TierUsage usage = tier->Usage(t);
      ASSERT_EQ(usage.used_bytes, used[t] * kExtentBytes);
      ASSERT_LE(usage.used_bytes, usage.held_bytes);
      ASSERT_LE(usage.held_bytes, budgets[t] * kExtentBytes);
    }
  }
}

TEST(Slot, CanBeCutAfterAnyExtent) {
  const Slot whole{.tenant = 3, .runs = {{0, 4, 2}, {1, 0, 1}, {0, 9, 3}}};
  for (uint64_t extents = 0; extents <= 8; ++extents) {
    Slot kept = whole;
    const Slot rest = kept.SplitAfter(extents);
    EXPECT_EQ(rest.tenant, 3u);
    EXPECT_EQ(kept.Extents(), std::min<uint64_t>(extents, 6));
    EXPECT_EQ(kept.Extents() + rest.Extents(), 6u);
  }
  Slot kept = whole;
  EXPECT_EQ(kept.SplitAfter(4).runs, (std::vector<ExtentRun>{{0, 10, 2}}));
  EXPECT_EQ(kept.runs, (std::vector<ExtentRun>{{0, 4, 2}, {1, 0, 1}, {0, 9, 1}}));
}

}  // namespace
}  // namespace ashlar::storage
