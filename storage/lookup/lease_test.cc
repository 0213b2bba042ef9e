// SPDX-License-Identifier: Apache-2.0
#include "storage/lookup/lease.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <random>
#include <utility>

#include "proto/limits.h"
#include "storage/objects/object_finder.h"
#include "storage/objects/object_writer.h"
#include "storage/testing/rig.h"
#include "storage/testing/tenants.h"

namespace ashlar::storage {
namespace {

constexpr Nanos kUnused = 1000;

class LeaseTest : public ::testing::Test {
 protected:
  LeaseTest()
      : tier_(TestTier({{kTenant, 4}})),
        table_({.ghosts_per_tenant = 4}, {.memory = {tier_.get()}}, executor_, clock_, observer_),
        leases_(Counter(), {.unused_lease = kUnused}) {}

  // The first draws are zero, and then a number repeats: neither may name a lease.
  static std::function<uint64_t()> Counter() {
    return [calls = uint64_t{0}]() mutable -> uint64_t {
      const uint64_t call = calls++;
      if (call < 2) return 0;
      return call < 6 ? 7 : call;
    };
  }

  LeasedObjects OneObject() {
    ObjectHeader plan{.bytes = limits::kExtentBytes};
    ObjectWriter::Reserved reserved = writer_.Reserve({kTenant}, plan);
    if (reserved.object) writer_.Publish(reserved.object, plan);
    LeasedObjects segments;
    segments.push_back(finder_.Find(kTenant, {.key = plan.key}));
    segments.push_back({.reason = MissReason::kNeverSeen});
    return segments;
  }

  // Releases all in one slice.
  static void ReleaseAll(LeaseTable& leases, SessionId session) {
    Slice whole;
    EXPECT_TRUE(leases.ReleaseAll(session, whole));
    EXPECT_TRUE(leases.SettleAll(whole));
  }
  static void Expire(LeaseTable& leases, Nanos now) {
    Slice whole;
    EXPECT_TRUE(leases.Expire(now, whole));
    EXPECT_TRUE(leases.SettleAll(whole));
  }

  uint32_t References() { return finder_.Find(kTenant, {.key = Key{}}).object->references - 1; }

  ManualClock clock_;
  CountingObserver observer_;
  ManualExecutor executor_;
  std::unique_ptr<MemoryTier> tier_;
  ObjectTable table_;
  ObjectFinder finder_{table_, clock_};
  ObjectWriter writer_{table_, clock_};
  LeaseTable leases_;
};

TEST_F(LeaseTest, NamesAreUniqueAndNeverZero) {
  const LeaseId first = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  const LeaseId second = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  EXPECT_NE(first, LeaseId{});
  EXPECT_NE(second, LeaseId{});
  EXPECT_NE(first, second);
}

TEST_F(LeaseTest, UsesGivenId) {
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

TEST_F(LeaseTest, HoldsObjectsUntilTheLastHolderReleases) {
  const LeaseId id = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  ASSERT_NE(leases_.Held(kAnn, id), nullptr);
  EXPECT_EQ(leases_.Held(kAnn, id)->size(), 2u);
  ASSERT_TRUE(leases_.Attach(kBob, kTenant, id).ok());
  EXPECT_EQ(References(), 1u);

  leases_.Release(kAnn, id);
  leases_.Release(kAnn, id);  // has no effect
  EXPECT_EQ(leases_.Held(kAnn, id), nullptr);
  EXPECT_NE(leases_.Held(kBob, id), nullptr);
  EXPECT_EQ(References(), 1u);

  ReleaseAll(leases_, kBob);
  EXPECT_EQ(leases_.Held(kBob, id), nullptr);
  EXPECT_TRUE(absl::IsNotFound(leases_.Attach(kBob, kTenant, id).status()));
  EXPECT_EQ(References(), 0u);
  EXPECT_EQ(leases_.size(), 0u);
}

TEST_F(LeaseTest, IsUnknownToOtherTenantsAndSessions) {
  const LeaseId id = leases_.Grant(kAnn, kTenant, OneObject(), 0);
  EXPECT_TRUE(absl::IsNotFound(leases_.Attach(kEve, kOther, id).status()));
  EXPECT_EQ(leases_.Held(kEve, id), nullptr);
  EXPECT_EQ(leases_.Held(kBob, id), nullptr) << "same tenant, but it did not attach";
  leases_.Release(kEve, id);
  ReleaseAll(leases_, kEve);
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

  Expire(leases_, kUnused - 1);
  EXPECT_EQ(leases_.size(), 4u);
  Expire(leases_, kUnused);
  EXPECT_EQ(leases_.Held(kAnn, unused), nullptr) << "looking at a lease is no use of it";
  EXPECT_NE(leases_.Held(kAnn, later), nullptr);
  Expire(leases_, 100 * kUnused);
  EXPECT_NE(leases_.Held(kAnn, landed), nullptr);
  EXPECT_NE(leases_.Held(kAnn, attached), nullptr);
  EXPECT_EQ(leases_.size(), 2u);
}

TEST_F(LeaseTest, CountsTheSegmentsThatASessionsLeasesList) {
  LeaseTable leases(Counter(), {.unused_lease = kUnused, .leases = 3, .segments = 5});
  const auto grant = [&](SessionId session, Nanos now) { return leases.Grant(session, kTenant, OneObject(), now); };
  EXPECT_TRUE(leases.HasCapacity(kAnn, kTenant, 5));
  EXPECT_FALSE(leases.HasCapacity(kAnn, kTenant, 6));
  const LeaseId first = grant(kAnn, 0), second = grant(kAnn, 1), bobs = grant(kBob, 2);
  EXPECT_TRUE(leases.HasCapacity(kAnn, kTenant, 1));
  EXPECT_FALSE(leases.HasCapacity(kAnn, kTenant, 2)) << "a lease of two segments each";

  const absl::Status refused = leases.Attach(kAnn, kTenant, bobs).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(refused.message(), "lease: a session may hold at most 3 leases with at most 5 segments");
  EXPECT_EQ(leases.Held(kAnn, bobs), nullptr);
  ASSERT_TRUE(leases.Attach(kAnn, kTenant, second).ok()) << "it holds this one";
  EXPECT_TRUE(leases.HasCapacity(kAnn, kTenant, 1)) << "which counts once";

  Expire(leases, kUnused);  // the first; the second is used
  EXPECT_EQ(leases.Held(kAnn, first), nullptr);
  EXPECT_TRUE(leases.HasCapacity(kAnn, kTenant, 3));
  ASSERT_TRUE(leases.Attach(kAnn, kTenant, bobs).ok());
  EXPECT_FALSE(leases.HasCapacity(kAnn, kTenant, 2)) << "a shared lease counts for each of its holders";
  EXPECT_TRUE(leases.HasCapacity(kBob, kTenant, 3));
  leases.Release(kAnn, second);
  EXPECT_TRUE(leases.HasCapacity(kAnn, kTenant, 3));
  ReleaseAll(leases, kAnn);
  EXPECT_TRUE(leases.HasCapacity(kAnn, kTenant, 5));
}

TEST_F(LeaseTest, BoundsWhatAllSessionsOfATenantHold) {
  LeaseTable leases(Counter(), {.unused_lease = kUnused, .tenant_leases = 3, .tenant_segments = 6});
  const auto grant = [&](SessionId session, TenantId tenant) { return leases.Grant(session, tenant, OneObject(), 0); };
  const LeaseId anns = grant(kAnn, kTenant), bobs = grant(kBob, kTenant);
  EXPECT_TRUE(leases.HasCapacity(kAnn, kTenant, 2));
  EXPECT_FALSE(leases.HasCapacity(kAnn, kTenant, 3));
  ASSERT_TRUE(leases.Attach(kAnn, kTenant, bobs).ok());
  EXPECT_FALSE(leases.HasCapacity(kBob, kTenant, 1)) << "whichever session it is, and every holder counts";
  EXPECT_TRUE(leases.HasCapacity(kEve, kOther, 6)) << "another tenant has its own";
  const absl::Status refused = leases.Attach(kBob, kTenant, anns).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(refused.message(), "lease: a tenant may hold at most 3 leases with at most 6 segments");
  leases.SetTenantBounds(kTenant, 4, 8);
  EXPECT_TRUE(leases.HasCapacity(kBob, kTenant, 2));
  ReleaseAll(leases, kAnn);
  leases.SetTenantBounds(kTenant, 2, 4);
  EXPECT_TRUE(leases.HasCapacity(kAnn, kTenant, 2)) << "only Bob's is left";
}

TEST_F(LeaseTest, SettlesOneStepPerSegment) {
  LeasedObjects segments;
  for (int i = 0; i < 10; ++i) segments.push_back(std::move(OneObject()[0]));
  leases_.Grant(kAnn, kTenant, std::move(segments), 0);
  leases_.Grant(kAnn, kTenant, OneObject(), 0);
  ASSERT_EQ(References(), 11u);
  Slice both(2);
  ASSERT_TRUE(leases_.ReleaseAll(kAnn, both));
  EXPECT_EQ(leases_.size(), 0u);
  Slice none(1), four(4), rest;
  EXPECT_TRUE(leases_.Settle(kOther, none)) << "each tenant's own";
  EXPECT_FALSE(leases_.Settle(kTenant, four));
  EXPECT_EQ(References(), 7u);
  EXPECT_TRUE(leases_.SettleAll(rest));
  EXPECT_EQ(References(), 0u);
}

// Compares with a search through all leases, for any order of granting, using, releasing and attaching.
TEST_F(LeaseTest, EndsInOrderOfDeadlineWhateverHappensBefore) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  LeaseTable leases([&random] { return random(); }, {.unused_lease = kUnused});
  struct Known {
    Nanos deadline;  // -1: it was used
    uint64_t order;
  };
  std::map<LeaseId, Known> known;
  Nanos now = 0;
  const auto any = [&] { return std::next(known.begin(), static_cast<ptrdiff_t>(random() % known.size())); };
  for (uint64_t i = 0; i < 4000; ++i) {
    const uint64_t draw = random() % 100;
    if (draw < 50 || known.empty()) {
      const Nanos needed_at = now + static_cast<Nanos>(random() % (3 * kUnused));
      LeasedObjects missed;
      missed.push_back({.reason = MissReason::kNeverSeen});
      known[leases.Grant(kAnn, kTenant, std::move(missed), needed_at)] = {needed_at + kUnused, i};
    } else if (draw < 60) {
      const auto lease = any();
      leases.Use(lease->first);
      lease->second.deadline = -1;
    } else if (draw < 70) {
      const auto lease = any();
      leases.Release(kAnn, lease->first);
      known.erase(lease);
    } else {
      now += static_cast<Nanos>(random() % 100);
      std::map<std::pair<Nanos, uint64_t>, LeaseId> due;
      for (const auto& [id, lease] : known) {
        if (lease.deadline >= 0 && lease.deadline <= now) due[{lease.deadline, lease.order}] = id;
      }
      while (!due.empty()) {  // in several batches
        const size_t steps = 1 + random() % 3, before = due.size();
        Slice slice(steps);
        ASSERT_EQ(leases.Expire(now, slice), steps >= before);
        for (size_t n = 0; n < std::min(steps, before); ++n) {
          ASSERT_FALSE(leases.Exists(due.begin()->second)) << "the earliest goes first";
          known.erase(due.begin()->second);
          due.erase(due.begin());
        }
      }
      Slice slice(1);
      ASSERT_TRUE(leases.Expire(now, slice)) << "nothing else is due, and nothing is looked at";
    }
    ASSERT_EQ(leases.size(), known.size());
  }
}

}  // namespace
}  // namespace ashlar::storage
