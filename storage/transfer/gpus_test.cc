// SPDX-License-Identifier: Apache-2.0
// Two emulated GPUs under one cache, each with an hbm tier above a common dram tier; compositions on a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/cuda/emulator/driver.h"
#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "storage/cache.h"
#include "storage/objects/object_bytes.h"
#include "storage/testing/engine.h"
#include "storage/testing/executors.h"
#include "storage/testing/layer_of.h"
#include "storage/testing/manual_clock.h"
#include "storage/testing/on_gpu.h"
#include "storage/testing/other_node.h"
#include "storage/testing/rig.h"
#include "storage/testing/tenants.h"
#include "storage/transfer/gpu_lane.h"

namespace ashlar::storage {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr uint64_t kTokens = 64, kObjectExtents = 3;
constexpr size_t kDramLevel = 2;

const kernels::Gpu& GpuOfNumber(int number) {
  std::string why;
  const kernels::Gpu* const gpu = kernels::FindGpu(number, &why);
  if (gpu == nullptr) std::abort();
  return *gpu;
}

class TwoGpus : public ::testing::Test {
 protected:
  static constexpr uint64_t kHbmExtents = 16;

  TwoGpus() {
    for (int i = 0; i < 2; ++i) {
      lanes_.push_back(*GpuLane::Make(GpuOfNumber(i), 1));
      hbm_.push_back(*MemoryTier::Make({.kind = TierKind::kHbm,
                                        .capacity_bytes = kHbmExtents * limits::kExtentBytes,
                                        .arena_bytes = 8 * limits::kExtentBytes,
                                        .arena = {.gpu = &GpuOfNumber(i)},
                                        .on_gpu = true,
                                        .first_arena = static_cast<uint32_t>(i) * kArenasApart}));
      EXPECT_TRUE(hbm_[i]->AddTenant(kTenant, kHbmExtents * limits::kExtentBytes).ok());
    }
    dram_ = *MemoryTier::Make({.capacity_bytes = 64 * limits::kExtentBytes,
                               .arena_bytes = 8 * limits::kExtentBytes,
                               .arena = {.gpu = &GpuOfNumber(0)},
                               .first_arena = 2 * kArenasApart});
    EXPECT_TRUE(dram_->AddTenant(kTenant, 64 * limits::kExtentBytes).ok());
    mover_.emplace(kernels::Host(), workers_, executor_, *dram_, kTurnBytes,
                   std::vector<GpuLane*>{lanes_[0].get(), lanes_[1].get()});
    CacheOptions options;
    options.objects.residence = [this](const TenantPool&, const ObjectHeader&, const Residence& residence) {
      resides_.push_back({residence.nearest, residence.level, residence.was, residence.was_level});
      return residence.nearest;
    };
    const Tiers tiers{
        .memory = {hbm_[0].get(), hbm_[1].get(), dram_.get()}, .remote = &other_, .sibling_count = 2, .common = 2};
    cache_.emplace(options, tiers, *mover_, executor_, clock_, &observer_);
    for (const SessionId session : {kAnn, kBob, kHost}) cache_->OpenSession(session, kTenant);
    cache_->SetLevel(kAnn, 0);
    cache_->SetLevel(kBob, 1);
  }
  ~TwoGpus() override {
    for (const SessionId session : {kAnn, kBob, kHost}) cache_->CloseSession(session, [] {});
    Fetch();
    EXPECT_EQ(other_.leased(), 0u);
  }
  void Fetch() {
    for (executor_.CompleteAll(); other_.pending() > 0; executor_.CompleteAll()) other_.End(0);
  }

  OnGpu& MemoryOf(SessionId session) { return session == kAnn ? ann_ : bob_; }

  PublishOutcome Publish(SessionId session, const ObjectHeader& plan, uint64_t text) {
    const Cache::Reservation reserved = cache_->Reserve(session, plan);
    EXPECT_EQ(reserved.outcome, ReserveOutcome::kGranted);
    std::optional<PublishOutcome> outcome;
    PublishSource source = session == kHost ? TestSource(plan, text) : MemoryOf(session).Source(plan, text);
    cache_->Publish(session, reserved.id, std::move(source), [&](PublishOutcome o) { outcome = o; });
    executor_.CompleteAll();
    return outcome.value();
  }

  Match Lookup(SessionId session, const ObjectHeader& plan) {
    const Query query{.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
    return cache_->Lookup(session, {&query, 1});
  }

  // The level of a hit's arenas.
  static size_t LevelOf(const Match& match) { return match.found[0].slot->runs[0].arena / kArenasApart; }

  // Lands the first object of a lease into memory of the session, and returns the error.
  double LandError(SessionId session, const Match& match, uint64_t text) {
    static LandingId next = 1;
    TestPages pages(16);
    LandTarget target = TestTarget(pages, {{0, 100}});
    if (session != kHost) {
      MemoryOf(session).Reset();
      MemoryOf(session).Move(target.rows, pages.memory().size_bytes());
    }
    const auto* const far = static_cast<const std::byte*>(target.rows.front().keys.base);
    std::optional<std::vector<MissReason>> verdict;
    cache_->Land(session, next++, match.lease, std::move(target),
                 {.progress = [](uint32_t) {}, .done = [&](std::vector<MissReason> v) { verdict = std::move(v); }});
    executor_.CompleteAll();
    EXPECT_THAT(verdict.value(), ElementsAre(MissReason::kNone));
    if (session != kHost) {
      MemoryOf(session).gpu().CopyToHost(pages.memory().data(), far, pages.memory().size_bytes());
    }
    return LandingError(pages, *match.found[0].header, text, 100);
  }

  static constexpr SessionId kHost = 77;  // an engine in CPU memory

  ManualClock clock_;
  ManualExecutor executor_;
  InlineWorkers workers_;
  CountingObserver observer_;
  OtherNode other_;
  OnGpu ann_{GpuOfNumber(0)}, bob_{GpuOfNumber(1)};
  std::vector<std::unique_ptr<GpuLane>> lanes_;
  std::vector<std::unique_ptr<MemoryTier>> hbm_;
  std::unique_ptr<MemoryTier> dram_;
  std::optional<Mover> mover_;
  // An object's nearest tier and level, and the previous ones, as reported by the table.
  std::vector<std::tuple<TierKind, int, TierKind, int>> resides_;
  std::optional<Cache> cache_;
};

TEST_F(TwoGpus, ResidenceNamesGpu) {
  const ObjectHeader plan = TestPlan(1, kTokens);
  ASSERT_EQ(Publish(kBob, plan, 1), PublishOutcome::kPublished);
  using Said = std::tuple<TierKind, int, TierKind, int>;
  EXPECT_THAT(resides_, ElementsAre(Said(TierKind::kHbm, 1, TierKind::kNone, 0)));
  const Match ann = Lookup(kAnn, plan);
  executor_.CompleteAll();
  EXPECT_EQ(resides_.back(), Said(TierKind::kHbm, 0, TierKind::kHbm, 1)) << "the first GPU that has it";
  cache_->Release(kAnn, ann.lease);
  ASSERT_TRUE(cache_->retention().Evict(kTenant, plan.key));
  EXPECT_EQ(resides_.back(), Said(TierKind::kNone, 0, TierKind::kHbm, 0));
}

TEST_F(TwoGpus, ObjectsReachOtherGpuThroughDram) {
  const ObjectHeader plan = TestPlan(1, kTokens);
  ASSERT_EQ(Publish(kAnn, plan, 1), PublishOutcome::kPublished);
  EXPECT_EQ(hbm_[0]->Usage(kTenant).used_bytes, kObjectExtents * limits::kExtentBytes);
  EXPECT_EQ(hbm_[1]->Usage(kTenant).used_bytes, 0u);
  const Match ann = Lookup(kAnn, plan), bob = Lookup(kBob, plan), host = Lookup(kHost, plan);
  EXPECT_EQ(ann.found[0].tier, TierKind::kHbm);
  EXPECT_EQ(bob.found[0].tier, TierKind::kDram) << "another GPU's memory is no nearer than what is below both";
  EXPECT_EQ(LevelOf(ann), 0u);
  EXPECT_EQ(LevelOf(bob), 1u);
  EXPECT_EQ(LevelOf(host), kDramLevel);
  for (const auto& [session, match] : {std::pair(kAnn, &ann), {kBob, &bob}, {kHost, &host}}) {
    SCOPED_TRACE(session);
    EXPECT_LT(LandError(session, *match, 1), 1e-5);
  }
  EXPECT_EQ(hbm_[1]->Usage(kTenant).used_bytes, kObjectExtents * limits::kExtentBytes);
}

// dram had no space when it was published: it is copied down when another GPU requests it.
TEST_F(TwoGpus, ObjectsOfOtherGpuAreDemotedFirst) {
  std::vector<Match> held;
  for (uint64_t text = 100; text < 121; ++text) {  // all of dram, held by leases
    ASSERT_EQ(Publish(kHost, TestPlan(text, kTokens), text), PublishOutcome::kPublished);
    held.push_back(Lookup(kHost, TestPlan(text, kTokens)));
    ASSERT_EQ(held.back().found[0].reason, MissReason::kNone);
  }
  const ObjectHeader plan = TestPlan(1, kTokens);
  ASSERT_EQ(Publish(kAnn, plan, 1), PublishOutcome::kPublished);
  EXPECT_THAT(cache_->upkeep().inventory().Where(kTenant, plan.key), ElementsAre(TierKind::kHbm));
  EXPECT_EQ(Lookup(kBob, plan).found[0].reason, MissReason::kBudgetRefused) << "there is no way yet";
  cache_->Release(kHost, held.back().lease);
  const Match bob = Lookup(kBob, plan);
  ASSERT_EQ(bob.found[0].reason, MissReason::kNone);
  EXPECT_EQ(LevelOf(bob), 1u);
  EXPECT_LT(LandError(kBob, bob, 1), 1e-5);
  EXPECT_THAT(cache_->upkeep().inventory().Where(kTenant, plan.key),
              ElementsAre(TierKind::kHbm, TierKind::kHbm, TierKind::kDram));
}

// Another node receives an object from a GPU if only that GPU has it and the source can access it; otherwise from dram.
TEST_F(TwoGpus, AnotherNodeFindsObjectsOnTheirGpu) {
  constexpr SessionId kNear = 50, kFar = 51;
  cache_->OpenSession(kNear, kTenant, SessionOf::kNodeReachingGpus);
  cache_->OpenSession(kFar, kTenant, SessionOf::kNode);
  const ObjectHeader in_both = TestPlan(2, kTokens);
  ASSERT_EQ(Publish(kBob, in_both, 2), PublishOutcome::kPublished);
  ASSERT_THAT(cache_->upkeep().inventory().Where(kTenant, in_both.key), ElementsAre(TierKind::kHbm, TierKind::kDram));
  const Match both = Lookup(kNear, in_both);
  EXPECT_EQ(LevelOf(both), kDramLevel);
  std::vector<Match> held;
  for (uint64_t text = 100; text < 120; ++text) {  // all of dram, held by leases
    ASSERT_EQ(Publish(kHost, TestPlan(text, kTokens), text), PublishOutcome::kPublished);
    held.push_back(Lookup(kHost, TestPlan(text, kTokens)));
    ASSERT_EQ(held.back().found[0].reason, MissReason::kNone);
  }
  const ObjectHeader plan = TestPlan(1, kTokens);
  ASSERT_EQ(Publish(kBob, plan, 1), PublishOutcome::kPublished);
  EXPECT_EQ(Lookup(kFar, plan).found[0].reason, MissReason::kBudgetRefused);
  const Match near = Lookup(kNear, plan);
  ASSERT_EQ(near.found[0].reason, MissReason::kNone);
  EXPECT_EQ(near.found[0].tier, TierKind::kHbm);
  EXPECT_EQ(LevelOf(near), 1u);
  EXPECT_THAT(cache_->upkeep().inventory().Where(kTenant, plan.key), ElementsAre(TierKind::kHbm))
      << "nothing was brought down";
  // The lease keeps that copy, even if others need its space.
  for (uint64_t text = 10; text < 30; ++text) {
    ASSERT_EQ(Publish(kBob, TestPlan(text, kTokens), text), PublishOutcome::kPublished) << text;
  }
  EXPECT_THAT(cache_->upkeep().inventory().Where(kTenant, plan.key), ElementsAre(TierKind::kHbm));
  for (const SessionId session : {kNear, kFar}) cache_->CloseSession(session, [] {});
  for (uint64_t text = 30; text < 50; ++text) {
    ASSERT_EQ(Publish(kBob, TestPlan(text, kTokens), text), PublishOutcome::kPublished) << text;
  }
  EXPECT_TRUE(cache_->upkeep().inventory().Where(kTenant, plan.key).empty());
}

// Another node's bundle is copied to its ranks' GPUs: directly if the source can access them, otherwise through dram.
TEST_F(TwoGpus, ShardsOfAnotherNodeLandOnTheirRanksGpus) {
  using Copied = std::pair<TierKind, TierKind>;
  for (const bool straight : {true, false}) {
    SCOPED_TRACE(straight);
    other_.reaches = straight;
    const uint64_t text = straight ? 1 : 11;
    std::vector<ObjectHeader> shards(2, TestPlan(text, kTokens));
    for (uint32_t rank = 0; rank < 2; ++rank) {
      shards[rank].shard = {.rank = rank, .size = 2};
      ASSERT_TRUE(other_.rig.Publish(OtherNode::kItself, shards[rank], text + rank));
    }
    other_.rig.Settle();
    const auto ask = [](const ObjectHeader& plan) {
      return Query{.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
    };
    // The ranks of this namespace are known from earlier work.
    ObjectHeader known = TestPlan(text + 5, kTokens);
    known.shard = shards[1].shard;
    ASSERT_EQ(Publish(kBob, known, text + 5), PublishOutcome::kPublished);
    observer_.copied.clear();
    for (const ObjectHeader& shard : shards) ASSERT_TRUE(other_.Offer(*cache_, ask(shard)));
    const Match first = Lookup(kAnn, shards[0]);
    ASSERT_EQ(first.found[0].tier, TierKind::kRemote);
    const auto second = cache_->Attach(kBob, first.lease, shards[1].shard);
    ASSERT_TRUE(second.ok()) << second.status();
    Fetch();
    EXPECT_LT(LandError(kAnn, first, text), 1e-5);
    EXPECT_LT(LandError(kBob, *second, text + 1), 1e-5);
    EXPECT_EQ(LevelOf(first), 0u);
    EXPECT_EQ(LevelOf(*second), 1u);
    EXPECT_EQ(std::ranges::count(observer_.copied, Copied(TierKind::kRemote, TierKind::kHbm)), straight ? 2 : 0);
    EXPECT_EQ(std::ranges::count(observer_.copied, Copied(TierKind::kRemote, TierKind::kDram)), straight ? 0 : 2);
    cache_->Release(kAnn, first.lease);
    cache_->Release(kBob, second->lease);
    EXPECT_EQ(other_.leased(), 0u);
  }
}

// Each GPU evicts only its own objects. A lease on one GPU keeps nothing on the other.
TEST_F(TwoGpus, EachGpuHasItsOwnCapacity) {
  const ObjectHeader plan = TestPlan(1, kTokens);
  ASSERT_EQ(Publish(kAnn, plan, 1), PublishOutcome::kPublished);
  const Match bob = Lookup(kBob, plan);
  executor_.CompleteAll();
  for (uint64_t text = 10; text < 30; ++text) {
    ASSERT_EQ(Publish(kAnn, TestPlan(text, kTokens), text), PublishOutcome::kPublished) << text;
  }
  EXPECT_LE(hbm_[0]->Usage(kTenant).used_bytes, kHbmExtents * limits::kExtentBytes);
  EXPECT_EQ(hbm_[1]->Usage(kTenant).used_bytes, kObjectExtents * limits::kExtentBytes);
  EXPECT_LT(LandError(kBob, bob, 1), 1e-5) << "its copy has stayed";
  const Match again = Lookup(kAnn, plan);
  ASSERT_EQ(again.found[0].reason, MissReason::kNone);
  EXPECT_LT(LandError(kAnn, again, 1), 1e-5) << "and the other GPU gets it again";
}

// One rank looks up for all; each attaches and lands its own shard on its own GPU.
TEST_F(TwoGpus, EachShardOfABundleIsOnItsRanksGpu) {
  std::vector<ObjectHeader> shards(2, TestPlan(1, kTokens));
  for (uint32_t rank = 0; rank < 2; ++rank) shards[rank].shard = {.rank = rank, .size = 2};
  ASSERT_EQ(Publish(kAnn, shards[0], 1), PublishOutcome::kPublished);
  ASSERT_EQ(Publish(kBob, shards[1], 2), PublishOutcome::kPublished);
  const Match first = Lookup(kAnn, shards[0]);
  ASSERT_EQ(first.found[0].reason, MissReason::kNone);
  const auto second = cache_->Attach(kBob, first.lease, shards[1].shard);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_EQ(second->found[0].reason, MissReason::kNone);
  EXPECT_EQ(LevelOf(first), 0u);
  EXPECT_EQ(LevelOf(*second), 1u);
  EXPECT_EQ(second->found[0].tier, TierKind::kHbm) << "it was there all along";
  EXPECT_LT(LandError(kAnn, first, 1), 1e-5);
  EXPECT_LT(LandError(kBob, *second, 2), 1e-5);
  for (const auto& hbm : hbm_) EXPECT_EQ(hbm->Usage(kTenant).used_bytes, kObjectExtents * limits::kExtentBytes);

  // The loss of one rank's engine does not affect the other rank's lease.
  cache_->CloseSession(kBob, [] {});
  executor_.CompleteAll();
  EXPECT_LT(LandError(kAnn, first, 1), 1e-5);
  cache_->OpenSession(kBob, kTenant);
}

// A rank that connects on a different GPU than expected gets its shard there.
TEST_F(TwoGpus, AMovedRankGetsItsShardOnItsGpu) {
  std::vector<ObjectHeader> shards(2, TestPlan(1, kTokens));
  for (uint32_t rank = 0; rank < 2; ++rank) shards[rank].shard = {.rank = rank, .size = 2};
  ASSERT_EQ(Publish(kAnn, shards[0], 1), PublishOutcome::kPublished);
  ASSERT_EQ(Publish(kAnn, shards[1], 2), PublishOutcome::kPublished);
  const Match first = Lookup(kAnn, shards[0]);
  const auto second = cache_->Attach(kBob, first.lease, shards[1].shard);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_EQ(second->found[0].reason, MissReason::kNone);
  EXPECT_EQ(LevelOf(*second), 1u);
  EXPECT_LT(LandError(kBob, *second, 2), 1e-5);
}

// A lease that was taken on one GPU can be used on the other after attaching, and not before.
TEST_F(TwoGpus, ALeaseOfAnotherGpuIsAttachedToWithCopiesHere) {
  const ObjectHeader plan = TestPlan(1, kTokens);
  ASSERT_EQ(Publish(kAnn, plan, 1), PublishOutcome::kPublished);
  const Match ann = Lookup(kAnn, plan);
  const auto bob = cache_->Attach(kBob, ann.lease);
  ASSERT_TRUE(bob.ok()) << bob.status();
  EXPECT_EQ(LevelOf(*bob), 1u);
  EXPECT_LT(LandError(kBob, *bob, 1), 1e-5);
  EXPECT_LT(LandError(kAnn, ann, 1), 1e-5);
}

// A composition of two interiors onto a state, on a GPU and by the reference.
class Composing : public TwoGpus {
 protected:
  void SetUp() override {
    for (uint64_t text = 1; text <= 2; ++text) {
      plans_.push_back(TestPlan(text, kTokens));
      ASSERT_EQ(Publish(kAnn, plans_.back(), text), PublishOutcome::kPublished);
    }
  }
  Match Both(SessionId session) {
    std::vector<Query> queries;
    for (const ObjectHeader& plan : plans_) {
      queries.push_back({.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens});
    }
    return cache_->Lookup(session, queries);
  }
  static std::vector<float> Start() {
    const kernels::LinearShape shape = TestShape();
    std::vector<float> state(static_cast<size_t>(shape.heads) * shape.d_k * shape.d_v);
    for (size_t i = 0; i < state.size(); ++i) state[i] = 0.01f * static_cast<float>(i % 83) - 0.4f;
    return state;
  }
  // `far`: a state on a GPU; null: `near`.
  CompositionVerdict Compose(SessionId session, const Match& match, std::byte* far, std::vector<float>& near,
                             const kernels::Gpu* gpu) {
    static LandingId next = 1000;
    Composition work{.interiors = {{.segment = 0}, {.segment = 1, .first_position = kTokens}}, .gpu = gpu};
    work.layers.push_back({.layer = 2,
                           .shape = TestShape(),
                           .state = {.data = far != nullptr ? far : reinterpret_cast<std::byte*>(near.data())}});
    std::optional<CompositionVerdict> verdict;
    cache_->Compose(session, next++, match.lease, std::move(work),
                    [&](CompositionVerdict v) { verdict = std::move(v); });
    executor_.CompleteAll();
    return verdict.value();
  }
  std::vector<ObjectHeader> plans_;
};

TEST_F(Composing, RunsOnGpuOfStates) {
  std::vector<float> expected = Start();
  ASSERT_EQ(Compose(kHost, Both(kHost), nullptr, expected, nullptr).outcome, MissReason::kNone);
  double largest = 0;
  for (const float number : expected) largest = std::max(largest, std::abs(static_cast<double>(number)));
  for (const SessionId session : {kAnn, kBob}) {
    SCOPED_TRACE(session);
    OnGpu& memory = MemoryOf(session);
    memory.Reset();
    std::vector<float> state = Start();
    std::byte* const far = memory.Put(state.data(), state.size() * sizeof(float));
    ASSERT_EQ(Compose(session, Both(session), far, state, &memory.gpu()).outcome, MissReason::kNone);
    memory.gpu().CopyToHost(state.data(), far, state.size() * sizeof(float));
    for (size_t i = 0; i < state.size(); ++i) ASSERT_NEAR(state[i], expected[i], 1e-5 * largest) << i;
  }
}

TEST_F(Composing, VerifiesWhatItReadsThereFirst) {
  const Match match = Both(kAnn);
  {
    const kernels::cuda::emulator::DeviceWork as_the_gpu(0);
    Corrupt(*hbm_[0], *match.found[1].slot, *match.found[1].header, 2, PartForm::kState);
  }
  std::vector<float> state = Start();
  ann_.Reset();
  std::byte* const far = ann_.Put(state.data(), state.size() * sizeof(float));
  const CompositionVerdict verdict = Compose(kAnn, match, far, state, &GpuOfNumber(0));
  EXPECT_EQ(verdict.outcome, MissReason::kChecksumFailed);
  EXPECT_THAT(verdict.interiors, ElementsAre(MissReason::kNone, MissReason::kChecksumFailed));
  ann_.gpu().CopyToHost(state.data(), far, state.size() * sizeof(float));
  EXPECT_EQ(state, Start()) << "nothing is written";
}

TEST_F(Composing, AnotherGpusTuplesAreInaccessible) {
  std::vector<float> state = Start();
  bob_.Reset();
  std::byte* const far = bob_.Put(state.data(), state.size() * sizeof(float));
  EXPECT_EQ(Compose(kAnn, Both(kAnn), far, state, &GpuOfNumber(1)).outcome, MissReason::kInvalidRequest);
}

TEST(GpuBounds, CountPointersAndStatesWithExponents) {
  Composition::Layer layer{.shape = TestShape()};
  EXPECT_EQ(GpuPointerBytes(layer, 0), 4 * sizeof(void*));
  EXPECT_EQ(GpuPointerBytes(layer, 100), 4 * (100 * sizeof(kernels::HeadTuple) + sizeof(void*)));
  EXPECT_EQ(GpuScratchBytes(layer), 0u);
  layer.state.dtype = DType::kF16;
  const uint64_t one = GpuScratchBytes(layer);
  EXPECT_GE(one, uint64_t{4} * 64 * 96 * sizeof(float));
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    layer.steps.push_back({.begin = 0, .end = 1, .checkpoint = StatePlace{.dtype = dtype}});
  }
  EXPECT_EQ(GpuPointerBytes(layer, 0), 4 * 3 * sizeof(void*));
  EXPECT_GE(GpuScratchBytes(layer), 2 * uint64_t{4} * 64 * 96 * sizeof(float));
  EXPECT_LT(GpuScratchBytes(layer), 3 * one);
}

// Tables of decays are in the layout, which a GPU cannot access, so calls use copies.
TEST(GpuCallsStage, ReturnsGpuAccessibleCopies) {
  const auto lane = *GpuLane::Make(GpuOfNumber(1), 1);
  std::vector<float> numbers(70'000);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
  for (const size_t count : {size_t{10}, numbers.size(), size_t{3}}) {
    GpuCalls calls(*lane);
    ASSERT_TRUE(calls.Reserve(1 << 20, count));
    const float* const staged = calls.Stage(std::span(numbers).first(count));
    EXPECT_TRUE(kernels::cuda::emulator::Reaches(staged, count * sizeof(float)));
    EXPECT_TRUE(std::equal(numbers.begin(), numbers.begin() + static_cast<ptrdiff_t>(count), staged));
    EXPECT_EQ(calls.Stage({}), nullptr);
  }
}

}  // namespace
}  // namespace ashlar::storage
