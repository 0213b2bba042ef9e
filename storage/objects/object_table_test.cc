// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/object_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/limits.h"
#include "storage/objects/object_finder.h"
#include "storage/objects/object_writer.h"
#include "storage/testing/engine.h"
#include "storage/testing/rig.h"
#include "storage/tier/remote_source.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ObjectTableTest : public ::testing::Test {
 protected:
  ObjectTableTest()
      : tier_(TestTier({{1, 8}, {2, 8}})),
        table_({.ghosts_per_tenant = 16}, {.memory = {tier_.get()}}, executor_, clock_, observer_) {}

  // A plan of `extents` extents; only its size and key matter here.
  static ObjectHeader Plan(uint8_t key, uint64_t extents) {
    ObjectHeader plan{.kind = ObjectKind::kSegment, .tokens = 1, .bytes = extents * limits::kExtentBytes};
    plan.key.bytes.fill(key);
    return plan;
  }

  ReserveOutcome Publish(uint8_t key, uint64_t extents, TenantId tenant = 1) {
    const ObjectWriter::Reserved reserved = writer_.Reserve({tenant}, Plan(key, extents));
    if (reserved.object) writer_.Publish(reserved.object, reserved.object->header);
    return reserved.outcome;
  }
  MissReason Find(uint8_t key, TenantId tenant = 1) { return finder_.Find(tenant, {.key = Plan(key, 1).key}).reason; }

  ManualClock clock_;
  CountingObserver observer_;
  ManualExecutor executor_;
  std::unique_ptr<MemoryTier> tier_;
  ObjectTable table_;
  ObjectFinder finder_{table_, clock_};
  ObjectWriter writer_{table_, clock_};
};

TEST_F(ObjectTableTest, EvictsTheLeastRecentlyUsed) {
  for (const uint8_t key : {1, 2, 3, 4}) ASSERT_EQ(Publish(key, 2), ReserveOutcome::kGranted);
  EXPECT_EQ(Find(1), MissReason::kNone);  // counts as a use
  EXPECT_EQ(Publish(5, 3), ReserveOutcome::kGranted);
  EXPECT_EQ(Find(2), MissReason::kEvicted);
  EXPECT_EQ(Find(3), MissReason::kEvicted);
  EXPECT_EQ(Find(4), MissReason::kNone);
  EXPECT_EQ(Find(1), MissReason::kNone);
  EXPECT_THAT(observer_.evicted, ElementsAre(MissReason::kEvicted, MissReason::kEvicted));
}

// Three objects are requested repeatedly, and others once. More other objects arrive between two uses than there is
// space for.
TEST(PoolEvictionTest, ReusedObjectStaysDuringScan) {
  const auto hits = [](EvictionMode mode) {
    const std::unique_ptr<MemoryTier> tier = TestTier({{1, 8}});
    ManualClock clock;
    CountingObserver observer;
    ManualExecutor executor;
    ObjectTable table({.eviction = mode}, {.memory = {tier.get()}}, executor, clock, observer);
    ObjectFinder finder(table, clock);
    ObjectWriter writer(table, clock);
    const auto ask = [&](uint32_t text) {
      ObjectHeader plan{.kind = ObjectKind::kSegment, .tokens = 64, .bytes = limits::kExtentBytes};
      for (size_t i = 0; i < 4; ++i) plan.key.bytes[i] = static_cast<uint8_t>(text >> 8 * i);
      table.reuse().Tick(1);
      if (finder.Find(1, {.key = plan.key}).reason == MissReason::kNone) return true;
      const ObjectWriter::Reserved reserved = writer.Reserve({1}, plan);
      EXPECT_EQ(reserved.outcome, ReserveOutcome::kGranted);
      if (reserved.object) writer.Publish(reserved.object, reserved.object->header);
      return false;
    };
    int found = 0;
    for (uint32_t turn = 0; turn < 1000; ++turn) {
      const bool hit = ask(turn % 3);
      if (turn >= 500) found += hit ? 1 : 0;
      for (uint32_t i = 0; i < 4; ++i) ask(1000 + turn * 4 + i);
    }
    return found;
  };
  EXPECT_EQ(hits(EvictionMode::kLru), 0) << "the least recently used one is always the next that is asked for";
  EXPECT_GT(hits(EvictionMode::kPrice), 450) << "of 500";
}

TEST_F(ObjectTableTest, AReferenceKeepsAnOldObject) {
  ASSERT_EQ(Publish(1, 4), ReserveOutcome::kGranted);
  FoundObject used = finder_.Find(1, {.key = Plan(1, 4).key});
  ObjectReference second = used.object.Share();
  ASSERT_EQ(Publish(2, 4), ReserveOutcome::kGranted);
  ASSERT_EQ(Publish(3, 4), ReserveOutcome::kGranted);
  EXPECT_EQ(Find(2), MissReason::kEvicted);
  used.object = {};
  EXPECT_EQ(Publish(4, 8), ReserveOutcome::kNoSpace);
  second = {};
  EXPECT_EQ(Publish(4, 8), ReserveOutcome::kGranted);
  EXPECT_EQ(Find(1), MissReason::kEvicted);
}

TEST_F(ObjectTableTest, EvictsNothingInVain) {
  ASSERT_EQ(Publish(1, 4), ReserveOutcome::kGranted);
  ASSERT_EQ(Publish(2, 4), ReserveOutcome::kGranted);
  EXPECT_EQ(Publish(3, 9), ReserveOutcome::kNoSpace) << "larger than the whole budget";
  const FoundObject used = finder_.Find(1, {.key = Plan(1, 4).key});
  EXPECT_EQ(Publish(3, 5), ReserveOutcome::kNoSpace) << "what is idle would not be enough";
  EXPECT_THAT(observer_.evicted, IsEmpty());
  EXPECT_EQ(Find(2), MissReason::kNone);
}

TEST_F(ObjectTableTest, EvictsNothingOfOtherTenants) {
  ASSERT_EQ(Publish(1, 8, 1), ReserveOutcome::kGranted);
  ASSERT_EQ(Publish(1, 8, 2), ReserveOutcome::kGranted) << "the same key, another tenant";
  ASSERT_EQ(Publish(2, 8, 2), ReserveOutcome::kGranted);
  EXPECT_EQ(Find(1, 1), MissReason::kNone);
  EXPECT_EQ(Find(1, 2), MissReason::kEvicted);
}

TEST_F(ObjectTableTest, HidesUnpublishedObjectsAndErasesAbandonedOnes) {
  {
    const ObjectWriter::Reserved reserved = writer_.Reserve({1}, Plan(1, 4));
    EXPECT_EQ(Find(1), MissReason::kBeingPublished);
    EXPECT_EQ(Publish(1, 4), ReserveOutcome::kBeingPublished);
    EXPECT_EQ(Publish(2, 5), ReserveOutcome::kNoSpace) << "a reservation is not evicted";
  }
  EXPECT_EQ(Find(1), MissReason::kAbandoned);
  EXPECT_EQ(tier_->Usage(1).used_bytes, 0u);
  EXPECT_EQ(Publish(1, 4), ReserveOutcome::kGranted);
  EXPECT_EQ(Publish(1, 4), ReserveOutcome::kAlreadyPresent);
}

TEST_F(ObjectTableTest, ADroppedObjectsBytesStayUntilTheLastReferenceGoes) {
  ASSERT_EQ(Publish(1, 4), ReserveOutcome::kGranted);
  FoundObject used = finder_.Find(1, {.key = Plan(1, 4).key});
  table_.Drop(used.object, MissReason::kChecksumFailed);
  table_.Drop(used.object, MissReason::kChecksumFailed);
  EXPECT_EQ(Find(1), MissReason::kChecksumFailed);
  EXPECT_EQ(table_.objects(), 0u);
  EXPECT_EQ(tier_->Usage(1).used_bytes, 4 * limits::kExtentBytes);
  EXPECT_EQ(Publish(1, 4), ReserveOutcome::kGranted) << "a good copy may come while the bad one is still referenced";
  used = {};
  EXPECT_EQ(tier_->Usage(1).used_bytes, 4 * limits::kExtentBytes);
  EXPECT_EQ(Find(1), MissReason::kNone);
  EXPECT_THAT(observer_.evicted, ElementsAre(MissReason::kChecksumFailed));
}

TEST_F(ObjectTableTest, RemembersGhosts) {
  ASSERT_EQ(Publish(1, 8), ReserveOutcome::kGranted);
  clock_.Advance(100);
  for (int use = 0; use < 3; ++use) EXPECT_EQ(Find(1), MissReason::kNone);
  clock_.Advance(20);
  const Nanos evicted_at = clock_.Now();
  { const ObjectWriter::Reserved never_published = writer_.Reserve({1}, Plan(2, 8)); }
  ASSERT_EQ(observer_.ghosts.size(), 2u);

  const Ghost& evicted = observer_.ghosts[0];
  EXPECT_EQ(evicted.reason, MissReason::kEvicted);
  EXPECT_EQ(evicted.policy, PolicyKind::kPrice);
  EXPECT_EQ(evicted.tier, TierKind::kDram);
  EXPECT_EQ(evicted.uses, 3u);
  EXPECT_EQ(evicted.bytes, 8 * limits::kExtentBytes);
  EXPECT_EQ(evicted.gone_at, evicted_at);
  EXPECT_EQ(evicted.lived, 120);
  EXPECT_EQ(evicted.idle, 20);

  const Ghost& abandoned = observer_.ghosts[1];
  EXPECT_EQ(abandoned.reason, MissReason::kAbandoned);
  EXPECT_EQ(abandoned.policy, PolicyKind::kNone);
  EXPECT_EQ(abandoned.tier, TierKind::kNone) << "no tier ever held it";
  EXPECT_EQ(abandoned.lived, 0);
}

// A machine without memory for another arena, although the budget allows one.
class FullMachine final : public Tier {
 public:
  explicit FullMachine(MemoryTier& tier) : tier_(tier) {}
  TierKind kind() const override { return tier_.kind(); }
  absl::StatusOr<Slot> Allocate(TenantId tenant, uint64_t extents) override {
    const TierUsage usage = tier_.Usage(tenant);
    const uint64_t free_in_arenas = (usage.held_bytes - usage.used_bytes) / limits::kExtentBytes;
    if (full && extents > free_in_arenas) return absl::ResourceExhaustedError("arena: no memory");
    return tier_.Allocate(tenant, extents);
  }
  void Free(Slot slot) override { tier_.Free(std::move(slot)); }
  TierUsage Usage(TenantId tenant) const override { return tier_.Usage(tenant); }
  TierUsage Usage() const override { return tier_.Usage(); }
  std::byte* Address(uint32_t arena, uint32_t extent) const override { return tier_.Address(arena, extent); }

  bool full = false;

 private:
  MemoryTier& tier_;
};

TEST(PoolOnAFullMachine, WorksWithTheAvailableMemory) {
  const auto memory = TestTier({{1, 32}});
  FullMachine tier(*memory);
  CountingObserver observer;
  ManualExecutor executor;
  const ManualClock clock;
  ObjectTable table({}, {.memory = {&tier}}, executor, clock, observer);
  ObjectWriter writer(table, clock);
  const auto publish = [&](uint8_t key, uint64_t extents) {
    ObjectHeader plan{.bytes = extents * limits::kExtentBytes};
    plan.key.bytes.fill(key);
    const ObjectWriter::Reserved reserved = writer.Reserve({1}, plan);
    if (reserved.object) writer.Publish(reserved.object, plan);
    return reserved.outcome;
  };
  ASSERT_EQ(publish(1, 3), ReserveOutcome::kGranted);
  ASSERT_EQ(publish(2, 3), ReserveOutcome::kGranted);
  EXPECT_EQ(observer.memory_refusals, 0);
  tier.full = true;  // with 8 of 32 extents in arenas
  EXPECT_EQ(publish(3, 4), ReserveOutcome::kGranted);
  EXPECT_EQ(observer.evicted.size(), 1u);
  EXPECT_EQ(observer.memory_refusals, 1) << "an operator should know why objects go below the budget";
  EXPECT_EQ(publish(4, 9), ReserveOutcome::kNoSpace);
}

// A node whose reads end when the test ends them.
class SlowNode final : public RemoteSource {
 public:
  bool Reaches(const kernels::Gpu&) const override { return false; }
  bool Read(RemoteCopyId, uint64_t, std::vector<std::byte*>, const kernels::Gpu*,
            std::function<void(absl::Status)> done) override {
    reads.push_back(std::move(done));
    return true;
  }
  void SetRecompute(RemoteCopyId, Nanos) override {}
  void Release(RemoteCopyId) override { ++released; }
  void Damaged(RemoteCopyId) override {}
  void EndRead() {
    const std::function<void(absl::Status)> done = std::move(reads.front());
    reads.pop_front();
    done(absl::OkStatus());
  }

  std::deque<std::function<void(absl::Status)>> reads;
  int released = 0;
};

// An object of another node on its way to hbm through dram, two pieces long.
class PromotionTest : public ::testing::Test {
 protected:
  PromotionTest() {
    ObjectHeader header{.kind = ObjectKind::kSegment, .tokens = 1, .bytes = kExtents * limits::kExtentBytes};
    header.key.bytes.fill(1);
    key_ = header.key;
    entry_ = &table_.Add({1}, std::move(header), 0);
    table_.index().keys().Insert(*entry_);
    table_.Appear(*entry_);
    table_.placement().copies().AdoptRemote(*entry_, /*copy=*/1, /*cost=*/0);
  }

  FoundObject Find() { return finder_.Find(1, {.key = key_}); }
  // Looks the object up and releases it when half of it is in dram, on its way to hbm. The read of the other half ends
  // before the copy to hbm: dram has a broken copy with a reader.
  void BreakCopyInDram() {
    {
      const FoundObject found = Find();
      ASSERT_EQ(found.reason, MissReason::kNone);
      ASSERT_EQ(node_.reads.size(), 2u);
      node_.EndRead();
      ASSERT_EQ(executor_.pending(), 1u);
    }
    node_.EndRead();
    ASSERT_EQ(entry_->copies[0].phase(), CopyPhase::kDraining);
    ASSERT_EQ(entry_->copies[1].phase(), CopyPhase::kBroken);
  }
  void Settle() {
    while (node_.reads.size() + executor_.pending() > 0) {
      executor_.CompleteAll();
      if (!node_.reads.empty()) node_.EndRead();
    }
  }

  static constexpr uint64_t kExtents = 8;

  ManualClock clock_;
  CountingObserver observer_;
  ManualExecutor executor_;
  SlowNode node_;
  std::unique_ptr<MemoryTier> hbm_ = TestTier({{1, 8}}, TierKind::kHbm), dram_ = TestTier({{1, 8}});
  ObjectTable table_{{}, {.memory = {hbm_.get(), dram_.get()}, .remote = &node_}, executor_, clock_, observer_};
  ObjectFinder finder_{table_, clock_};
  Key key_;
  Entry* entry_ = nullptr;
};

// An engine may cancel the landing of an object that is then never loaded.
TEST_F(PromotionTest, ACallThatWaitsIsDeletedWithTheLastUser) {
  const auto held = std::make_shared<int>();
  {
    const FoundObject found = Find();
    ASSERT_EQ(found.reason, MissReason::kNone);
    found.object.WhenLoaded(kExtents * limits::kExtentBytes, [held] { ADD_FAILURE() << "it is not loaded"; });
    const ObjectReference second = found.object.Share();
    EXPECT_EQ(held.use_count(), 2);
  }
  EXPECT_EQ(held.use_count(), 1);
  Settle();
}

TEST_F(PromotionTest, ABrokenCopyIsAMissForAnAttachedRank) {
  BreakCopyInDram();
  const FoundObject again = Find();
  ASSERT_EQ(again.reason, MissReason::kNone);
  EXPECT_EQ(finder_.ShardAt(again.object, {}, /*level=*/1).reason, MissReason::kBudgetRefused)
      << "it is never filled, so a landing from it would not end";
  Settle();
  EXPECT_TRUE(again.object.copy().whole());
  EXPECT_TRUE(entry_->copies[1].whole());
}

TEST_F(PromotionTest, ABrokenCopyIsReleasedWithItsLastUser) {
  BreakCopyInDram();
  {
    const ObjectReference user(*entry_, 1);
    executor_.CompleteAll();
    EXPECT_EQ(entry_->copies[1].state.readers(), 0u);
    EXPECT_EQ(dram_->Usage(1).used_bytes, kExtents * limits::kExtentBytes);
  }
  EXPECT_EQ(dram_->Usage(1).used_bytes, 0u);
  EXPECT_EQ(node_.released, 1);
}

}  // namespace
}  // namespace ashlar::storage
