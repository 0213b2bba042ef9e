// SPDX-License-Identifier: Apache-2.0
// Lookups in slices: the result of one uninterrupted lookup if nothing happens in between, and a correct result if
// anything does.
#include "storage/lookup/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "storage/testing/prefix_engine.h"
#include "storage/testing/tenants.h"
#include "storage/testing/tiered_rig.h"
#include "storage/testing/tokens.h"

namespace ashlar::storage {
namespace {

using ::testing::Each;
using ::testing::Field;

constexpr uint64_t kTokens = 64;  // tokens of a segment

// One cache, with texts of several segments, preceded by prefixes.
class SearchWorld {
 public:
  explicit SearchWorld(CacheOptions options = {})
      : rig_({.hbm = 0, .dram = 96, .ssd = 0, .cache = std::move(options)}) {
    for (const SessionId session : {kAnn, kBob}) cache().OpenSession(session, kTenant);
  }

  Cache& cache() { return *rig_.cache; }
  TieredRig& rig() { return rig_; }

  static std::vector<Query> Queries(std::span<const uint64_t> texts) {
    std::vector<Query> queries;
    for (const uint64_t text : texts) {
      const ObjectHeader plan = TestPlan(text, kTokens);
      queries.push_back(
          {.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens});
    }
    return queries;
  }

  void Publish(uint64_t text) {
    const ObjectHeader plan = TestPlan(text, kTokens);
    const Cache::Reservation reservation = cache().Reserve(kBob, plan);
    if (reservation.outcome != ReserveOutcome::kGranted) return;
    cache().Publish(kBob, reservation.id, TestSource(plan, text), [](PublishOutcome) {});
    rig_.Settle();
  }
  void Commit(const Tokens& text) {
    cache().Commit(kBob, engine_.Offer(text, text.size(), {}), [](const std::vector<CommitOutcome>&) {});
    rig_.Settle();
  }
  void Evict(uint64_t text) { cache().retention().Evict(kTenant, TestPlan(text, kTokens).key); }
  PrefixText Text(const Tokens& tokens) const { return engine_.Text(tokens); }

  // A lookup with `steps` per slice. Calls `between` after each slice but the last.
  Match Lookup(std::span<const Query> queries, const PrefixText* prompt, size_t steps,
               const std::function<void()>& between, const LeaseId& name = {}) {
    const auto search = cache().StartLookup(kAnn, queries, prompt, nullptr, name);
    while (true) {
      Slice slice(steps);
      if (search->Run(slice)) return search->Take();
      between();
    }
  }

 private:
  TieredRig rig_;
  PrefixEngine engine_{kTenant};
};

std::vector<MissReason> Reasons(const Match& match) {
  std::vector<MissReason> reasons;
  for (const Found& found : match.found) reasons.push_back(found.reason);
  return reasons;
}

// The same calls on two caches, one of which looks up in slices. Prompts begin with committed texts, so that prefixes
// are chosen, held and answered, too.
TEST(Search, FindsTheSameAsAnUnslicedLookup) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  SearchWorld whole, cut;
  size_t hits = 0, resumed = 0;
  for (int round = 0; round < 40; ++round) {
    const uint64_t one = random() % 12;
    const Tokens text = Numbers(static_cast<int32_t>(1000 * (one % 4)), 256 + 128 * (random() % 6));
    for (SearchWorld* world : {&whole, &cut}) {
      if (round % 3 == 0) world->Publish(one);
      if (round % 5 == 0) world->Commit(text);
    }
    Tokens prompt = Join(text, Numbers(100'000 + round, 3 * kTokens));
    prompt.resize(prompt.size() / kTokens * kTokens);
    std::vector<uint64_t> texts;
    for (size_t i = 0; i < prompt.size() / kTokens; ++i) texts.push_back(random() % 12);
    const std::vector<Query> queries = SearchWorld::Queries(texts);
    const bool with_prompt = random() % 2 == 0;
    const PrefixText a = whole.Text(prompt), b = cut.Text(prompt);
    const Match expected =
        with_prompt ? whole.cache().Lookup(kAnn, queries, a, nullptr) : whole.cache().Lookup(kAnn, queries);
    const Match match = cut.Lookup(queries, with_prompt ? &b : nullptr, 1 + random() % 3, [] {});
    ASSERT_EQ(Reasons(match), Reasons(expected)) << "round " << round;
    ASSERT_EQ(match.prefix.depth, expected.prefix.depth);
    ASSERT_EQ(match.prefix.objects, expected.prefix.objects);
    ASSERT_EQ(match.prefix.checkpoint_at, expected.prefix.checkpoint_at);
    ASSERT_EQ(match.lease == LeaseId{}, expected.lease == LeaseId{});
    hits += std::ranges::count(Reasons(match), MissReason::kNone);
    resumed += match.prefix.depth > 0;
    whole.cache().Release(kAnn, expected.lease);
    cut.cache().Release(kAnn, match.lease);
    ASSERT_EQ(cut.rig().observer.hits, whole.rig().observer.hits);
    ASSERT_EQ(cut.rig().observer.misses, whole.rig().observer.misses);
  }
  EXPECT_GT(hits, 20u);
  EXPECT_GT(resumed, 1u);
}

// An object reported as a hit is the requested one, and stays until the lease ends, whatever happens between two
// slices.
TEST(Search, HoldsWhatItFindsBetweenSlices) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  SearchWorld world;
  Cache& cache = world.cache();
  size_t hits = 0, misses = 0;
  for (int round = 0; round < 40; ++round) {
    const Tokens text = Numbers(static_cast<int32_t>(1000 * (random() % 4)), 512);
    const Tokens prompt = Join(text, Numbers(100'000 + round, 4 * kTokens));
    std::vector<uint64_t> texts;
    for (size_t i = 0; i < prompt.size() / kTokens; ++i) texts.push_back(random() % 16);
    const std::vector<Query> queries = SearchWorld::Queries(texts);
    const PrefixText asked = world.Text(prompt);
    const Match match = world.Lookup(queries, random() % 2 == 0 ? &asked : nullptr, 1 + random() % 4, [&] {
      switch (random() % 5) {
        case 0:
          return world.Publish(random() % 16);
        case 1:
          return world.Evict(random() % 16);
        case 2:
          return world.Commit(Numbers(static_cast<int32_t>(1000 * (random() % 4)), 512));
        case 3:  // other texts need the space
          return world.Publish(1000 + random());
        default: {
          const std::vector<Query> others = SearchWorld::Queries(std::vector<uint64_t>{random() % 16, random() % 16});
          cache.Release(kBob, cache.Lookup(kBob, others).lease);
        }
      }
    });
    for (size_t i = 0; i < match.found.size(); ++i) {
      const Found& found = match.found[i];
      (found.reason == MissReason::kNone ? hits : misses) += 1;
      if (found.reason != MissReason::kNone) continue;
      if (i < queries.size()) {
        ASSERT_EQ(found.header->key, queries[i].key);
      }
      ASSERT_GT(found.slot->Extents(), 0u);
      ASSERT_TRUE(cache.Holds(kAnn, match.lease));
    }
    // Publishes enough to fill all space that is not leased: only the lease holds objects.
    for (uint64_t other = 0; other < 3; ++other) world.Publish(1'000'000 + random());
    for (size_t i = 0; i < queries.size(); ++i) {
      if (match.found[i].reason == MissReason::kNone) {
        ASSERT_EQ(match.found[i].header->key, queries[i].key);
      }
    }
    cache.Release(kAnn, match.lease);
    ASSERT_EQ(cache.stats().leases, 0u);
  }
  EXPECT_GT(hits, 20u);
  EXPECT_GT(misses, 20u);
}

class SearchEnds : public ::testing::Test {
 protected:
  // A lookup of four existing texts, with one call of `between` after the first two.
  Match Lookup(const std::function<void()>& between, const LeaseId& name = {}) {
    for (const uint64_t text : texts_) world_.Publish(text);
    bool called = false;
    return world_.Lookup(
        queries_, nullptr, 3,
        [&] {
          if (!std::exchange(called, true)) between();
        },
        name);
  }
  uint32_t References() { return cache().explainer().Explain(kTenant, queries_[0]).present->references; }
  Cache& cache() { return world_.cache(); }

  SearchWorld world_{CacheOptions{.leased_segments_per_session = 6}};
  const std::vector<uint64_t> texts_ = {1, 2, 3, 4};
  const std::vector<Query> queries_ = SearchWorld::Queries(texts_);
};

TEST_F(SearchEnds, EndsWithSession) {
  const Match match = Lookup([&] { cache().CloseSession(kAnn, [] {}); });
  EXPECT_THAT(Reasons(match), Each(MissReason::kInvalidRequest));
  EXPECT_EQ(match.lease, LeaseId{});
  EXPECT_EQ(cache().stats().leases, 0u);
  cache().Tick();
  EXPECT_EQ(References(), 0u);
}

TEST_F(SearchEnds, HitsDespiteLaterDrain) {
  const Match match = Lookup([&] { cache().offers().StartDrain(); });
  EXPECT_THAT(Reasons(match), Each(MissReason::kNone));
  EXPECT_THAT(Reasons(cache().Lookup(kAnn, queries_)), Each(MissReason::kDaemonUnavailable)) << "what begins now";
}

TEST_F(SearchEnds, NoLeaseIfIdIsTakenMeanwhile) {
  const LeaseId name{7};
  const Match match = Lookup([&] { cache().Lookup(kBob, std::span(queries_).first(1), nullptr, name); }, name);
  EXPECT_THAT(Reasons(match), Each(MissReason::kInvalidRequest));
  EXPECT_EQ(cache().stats().leases, 1u);
}

TEST_F(SearchEnds, BusyWhenItsCapacityIsTakenMeanwhile) {
  const Match match = Lookup([&] { cache().Lookup(kAnn, std::span(queries_).first(3)); });
  EXPECT_THAT(Reasons(match), Each(MissReason::kBusy));
  EXPECT_EQ(cache().stats().leases, 1u);
}

TEST_F(SearchEnds, MissesObjectsEvictedMeanwhile) {
  const Match match = Lookup([&] { world_.Evict(1), world_.Evict(4); });
  EXPECT_EQ(match.found[0].reason, MissReason::kEvicted) << "which it had found";
  EXPECT_EQ(match.found[1].reason, MissReason::kNone);
  EXPECT_EQ(match.found[3].reason, MissReason::kEvicted) << "which it had not come to";
}

TEST_F(SearchEnds, LostObjectsFreeSpace) {
  const Match match = Lookup([&] {
    for (const uint64_t text : texts_) world_.Evict(text);
  });
  EXPECT_THAT(Reasons(match), Each(MissReason::kEvicted));
  EXPECT_EQ(match.lease, LeaseId{}) << "nothing is there to be held";
  EXPECT_EQ(world_.rig().dram->Usage(kTenant).used_bytes, 0u);
}

TEST_F(SearchEnds, FindsObjectsPublishedMeanwhile) {
  const std::vector<Query> queries = SearchWorld::Queries(std::vector<uint64_t>{8, 9, 10, 11});
  const Match match = world_.Lookup(queries, nullptr, 3, [&] { world_.Publish(8), world_.Publish(11); });
  EXPECT_EQ(match.found[0].reason, MissReason::kNeverSeen);
  EXPECT_EQ(match.found[3].reason, MissReason::kNone);
}

TEST_F(SearchEnds, ReleasesWhenCancelled) {
  for (const uint64_t text : texts_) world_.Publish(text);
  {
    const auto search = cache().StartLookup(kAnn, queries_, nullptr, nullptr);
    Slice slice(3);
    ASSERT_FALSE(search->Run(slice));
    EXPECT_EQ(References(), 1u);
  }
  cache().Tick();
  EXPECT_EQ(References(), 0u);
}

// After a restart, the disk has objects that memory has no arenas for.
TEST(Search, WaitsForArenasThatAnotherThreadCreates) {
  std::vector<uint64_t> texts(12);
  std::iota(texts.begin(), texts.end(), 1);
  TieredRig rig({.hbm = 0, .dram = 64, .ssd = 64});
  rig.cache->OpenSession(kAnn, kTenant);
  for (const uint64_t text : texts) ASSERT_TRUE(rig.Publish(kAnn, TestPlan(text, kTokens), text));
  rig.Settle();
  rig.Restart();
  rig.cache->OpenSession(kAnn, kTenant);
  std::vector<std::shared_ptr<ComingArena>> coming;
  rig.dram->CreateOn([&](TenantId, const std::shared_ptr<ComingArena>& arena) {
    coming.push_back(arena);
    return true;
  });
  const std::vector<Query> queries = SearchWorld::Queries(texts);
  const auto search = rig.cache->StartLookup(kAnn, queries, nullptr, nullptr);
  int waits = 0, resumed = 0;
  while (true) {
    Slice slice(1000, [&] { ++resumed; });
    if (search->Run(slice)) break;
    ASSERT_TRUE(slice.waits());
    ASSERT_EQ(coming.size(), 1u);
    EXPECT_EQ(resumed, waits);
    ++waits;
    const auto arena = std::exchange(coming, {}).front();
    arena->MakeAhead();
    ASSERT_TRUE(rig.dram->Prepared(kTenant, arena).ok());
    ASSERT_EQ(resumed, waits);
  }
  EXPECT_GT(waits, 1);
  const Match match = search->Take();
  EXPECT_THAT(Reasons(match), Each(MissReason::kNone));
  const uint64_t arenas = waits + coming.size();
  EXPECT_EQ(rig.dram->Usage(kTenant).held_bytes, arenas * 8 * limits::kExtentBytes) << "the search has created none";
}

TEST(Search, CreatesTheArenaIfItCannotWait) {
  TieredRig rig({.hbm = 0, .dram = 16, .ssd = 16});
  rig.cache->OpenSession(kAnn, kTenant);
  ASSERT_TRUE(rig.Publish(kAnn, TestPlan(1, kTokens), 1));
  rig.Settle();
  rig.Restart();
  rig.cache->OpenSession(kAnn, kTenant);
  rig.dram->CreateOn([](TenantId, const std::shared_ptr<ComingArena>&) { return true; });
  EXPECT_EQ(rig.Lookup(kAnn, TestPlan(1, kTokens)).found[0].reason, MissReason::kNone);
}

TEST_F(SearchEnds, ReacquiresObjectsDuringSettle) {
  for (const uint64_t text : texts_) world_.Publish(text);
  const Match ended = cache().Lookup(kAnn, std::span(queries_).first(2)), match = cache().Lookup(kAnn, queries_);
  ASSERT_TRUE(cache().Attach(kBob, match.lease).ok());
  for (const LeaseId& lease : {ended.lease, match.lease}) cache().EndLease(kAnn, lease);
  EXPECT_FALSE(cache().Holds(kAnn, match.lease)) << "at once";
  Slice first(1);
  ASSERT_FALSE(cache().SettleLeases(kAnn, first));
  ASSERT_TRUE(cache().Attach(kAnn, match.lease).ok());
  Slice rest;
  EXPECT_TRUE(cache().SettleLeases(kAnn, rest));
  EXPECT_TRUE(cache().Holds(kAnn, match.lease));
}

// A session that ends in slices: it is closed at once, and everything it held is released in the end.
TEST_F(SearchEnds, EndsWithSessionClosedInSlices) {
  Lookup([] {});
  const Cache::Reservation reserved = cache().Reserve(kAnn, TestPlan(77, kTokens));
  ASSERT_EQ(reserved.outcome, ReserveOutcome::kGranted);
  bool drained = false;
  std::optional<Cache::Freed> freed;
  int calls = 0;
  for (; !freed.has_value(); ++calls) {
    Slice slice(1);
    freed = cache().CloseSession(
        kAnn, [&] { drained = true; }, slice);
    EXPECT_THAT(Reasons(cache().Lookup(kAnn, queries_)), Each(MissReason::kInvalidRequest));
    EXPECT_EQ(drained, freed.has_value());
  }
  EXPECT_GE(calls, 5);
  EXPECT_EQ(freed->leases, 1u);
  EXPECT_EQ(freed->reservations, 1u);
  EXPECT_EQ(References(), 0u);
  EXPECT_EQ(cache().stats().reservations, 0u);
}

}  // namespace
}  // namespace ashlar::storage
