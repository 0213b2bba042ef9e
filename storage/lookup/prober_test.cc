// SPDX-License-Identifier: Apache-2.0
// Probes: what the next lookup finds, and nothing else changes.
#include "storage/lookup/prober.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "storage/testing/prefixes_fixture.h"

namespace ashlar::storage {
namespace {

class ProberTest : public PrefixesTest {
 protected:
  Probed Probe(std::span<const Query> queries, const PrefixText* text, size_t steps = SIZE_MAX, TenantId tenant = 1) {
    const Layout* const layout = text == nullptr ? nullptr : text->model().layout.get();
    const auto prober = rig_.cache->StartProbe(tenant, queries, text, layout == nullptr ? 0 : layout->head,
                                               layout == nullptr ? 0 : layout->tail);
    while (true) {
      Slice slice(steps);
      if (prober->Run(slice)) return prober->result();
    }
  }
  static uint64_t Sum(const Probed& probed) {
    return std::accumulate(probed.tokens.begin(), probed.tokens.end(), uint64_t{0});
  }
};

TEST_F(ProberTest, FindsThePrefixThatTheNextLookupFinds) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  size_t found = 0;
  for (int round = 0; round < 60; ++round) {
    const Tokens head = Numbers(static_cast<int32_t>(1000 * (random() % 5)), 100 + random() % 900);
    const Tokens prompt = Join(head, Numbers(100'000 + 1000 * round, 50));
    const PrefixText text = engine_.Text(prompt);
    const Probed probed = Probe({}, &text, 1 + random() % 4);
    const Match match = Ask(prompt);
    ASSERT_EQ(probed.prefix_tokens, match.prefix.depth) << "round " << round;
    ASSERT_EQ(Sum(probed), match.prefix.depth);
    ASSERT_EQ(probed.tokens[static_cast<size_t>(TierKind::kDram)], match.prefix.depth);
    found += match.prefix.depth > 0 ? 1 : 0;
    rig_.cache->Release(kAnn, match.lease);
    Serve(random() % 2 == 0 ? prompt : head);
  }
  EXPECT_GT(found, 10u);
}

TEST_F(ProberTest, FindsOwnStatesOfAConversationOnlyForIt) {
  const Tokens prompt = Numbers(0, 700);
  PrefixCommit commit = engine_.Offer(prompt, prompt.size(), {}, Conversation(1));
  commit.provenance = Provenance::kComposed;
  Commit(std::move(commit));
  const Tokens next = Join(prompt, Numbers(5000, 40));
  const PrefixText own = engine_.Text(next, Conversation(1)), other = engine_.Text(next, Conversation(2));
  EXPECT_EQ(Probe({}, &own).prefix_tokens, 700u);
  EXPECT_EQ(Probe({}, &other).prefix_tokens, 0u);
}

TEST_F(ProberTest, FindsNothingOfAnotherTenantOrWhileTheCacheDrains) {
  const Tokens prompt = Numbers(0, 600);
  Serve(prompt);
  const Tokens next = Join(prompt, Numbers(5000, 40));
  const PrefixText text = engine_.Text(next);
  EXPECT_EQ(Probe({}, &text).prefix_tokens, 600u);
  EXPECT_EQ(Probe({}, &text, SIZE_MAX, 2).prefix_tokens, 0u);
  rig_.cache->offers().StartDrain();
  EXPECT_EQ(Probe({}, &text).prefix_tokens, 0u);
}

TEST_F(ProberTest, TakesNoLeaseAndIsNoUse) {
  Serve(Numbers(0, 600));
  const Tokens next = Numbers(0, 650);
  const PrefixText text = engine_.Text(next);
  const auto hits = rig_.observer.hits;
  const auto misses = rig_.observer.misses;
  const Cache::Stats before = rig_.cache->stats();
  const size_t explained = rig_.cache->explainer().LastMisses(1, 10).size();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Probe({}, &text).prefix_tokens, 600u);
  const Tokens unknown = Numbers(7000, 300);
  const PrefixText missed = engine_.Text(unknown);
  EXPECT_EQ(Probe({}, &missed).prefix_tokens, 0u);
  EXPECT_EQ(rig_.observer.hits, hits);
  EXPECT_EQ(rig_.observer.misses, misses);
  EXPECT_EQ(rig_.cache->stats().leases, before.leases);
  EXPECT_EQ(rig_.cache->stats().objects, before.objects);
  EXPECT_EQ(rig_.cache->explainer().LastMisses(1, 10).size(), explained);
}

// A segment that is whole counts without its seams; one that is reserved only does not count.
TEST_F(ProberTest, CountsSegmentsThatArePublished) {
  std::vector<Query> queries;
  for (const uint64_t text : {uint64_t{1}, uint64_t{2}, uint64_t{3}}) {
    const ObjectHeader plan = TestPlan(text, 64);
    queries.push_back({.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens});
  }
  EXPECT_EQ(Probe(queries, nullptr).segment_tokens, 0u);
  for (const uint64_t text : {uint64_t{2}, uint64_t{3}}) {
    const ObjectHeader plan = TestPlan(text, 64);
    const Cache::Reservation reservation = rig_.cache->Reserve(kBob, plan);
    ASSERT_EQ(reservation.outcome, ReserveOutcome::kGranted);
    if (text == 3) continue;
    rig_.cache->Publish(kBob, reservation.id, TestSource(plan, text), [](PublishOutcome) {});
    rig_.Settle();
  }
  const Probed probed = Probe(queries, nullptr);
  EXPECT_EQ(probed.segment_tokens, 64u);
  EXPECT_EQ(probed.prefix_tokens, 0u);
  EXPECT_EQ(probed.tokens[static_cast<size_t>(TierKind::kDram)], 64u);
  queries[1].recompute = 1;  // computing takes a nanosecond
  rig_.cache->Release(kAnn, {});
}

}  // namespace
}  // namespace ashlar::storage
