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
  LeaseTest()
      : tier_(TestTier({{kTenant, 4}})),
        pool_({.ghosts_per_tenant = 4}, {.memory = {tier_.get()}}, executor_, clock_, observer_),
        leases_(Counter(), {.unused_lease = kUnused}) {}

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
    Pool::Room room = pool_.Reserve({kTenant}, plan);
    if (room.object) pool_.Publish(room.object, plan);
    LeaseTable::Segments segments;
    segments.push_back(pool_.Find(kTenant, {.key = plan.key}));
    segments.push_back({.reason = MissReason::kNeverSeen});
    return segments;
  }

  uint32_t References() { return pool_.Find(kTenant, {.key = Key{}}).object->references - 1; }

  ManualClock clock_;
  CountingObserver observer_;
  ManualExecutor executor_;
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

TEST_F(LeaseTest, HasTheNameThatItIsGiven) {
  const LeaseId name{1, 2, 3};
  EXPECT_FALSE(leases_.Exists(name));
  EXPECT_EQ(leases_.Grant(kAnn, kTenant, OneObject(), 0, {}, {}, name), name);
  EXPECT_TRUE(leases_.Exists(name));
  EXPECT_NE(leases_.Held(kAnn, name), nullptr);
  leases_.Release(kAnn, name);
  EXPECT_FALSE(leases_.Exists(name));
}

TEST_F(LeaseTest, TheSystemsRandomNamesDiffer) {
  LeaseTable leases(nullptr, {.unused_lease = kUnused});
  EXPECT_NE(leases.Grant(kAnn, kTenant, OneObject(), 0), leases.Grant(kAnn, kTenant, OneObject(), 0));
}

TEST_F(LeaseTest, HoldsObjectsUntilTheLastHolderLetsGo) {
  const LeaseId id = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  ASSERT_NE(leases_.Held(kAnn, id), nullptr);
  EXPECT_EQ(leases_.Held(kAnn, id)->size(), 2u);
  ASSERT_TRUE(leases_.Attach(kBob, kTenant, id).ok());
  EXPECT_EQ(References(), 1u);

  leases_.Release(kAnn, id);
  leases_.Release(kAnn, id);  // harmless
  EXPECT_EQ(leases_.Held(kAnn, id), nullptr);
  EXPECT_NE(leases_.Held(kBob, id), nullptr);
  EXPECT_EQ(References(), 1u);

  leases_.ReleaseAll(kBob);
  EXPECT_EQ(leases_.Held(kBob, id), nullptr);
  EXPECT_TRUE(absl::IsNotFound(leases_.Attach(kBob, kTenant, id).status()));
  EXPECT_EQ(References(), 0u);
  EXPECT_EQ(leases_.size(), 0u);
}

TEST_F(LeaseTest, IsUnknownToOtherTenantsAndOtherSessions) {
  const LeaseId id = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  EXPECT_TRUE(absl::IsNotFound(leases_.Attach(kEve, kOther, id).status()));
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
  ASSERT_TRUE(leases_.Attach(kBob, kTenant, attached).ok());
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

TEST_F(LeaseTest, CountsTheSegmentsThatASessionsLeasesList) {
  LeaseTable leases(Counter(), {.unused_lease = kUnused, .leases = 3, .segments = 5});
  const auto grant = [&](SessionId session, Nanos now) { return leases.Grant(session, kTenant, OneObject(), now); };
  EXPECT_TRUE(leases.HasRoom(kAnn, 5));
  EXPECT_FALSE(leases.HasRoom(kAnn, 6));
  const LeaseId first = grant(kAnn, 0), second = grant(kAnn, 1), bobs = grant(kBob, 2);
  EXPECT_TRUE(leases.HasRoom(kAnn, 1));
  EXPECT_FALSE(leases.HasRoom(kAnn, 2)) << "a lease of two segments each";

  const absl::Status refused = leases.Attach(kAnn, kTenant, bobs).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(refused.message(), "lease: a session holds at most 3 leases, which list at most 5 segments");
  EXPECT_EQ(leases.Held(kAnn, bobs), nullptr);
  ASSERT_TRUE(leases.Attach(kAnn, kTenant, second).ok()) << "it holds this one";
  EXPECT_TRUE(leases.HasRoom(kAnn, 1)) << "which counts once";

  leases.Expire(kUnused);  // the first; the second is used
  EXPECT_EQ(leases.Held(kAnn, first), nullptr);
  EXPECT_TRUE(leases.HasRoom(kAnn, 3));
  ASSERT_TRUE(leases.Attach(kAnn, kTenant, bobs).ok());
  EXPECT_FALSE(leases.HasRoom(kAnn, 2)) << "a shared lease counts for each of its holders";
  EXPECT_TRUE(leases.HasRoom(kBob, 3));
  leases.Release(kAnn, second);
  EXPECT_TRUE(leases.HasRoom(kAnn, 3));
  leases.ReleaseAll(kAnn);
  EXPECT_TRUE(leases.HasRoom(kAnn, 5));
}

}  // namespace
}  // namespace ashlar::storage
