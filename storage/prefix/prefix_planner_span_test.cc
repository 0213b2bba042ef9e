// SPDX-License-Identifier: Apache-2.0
// Spans in the planner: when a span replaces states, which lookups find it, and that it is erased with the states
// before it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "storage/prefix/prefix_planner.h"
#include "storage/testing/prefix_recount.h"
#include "storage/testing/tokens.h"

namespace ashlar::storage {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using Kept = PrefixPlanner::Kept;

constexpr PrefixCosts kPagedCosts{.page_tokens = 16, .page_bytes = 160, .checkpoint_bytes = 1000, .flops_per_token = 1};
constexpr uint64_t kNeverFull = uint64_t{1} << 40;

class PrefixSpans : public ::testing::Test {
 protected:
  // A prompt and its answer, with states before the prompt's last token and the span from there on.
  void Answer(const Tokens& prompt, const Tokens& decoded, uint64_t bytes = 50) {
    const PrefixPlanner::Match match = planner_.Lookup(prompt, true);
    const uint64_t begin = prompt.size() - 1;
    planner_.Commit(match, Join(prompt, decoded), prompt.size(), std::vector<uint64_t>{begin},
                    PrefixPlanner::SpanOffer{begin, bytes});
  }
  uint64_t Resumed(const Tokens& prompt, bool rebuilds = true) {
    const PrefixPlanner::Match match = planner_.Lookup(prompt, rebuilds);
    planner_.Release(match);
    return match.resume;
  }
  void ExpectBooks() {
    const PrefixRecount count = Recount(planner_.tree().root(), kPagedCosts);
    EXPECT_TRUE(count.needs_hold);
    EXPECT_TRUE(count.spans_hold);
    EXPECT_EQ(count.bytes, planner_.budget().bytes());
    EXPECT_EQ(count.spans, planner_.budget().spans());
    EXPECT_EQ(count.kept.size(), planner_.budget().checkpoints() + planner_.budget().spans());
  }

  const Tokens prompt_ = Numbers(0, 101), answer_ = Numbers(1000, 40);
  PrefixPlanner planner_{kPagedCosts, {.capacity_bytes = kNeverFull}};
};

TEST_F(PrefixSpans, ReplaceStatesIfTheyAreSmaller) {
  Answer(prompt_, answer_, 50);
  EXPECT_EQ(planner_.IsKept(First(prompt_, 100)), Kept::kByStates);
  EXPECT_EQ(planner_.IsKept(Join(prompt_, answer_)), Kept::kBySpan);
  // Six pages and a tail before the states at 100; the span has its own keys and values.
  EXPECT_EQ(planner_.budget().bytes(), 1000 + 7 * 160 + 50u);
  EXPECT_EQ(planner_.budget().saved_bytes(), 1000 + 160 - 50u);
  const Tokens other = Numbers(5000, 101);
  Answer(other, answer_, 5000);
  EXPECT_EQ(planner_.IsKept(Join(other, answer_)), Kept::kByStates) << "a span of more bytes than states";
  EXPECT_EQ(planner_.budget().spans(), 1u);
  ExpectBooks();
}

TEST_F(PrefixSpans, RebuildingEnginesResumeAtEveryDepth) {
  Answer(prompt_, answer_);
  const Tokens text = Join(prompt_, answer_);
  for (size_t common = 100; common <= text.size(); ++common) {
    EXPECT_EQ(Resumed(Join(First(text, common), {-1, -2})), common);
    EXPECT_EQ(Resumed(Join(First(text, common), {-1, -2}), false), 100u);
  }
  EXPECT_EQ(Resumed(First(text, 120)), 120u) << "that ends inside";
  const PrefixPlanner::Match match = planner_.Lookup(Join(First(text, 120), {-1}), true);
  ASSERT_EQ(match.spans.size(), 1u);
  EXPECT_EQ(match.spans[0].begin, 100u);
  EXPECT_EQ(match.spans[0].depth, 120u);
  EXPECT_THAT(match.resumable, ElementsAre(100u));
  EXPECT_THAT(match.checkpoint_at, testing::Not(testing::Contains(120u))) << "a branch that the span makes needless";
  planner_.Release(match);
}

// Answers to one prompt hang on the same states. A prompt that parts from both takes the answer with which it has more
// tokens in common.
TEST_F(PrefixSpans, SeveralSpansShareABase) {
  Answer(prompt_, answer_);
  const Tokens again = Join(First(answer_, 10), Numbers(2000, 30));
  Answer(prompt_, again);
  EXPECT_EQ(planner_.budget().spans(), 2u);
  EXPECT_EQ(planner_.budget().checkpoints(), 1u);
  EXPECT_EQ(Resumed(Join(Join(prompt_, First(again, 25)), {-1})), 126u);
  EXPECT_EQ(Resumed(Join(Join(prompt_, First(answer_, 25)), {-1})), 126u);
  EXPECT_EQ(Resumed(Join(Join(prompt_, First(answer_, 5)), {-1})), 106u);
  ExpectBooks();
}

TEST_F(PrefixSpans, AreDroppedWithTheirBase) {
  std::vector<uint64_t> gone;
  planner_.WhenGone([&](PrefixNode& node) { gone.push_back(node.depth()); });
  Answer(prompt_, answer_);
  Answer(prompt_, Numbers(3000, 20));
  planner_.Lost(First(prompt_, 100));
  EXPECT_THAT(gone, testing::UnorderedElementsAre(141u, 121u, 100u));
  EXPECT_EQ(planner_.budget().bytes(), 0u);
  EXPECT_EQ(Resumed(Join(prompt_, answer_)), 0u);
  ExpectBooks();
  // Without these states a span is of no use.
  const PrefixPlanner::Match match = planner_.Lookup(prompt_, true);
  planner_.Commit(match, Join(prompt_, answer_), prompt_.size(), {}, PrefixPlanner::SpanOffer{100, 50});
  EXPECT_EQ(planner_.IsKept(Join(prompt_, answer_)), Kept::kByStates);
}

TEST_F(PrefixSpans, AreRecoveredOnlyWithTheirBase) {
  const Tokens text = Join(prompt_, answer_);
  using enum PrefixPlanner::Recovery;
  const PrefixPlanner::Found states[] = {{.depth = 100}};
  const PrefixPlanner::Found spans[] = {
      {.depth = text.size() - 5, .span = PrefixPlanner::SpanOffer{100, 50}},
      {.depth = text.size(), .span = PrefixPlanner::SpanOffer{100, 50}},
      {.depth = text.size(), .span = PrefixPlanner::SpanOffer{60, 50}},
  };
  EXPECT_THAT(planner_.Recover(text, spans), Each(kDeclined));
  EXPECT_THAT(planner_.Recover(prompt_, states), ElementsAre(kKept));
  EXPECT_THAT(planner_.Recover(prompt_, states), ElementsAre(kKnown));
  EXPECT_THAT(planner_.Recover(text, spans), ElementsAre(kKept, kKept, kDeclined));
  EXPECT_THAT(planner_.Recover(text, spans), ElementsAre(kKnown, kKnown, kKnown));
  EXPECT_EQ(Resumed(Join(First(text, 130), {-1})), 130u);
  ExpectBooks();
}

// With few bytes: states on which a span hangs are not given up before it, and the accounts are right at every step.
TEST_F(PrefixSpans, StatesStayWhileSpansDependOnThem) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    std::mt19937_64 random(seed);
    PrefixPlanner planner(kPagedCosts, {.capacity_bytes = 6000 + random() % 20'000, .history_bytes = 50'000});
    std::vector<Tokens> known = {{}};
    size_t inside = 0, evictions = 0;
    planner.WhenGone([&](PrefixNode& node) {
      ++evictions;
      EXPECT_TRUE(node.data.hanging.empty());
    });
    for (int i = 0; i < 300; ++i) {
      Tokens prompt = known[random() % known.size()];
      prompt.resize(prompt.size() - std::min<size_t>(prompt.size(), random() % 60));
      prompt = Join(prompt, Numbers(static_cast<int32_t>(random() % 5 * 100), static_cast<int32_t>(2 + random() % 80)));
      const PrefixPlanner::Match match = planner.Lookup(prompt, true);
      for (const PrefixPlanner::Match::Span& span : match.spans) inside += span.depth < span.end->depth() ? 1 : 0;
      const Tokens text = Join(prompt, Numbers(static_cast<int32_t>(random() % 3 * 1000), 30));
      const uint64_t begin = prompt.size() - 1;
      planner.Commit(match, text, prompt.size(), std::vector<uint64_t>{begin},
                     PrefixPlanner::SpanOffer{begin, random() % 400});
      known.push_back(text);
      const PrefixRecount count = Recount(planner.tree().root(), kPagedCosts);
      ASSERT_TRUE(count.needs_hold && count.spans_hold);
      ASSERT_EQ(count.bytes, planner.budget().bytes());
      ASSERT_LE(planner.budget().bytes(), planner.budget().capacity_bytes());
    }
    EXPECT_GT(inside, 5u);
    EXPECT_GT(evictions, 50u);
  }
}

}  // namespace
}  // namespace ashlar::storage
