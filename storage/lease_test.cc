#include "storage/lease.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <random>
#include <utility>

#include "proto/limits.h"
#include "storage/testing/rig.h"

namespace ashlar::storage {
namespace {

constexpr SessionId kAnn = 11, kBob = 12, kEve = 13;
constexpr TenantId kTenant = 1, kOther = 2;
constexpr Nanos kUnused = 1000;

class LeaseTest : public ::testing::Test {
 protected:
  LeaseTest() : tier_(TestTier({{kTenant, 4}})), pool_(*tier_, lru_, 4, observer_), leases_(Counter(), kUnused) {}

  // The first draws are zero, then a number repeats: neither may name a lease.
  static std::function<uint64_t()> Counter() {
    return [calls = uint64_t{0}]() mutable -> uint64_t {
      const uint64_t call = calls++;
      if (call < 2) return 0;
      return call < 6 ? 7 : call;
    };
  }

  LeaseTable::Segments OneObject() {
    ObjectHeader plan{.bytes = limits::kExtentBytes};
    Pool::Room room = pool_.Reserve(kTenant, plan);
    if (room.object) pool_.Publish(room.object, plan);
    LeaseTable::Segments segments;
    segments.push_back(pool_.Find(kTenant, plan.key));
    segments.push_back({MissReason::kNeverSeen, {}});
    return segments;
  }

  uint32_t References() { return pool_.Find(kTenant, Key{}).object->references - 1; }

  CountingObserver observer_;
  LruPolicy lru_;
  std::unique_ptr<MemoryTier> tier_;
  Pool pool_;
  LeaseTable leases_;
};

TEST_F(LeaseTest, NamesAreUniqueAndNeverZero) {
  const LeaseId first = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  const LeaseId second = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  EXPECT_NE(first, LeaseId{});
  EXPECT_NE(second, LeaseId{});
  EXPECT_NE(first, second);
}

TEST_F(LeaseTest, TheSystemsRandomNamesDiffer) {
  LeaseTable leases(nullptr, kUnused);
  EXPECT_NE(leases.Grant(kAnn, kTenant, OneObject(), 0), leases.Grant(kAnn, kTenant, OneObject(), 0));
}

TEST_F(LeaseTest, HoldsObjectsUntilTheLastHolderLetsGo) {
  const LeaseId id = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  ASSERT_NE(leases_.Held(kAnn, id), nullptr);
  EXPECT_EQ(leases_.Held(kAnn, id)->size(), 2u);
  ASSERT_NE(leases_.Attach(kBob, kTenant, id), nullptr);
  EXPECT_EQ(References(), 1u);

  EXPECT_EQ(leases_.HeldBy(kAnn), 1u);
  leases_.Release(kAnn, id);
  leases_.Release(kAnn, id);  // harmless
  EXPECT_EQ(leases_.HeldBy(kAnn), 0u);
  EXPECT_EQ(leases_.Held(kAnn, id), nullptr);
  EXPECT_NE(leases_.Held(kBob, id), nullptr);
  EXPECT_EQ(References(), 1u);

  leases_.ReleaseAll(kBob);
  EXPECT_EQ(leases_.Held(kBob, id), nullptr);
  EXPECT_EQ(leases_.Attach(kBob, kTenant, id), nullptr);
  EXPECT_EQ(References(), 0u);
  EXPECT_EQ(leases_.size(), 0u);
}

TEST_F(LeaseTest, IsUnknownToOtherTenantsAndOtherSessions) {
  const LeaseId id = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  EXPECT_EQ(leases_.Attach(kEve, kOther, id), nullptr);
  EXPECT_EQ(leases_.Held(kEve, id), nullptr);
  EXPECT_EQ(leases_.Held(kBob, id), nullptr) << "same tenant, but it did not attach";
  leases_.Release(kEve, id);
  leases_.ReleaseAll(kEve);
  EXPECT_NE(leases_.Held(kAnn, id), nullptr);
}

TEST_F(LeaseTest, ADeadlineEndsOnlyWhatWasNeverUsed) {
  const LeaseId unused = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  const LeaseId landed = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  const LeaseId attached = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  const LeaseId later = leases_.Grant(kAnn, kTenant, OneObject(), 1);
  leases_.Use(landed);
  ASSERT_NE(leases_.Attach(kBob, kTenant, attached), nullptr);
  EXPECT_NE(leases_.Held(kAnn, unused), nullptr);

  leases_.Expire(kUnused - 1);
  EXPECT_EQ(leases_.size(), 4u);
  leases_.Expire(kUnused);
  EXPECT_EQ(leases_.Held(kAnn, unused), nullptr) << "looking at a lease is no use of it";
  EXPECT_NE(leases_.Held(kAnn, later), nullptr);
  leases_.Expire(100 * kUnused);
  EXPECT_NE(leases_.Held(kAnn, landed), nullptr);
  EXPECT_NE(leases_.Held(kAnn, attached), nullptr);
  EXPECT_EQ(leases_.size(), 2u);
}

}  // namespace
}  // namespace ashlar::storage
