// SPDX-License-Identifier: Apache-2.0
// SsdTierTest: the fixture of the SSD tier's tests, a tier of two tenants on a simulated disk.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "storage/testing/disk_objects.h"
#include "storage/testing/executors.h"
#include "storage/testing/simulated_disk.h"
#include "storage/tier/ssd_tier.h"

namespace ashlar::storage {

using limits::kExtentBytes;
inline constexpr TenantId kAcme = 3, kBolt = 5;

class SsdTierTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kCapacity = 16 * kExtentBytes;

  SsdTierTest() : disk_(SsdTier::SlabBytes(kCapacity), /*seed=*/1) { memory_.Fill(7); }

  absl::Status Open(SlabId new_id = {9}) {
    tier_.reset();
    io_.emplace(capacity_);
    auto tier = SsdTier::Open({.new_id = new_id, .pieces_in_flight = 2}, disk_.file(), disk_.records(), *io_);
    if (tier.ok()) tier_ = *std::move(tier);
    return tier.status();
  }
  std::vector<SsdTier::Recovered> OpenWithTenants(uint64_t acme = 10 * kExtentBytes, uint64_t bolt = 6 * kExtentBytes) {
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

  // Runs the executor until it is empty.
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

}  // namespace ashlar::storage
