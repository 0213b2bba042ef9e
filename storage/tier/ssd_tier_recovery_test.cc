// SPDX-License-Identifier: Apache-2.0
// The start of the SSD tier: objects of an earlier run, damaged records, and a disk that is mounted late.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/checksum.h"
#include "storage/testing/ssd_tier_fixture.h"
#include "storage/tier/ssd_format.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

TEST_F(SsdTierTest, CommittedObjectsAreRecovered) {
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
  EXPECT_EQ(tier_->Usage(kAcme).used_bytes, 5 * kExtentBytes);
  EXPECT_EQ(tier_->Usage().used_bytes, 6 * kExtentBytes);
  EXPECT_EQ(tier_->recovery().objects, 2u);
  EXPECT_EQ(tier_->recovery().bytes, 6 * kExtentBytes);
}

TEST_F(SsdTierTest, TenantsMayHaveOtherNumbersNextTime) {
  OpenWithTenants();
  Store(kAcme, 1, 1);
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(tier_->AddTenant(77, "acme", kExtentBytes), absl::OkStatus());
  const auto recovered = tier_->Recover().value();
  ASSERT_EQ(recovered.size(), 1u);
  EXPECT_EQ(recovered[0].tenant, 77u);
  EXPECT_EQ(recovered[0].slot.tenant, 77u);
}

TEST_F(SsdTierTest, TenantsThatAreNotConfiguredKeepWhatTheyHave) {
  OpenWithTenants();
  Store(kAcme, 1, 9);
  Store(kBolt, 2, 6);
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(tier_->AddTenant(kBolt, "bolt", kCapacity), absl::OkStatus());
  EXPECT_EQ(tier_->Recover()->size(), 1u);
  EXPECT_THAT(tier_->recovery().unknown_tenants, ElementsAre(Pair("acme", 9 * kExtentBytes)));
  EXPECT_EQ(tier_->Usage().used_bytes, 15 * kExtentBytes);
  EXPECT_THAT(tier_->Allocate(kBolt, 2).status().message(), HasSubstr("not configured"));
  EXPECT_TRUE(tier_->Allocate(kBolt, 1).ok());
  const auto recovered = OpenWithTenants();
  EXPECT_EQ(recovered.size(), 2u);
  EXPECT_TRUE(Holds(recovered[0].slot, 1));
}

TEST_F(SsdTierTest, ASmallerBudgetKeepsWhatWasStoredLast) {
  OpenWithTenants();
  for (int i = 0; i < 4; ++i) Store(kAcme, i, 2);
  const auto recovered = OpenWithTenants(/*acme=*/5 * kExtentBytes);
  ASSERT_EQ(recovered.size(), 2u);
  EXPECT_EQ(recovered[0].header.key, NumberedKey(2));
  EXPECT_EQ(recovered[1].header.key, NumberedKey(3));
  EXPECT_EQ(tier_->recovery().over_budget, 2u);
  EXPECT_EQ(OpenWithTenants().size(), 2u);  // the others are lost permanently
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
  EXPECT_EQ(tier_->Usage(kAcme).used_bytes, 4 * kExtentBytes);
  EXPECT_EQ(Records(), 1 + 3u);  // orphans are also deleted from the disk
  // Sequence numbers continue after the largest one.
  const Slot slot = Store(kBolt, 1, 1);
  const auto again = OpenWithTenants();
  EXPECT_EQ(again.back().slot.runs, slot.runs);
}

TEST_F(SsdTierRecordsTest, RecordsThatAreInvalidAreRemoved) {
  OpenWithTenants();
  Store(kAcme, 5, 1);
  Put(10, 1, {{.first = 0, .count = 1}});   // the slab's header
  Put(11, 2, {{.first = 15, .count = 3}});  // beyond the slab's end
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
  EXPECT_THAT(Open().message(), HasSubstr("does not match the index"));
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

TEST_F(SsdTierTest, ATierIsEmptyUntilItsDiskIsAttached) {
  OpenWithTenants();
  const Slot slot = Store(kAcme, 1, 2);
  io_.emplace(capacity_);
  const auto with_tenants = [&](absl::StatusOr<std::unique_ptr<SsdTier>> made) {
    EXPECT_EQ(made.status(), absl::OkStatus());
    EXPECT_EQ((*made)->AddTenant(kAcme, "acme", 10 * kExtentBytes), absl::OkStatus());
    return *std::move(made);
  };
  tier_ = with_tenants(SsdTier::WithoutDisk({}, kCapacity, *io_, absl::UnavailableError("read-only")));
  EXPECT_EQ(tier_->health().status().message(), "read-only");
  EXPECT_EQ(tier_->Usage().capacity_bytes, kCapacity);
  EXPECT_EQ(tier_->Usage().used_bytes, 0u);
  EXPECT_FALSE(tier_->Allocate(kAcme, 1).ok());
  tier_->health().Tick(100'000'000'000);
  EXPECT_EQ(io_->pending(), 0u) << "there is nothing to be tried";
  auto opened = with_tenants(SsdTier::Open({}, disk_.file(), disk_.records(), *io_));
  ASSERT_EQ(opened->Recover()->size(), 1u);
  tier_->Attach(std::move(opened));
  EXPECT_EQ(tier_->health().status(), absl::OkStatus());
  EXPECT_EQ(tier_->Usage(kAcme).used_bytes, 2 * kExtentBytes);
  EXPECT_TRUE(Holds(slot, 1));
  Store(kAcme, 2, 3);
  tier_->Erase(kAcme, NumberedKey(1), slot);
  io_->CompleteAll();
  EXPECT_EQ(OpenWithTenants().size(), 1u);
}

}  // namespace
}  // namespace ashlar::storage
