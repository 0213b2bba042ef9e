// SPDX-License-Identifier: Apache-2.0
// Whose turn it is to copy, which the tests of placement cannot observe. They cover whole copies between tiers.
#include "storage/objects/tier_copier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "storage/testing/executors.h"
#include "storage/testing/rig.h"
#include "storage/testing/simulated_disk.h"

namespace ashlar::storage {
namespace {

constexpr uint64_t kExtents = 4;  // extents of one piece
constexpr TenantId kBlue = 1, kGreen = 2;

// Refuses some tenants' work, like an executor whose queue share is full.
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

// Other nodes, one of which has no space for any read.
class OneFull final : public RemoteSource {
 public:
  static constexpr RemoteCopyId kFull = 1;

  bool Reaches(const kernels::Gpu&) const override { return false; }
  bool Read(RemoteCopyId copy, uint64_t, std::vector<std::byte*>, const kernels::Gpu*,
            std::function<void(absl::Status)> done) override {
    asked.push_back(copy);
    if (copy == kFull) return false;
    under_way.push_back(std::move(done));
    return true;
  }
  void Release(RemoteCopyId) override {}
  void Damaged(RemoteCopyId) override {}
  void SetRecompute(RemoteCopyId, Nanos) override {}

  std::vector<RemoteCopyId> asked;
  std::vector<std::function<void(absl::Status)>> under_way;
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
  // Among the pieces in flight that began last.
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

TEST_F(TierCopierTest, ADiskThatRefusesDoesNotDelayMemory) {
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

TEST_F(TierCopierTest, MemoryThatRefusesDoesNotDelayTheDisk) {
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

// One tenant's copies, with the full node's copies needed first: the others begin, and the full node is asked once
// instead of once per copy.
TEST_F(TierCopierTest, ANodeWithoutSpaceDoesNotDelayCopiesFromOthers) {
  OneFull source;
  TierCopier copier(executor_, nullptr, &source);
  std::vector<Slot> to(4);
  Nanos needed_at = 0;
  for (Slot& slot : to) {
    slot = *memory_->Allocate(kBlue, kExtents);
    const RemoteCopyId copy = needed_at == 0 ? OneFull::kFull : OneFull::kFull + 1;
    copier.Start({.remote = copy}, {memory_.get(), &slot}, kExtents, kExtents, needed_at++,
                 {.progress = [](uint64_t) {}, .done = [](const absl::Status&) {}});
  }
  copier.Pump();
  EXPECT_EQ(source.under_way.size(), 3u);
  EXPECT_EQ(std::ranges::count(source.asked, OneFull::kFull), 1);
  copier.Pump();
  EXPECT_EQ(std::ranges::count(source.asked, OneFull::kFull), 2) << "again with each call";
  for (const auto& done : std::exchange(source.under_way, {})) done(absl::OkStatus());
}

TEST_F(TierCopierTest, CopiesEarliestNeedFirst) {
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

TEST_F(TierCopierTest, ANewTenantsFirstPieceIsNext) {
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

TEST_F(TierCopierTest, FullQueueOfATenantDelaysNoOther) {
  choosy_.refused = kBlue;
  Ask(kBlue, 10, /*needed_at=*/0);
  Ask(kGreen, 10, /*needed_at=*/1);
  EXPECT_EQ(executor_.pending(), 32u);
  choosy_.refused = kNoTenant;
  for (int i = 0; i < 32; ++i) executor_.Complete(0);
  EXPECT_EQ(Latest(kBlue, 32), 24u) << "in turn with the last eight of Bob's forty";
}

TEST_F(TierCopierTest, BackgroundCopiesProgressBesideOtherTenants) {
  Ask(kBlue, 200, /*needed_at=*/0);
  Ask(kGreen, 50, TierCopier::kWhenIdle);
  for (int i = 0; i < 64; ++i) executor_.Complete(0);
  EXPECT_EQ(Latest(kGreen, 32), 4u);
}

TEST_F(TierCopierTest, BackgroundCopiesYieldToNeededOnes) {
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

// Copies of three tenants in memory, of random size, source availability, and time of need. Counts, for each tenant,
// the pieces of others that begin while the tenant has one that could.
class RandomCopies final : public Executor {
 public:
  static constexpr size_t kTenants = 3;

  explicit RandomCopies(uint64_t seed)
      : random_(seed), in_flight_(1 + random_() % 6), copier_(*this, nullptr, nullptr, in_flight_) {
    for (TenantId tenant = 1; tenant <= kTenants; ++tenant) {
      for (Slot& slot : slots_[tenant - 1]) slot = *memory_->Allocate(tenant, kMostExtents);
    }
  }

  bool Run(TenantId tenant, std::function<void()> work, std::function<void()> done) override {
    if (tenant == left_out || !inner_.Run(tenant, std::move(work), std::move(done))) return false;
    --startable_[tenant - 1];
    for (size_t other = 0; other < kTenants; ++other) {
      passed_[other] = other + 1 == tenant || startable_[other] == 0 ? 0 : passed_[other] + 1;
      most_passed_ = std::max(most_passed_, passed_[other]);
    }
    return true;
  }
  void Post(TenantId tenant, std::function<void()> event) override { inner_.Post(tenant, std::move(event)); }

  void Step() {
    const uint64_t what = random_() % 8;
    if (what < 2) {
      Begin();
    } else if (what < 4 && !open_.empty()) {
      Offer();
    } else if (what == 4) {
      inner_.set_capacity(random_() % 4 == 0 ? 1 : 64);
    } else if (inner_.pending() > 0) {
      inner_.Complete(random_() % inner_.pending());
    }
    copier_.Pump();
  }

  size_t most_passed() const { return most_passed_; }
  TenantId left_out = kNoTenant;  // an injected mistake: no piece of this tenant begins

 private:
  static constexpr uint64_t kMostExtents = 20;
  struct Open {
    std::shared_ptr<TierCopy> copy;
    TenantId tenant;
    uint64_t extents, available;
  };

  // Pieces that can begin if this part of the source is available: whole ones, and the last one.
  static uint64_t Pieces(uint64_t extents, uint64_t available) {
    return available == extents ? (extents + kExtents - 1) / kExtents : available / kExtents;
  }
  void Begin() {
    const TenantId tenant = 1 + static_cast<TenantId>(random_() % kTenants);
    const uint64_t extents = 1 + random_() % kMostExtents, available = random_() % (extents + 1);
    startable_[tenant - 1] += Pieces(extents, available);
    auto& [from, to] = slots_[tenant - 1];
    auto copy = copier_.Start({memory_.get(), &from}, {memory_.get(), &to}, extents, available,
                              static_cast<Nanos>(random_() % 100),
                              {.progress = [](uint64_t) {}, .done = [](const absl::Status&) {}});
    if (available < extents) open_.push_back({std::move(copy), tenant, extents, available});
  }
  void Offer() {
    const size_t chosen = random_() % open_.size();
    Open& open = open_[chosen];
    const uint64_t available = open.available + 1 + random_() % (open.extents - open.available);
    startable_[open.tenant - 1] += Pieces(open.extents, available) - Pieces(open.extents, open.available);
    open.available = available;
    copier_.Offer(*open.copy, available);
    if (available == open.extents) open_.erase(open_.begin() + static_cast<ptrdiff_t>(chosen));
  }

  std::mt19937_64 random_;
  const size_t in_flight_;
  std::unique_ptr<MemoryTier> memory_ = TestTier({{1, 64}, {2, 64}, {3, 64}});
  std::array<std::array<Slot, 2>, kTenants> slots_;
  ManualExecutor inner_;
  std::vector<Open> open_;  // more of their sources will arrive
  std::array<uint64_t, kTenants> startable_{};
  std::array<size_t, kTenants> passed_{};
  size_t most_passed_ = 0;
  TierCopier copier_;
};

// A piece costs up to four quanta, which the tenant owes for as many rounds; in each round every other tenant begins a
// piece.
constexpr size_t kMostPassed = (RandomCopies::kTenants - 1) * (kExtents + 1);

TEST(TierCopierTurns, AnyOrderOfCopiesServesAllTenants) {
  for (int i = 0; i < 12; ++i) {
    const uint64_t seed = std::random_device()();
    RandomCopies copies(seed);
    for (int step = 0; step < 1000 && copies.most_passed() <= kMostPassed; ++step) copies.Step();
    ASSERT_LE(copies.most_passed(), kMostPassed) << "seed " << seed;
  }
}

TEST(TierCopierTurns, DetectsAStarvedTenant) {
  RandomCopies copies(std::random_device{}());
  copies.left_out = 2;
  for (int step = 0; step < 1000; ++step) copies.Step();
  EXPECT_GT(copies.most_passed(), kMostPassed);
}

}  // namespace
}  // namespace ashlar::storage
