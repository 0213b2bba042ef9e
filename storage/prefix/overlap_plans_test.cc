// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/overlap_plans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ashlar::storage {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr PrefixCosts kCosts{.page_tokens = 16, .page_bytes = 100, .checkpoint_bytes = 1000, .flops_per_token = 1};
constexpr size_t kMost = 8;

// Keeps the jobs until the test runs them.
class Jobs {
 public:
  OverlapPlans::Background Queue() {
    return [this](std::function<void()> work, std::function<void()> done) {
      ++offered;
      if (full) return false;
      jobs_.emplace_back(std::move(work), std::move(done));
      return true;
    };
  }
  void RunOne() {
    const auto [work, done] = jobs_.front();
    jobs_.pop_front();
    work();
    done();
  }
  size_t waiting() const { return jobs_.size(); }

  bool full = false;
  int offered = 0;

 private:
  std::deque<std::pair<std::function<void()>, std::function<void()>>> jobs_;
};

std::vector<uint64_t> Plan(OverlapPlans& plans, uint64_t tokens, size_t checkpoints = 1) {
  return plans.For({.tokens = tokens}).Positions(checkpoints);
}

// Of many divergences, which the planner has learned.
void Learn(OverlapPlans& plans, uint64_t depth, uint64_t length, int times = 300) {
  for (int i = 0; i < times; ++i) plans.Observe(depth, length);
}

TEST(OverlapPlansTest, LearnsTheFirstDivergencesAtOnce) {
  Jobs jobs;
  OverlapPlans plans(kCosts, 1, kMost, jobs.Queue());
  EXPECT_THAT(Plan(plans, 5000), IsEmpty());
  plans.Observe(700, 5000);
  EXPECT_THAT(Plan(plans, 5000, 2), ElementsAre(700 / 16 * 16)) << "the grid of 5,000 tokens is 16";
  EXPECT_EQ(jobs.offered, 0);
}

TEST(OverlapPlansTest, TheFirstPromptsAreAlsoPlannedForOtherDivergences) {
  OverlapPlans plans(kCosts, 1, kMost, {});
  const auto planned = [&](bool guess) { return plans.For({.tokens = 5000}, guess).Positions(kMost); };
  EXPECT_THAT(planned(true), IsEmpty()) << "no divergence is known";
  plans.Observe(700, 5000);
  for (int i = 0; i < 31; ++i) {
    EXPECT_THAT(planned(true), AllOf(SizeIs(kMost), Contains(700 / 16 * 16), Contains(Gt(4700u))));
    EXPECT_THAT(planned(false), ElementsAre(700 / 16 * 16));
  }
  EXPECT_THAT(planned(true), SizeIs(kMost));
  EXPECT_THAT(planned(true), ElementsAre(700 / 16 * 16));
}

TEST(OverlapPlansTest, LaterPlansAreARequestLate) {
  OverlapPlans plans(kCosts, 1, kMost, {});
  Learn(plans, 700, 5000);
  EXPECT_THAT(Plan(plans, 5000), IsEmpty());
  plans.BeginRequest();
  EXPECT_THAT(Plan(plans, 5000), ElementsAre(700 / 16 * 16));
  Learn(plans, 2000, 5000, 1000);
  EXPECT_THAT(Plan(plans, 5000), ElementsAre(700 / 16 * 16));
  plans.BeginRequest();
  EXPECT_THAT(Plan(plans, 5000), ElementsAre(2000));
}

// The plan that is looked up is the one that the whole model gives.
TEST(OverlapPlansTest, MatchesThePlanOfTheModel) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapPlans plans(kCosts, 1, kMost, {});
  OverlapModel model;
  const auto flops = [](uint64_t depth) { return kCosts.Flops(depth); };
  const CheckpointPlan::Prompt prompt{.resume = 100, .shared = 300, .tokens = 7000};
  for (int i = 0; i < 64; ++i) {
    for (int k = 0; k < 64; ++k) {  // as many as a refresh waits for
      const uint64_t length = 2000 + random() % 9000, depth = 1 + random() % length;
      plans.Observe(depth, length);
      model.Observe(depth, length);
    }
    plans.BeginRequest();
    plans.For(prompt);
  }
  plans.BeginRequest();
  const CheckpointPlan exact(model.Forecast(64).Within(7000), 7000, CheckpointGrid(7000, 1), kMost, flops);
  const auto expected = exact.For(prompt, CheckpointGrid(7000, 1), flops), found = plans.For(prompt);
  ASSERT_EQ(found.most(), kMost);
  for (size_t m = 0; m <= kMost; ++m) {
    EXPECT_THAT(found.Expected(m), DoubleNear(expected.Expected(m), 1e-9));
    EXPECT_EQ(found.Positions(m), expected.Positions(m));
  }
}

// Documents of different lengths before short questions, after instructions of one length.
TEST(OverlapPlansTest, ServesSimilarLengths) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  OverlapPlans plans(kCosts, 1, kMost, {});
  for (int i = 0; i < 4000; ++i) {
    plans.BeginRequest();
    const uint64_t length = 20'000 + random() % 1'000'000;
    plans.Observe(i % 2 == 0 ? 512 : length - 100, length);
    Plan(plans, 4800);
  }
  plans.BeginRequest();
  EXPECT_THAT(Plan(plans, 4400, 2), ElementsAre(512, 4400 - 112)) << "100 from the end, on a grid of 16";
  EXPECT_THAT(plans.For({.resume = 512, .shared = 600, .tokens = 5000}).Positions(1), ElementsAre(4896));
  EXPECT_THAT(Plan(plans, 12'000, 2), IsEmpty()) << "no plan for half or twice its length";
  plans.BeginRequest();
  EXPECT_THAT(Plan(plans, 12'000, 2), ElementsAre(512, 11'872)) << "planned after it was asked for";
}

TEST(OverlapPlansTest, WorksOnlyInTheBackground) {
  Jobs jobs;
  OverlapPlans plans(kCosts, 1, kMost, jobs.Queue());
  Learn(plans, 512, 4800);
  EXPECT_EQ(jobs.waiting(), 0u) << "work is offered with a prompt to plan for";
  EXPECT_THAT(Plan(plans, 4800), IsEmpty());
  EXPECT_EQ(jobs.waiting(), 1u);
  Learn(plans, 1024, 4800);
  plans.BeginRequest();
  EXPECT_THAT(Plan(plans, 4800), IsEmpty());
  EXPECT_EQ(jobs.waiting(), 1u) << "one at a time";
  jobs.RunOne();
  EXPECT_THAT(Plan(plans, 4800), ElementsAre(512));
  EXPECT_EQ(jobs.waiting(), 1u) << "what was observed meanwhile";
}

TEST(OverlapPlansTest, PlansLengthsThatReturnAgain) {
  Jobs jobs;
  OverlapPlans plans(kCosts, 1, kMost, jobs.Queue());
  Learn(plans, 512, 4800);
  Plan(plans, 4800);
  jobs.RunOne();
  EXPECT_THAT(Plan(plans, 4800), ElementsAre(512));
  EXPECT_EQ(jobs.waiting(), 0u) << "its plan is by the latest forecast";
  const uint64_t one = plans.bytes();
  EXPECT_GT(one, 0u);
  for (int i = 0; i < 20; ++i) {  // other lengths, meanwhile
    Learn(plans, 1024, 48'000);
    Plan(plans, 48'000);
    if (jobs.waiting() > 0) jobs.RunOne();
  }
  EXPECT_LE(plans.bytes(), one + 10'000) << "an unused plan is dropped";
  EXPECT_THAT(Plan(plans, 4800), IsEmpty());
  EXPECT_EQ(jobs.waiting(), 1u);
}

TEST(OverlapPlansTest, OffersRefusedWorkAgain) {
  Jobs jobs;
  OverlapPlans plans(kCosts, 1, kMost, jobs.Queue());
  jobs.full = true;
  Learn(plans, 512, 4800, 100'000);  // bounded
  for (int i = 0; i < 64; ++i) Plan(plans, 4800);
  EXPECT_EQ(jobs.offered, 1);
  jobs.full = false;
  Plan(plans, 4800);
  Plan(plans, 4800);
  EXPECT_EQ(jobs.offered, 2);
  jobs.RunOne();
  EXPECT_THAT(Plan(plans, 4800), ElementsAre(512));
}

TEST(OverlapPlansTest, AJobPlansFewLengths) {
  Jobs jobs;
  OverlapPlans plans(kCosts, 1, kMost, jobs.Queue());
  Learn(plans, 512, 4800);
  Plan(plans, 1000);
  ASSERT_EQ(jobs.waiting(), 1u);
  for (uint64_t tokens = 1000; tokens < 64'000; tokens += tokens / 32) Plan(plans, tokens);
  jobs.RunOne();
  Plan(plans, 64'000);
  const uint64_t before = plans.bytes();
  jobs.RunOne();
  EXPECT_GT(plans.bytes(), before);
  EXPECT_THAT(Plan(plans, 64'000), Not(IsEmpty()));
  EXPECT_THAT(Plan(plans, 4000), IsEmpty()) << "is not among the last 16";
}

TEST(OverlapPlansTest, CompletionAfterItsEndIsIgnored) {
  Jobs jobs;
  std::optional<OverlapPlans> plans(std::in_place, kCosts, 1, kMost, jobs.Queue());
  Learn(*plans, 512, 4800);
  Plan(*plans, 4800);
  ASSERT_EQ(jobs.waiting(), 1u);
  plans.reset();
  jobs.RunOne();  // a sanitizer reports an access to what was destroyed
  EXPECT_EQ(jobs.waiting(), 0u);
}

}  // namespace
}  // namespace ashlar::storage
