// Of whole ways between tiers the tests of placement see enough; here is what they cannot: whose turn it is.
#include "storage/objects/tier_copier.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "storage/testing/executors.h"
#include "storage/testing/rig.h"
#include "storage/testing/simulated_disk.h"

namespace ashlar::storage {
namespace {

constexpr uint64_t kExtents = 4;  // one piece
constexpr TenantId kBlue = 1, kGreen = 2;

// Refuses some tenants' work, as where their share of the queue is full.
class Choosy final : public Executor {
 public:
  explicit Choosy(ManualExecutor& inner) : inner_(inner) {}
  bool Run(TenantId tenant, std::function<void()> work, std::function<void()> done) override {
    return tenant != refused && inner_.Run(tenant, std::move(work), std::move(done));
  }
  void Post(TenantId tenant, std::function<void()> event) override { inner_.Post(tenant, std::move(event)); }

  TenantId refused = kNoTenant;

 private:
  ManualExecutor& inner_;
};

class TierCopierTest : public ::testing::Test {
 protected:
  TierCopierTest() {
    EXPECT_TRUE(ssd_->AddTenant(kBlue, "ann", 32 * limits::kExtentBytes).ok());
    EXPECT_TRUE(ssd_->AddTenant(kGreen, "bob", 32 * limits::kExtentBytes).ok());
    EXPECT_TRUE(ssd_->Recover().ok());
  }

  std::shared_ptr<TierCopy> Start(TierCopier::End from, TierCopier::End to, Nanos needed_at) {
    return copier_.Start(from, to, kExtents, kExtents, needed_at,
                         {.progress = [](uint64_t) {},
                          .done =
                              [this, needed_at](const absl::Status& status) {
                                EXPECT_TRUE(status.ok()) << status;
                                ended_.push_back(needed_at);
                              }});
  }

  // `count` copies of a tenant's in memory, of some pieces each.
  void Ask(TenantId tenant, size_t count, Nanos needed_at, uint64_t pieces = 4) {
    for (Slot& slot : slots_[tenant]) {
      if (slot.runs.empty()) slot = *memory_->Allocate(tenant, 4 * kExtents);
    }
    for (size_t i = 0; i < count; ++i) {
      copier_.Start({memory_.get(), &slots_[tenant][0]}, {memory_.get(), &slots_[tenant][1]}, pieces * kExtents,
                    pieces * kExtents, needed_at, {.progress = [](uint64_t) {}, .done = [](const absl::Status&) {}});
    }
    copier_.Pump();
  }
  // Of the pieces in flight that have begun last.
  size_t Latest(TenantId tenant, size_t of) {
    size_t count = 0;
    for (size_t i = executor_.pending() - of; i < executor_.pending(); ++i) count += executor_.tenant(i) == tenant;
    return count;
  }

  std::unique_ptr<MemoryTier> memory_ = TestTier({{kBlue, 64}, {kGreen, 64}});
  std::map<TenantId, std::array<Slot, 2>> slots_{{kBlue, {}}, {kGreen, {}}};
  SimulatedDisk disk_{SsdTier::SlabBytes(64 * limits::kExtentBytes), 1};
  ManualExecutor executor_, io_;
  std::unique_ptr<SsdTier> ssd_ = *SsdTier::Open({}, disk_.file(), disk_.records(), io_);
  Choosy choosy_{executor_};
  TierCopier copier_{choosy_, ssd_.get()};
  std::vector<Nanos> ended_;
};

TEST_F(TierCopierTest, ADiskThatRefusesDoesNotHoldUpMemory) {
  const Slot on_disk = *ssd_->Allocate(1, kExtents);
  const Slot first = *memory_->Allocate(1, kExtents), second = *memory_->Allocate(1, kExtents);
  io_.set_capacity(0);
  Start({memory_.get(), &first}, {nullptr, &on_disk}, 1);
  Start({memory_.get(), &first}, {memory_.get(), &second}, 2);
  copier_.Pump();
  executor_.CompleteAll();
  EXPECT_EQ(ended_, (std::vector<Nanos>{2}));

  io_.set_capacity(1024);
  copier_.Pump();
  io_.CompleteAll();
  EXPECT_EQ(ended_, (std::vector<Nanos>{2, 1}));
}

TEST_F(TierCopierTest, MemoryThatRefusesDoesNotHoldUpTheDisk) {
  const Slot on_disk = *ssd_->Allocate(1, kExtents);
  const Slot first = *memory_->Allocate(1, kExtents), second = *memory_->Allocate(1, kExtents);
  executor_.set_capacity(0);
  Start({memory_.get(), &first}, {memory_.get(), &second}, 1);
  Start({memory_.get(), &first}, {nullptr, &on_disk}, 2);
  copier_.Pump();
  io_.CompleteAll();
  EXPECT_EQ(ended_, (std::vector<Nanos>{2}));

  executor_.set_capacity(1024);
  copier_.Pump();
  executor_.CompleteAll();
  EXPECT_EQ(ended_, (std::vector<Nanos>{2, 1}));
}

TEST_F(TierCopierTest, WhatIsNeededFirstGoesFirst) {
  const Slot from = *memory_->Allocate(1, kExtents);
  std::vector<Slot> to(3);
  for (Slot& slot : to) slot = *memory_->Allocate(1, kExtents);
  executor_.set_capacity(1);
  Start({memory_.get(), &from}, {memory_.get(), &to[0]}, 30);
  Start({memory_.get(), &from}, {memory_.get(), &to[1]}, 20);
  const auto hastened = Start({memory_.get(), &from}, {memory_.get(), &to[2]}, 40);
  copier_.Hasten(hastened, 10);
  for (int i = 0; i < 3; ++i) {
    copier_.Pump();
    executor_.CompleteAll();
  }
  EXPECT_EQ(ended_, (std::vector<Nanos>{40, 20, 30}));
}

TEST_F(TierCopierTest, ANewcomersFirstPieceIsNextWhateverAnotherHasAskedFor) {
  Ask(kBlue, 200, /*needed_at=*/0);
  ASSERT_EQ(executor_.pending(), 32u);  // of 800
  Ask(kGreen, 1, /*needed_at=*/1'000'000'000, /*pieces=*/1);
  EXPECT_EQ(executor_.pending(), 32u);
  executor_.Complete(0);
  EXPECT_EQ(Latest(kGreen, 1), 1u);
}

TEST_F(TierCopierTest, TenantsHaveEqualShares) {
  Ask(kBlue, 200, /*needed_at=*/0);
  Ask(kGreen, 50, /*needed_at=*/1'000'000'000);
  for (int i = 0; i < 64; ++i) executor_.Complete(0);
  EXPECT_EQ(Latest(kGreen, 32), 16u);
}

TEST_F(TierCopierTest, OneTenantsFullQueueHoldsUpNobodyElse) {
  choosy_.refused = kBlue;
  Ask(kBlue, 10, /*needed_at=*/0);
  Ask(kGreen, 10, /*needed_at=*/1);
  EXPECT_EQ(executor_.pending(), 32u);
  choosy_.refused = kNoTenant;
  for (int i = 0; i < 32; ++i) executor_.Complete(0);
  EXPECT_EQ(Latest(kBlue, 32), 24u) << "in turn with the last eight of Bob's forty";
}

TEST_F(TierCopierTest, WhatNobodyWaitsForGetsOnBesideWhatOthersNeed) {
  Ask(kBlue, 200, /*needed_at=*/0);
  Ask(kGreen, 50, TierCopier::kWhenIdle);
  for (int i = 0; i < 64; ++i) executor_.Complete(0);
  EXPECT_EQ(Latest(kGreen, 32), 4u);
}

TEST_F(TierCopierTest, WhatNobodyWaitsForIsBehindAllThatItsTenantNeeds) {
  const Slot from = *memory_->Allocate(kBlue, kExtents), to = *memory_->Allocate(kBlue, kExtents);
  executor_.set_capacity(1);
  Start({memory_.get(), &from}, {memory_.get(), &to}, TierCopier::kWhenIdle);
  for (Nanos needed_at = 1; needed_at <= 20; ++needed_at) {
    Start({memory_.get(), &from}, {memory_.get(), &to}, needed_at);
  }
  copier_.Pump();
  executor_.CompleteAll();
  ASSERT_EQ(ended_.size(), 21u);
  EXPECT_EQ(ended_.back(), TierCopier::kWhenIdle);
}

}  // namespace
}  // namespace ashlar::storage
