#include "storage/tier/ssd_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "kernels/checksum.h"
#include "storage/testing/disk_objects.h"
#include "storage/testing/executors.h"
#include "storage/testing/simulated_disk.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr uint64_t kExtent = limits::kExtentBytes;
constexpr TenantId kAcme = 3, kBolt = 5;

class SsdTierTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kCapacity = 16 * kExtent;

  SsdTierTest() : disk_(SsdTier::SlabBytes(kCapacity), /*seed=*/1) { memory_.Fill(7); }

  absl::Status Open(SlabId new_id = {9}) {
    tier_.reset();
    io_.emplace(capacity_);
    auto tier = SsdTier::Open({.new_id = new_id, .pieces_in_flight = 2}, disk_.file(), disk_.records(), *io_);
    if (tier.ok()) tier_ = *std::move(tier);
    return tier.status();
  }
  std::vector<SsdTier::Recovered> OpenWithTenants(uint64_t acme = 10 * kExtent, uint64_t bolt = 6 * kExtent) {
    EXPECT_EQ(Open(), absl::OkStatus());
    EXPECT_EQ(tier_->AddTenant(kAcme, "acme", acme), absl::OkStatus());
    EXPECT_EQ(tier_->AddTenant(kBolt, "bolt", bolt), absl::OkStatus());
    auto recovered = tier_->Recover();
    EXPECT_EQ(recovered.status(), absl::OkStatus());
    return *std::move(recovered);
  }

  std::vector<const std::byte*> Sources(size_t first, size_t extents) const {
    std::vector<const std::byte*> sources;
    for (size_t i = 0; i < extents; ++i) sources.push_back(memory_[(first + i) % memory_.extents()]);
    return sources;
  }

  // Until the executor has nothing left.
  absl::Status Write(const Slot& slot, size_t content) {
    std::optional<absl::Status> status;
    EXPECT_TRUE(tier_->Write(slot, 0, Sources(content, slot.Extents()), [&](absl::Status s) { status = s; }));
    EXPECT_FALSE(status.has_value());
    io_->CompleteAll();
    return status.value();
  }
  absl::Status Commit(TenantId tenant, uint64_t number, const Slot& slot) {
    std::optional<absl::Status> status;
    tier_->Commit(tenant, PoolKind::kPublic, HeaderOfExtents(number, slot.Extents()), slot,
                  [&](absl::Status s) { status = s; });
    EXPECT_FALSE(status.has_value());
    io_->CompleteAll();
    return status.value();
  }
  // Object `number` has the contents that begin at that extent of the memory.
  Slot Store(TenantId tenant, uint64_t number, uint64_t extents) {
    const Slot slot = tier_->Allocate(tenant, extents).value();
    EXPECT_EQ(Write(slot, number), absl::OkStatus());
    EXPECT_EQ(Commit(tenant, number, slot), absl::OkStatus());
    return slot;
  }
  bool Holds(const Slot& slot, size_t content) {
    ExtentMemory read(slot.Extents());
    std::vector<std::byte*> targets;
    for (size_t i = 0; i < slot.Extents(); ++i) targets.push_back(read[i]);
    std::optional<absl::Status> status;
    EXPECT_TRUE(tier_->Read(slot, 0, targets, [&](absl::Status s) { status = s; }));
    io_->CompleteAll();
    EXPECT_EQ(*status, absl::OkStatus());
    const auto expected = Sources(content, slot.Extents());
    for (size_t i = 0; i < slot.Extents(); ++i) {
      if (!SameExtent(read[i], expected[i])) return false;
    }
    return true;
  }

  SimulatedDisk disk_;
  size_t capacity_ = 64;
  std::optional<ManualExecutor> io_;
  std::unique_ptr<SsdTier> tier_;
  ExtentMemory memory_{24};
};

TEST_F(SsdTierTest, WhatWasCommittedComesBack) {
  EXPECT_TRUE(OpenWithTenants().empty());
  Store(kAcme, 1, 5);
  const Slot bolts = Store(kBolt, 2, 1);
  const Slot unwritten = tier_->Allocate(kAcme, 1).value();
  const Slot uncommitted = tier_->Allocate(kAcme, 2).value();
  EXPECT_EQ(Write(uncommitted, 3), absl::OkStatus());
  disk_.Crash();
  disk_.Restart();
  const auto recovered = OpenWithTenants();
  ASSERT_EQ(recovered.size(), 2u);
  EXPECT_EQ(recovered[0].tenant, kAcme);
  EXPECT_EQ(recovered[0].header, HeaderOfExtents(1, 5));
  EXPECT_TRUE(Holds(recovered[0].slot, 1));
  EXPECT_EQ(recovered[1].tenant, kBolt);
  EXPECT_EQ(recovered[1].slot.runs, bolts.runs);
  EXPECT_TRUE(Holds(recovered[1].slot, 2));
  EXPECT_EQ(tier_->Usage(kAcme).used_bytes, 5 * kExtent);
  EXPECT_EQ(tier_->Usage().used_bytes, 6 * kExtent);
  EXPECT_EQ(tier_->recovery().objects, 2u);
  EXPECT_EQ(tier_->recovery().bytes, 6 * kExtent);
}

TEST_F(SsdTierTest, TenantsMayHaveOtherNumbersNextTime) {
  OpenWithTenants();
  Store(kAcme, 1, 1);
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(tier_->AddTenant(77, "acme", kExtent), absl::OkStatus());
  const auto recovered = tier_->Recover().value();
  ASSERT_EQ(recovered.size(), 1u);
  EXPECT_EQ(recovered[0].tenant, 77u);
  EXPECT_EQ(recovered[0].slot.tenant, 77u);
}

TEST_F(SsdTierTest, BudgetsAreRefusedByName) {
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_THAT(tier_->AddTenant(kAcme, "acme", kExtent - 1).message(), HasSubstr("ssd_bytes"));
  EXPECT_THAT(tier_->AddTenant(kAcme, "", kExtent).message(), HasSubstr("name"));
  EXPECT_THAT(tier_->AddTenant(kAcme, "acme", kCapacity + kExtent).message(), HasSubstr("ssd_bytes"));
  EXPECT_EQ(tier_->AddTenant(kAcme, "acme", kCapacity - kExtent), absl::OkStatus());
  EXPECT_EQ(tier_->AddTenant(kAcme, "other", kExtent).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(tier_->AddTenant(kBolt, "acme", kExtent).message(), HasSubstr("name"));
  EXPECT_THAT(tier_->AddTenant(kBolt, "bolt", 2 * kExtent).message(), HasSubstr("other tenants leave"));
  EXPECT_EQ(tier_->AddTenant(kBolt, "bolt", kExtent), absl::OkStatus());
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
  SimulatedDisk small(kExtent, 1);
  ManualExecutor io;
  EXPECT_THAT(SsdTier::Open({}, small.file(), small.records(), io).status().message(), HasSubstr("ssd.capacity_bytes"));
  EXPECT_EQ(SsdTier::SlabBytes(3 * kExtent + 1), 4 * kExtent);
}

TEST_F(SsdTierTest, AQueueThatIsFullRefusesAtOnceAndLosesNothing) {
  capacity_ = 1;
  OpenWithTenants();
  const Slot large = tier_->Allocate(kAcme, 10).value();  // three pieces, for one place
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
  // A commit is never refused: it waits for a place.
  EXPECT_TRUE(tier_->Read(small, 0, {memory_[20]}, note(4)));
  tier_->Commit(kBolt, PoolKind::kPublic, HeaderOfExtents(2, 1), small, note(5));
  io_->CompleteAll();
  EXPECT_THAT(order, ElementsAre(1, 3, 4, 5));
  EXPECT_TRUE(Holds(large, 0));
}

TEST_F(SsdTierTest, PiecesGoOutInOrderAFewAtATime) {
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
  EXPECT_EQ(disk_.counts().writes, 1u + 3u);  // the slab's header, and what lies together in one call each
}

TEST_F(SsdTierTest, MovesWhatLiesScattered) {
  OpenWithTenants();
  // Only single extents are free, so that a larger slot is scattered on the disk; its memory is, too.
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
  EXPECT_EQ(disk_.counts().syncs, before.syncs + 2);  // the first one's, and one for all that came meanwhile
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

TEST_F(SsdTierTest, NothingIsCommittedThatWasNotWritten) {
  OpenWithTenants();
  const Slot slot = tier_->Allocate(kAcme, 3).value();
  EXPECT_EQ(Commit(kAcme, 1, slot).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(tier_->Write(slot, 0, Sources(0, 2), [](absl::Status) {}));
  io_->CompleteAll();
  EXPECT_EQ(Commit(kAcme, 1, slot).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(tier_->Write(slot, 2, Sources(2, 1), [](absl::Status) {}));
  std::optional<absl::Status> early;  // before that write is done
  tier_->Commit(kAcme, PoolKind::kPublic, HeaderOfExtents(1, 3), slot, [&](absl::Status s) { early = s; });
  io_->CompleteAll();
  EXPECT_EQ(early->code(), absl::StatusCode::kFailedPrecondition);
  std::optional<absl::Status> wrong;
  tier_->Commit(kAcme, PoolKind::kPublic, HeaderOfExtents(1, 2), slot, [&](absl::Status s) { wrong = s; });
  io_->CompleteAll();
  EXPECT_EQ(wrong->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Commit(kAcme, 1, slot), absl::OkStatus());
}

TEST_F(SsdTierTest, AWriteThatFailedIsTheEndOfItsObjectAlone) {
  OpenWithTenants();
  const Slot kept = Store(kAcme, 1, 2);
  const Slot slot = tier_->Allocate(kAcme, 2).value();
  disk_.set_faults({.write_error = 1});
  EXPECT_FALSE(Write(slot, 5).ok());
  disk_.set_faults({});
  EXPECT_EQ(Commit(kAcme, 2, slot).code(), absl::StatusCode::kAborted);
  tier_->Free(slot);
  EXPECT_EQ(tier_->Usage(kAcme).used_bytes, 2 * kExtent);
  EXPECT_TRUE(Holds(kept, 1));
  Store(kAcme, 3, 8);
}

TEST_F(SsdTierTest, AFullDiskIsAnErrorLikeAnyOther) {
  OpenWithTenants();
  const Slot kept = Store(kAcme, 1, 2);
  const Slot slot = tier_->Allocate(kAcme, 2).value();
  disk_.set_faults({.full = true});
  EXPECT_EQ(Write(slot, 5).code(), absl::StatusCode::kResourceExhausted);
  disk_.set_faults({});
  tier_->Free(slot);
  EXPECT_TRUE(Holds(kept, 1));
}

// fsync reports an error once: what it did not write is forgotten, and the next one succeeds.
TEST_F(SsdTierTest, NoLaterSyncVouchesForWhatAFailedOneCovered) {
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

TEST_F(SsdTierTest, ExtentsAreUsedAgainOnlyWhenTheDeletionIsDurable) {
  OpenWithTenants();
  const Slot slot = Store(kBolt, 1, 6);
  disk_.set_faults({.record_error = 1});
  bool erased = false;
  tier_->Erase(kBolt, NumberedKey(1), slot, [&] { erased = true; });
  io_->CompleteAll();
  EXPECT_FALSE(erased);
  EXPECT_EQ(tier_->Usage(kBolt).used_bytes, 6 * kExtent);
  disk_.set_faults({});
  EXPECT_FALSE(tier_->Allocate(kBolt, 1).ok());  // which asks for the deletion again
  io_->CompleteAll();
  EXPECT_TRUE(erased);
  EXPECT_TRUE(tier_->Allocate(kBolt, 6).ok());
}

TEST_F(SsdTierTest, ACommitInDoubtIsTakenBackBeforeItsExtentsAreUsedAgain) {
  OpenWithTenants();
  // The disk chooses whether the failed batch was written; a few tries see both.
  for (int i = 0; i < 8; ++i) {
    const Slot slot = tier_->Allocate(kBolt, 6).value();
    ASSERT_EQ(Write(slot, 1), absl::OkStatus());
    disk_.set_faults({.record_error = 1});
    EXPECT_FALSE(Commit(kBolt, 1, slot).ok());
    tier_->Free(slot);
    io_->CompleteAll();  // the deletion fails, too
    EXPECT_EQ(tier_->Usage(kBolt).used_bytes, 6 * kExtent);
    disk_.set_faults({});
    EXPECT_FALSE(tier_->Allocate(kBolt, 1).ok());
    io_->CompleteAll();
    EXPECT_EQ(tier_->Usage(kBolt).used_bytes, 0u);
  }
  EXPECT_TRUE(OpenWithTenants().empty());
}

TEST_F(SsdTierTest, TenantsThatAreNotConfiguredKeepWhatTheyHave) {
  OpenWithTenants();
  Store(kAcme, 1, 9);
  Store(kBolt, 2, 6);
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(tier_->AddTenant(kBolt, "bolt", kCapacity), absl::OkStatus());
  EXPECT_EQ(tier_->Recover()->size(), 1u);
  EXPECT_THAT(tier_->recovery().unknown_tenants, ElementsAre(Pair("acme", 9 * kExtent)));
  EXPECT_EQ(tier_->Usage().used_bytes, 15 * kExtent);
  EXPECT_THAT(tier_->Allocate(kBolt, 2).status().message(), HasSubstr("not configured"));
  EXPECT_TRUE(tier_->Allocate(kBolt, 1).ok());
  const auto recovered = OpenWithTenants();
  EXPECT_EQ(recovered.size(), 2u);
  EXPECT_TRUE(Holds(recovered[0].slot, 1));
}

TEST_F(SsdTierTest, ASmallerBudgetKeepsWhatWasStoredLast) {
  OpenWithTenants();
  for (int i = 0; i < 4; ++i) Store(kAcme, i, 2);
  const auto recovered = OpenWithTenants(/*acme=*/5 * kExtent);
  ASSERT_EQ(recovered.size(), 2u);
  EXPECT_EQ(recovered[0].header.key, NumberedKey(2));
  EXPECT_EQ(recovered[1].header.key, NumberedKey(3));
  EXPECT_EQ(tier_->recovery().over_budget, 2u);
  EXPECT_EQ(OpenWithTenants().size(), 2u);  // the others are gone for good
}

class SsdTierRecordsTest : public SsdTierTest {
 protected:
  void Put(uint64_t sequence, uint64_t number, std::vector<ExtentRun> runs, const std::string& tenant = "acme") {
    const SsdRecord record{sequence, tenant, PoolKind::kPublic, runs,
                           HeaderOfExtents(number, Slot{.runs = runs}.Extents())};
    PutBytes(RecordName(record.header.key, sequence), EncodeRecord(record));
  }
  void PutBytes(const std::string& name, std::optional<std::string> value) {
    const RecordStore::Change change{name, std::move(value)};
    ASSERT_EQ(disk_.records().Write({&change, 1}), absl::OkStatus());
  }
  size_t Records() {
    size_t records = 0;
    EXPECT_EQ(disk_.records().Load([&](std::string_view, std::string_view) {
      ++records;
      return absl::OkStatus();
    }),
              absl::OkStatus());
    return records;
  }
};

TEST_F(SsdTierRecordsTest, TheLaterOfTwoRecordsIsRight) {
  OpenWithTenants();
  Put(10, /*number=*/1, {{.first = 1, .count = 2}});
  Put(11, /*number=*/1, {{.first = 4, .count = 1}});  // the same key
  Put(12, /*number=*/2, {{.first = 6, .count = 1}, {.first = 9, .count = 1}});
  Put(13, /*number=*/3, {{.first = 8, .count = 3}});           // in the same extent
  Put(14, /*number=*/1, {{.first = 12, .count = 1}}, "bolt");  // another tenant's key
  const auto recovered = OpenWithTenants();
  ASSERT_EQ(recovered.size(), 3u);
  EXPECT_THAT(recovered[0].slot.runs, ElementsAre(ExtentRun{0, 4, 1}));
  EXPECT_THAT(recovered[1].slot.runs, ElementsAre(ExtentRun{0, 8, 3}));
  EXPECT_EQ(recovered[2].tenant, kBolt);
  EXPECT_EQ(tier_->recovery().superseded, 2u);
  EXPECT_EQ(tier_->Usage(kAcme).used_bytes, 4 * kExtent);
  EXPECT_EQ(Records(), 1 + 3u);  // orphans have gone from the disk, too
  // Sequence numbers continue behind the greatest one.
  const Slot slot = Store(kBolt, 1, 1);
  const auto again = OpenWithTenants();
  EXPECT_EQ(again.back().slot.runs, slot.runs);
}

TEST_F(SsdTierRecordsTest, RecordsThatMakeNoSenseAreRemoved) {
  OpenWithTenants();
  Store(kAcme, 5, 1);
  Put(10, 1, {{.first = 0, .count = 1}});   // the slab's header
  Put(11, 2, {{.first = 15, .count = 3}});  // behind the slab's end
  PutBytes("object/damaged", "bytes");
  PutBytes("unheard of", "bytes");
  EXPECT_EQ(OpenWithTenants().size(), 1u);
  EXPECT_EQ(tier_->recovery().damaged, 4u);
  EXPECT_EQ(Records(), 1 + 1u);
}

TEST_F(SsdTierRecordsTest, ASlabIsReadWithItsOwnRecordsAlone) {
  OpenWithTenants();
  Store(kAcme, 1, 1);
  const std::string ours = EncodeManifest({9});
  PutBytes("manifest", EncodeManifest({8}));
  EXPECT_THAT(Open().message(), HasSubstr("not the one that the index describes"));
  for (const int version : {1, 3}) {
    std::string other = ours;
    other[8] = static_cast<char>(version);
    const uint64_t checksum = kernels::UnitChecksum(other.data(), other.size() - sizeof checksum);
    std::memcpy(other.data() + other.size() - sizeof checksum, &checksum, sizeof checksum);
    PutBytes("manifest", other);
    EXPECT_THAT(Open().message(), HasSubstr("format version " + std::to_string(version)));
  }
  PutBytes("manifest", "damaged");
  EXPECT_EQ(Open().code(), absl::StatusCode::kDataLoss);
  PutBytes("manifest", std::nullopt);
  EXPECT_THAT(Open().message(), HasSubstr("manifest: missing"));
  PutBytes("manifest", ours);
  EXPECT_EQ(OpenWithTenants().size(), 1u);
}

TEST_F(SsdTierRecordsTest, ASlabThatIsGoneIsDamageAndAnotherIsRefused) {
  OpenWithTenants();
  alignas(4096) std::array<std::byte, 4096> block{};
  ASSERT_EQ(disk_.file().Write(0, block), absl::OkStatus());
  EXPECT_EQ(Open().code(), absl::StatusCode::kDataLoss);
  const std::string another = EncodeSlabHeader({8});
  std::memcpy(block.data(), another.data(), another.size());
  ASSERT_EQ(disk_.file().Write(0, block), absl::OkStatus());
  EXPECT_EQ(Open().code(), absl::StatusCode::kFailedPrecondition) << "it may be wanted elsewhere";
}

TEST_F(SsdTierTest, ATierWithoutItsDiskIsEmptyUntilItIsAttached) {
  OpenWithTenants();
  const Slot slot = Store(kAcme, 1, 2);
  io_.emplace(capacity_);
  const auto with_tenants = [&](absl::StatusOr<std::unique_ptr<SsdTier>> made) {
    EXPECT_EQ(made.status(), absl::OkStatus());
    EXPECT_EQ((*made)->AddTenant(kAcme, "acme", 10 * kExtent), absl::OkStatus());
    return *std::move(made);
  };
  tier_ = with_tenants(SsdTier::WithoutDisk({}, kCapacity, *io_, absl::UnavailableError("read-only")));
  EXPECT_EQ(tier_->health().message(), "read-only");
  EXPECT_EQ(tier_->Usage().capacity_bytes, kCapacity);
  EXPECT_EQ(tier_->Usage().used_bytes, 0u);
  EXPECT_FALSE(tier_->Allocate(kAcme, 1).ok());
  tier_->Tick(100'000'000'000);
  EXPECT_EQ(io_->pending(), 0u) << "there is nothing to be tried";
  auto opened = with_tenants(SsdTier::Open({}, disk_.file(), disk_.records(), *io_));
  ASSERT_EQ(opened->Recover()->size(), 1u);
  tier_->Attach(std::move(opened));
  EXPECT_EQ(tier_->health(), absl::OkStatus());
  EXPECT_EQ(tier_->Usage(kAcme).used_bytes, 2 * kExtent);
  EXPECT_TRUE(Holds(slot, 1));
  Store(kAcme, 2, 3);
  tier_->Erase(kAcme, NumberedKey(1), slot);
  io_->CompleteAll();
  EXPECT_EQ(OpenWithTenants().size(), 1u);
}

using SsdTierDeathTest = SsdTierTest;

TEST_F(SsdTierDeathTest, TwoOwnersOfASlotAreNoErrorToGoOnFrom) {
  OpenWithTenants();
  const Slot slot = Store(kAcme, 1, 1);
  EXPECT_DEATH(tier_->Free(slot), "committed");
  tier_->Erase(kAcme, NumberedKey(1), slot);
  EXPECT_DEATH(tier_->Erase(kAcme, NumberedKey(1), slot), "not committed");
}

}  // namespace
}  // namespace ashlar::storage
