// SPDX-License-Identifier: Apache-2.0
// Erased objects are not found by any tenant, leave every tier, and do not return after a crash.
#include "storage/upkeep/erasure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "storage/testing/prefixes_fixture.h"
#include "storage/testing/tiers_fixture.h"

namespace ashlar::storage {
namespace {

using limits::kExtentBytes;
using ::testing::Each;
using ::testing::IsEmpty;

class ErasureTest : public TiersTest {
 protected:
  std::shared_ptr<Erasure> Start(std::optional<NamespaceId> ns = std::nullopt) {
    auto erasure = rig_->cache->upkeep().Erase(1, "tenant1", ns);
    EXPECT_TRUE(erasure.ok()) << erasure.status();
    return *erasure;
  }
  // Runs until the erasure is acknowledged.
  Erasure::Progress Erase(std::optional<NamespaceId> ns = std::nullopt) {
    const auto erasure = Start(ns);
    for (int rounds = 0; rounds < 100; ++rounds) {
      Slice whole;
      if (erasure->Run(whole)) return erasure->progress();
      rig_->Settle();
    }
    ADD_FAILURE() << "it does not end";
    return erasure->progress();
  }
  // Returns the number of nonzero extents of the slab after its header.
  size_t Written() {
    alignas(BlockFile::kBlockBytes) static std::array<std::byte, kExtentBytes> extent;
    size_t written = 0;
    for (uint64_t at = kExtentBytes; at < rig_->disk.file().size(); at += kExtentBytes) {
      EXPECT_TRUE(rig_->disk.file().Read(at, extent).ok());
      written += std::ranges::any_of(extent, [](std::byte b) { return b != std::byte{0}; }) ? 1 : 0;
    }
    return written;
  }
};

TEST_F(ErasureTest, ErasesTenantFromAllTiers) {
  Make({.hbm = 4, .dram = 8, .ssd = 64});
  rig_->cache->OpenSession(2, 2);
  for (uint64_t text = 1; text <= 6; ++text) PublishAndSettle(text);
  const ObjectHeader others = TestPlan(1, 64, ObjectKind::kSegment, 2);
  ASSERT_TRUE(rig_->Publish(2, others, 1));
  rig_->Settle();
  ASSERT_EQ(Written(), 21u);
  const Erasure::Progress done = Erase();
  EXPECT_EQ(done.erased.objects, 6u);
  EXPECT_EQ(done.erased.bytes, 6 * Plan(1).bytes);
  EXPECT_EQ(done.erased.leased_objects, 0u);
  EXPECT_EQ(done.erased.tier_bytes[static_cast<size_t>(TierKind::kSsd)], 6 * Plan(1).bytes);
  EXPECT_TRUE(done.overwritten.ok());
  for (const Tier* const tier : {static_cast<Tier*>(rig_->hbm.get()), static_cast<Tier*>(rig_->dram.get()),
                                 static_cast<Tier*>(rig_->ssd.get())}) {
    EXPECT_EQ(Used(*tier), 0u);
  }
  EXPECT_EQ(Written(), 3u) << "of the other tenant";
  for (uint64_t text = 1; text <= 6; ++text) {
    EXPECT_EQ(Ask(text).reason, MissReason::kNeverSeen) << "no ghost tells of it";
  }
  EXPECT_EQ(rig_->Lookup(2, others).found[0].reason, MissReason::kNone);
  rig_->cache->CloseSession(2, [] {});
  PublishAndSettle(1);
  EXPECT_EQ(Land(1), TierKind::kHbm) << "what is published later stays";
}

TEST_F(ErasureTest, AnotherNamespaceOfTheTenantStays) {
  Make({});
  PublishAndSettle(1);
  NamespaceId other;
  other.bytes.fill(7);
  EXPECT_EQ(Erase(other).erased.objects, 0u);
  EXPECT_EQ(Ask(1).reason, MissReason::kNone);
  EXPECT_EQ(Erase(Plan(1).ns).erased.objects, 1u);
  EXPECT_EQ(Ask(1).reason, MissReason::kNeverSeen);
}

// At every point of the disk's work from the call to its acknowledgement, and right after it.
TEST_F(ErasureTest, ACrashAfterTheAcknowledgementRestoresNothing) {
  for (uint64_t point = 0;; ++point) {
    SCOPED_TRACE(point);
    Make({.hbm = 0, .dram = 8, .ssd = 64, .seed = point + 1});
    for (uint64_t text = 1; text <= 4; ++text) PublishAndSettle(text);
    rig_->disk.CrashAfter(point);
    const auto erasure = Start();
    bool done = false;
    for (int rounds = 0; rounds < 20 && !done; ++rounds) {
      Slice whole;
      done = erasure->Run(whole);
      for (uint64_t text = 1; text <= 4; ++text) EXPECT_NE(Ask(text).reason, MissReason::kNone) << "at once";
      if (!done) rig_->Settle();
    }
    const bool crashed = rig_->disk.crashed();
    if (!crashed) rig_->disk.Crash();
    Restart();
    for (uint64_t text = 1; text <= 4 && done; ++text) EXPECT_EQ(Ask(text).reason, MissReason::kNeverSeen);
    if (!crashed) {
      EXPECT_TRUE(done);
      EXPECT_EQ(Written(), 0u);
      break;
    }
    EXPECT_FALSE(done) << "acknowledged by a disk that had stopped";
    if (point % 2 == 0) Land(1 + point / 2 % 4);  // which ends the object after part of it was overwritten
    EXPECT_TRUE(Erase().done);
    EXPECT_EQ(Written(), 0u) << "the second time finds what the first one left";
    rig_->disk.Crash();
    Restart();
    for (uint64_t text = 1; text <= 4; ++text) EXPECT_EQ(Ask(text).reason, MissReason::kNeverSeen);
    ASSERT_LT(point, 200u);
  }
}

TEST_F(ErasureTest, ErasedLeasedBytesStayHiddenUntilTheLeaseEnds) {
  Make({.hbm = 0, .dram = 16, .ssd = 64});
  PublishAndSettle(1);
  const Match match = rig_->Lookup(kSession, Plan(1));
  const Erasure::Progress done = Erase();
  EXPECT_EQ(done.erased.leased_objects, 1u);
  EXPECT_EQ(done.erased.leased_bytes, Plan(1).bytes);
  EXPECT_EQ(Used(*rig_->ssd), 0u) << "the disk has nothing that a restart would find";
  EXPECT_EQ(Used(*rig_->dram), 3u);
  EXPECT_EQ(TupleError(*rig_->dram, *match.found[0].slot, *match.found[0].header, 1), 0.0);
  EXPECT_EQ(Ask(1).reason, MissReason::kNeverSeen);
  rig_->cache->Release(kSession, match.lease);
  EXPECT_EQ(Used(*rig_->dram), 0u);
  EXPECT_EQ(rig_->cache->stats().objects, 0u);
}

TEST_F(ErasureTest, PublishInFlightIsErasedWhenDone) {
  Make({});
  const Cache::Reservation reserved = rig_->cache->Reserve(kSession, Plan(1));
  std::optional<PublishOutcome> outcome;
  rig_->cache->Publish(kSession, reserved.id, TestSource(Plan(1), 1), [&](PublishOutcome o) { outcome = o; });
  EXPECT_EQ(Erase().erased.objects, 0u);
  rig_->Settle();
  EXPECT_TRUE(outcome);
  EXPECT_EQ(Ask(1).reason, MissReason::kNeverSeen);
  EXPECT_EQ(Used(*rig_->hbm), 0u);
}

TEST_F(ErasureTest, ACopyInFlightToTheDiskIsCancelled) {
  for (size_t steps = 0; steps < 12; ++steps) {
    SCOPED_TRACE(steps);
    Make({.hbm = 0, .dram = 16, .ssd = 64});
    ASSERT_TRUE(rig_->Publish(kSession, Plan(1), 1));
    for (size_t i = 0; i < steps && rig_->io.pending() > 0; ++i) rig_->io.Complete(0);
    EXPECT_TRUE(Erase().done);
    EXPECT_EQ(Used(*rig_->ssd), 0u);
    EXPECT_EQ(Written(), 0u);
    rig_->disk.Crash();
    Restart();
    EXPECT_EQ(Ask(1).reason, MissReason::kNeverSeen);
  }
}

TEST_F(ErasureTest, AnErasureIsAcknowledgedOnceTheDiskRecovers) {
  Make({.hbm = 0, .dram = 16, .ssd = 64});
  PublishAndSettle(1);
  rig_->disk.set_faults({.record_error = 1});
  const auto erasure = Start();
  for (int rounds = 0; rounds < 10; ++rounds) {
    Slice whole;
    EXPECT_FALSE(erasure->Run(whole));
    rig_->Settle();
  }
  EXPECT_TRUE(erasure->progress().found_gone);
  EXPECT_EQ(Ask(1).reason, MissReason::kNeverSeen);
  rig_->disk.set_faults({});
  rig_->LetDiskRecover();
  Slice whole;
  for (int rounds = 0; rounds < 10 && !erasure->Run(whole); ++rounds) rig_->Settle();
  EXPECT_TRUE(erasure->progress().done);
  EXPECT_EQ(Written(), 0u);
}

TEST_F(ErasureTest, FailedOverwritesAreReportedAndRetried) {
  Make({.hbm = 0, .dram = 16, .ssd = 64});
  PublishAndSettle(1);
  rig_->disk.set_faults({.write_error = 1});
  const auto erasure = Start();
  Slice whole;
  for (int rounds = 0; rounds < 10; ++rounds) {
    EXPECT_FALSE(erasure->Run(whole));
    rig_->Settle();
    if (rounds % 3 == 2) rig_->LetDiskRecover();  // fails
  }
  EXPECT_FALSE(erasure->progress().overwritten.ok());
  EXPECT_EQ(Used(*rig_->ssd), 3u) << "no other object gets these extents";
  EXPECT_EQ(Ask(1).reason, MissReason::kNeverSeen);
  rig_->disk.set_faults({});
  rig_->LetDiskRecover();
  const Erasure::Progress again = Erase();
  EXPECT_EQ(again.erased.objects, 0u);
  EXPECT_TRUE(again.done);
  EXPECT_EQ(Written(), 0u);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
  for (int rounds = 0; rounds < 10 && !erasure->Run(whole); ++rounds) rig_->Settle();
  EXPECT_TRUE(erasure->progress().done) << "the first one ends, too";
}

// It was evicted before, while the disk was about to acknowledge it.
TEST_F(ErasureTest, EarlierEvictedObjectsDoNotReturn) {
  for (size_t steps = 0; steps < 12; ++steps) {
    SCOPED_TRACE(steps);
    Make({.hbm = 0, .dram = 16, .ssd = 64});
    ASSERT_TRUE(rig_->Publish(kSession, Plan(1), 1));
    for (size_t i = 0; i < steps && rig_->io.pending() > 0; ++i) rig_->io.Complete(0);
    rig_->cache->retention().Evict(1, Plan(1).key);
    const auto erasure = Start();
    bool done = false;
    for (int rounds = 0; rounds < 100 && !done; ++rounds) {
      Slice whole;
      done = erasure->Run(whole);
      if (!done && rig_->io.pending() > 0) rig_->io.Complete(0);
      if (!done && rig_->executor.pending() > 0) rig_->executor.Complete(0);
    }
    ASSERT_TRUE(done);
    rig_->disk.Crash();
    Restart();
    EXPECT_EQ(Ask(1).reason, MissReason::kNeverSeen);
  }
}

// A tenant that is no longer configured, or has no budget on the disk any longer.
TEST_F(ErasureTest, ErasesObjectsOfATenantWithoutADiskBudget) {
  Make({.hbm = 0, .dram = 8, .ssd = 64});
  PublishAndSettle(1);
  PublishAndSettle(2);
  rig_->names[0] = "renamed";
  Restart();
  ASSERT_EQ(Written(), 6u);
  const auto erase = [&](std::optional<NamespaceId> ns) {
    const auto erasure = *rig_->cache->upkeep().Erase(kNoTenant, "tenant1", ns);
    for (int rounds = 0; rounds < 100; ++rounds) {
      Slice whole;
      if (erasure->Run(whole)) break;
      rig_->Settle();
    }
    EXPECT_TRUE(erasure->progress().done);
    return erasure->progress().erased.objects;
  };
  NamespaceId other = Plan(1).ns;
  other.bytes[0] ^= 1;
  EXPECT_EQ(erase(other), 0u);
  EXPECT_EQ(Written(), 6u);
  EXPECT_EQ(erase(std::nullopt), 2u);
  EXPECT_EQ(Written(), 0u);
  EXPECT_EQ(rig_->ssd->Usage().used_bytes, 0u);
  rig_->names[0] = "tenant1";
  Restart();
  EXPECT_EQ(Ask(1).reason, MissReason::kNeverSeen);
}

// A disk that is attached late delivers its objects in several parts, between which operators' calls run.
TEST_F(ErasureTest, RefusedWhileDiskObjectsAreAdopted) {
  Make({.hbm = 0, .dram = 8, .ssd = 64});
  rig_->cache->adoption().Adopt({}, /*more=*/true);
  EXPECT_TRUE(absl::IsUnavailable(rig_->cache->upkeep().Erase(1, "tenant1", std::nullopt).status()));
  rig_->cache->adoption().Adopt({});
  EXPECT_TRUE(rig_->cache->upkeep().Erase(1, "tenant1", std::nullopt).ok());
}

class ErasurePrefixesTest : public PrefixesTest {
 protected:
  ErasurePrefixesTest() : PrefixesTest({.hbm = 0, .dram = 256, .ssd = 512}) {}
  void Erase() {
    const auto erasure = rig_.cache->upkeep().Erase(1, "tenant1", std::nullopt);
    Slice whole;
    for (int rounds = 0; rounds < 100 && !(*erasure)->Run(whole); ++rounds) rig_.Settle();
    EXPECT_TRUE((*erasure)->progress().done);
  }
};

TEST_F(ErasurePrefixesTest, PromptsAndConversationsAreErasedToo) {
  const Tokens shared = Numbers(0, 600), own = Numbers(50000, 600);
  Serve(shared);
  PrefixCommit composed = engine_.Offer(own, 590, {256}, Conversation(1));
  composed.provenance = Provenance::kComposed;
  Commit(std::move(composed));
  ASSERT_EQ(Ask(Join(shared, {1})).prefix.depth, 600u);
  ASSERT_EQ(Ask(Join(own, {1}), kAnn, Conversation(1)).prefix.depth, 600u);
  ASSERT_GT(rig_.cache->prefixes().stats(1).history_bytes, 0u);
  Erase();
  EXPECT_EQ(rig_.cache->prefixes().stats(1).namespaces, 0u);
  EXPECT_EQ(rig_.cache->prefixes().stats(1).history_bytes, 0u);
  EXPECT_EQ(Ask(Join(shared, {1})).prefix.depth, 0u);
  EXPECT_EQ(Ask(Join(own, {1}), kAnn, Conversation(1)).prefix.depth, 0u);
  Serve(shared);
  EXPECT_EQ(Ask(Join(shared, {1})).prefix.depth, 600u) << "it is stored again";
}

TEST_F(ErasurePrefixesTest, APrefixThatIsBeingCommittedEndsToo) {
  const Tokens text = Numbers(0, 600);
  std::optional<std::vector<CommitOutcome>> outcomes;
  rig_.cache->Commit(kAnn, engine_.Offer(text, 600, {}),
                     [&](std::vector<CommitOutcome> o) { outcomes = std::move(o); });
  Erase();
  EXPECT_TRUE(outcomes);
  EXPECT_EQ(Ask(Join(text, {1})).prefix.depth, 0u);
  EXPECT_EQ(rig_.cache->stats().objects, 0u);
}

}  // namespace
}  // namespace ashlar::storage
