// SPDX-License-Identifier: Apache-2.0
// Compositions through the cache: what is verified and kept, and calls that end early.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "storage/testing/tenants.h"
#include "storage/testing/tiered_rig.h"

namespace ashlar::storage {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr uint32_t kLayer = 2;  // between the two attention layers of the test layout

class ComposerTest : public ::testing::Test {
 protected:
  ComposerTest() {
    rig_.cache.OpenSession(kAnn, 1);
    rig_.cache.OpenSession(kBob, 1);
    EXPECT_TRUE(rig_.Publish(kAnn, plans_[0], 1));
    EXPECT_TRUE(rig_.Publish(kAnn, plans_[1], 2));
    const Query queries[] = {rig_.Ask(plans_[0]), rig_.Ask(plans_[1])};
    match_ = rig_.cache.Lookup(kAnn, queries);
  }

  Composition Work() {
    const kernels::LinearShape shape = TestShape();
    state_ = std::make_shared<std::vector<float>>(size_t(shape.heads) * shape.d_k * shape.d_v, 0.5f);
    Composition work;
    work.interiors = {{.segment = 0}, {.segment = 1, .first_position = 64}};
    work.layers.push_back(
        {.layer = kLayer, .shape = shape, .state = {.data = reinterpret_cast<std::byte*>(state_->data())}});
    work.keep = state_;
    return work;
  }
  bool Untouched() const {
    return std::ranges::all_of(*state_, [](float value) { return value == 0.5f; });
  }

  std::shared_ptr<std::optional<CompositionVerdict>> Start(SessionId session, LandingId number, Composition work) {
    auto verdict = std::make_shared<std::optional<CompositionVerdict>>();
    rig_.cache.Compose(session, number, match_.lease, std::move(work),
                       [verdict](CompositionVerdict v) { *verdict = std::move(v); });
    return verdict;
  }
  CompositionVerdict Run(Composition work) {
    const auto verdict = Start(kAnn, next_++, std::move(work));
    rig_.executor.CompleteAll();
    return verdict->value();
  }

  Rig rig_;
  const std::vector<ObjectHeader> plans_ = {TestPlan(1, 64), TestPlan(2, 64)};
  Match match_;
  std::shared_ptr<std::vector<float>> state_;
  LandingId next_ = 1;
};

TEST_F(ComposerTest, ComposesAndReleases) {
  const CompositionVerdict verdict = Run(Work());
  EXPECT_EQ(verdict.outcome, MissReason::kNone);
  EXPECT_THAT(verdict.interiors, Each(MissReason::kNone));
  EXPECT_FALSE(Untouched());
  EXPECT_EQ(state_.use_count(), 1) << "the engine's memory is still held";
  EXPECT_EQ(rig_.cache.stats().compositions, 0u);
}

TEST_F(ComposerTest, ACorruptTupleIsDroppedBeforeAnythingIsWritten) {
  Corrupt(*rig_.tier, *match_.found[1].slot, *match_.found[1].header, kLayer, PartForm::kState);
  const CompositionVerdict verdict = Run(Work());
  EXPECT_EQ(verdict.outcome, MissReason::kChecksumFailed);
  EXPECT_THAT(verdict.interiors, ElementsAre(MissReason::kNone, MissReason::kChecksumFailed));
  EXPECT_TRUE(Untouched());
  EXPECT_EQ(rig_.Reason(kBob, plans_[1]), MissReason::kChecksumFailed);
  EXPECT_EQ(rig_.Reason(kBob, plans_[0]), MissReason::kNone);
  // On the second call, the lease already records that.
  EXPECT_THAT(Run(Work()).interiors, ElementsAre(MissReason::kNone, MissReason::kChecksumFailed));
  EXPECT_TRUE(Untouched());
}

TEST_F(ComposerTest, YieldsAfterEachLayerWhileOthersWait) {
  const auto two_layers = [&] {
    Composition work = Work();
    work.layers.push_back(work.layers.front());
    return work;
  };
  EXPECT_EQ(Run(two_layers()).outcome, MissReason::kNone);
  const std::vector<float> expected = *state_;
  rig_.executor.set_crowded(true);
  const auto verdict = Start(kAnn, next_++, two_layers());
  for (int i = 0; i < 2; ++i) {
    rig_.executor.Complete(0);
    EXPECT_TRUE(Untouched()) << "all is verified first";
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(verdict->has_value());
    ASSERT_EQ(rig_.executor.pending(), 1u);
    rig_.executor.Complete(0);
    EXPECT_EQ(*state_ == expected, i == 1);
  }
  ASSERT_TRUE(verdict->has_value());
  EXPECT_EQ((*verdict)->outcome, MissReason::kNone);
}

TEST_F(ComposerTest, CountsLikeATenantsLandings) {
  rig_.cache.SetBounds(1, {.in_flight = InFlight::Bounds{.calls = 1}});
  const TestPages pages(16);
  const auto landing =
      rig_.StartLanding(kBob, next_++, rig_.Lookup(kBob, plans_[0]).lease, TestTarget(pages, {{0, 0}}));
  EXPECT_EQ((*Start(kAnn, next_++, Work()))->outcome, MissReason::kBusy);
  rig_.executor.CompleteAll();
  ASSERT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
  EXPECT_EQ(Run(Work()).outcome, MissReason::kNone);
}

TEST_F(ComposerTest, IgnoresOtherLayers) {
  Corrupt(*rig_.tier, *match_.found[1].slot, *match_.found[1].header, kLayer + 1, PartForm::kState);
  EXPECT_EQ(Run(Work()).outcome, MissReason::kNone);
}

TEST_F(ComposerTest, VerifiesTuplesThatNoLandingHasVerified) {
  const TestPages pages(16);
  const auto landing = rig_.StartLanding(kAnn, next_++, match_.lease, TestTarget(pages, {{0, 0}, {1, 64}}));
  rig_.executor.Complete(0);  // the first attention layer, and the linear layer before it
  EXPECT_EQ(landing->layers, 1u);
  rig_.executor.Work(0);  // the second one has been verified, but the metadata thread does not know it yet
  Corrupt(*rig_.tier, *match_.found[1].slot, *match_.found[1].header, kLayer, PartForm::kState);
  const auto early = Start(kAnn, next_++, Work());
  rig_.executor.Complete(1);
  EXPECT_EQ((*early)->outcome, MissReason::kChecksumFailed);
  rig_.executor.CompleteAll();
}

// A landing of the lease verifies every tuple once, and a composition does not verify it again.
TEST_F(ComposerTest, TrustsTuplesThatALandingHasVerified) {
  const TestPages pages(16);
  const auto landing = rig_.StartLanding(kAnn, next_++, match_.lease, TestTarget(pages, {{0, 0}, {1, 64}}));
  rig_.executor.Complete(0);
  rig_.executor.Complete(0);
  EXPECT_EQ(landing->layers, 2u);
  Corrupt(*rig_.tier, *match_.found[1].slot, *match_.found[1].header, kLayer, PartForm::kState);
  Corrupt(*rig_.tier, *match_.found[1].slot, *match_.found[1].header, kLayer + 3, PartForm::kState);
  const auto verdict = Start(kAnn, next_++, Work());
  rig_.executor.Complete(1);
  EXPECT_EQ((*verdict)->outcome, MissReason::kNone) << "verified twice";
  Composition behind = Work();
  behind.layers[0].layer = kLayer + 3;
  const auto other = Start(kAnn, next_++, std::move(behind));
  rig_.executor.Complete(1);
  EXPECT_EQ((*other)->outcome, MissReason::kChecksumFailed) << "the landing has not come so far";
  rig_.executor.CompleteAll();
}

TEST_F(ComposerTest, TupleOfAnotherShapeIsRefused) {
  Composition work = Work();
  work.layers[0].shape.d_v /= 2;
  const CompositionVerdict verdict = Run(std::move(work));
  EXPECT_EQ(verdict.outcome, MissReason::kInvalidRequest);
  EXPECT_TRUE(Untouched());
  work = Work();
  work.interiors[1].segment = 2;
  EXPECT_THAT(Run(std::move(work)).interiors, ElementsAre(MissReason::kNone, MissReason::kInvalidRequest));
}

TEST_F(ComposerTest, OnlyTheHolderOfALeaseComposesUnderIt) {
  const auto verdict = Start(kBob, 1, Work());
  EXPECT_EQ((*verdict)->outcome, MissReason::kLeaseLost);
  EXPECT_THAT((*verdict)->interiors, Each(MissReason::kLeaseLost));
  EXPECT_EQ(rig_.executor.pending(), 0u);
}

TEST_F(ComposerTest, CompositionsPerSessionAreBounded) {
  std::vector<std::shared_ptr<std::optional<CompositionVerdict>>> verdicts;
  for (size_t i = 0; i < limits::kMaxCompositions; ++i) verdicts.push_back(Start(kAnn, next_++, Work()));
  EXPECT_EQ(rig_.cache.stats().compositions, limits::kMaxCompositions);
  EXPECT_EQ((*Start(kAnn, next_++, Work()))->outcome, MissReason::kBusy);
  rig_.executor.CompleteAll();
  for (const auto& verdict : verdicts) EXPECT_EQ((*verdict)->outcome, MissReason::kNone);
  EXPECT_EQ(Run(Work()).outcome, MissReason::kNone);

  rig_.executor.set_capacity(0);
  EXPECT_EQ((*Start(kAnn, next_++, Work()))->outcome, MissReason::kBusy);
  EXPECT_EQ(rig_.cache.stats().compositions, 0u);
}

// It yields before every layer: there are two to verify and two to write.
TEST_F(ComposerTest, YieldingIntoFullQueueIsBusyUnlessWritten) {
  for (size_t turns = 1; turns <= 3; ++turns) {
    SCOPED_TRACE(turns);
    Composition work = Work();
    work.layers.push_back(work.layers[0]);
    rig_.executor.set_crowded(true);
    const auto verdict = Start(kAnn, next_++, std::move(work));
    for (size_t turn = 1; turn < turns; ++turn) rig_.executor.Complete(0);
    rig_.executor.set_capacity(0);
    rig_.executor.Complete(0);
    ASSERT_TRUE(verdict->has_value());
    EXPECT_EQ((*verdict)->outcome, Untouched() ? MissReason::kBusy : MissReason::kCancelled);
    EXPECT_EQ(Untouched(), turns < 3);
    EXPECT_EQ(rig_.cache.stats().compositions, 0u);
    rig_.executor.set_capacity(1024);
    rig_.executor.set_crowded(false);
  }
}

TEST_F(ComposerTest, ANumberInUseIsRefused) {
  const auto first = Start(kAnn, 7, Work());
  EXPECT_EQ((*Start(kAnn, 7, Work()))->outcome, MissReason::kInvalidRequest);
  rig_.executor.CompleteAll();
  EXPECT_EQ((*first)->outcome, MissReason::kNone);
}

TEST_F(ComposerTest, QuiescesAfterTheVerdict) {
  const auto verdict = Start(kAnn, 7, Work());
  bool quiesced = false;
  rig_.cache.Quiesce(kAnn, 7, [&] {
    EXPECT_TRUE(verdict->has_value());
    quiesced = true;
  });
  EXPECT_FALSE(quiesced);
  rig_.executor.CompleteAll();
  EXPECT_TRUE(quiesced);
  EXPECT_EQ((*verdict)->outcome, MissReason::kCancelled);
  EXPECT_TRUE(Untouched());
}

TEST_F(ComposerTest, KeepsObjectsAfterLeaseEnds) {
  const auto verdict = Start(kAnn, next_++, Work());
  rig_.cache.Release(kAnn, match_.lease);
  const uint64_t used = rig_.tier->Usage(1).used_bytes;
  for (uint64_t text = 10; text < 40; ++text) {  // evicts everything that may leave
    const Cache::Reservation reservation = rig_.cache.Reserve(kBob, TestPlan(text, 64));
    if (reservation.outcome != ReserveOutcome::kGranted) break;
  }
  EXPECT_GE(rig_.tier->Usage(1).used_bytes, used);
  rig_.executor.CompleteAll();
  EXPECT_EQ((*verdict)->outcome, MissReason::kNone);
}

TEST_F(ComposerTest, ASessionDrainsOnceItsCompositionsAreOver) {
  const auto verdict = Start(kAnn, next_++, Work());
  bool drained = false;
  rig_.cache.CloseSession(kAnn, [&] { drained = true; });
  EXPECT_FALSE(drained);
  rig_.executor.CompleteAll();
  EXPECT_TRUE(drained);
  EXPECT_EQ((*verdict)->outcome, MissReason::kCancelled);
  EXPECT_TRUE(Untouched());
}

TEST(ComposerTiers, WaitsForObjectsBeingPromoted) {
  TieredRig rig({.hbm = 0, .dram = 16, .ssd = 64});
  const ObjectHeader plan = TestPlan(1, 64);
  rig.cache->OpenSession(kAnn, 1);
  ASSERT_TRUE(rig.Publish(kAnn, plan, 1));
  rig.Settle();
  rig.Restart();  // now only the disk has it
  rig.cache->OpenSession(kAnn, 1);
  const kernels::LinearShape shape = TestShape();
  const Match match = rig.Lookup(kAnn, plan);
  const auto compose = [&](LandingId number, std::vector<float>& state, std::optional<CompositionVerdict>& verdict) {
    Composition work{.interiors = {{.segment = 0}}};
    work.layers.push_back(
        {.layer = kLayer, .shape = shape, .state = {.data = reinterpret_cast<std::byte*>(state.data())}});
    rig.cache->Compose(kAnn, number, match.lease, std::move(work),
                       [&](CompositionVerdict v) { verdict = std::move(v); });
  };
  std::vector<float> early(size_t(shape.heads) * shape.d_k * shape.d_v, 0.5f), late = early;
  std::optional<CompositionVerdict> verdict;
  compose(1, early, verdict);
  EXPECT_FALSE(verdict);
  rig.Settle();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->outcome, MissReason::kNone);
  compose(2, late, verdict);  // composes the bytes that have arrived by now
  rig.Settle();
  EXPECT_EQ(early, late);
  EXPECT_NE(early.front(), 0.5f);
  rig.cache->CloseSession(kAnn, [] {});
  rig.Settle();
}

}  // namespace
}  // namespace ashlar::storage
