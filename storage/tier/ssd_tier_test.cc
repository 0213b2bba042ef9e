// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/ssd_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "storage/testing/ssd_tier_fixture.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(SsdTierTest, BudgetsAreRefusedByName) {
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_THAT(tier_->AddTenant(kAcme, "acme", kExtentBytes - 1).message(), HasSubstr("ssd_bytes"));
  EXPECT_THAT(tier_->AddTenant(kAcme, "", kExtentBytes).message(), HasSubstr("name"));
  EXPECT_THAT(tier_->AddTenant(kAcme, "acme", kCapacity + kExtentBytes).message(), HasSubstr("ssd_bytes"));
  EXPECT_EQ(tier_->AddTenant(kAcme, "acme", kCapacity - kExtentBytes), absl::OkStatus());
  EXPECT_EQ(tier_->AddTenant(kAcme, "other", kExtentBytes).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(tier_->AddTenant(kBolt, "acme", kExtentBytes).message(), HasSubstr("name"));
  EXPECT_THAT(tier_->AddTenant(kBolt, "bolt", 2 * kExtentBytes).message(),
              HasSubstr("that is not assigned to other tenants"));
  EXPECT_EQ(tier_->AddTenant(kBolt, "bolt", kExtentBytes), absl::OkStatus());
}

TEST_F(SsdTierTest, ABudgetHoldsAtEveryInstant) {
  OpenWithTenants();
  EXPECT_EQ(tier_->Allocate(9, 1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(tier_->Allocate(kBolt, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tier_->Allocate(kBolt, 7).status().code(), absl::StatusCode::kResourceExhausted);
  const Slot all = tier_->Allocate(kBolt, 6).value();
  EXPECT_EQ(tier_->Allocate(kBolt, 1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(tier_->Usage(kBolt).used_bytes, tier_->Usage(kBolt).capacity_bytes);
  tier_->Free(all);
  EXPECT_EQ(tier_->Usage().used_bytes, 0u);
  EXPECT_TRUE(tier_->Allocate(kBolt, 6).ok());
}

TEST_F(SsdTierTest, ASlabMustHoldAnExtent) {
  SimulatedDisk small(kExtentBytes, 1);
  ManualExecutor io;
  EXPECT_THAT(SsdTier::Open({}, small.file(), small.records(), io).status().message(), HasSubstr("ssd.capacity_bytes"));
  EXPECT_EQ(SsdTier::SlabBytes(3 * kExtentBytes + 1), 4 * kExtentBytes);
}

TEST_F(SsdTierTest, AFullQueueRefusesAtOnceWithoutLoss) {
  capacity_ = 1;
  OpenWithTenants();
  const Slot large = tier_->Allocate(kAcme, 10).value();  // three pieces for one slot in the executor
  const Slot small = tier_->Allocate(kBolt, 1).value();
  std::vector<int> order;
  const auto note = [&](int number) {
    return [&order, number](absl::Status s) { order.push_back(s.ok() ? number : -1); };
  };
  EXPECT_TRUE(tier_->Write(large, 0, Sources(0, 10), note(1)));
  EXPECT_FALSE(tier_->Write(small, 0, Sources(10, 1), note(2)));
  EXPECT_EQ(io_->pending(), 1u);
  io_->CompleteAll();
  EXPECT_TRUE(tier_->Write(small, 0, Sources(10, 1), note(3)));
  io_->CompleteAll();
  EXPECT_THAT(order, ElementsAre(1, 3));
  // A commit is never refused: it waits in the queue.
  EXPECT_TRUE(tier_->Read(small, 0, {memory_[20]}, note(4)));
  tier_->Commit(kBolt, PoolKind::kPublic, HeaderOfExtents(2, 1), small, note(5));
  io_->CompleteAll();
  EXPECT_THAT(order, ElementsAre(1, 3, 4, 5));
  EXPECT_TRUE(Holds(large, 0));
}

TEST_F(SsdTierTest, PiecesAreIssuedInOrderAFewAtATime) {
  OpenWithTenants();
  const Slot slot = tier_->Allocate(kAcme, 10).value();
  bool done = false;
  ASSERT_TRUE(tier_->Write(slot, 0, Sources(0, 10), [&](absl::Status) { done = true; }));
  EXPECT_EQ(io_->pending(), 2u);
  io_->Complete(1);
  EXPECT_EQ(io_->pending(), 2u);
  EXPECT_FALSE(done);
  io_->CompleteAll();
  EXPECT_TRUE(done);
  EXPECT_EQ(disk_.counts().writes, 1u + 3u);  // the slab's header, and one call per run of adjacent extents
}

TEST_F(SsdTierTest, MovesScatteredExtents) {
  OpenWithTenants();
  // Only single extents are free, so a larger slot is scattered on the disk, and also in memory.
  ASSERT_TRUE(tier_->Allocate(kBolt, 6).ok());
  std::vector<Slot> singles;
  for (int i = 0; i < 10; ++i) singles.push_back(tier_->Allocate(kAcme, 1).value());
  for (int i : {1, 2, 5, 8}) tier_->Free(singles[i]);
  const Slot slot = tier_->Allocate(kAcme, 4).value();
  ASSERT_GT(slot.runs.size(), 1u);
  bool written = false;
  ASSERT_TRUE(tier_->Write(slot, 2, {memory_[9], memory_[3]}, [&](absl::Status s) { written = s.ok(); }));
  io_->CompleteAll();
  ASSERT_TRUE(tier_->Write(slot, 0, {memory_[4], memory_[5]}, [&](absl::Status s) { written = written && s.ok(); }));
  io_->CompleteAll();
  ASSERT_TRUE(written);
  ExtentMemory read(3);
  ASSERT_TRUE(tier_->Read(slot, 1, {read[1], read[2], read[0]}, [](absl::Status) {}));
  io_->CompleteAll();
  EXPECT_TRUE(SameExtent(read[1], memory_[5]));
  EXPECT_TRUE(SameExtent(read[2], memory_[9]));
  EXPECT_TRUE(SameExtent(read[0], memory_[3]));
}

TEST_F(SsdTierTest, ManyCommitsShareOneSync) {
  OpenWithTenants();
  std::vector<Slot> slots;
  for (int i = 0; i < 10; ++i) {
    slots.push_back(tier_->Allocate(kAcme, 1).value());
    ASSERT_EQ(Write(slots.back(), i), absl::OkStatus());
  }
  const SimulatedDisk::Counts before = disk_.counts();
  int acknowledged = 0;
  for (int i = 0; i < 10; ++i) {
    tier_->Commit(kAcme, PoolKind::kPublic, HeaderOfExtents(i, 1), slots[i],
                  [&](absl::Status s) { acknowledged += s.ok(); });
  }
  io_->CompleteAll();
  EXPECT_EQ(acknowledged, 10);
  EXPECT_EQ(disk_.counts().syncs, before.syncs + 2);  // one for the first, and one for all that arrived meanwhile
  EXPECT_EQ(disk_.counts().batches, before.batches + 2);
}

TEST_F(SsdTierTest, DataIsSyncedWhileRecordsOfOthersAreWritten) {
  OpenWithTenants();
  bool acknowledged[2] = {};
  const Slot slots[] = {tier_->Allocate(kAcme, 1).value(), tier_->Allocate(kAcme, 1).value()};
  for (const Slot& slot : slots) ASSERT_EQ(Write(slot, 1), absl::OkStatus());
  const auto commit = [&](int i) {
    tier_->Commit(kAcme, PoolKind::kPublic, HeaderOfExtents(i, 1), slots[i],
                  [&acknowledged, i](absl::Status s) { acknowledged[i] = s.ok(); });
  };
  commit(0);
  io_->Complete(0);  // its sync
  commit(1);
  ASSERT_EQ(io_->pending(), 2u) << "the first one's record, and the second one's sync";
  io_->Complete(1);
  EXPECT_EQ(io_->pending(), 1u) << "one batch at a time";
  io_->Complete(0);
  EXPECT_TRUE(acknowledged[0]);
  EXPECT_FALSE(acknowledged[1]);
  io_->CompleteAll();
  EXPECT_TRUE(acknowledged[1]);
}

TEST_F(SsdTierTest, CommitRequiresAllWrites) {
  OpenWithTenants();
  const Slot slot = tier_->Allocate(kAcme, 3).value();
  EXPECT_EQ(Commit(kAcme, 1, slot).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(tier_->Write(slot, 0, Sources(0, 2), [](absl::Status) {}));
  io_->CompleteAll();
  EXPECT_EQ(Commit(kAcme, 1, slot).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(tier_->Write(slot, 2, Sources(2, 1), [](absl::Status) {}));
  std::optional<absl::Status> early;  // status of a commit before the write has completed
  tier_->Commit(kAcme, PoolKind::kPublic, HeaderOfExtents(1, 3), slot, [&](absl::Status s) { early = s; });
  io_->CompleteAll();
  EXPECT_EQ(early->code(), absl::StatusCode::kFailedPrecondition);
  std::optional<absl::Status> wrong;
  tier_->Commit(kAcme, PoolKind::kPublic, HeaderOfExtents(1, 2), slot, [&](absl::Status s) { wrong = s; });
  io_->CompleteAll();
  EXPECT_EQ(wrong->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Commit(kAcme, 1, slot), absl::OkStatus());
}

TEST_F(SsdTierTest, AFailedWriteEndsOnlyItsObject) {
  OpenWithTenants();
  const Slot kept = Store(kAcme, 1, 2);
  const Slot slot = tier_->Allocate(kAcme, 2).value();
  disk_.set_faults({.write_error = 1});
  EXPECT_FALSE(Write(slot, 5).ok());
  disk_.set_faults({});
  EXPECT_EQ(Commit(kAcme, 2, slot).code(), absl::StatusCode::kAborted);
  tier_->Free(slot);
  EXPECT_EQ(tier_->Usage(kAcme).used_bytes, 2 * kExtentBytes);
  EXPECT_TRUE(Holds(kept, 1));
  Store(kAcme, 3, 8);
}

TEST_F(SsdTierTest, AFullDiskIsAnOrdinaryError) {
  OpenWithTenants();
  const Slot kept = Store(kAcme, 1, 2);
  const Slot slot = tier_->Allocate(kAcme, 2).value();
  disk_.set_faults({.full = true});
  EXPECT_EQ(Write(slot, 5).code(), absl::StatusCode::kResourceExhausted);
  disk_.set_faults({});
  tier_->Free(slot);
  EXPECT_TRUE(Holds(kept, 1));
}

// fsync reports an error once: what it did not write is lost, and the next call succeeds.
TEST_F(SsdTierTest, ALaterSyncDoesNotCoverWritesOfAFailedSync) {
  OpenWithTenants();
  const Slot first = tier_->Allocate(kAcme, 1).value();
  const Slot second = tier_->Allocate(kAcme, 1).value();
  ASSERT_EQ(Write(first, 1), absl::OkStatus());
  ASSERT_EQ(Write(second, 2), absl::OkStatus());
  disk_.set_faults({.sync_error = 1});
  EXPECT_FALSE(Commit(kAcme, 1, first).ok());
  disk_.set_faults({});
  EXPECT_EQ(Commit(kAcme, 1, first).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Commit(kAcme, 2, second).code(), absl::StatusCode::kAborted);
  tier_->Free(first);
  tier_->Free(second);
  const Slot again = Store(kAcme, 2, 1);
  disk_.Crash();
  disk_.Restart();
  const auto recovered = OpenWithTenants();
  ASSERT_EQ(recovered.size(), 1u);
  EXPECT_EQ(recovered[0].slot.runs, again.runs);
  EXPECT_TRUE(Holds(recovered[0].slot, 2));
}

TEST_F(SsdTierTest, ALaterSyncDoesNotCoverAFailedErasureSync) {
  OpenWithTenants();
  const Slot erased = Store(kBolt, 1, 2);
  const Slot slot = tier_->Allocate(kAcme, 1).value();
  ASSERT_EQ(Write(slot, 2), absl::OkStatus());
  tier_->Shred(erased);
  tier_->Erase(kBolt, NumberedKey(1), erased);
  disk_.set_faults({.sync_error = 1});
  std::optional<absl::Status> told;
  tier_->WhenErased(kBolt, [&](const absl::Status& status) { told = status; });
  io_->CompleteAll();
  disk_.set_faults({});
  ASSERT_TRUE(told.has_value());
  EXPECT_FALSE(told->ok());
  EXPECT_EQ(Commit(kAcme, 2, slot).code(), absl::StatusCode::kAborted);
}

TEST_F(SsdTierTest, ExtentsAreReusedOnlyAfterADurableDeletion) {
  OpenWithTenants();
  const Slot slot = Store(kBolt, 1, 6);
  disk_.set_faults({.record_error = 1});
  bool erased = false;
  tier_->Erase(kBolt, NumberedKey(1), slot, [&] { erased = true; });
  io_->CompleteAll();
  EXPECT_FALSE(erased);
  EXPECT_EQ(tier_->Usage(kBolt).used_bytes, 6 * kExtentBytes);
  disk_.set_faults({});
  EXPECT_FALSE(tier_->Allocate(kBolt, 1).ok());  // which requests the deletion again
  io_->CompleteAll();
  EXPECT_TRUE(erased);
  EXPECT_TRUE(tier_->Allocate(kBolt, 6).ok());
}

TEST_F(SsdTierTest, AnUnresolvedCommitIsRevertedBeforeItsExtentsAreReused) {
  OpenWithTenants();
  // The disk chooses whether the failed batch was written; a few tries see both.
  for (int i = 0; i < 8; ++i) {
    const Slot slot = tier_->Allocate(kBolt, 6).value();
    ASSERT_EQ(Write(slot, 1), absl::OkStatus());
    disk_.set_faults({.record_error = 1});
    EXPECT_FALSE(Commit(kBolt, 1, slot).ok());
    tier_->Free(slot);
    io_->CompleteAll();  // the deletion fails as well
    EXPECT_EQ(tier_->Usage(kBolt).used_bytes, 6 * kExtentBytes);
    disk_.set_faults({});
    EXPECT_FALSE(tier_->Allocate(kBolt, 1).ok());
    io_->CompleteAll();
    EXPECT_EQ(tier_->Usage(kBolt).used_bytes, 0u);
  }
  EXPECT_TRUE(OpenWithTenants().empty());
}

using SsdTierDeathTest = SsdTierTest;

TEST_F(SsdTierDeathTest, TwoOwnersOfASlotAreFatal) {
  OpenWithTenants();
  const Slot slot = Store(kAcme, 1, 1);
  EXPECT_DEATH(tier_->Free(slot), "committed");
  tier_->Erase(kAcme, NumberedKey(1), slot);
  EXPECT_DEATH(tier_->Erase(kAcme, NumberedKey(1), slot), "uncommitted slot");
}

}  // namespace
}  // namespace ashlar::storage
