// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/reuse_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>

namespace ashlar::storage {
namespace {

using Subject = ReuseModel::Subject;

constexpr Subject kEnd{.kind = ReuseKind::kRequestEnd, .uses = 0, .fresh = 100};

void End(ReuseModel& model, const Subject& subject, uint64_t age, bool used, int times = 1) {
  for (int i = 0; i < times; ++i) model.Ended(subject, age, used);
}

// Without observations the order is least recent use, and the price falls as 1/age.
TEST(ReuseModelTest, DefaultsToLeastRecentlyUsed) {
  const ReuseModel model;
  for (size_t kind = 0; kind < kReuseKinds; ++kind) {
    for (const uint32_t uses : {0u, 1u, 7u, 100u}) {
      const Subject subject{static_cast<ReuseKind>(kind), uses, 1000};
      double before = 1;
      for (uint64_t age = 1; age < uint64_t{1} << 30; age *= 2) {
        const double rate = model.Rate(subject, age);
        EXPECT_GT(rate, 0);
        EXPECT_LT(rate, before) << "at age " << age;
        if (age > 1) {
          EXPECT_NEAR(rate / before, 0.5, 1e-9);
        }
        EXPECT_EQ(rate, model.Rate(kEnd, age)) << "all are alike";
        before = rate;
      }
    }
  }
  EXPECT_LE(model.Rate(kEnd, 1001), model.Rate(kEnd, 1000)) << "of two ages in a bucket, too";
}

TEST(ReuseModelTest, RateIsDefinedAtEveryAge) {
  const ReuseModel model;
  for (const uint64_t age : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 31, uint64_t{1} << 40, UINT64_MAX}) {
    EXPECT_GT(model.Rate(kEnd, age), 0);
    EXPECT_TRUE(std::isfinite(model.Rate(kEnd, age)));
  }
  EXPECT_GT(model.Rate({ReuseKind::kEdge, UINT32_MAX, UINT64_MAX}, 3), 0);
}

TEST(ReuseModelTest, ChangesOnlyAtARefresh) {
  ReuseModel model;
  const double before = model.Rate(kEnd, 1);
  End(model, kEnd, 1, true, 100);
  EXPECT_EQ(model.Rate(kEnd, 1), before);
  model.Refresh();
  EXPECT_GT(model.Rate(kEnd, 1), 2 * before);
}

TEST(ReuseModelTest, UnusedSubjectsGetCheap) {
  ReuseModel model;
  const double before = model.Rate(kEnd, 4);
  End(model, kEnd, 1000, false, 500);
  model.Refresh();
  EXPECT_LT(model.Rate(kEnd, 4), before / 20);
}

// An unfinished spell counts up to its present age, and only while it is reported.
TEST(ReuseModelTest, UnfinishedSpellsCountUpToTheirAge) {
  ReuseModel model;
  const double before = model.Rate(kEnd, 1);
  for (int i = 0; i < 500; ++i) model.GoesOn(kEnd, 1000);
  EXPECT_EQ(model.Rate(kEnd, 1), before);
  model.Refresh();
  const double unused = model.Rate(kEnd, 1);
  EXPECT_LT(unused, before / 5);
  EXPECT_NEAR(model.Rate(kEnd, 4096), ReuseModel().Rate(kEnd, 4096), 1e-3 * before) << "nothing came to that age";
  // Nothing reports them any longer.
  model.Refresh();
  EXPECT_EQ(model.Rate(kEnd, 1), before);
}

// Half of the subjects are used whenever an age is reached: censored spells must not count as unused after their last
// age.
TEST(ReuseModelTest, ShortSpellsDoNotAffectLaterAges) {
  ReuseModel with, without;
  for (ReuseModel* model : {&with, &without}) {
    End(*model, kEnd, 256, true, 50);
    End(*model, kEnd, 1024, false, 50);
  }
  const Subject other_size{.kind = kEnd.kind, .uses = kEnd.uses, .fresh = 100'000};
  for (int i = 0; i < 5000; ++i) with.GoesOn(other_size, 8);
  with.Refresh();
  without.Refresh();
  EXPECT_NEAR(with.Rate(kEnd, 256), without.Rate(kEnd, 256), 1e-12);
}

// An object used every hundred requests is worth more the nearer its next use is, and little after that use has not
// happened.
TEST(ReuseModelTest, PeriodicSubjectsStayForTheirPeriod) {
  ReuseModel model;
  for (int i = 0; i < 40; ++i) {
    End(model, kEnd, 120, true, 12);
    End(model, kEnd, 127, true, 12);
    End(model, kEnd, 10'000, false);
    model.Refresh();
  }
  const double young = model.Rate(kEnd, 1), nearly = model.Rate(kEnd, 91), late = model.Rate(kEnd, 200);
  EXPECT_GT(nearly, 2 * young);
  EXPECT_GT(young, 10 * late) << "even the young ones are worth more than those that were not used";
  EXPECT_NEAR(young, 1.0 / 100, 0.005) << "a use a hundred requests of waiting";
}

// Gittins' index looks ahead: a certain later use counts now, but not if it is beyond the best stopping age.
TEST(ReuseModelTest, StopsAtBestAge) {
  ReuseModel model;
  End(model, kEnd, 1, true, 500);           // half of them at once
  End(model, kEnd, 1'000'000, false, 500);  // half of them never
  model.Refresh();
  EXPECT_GT(model.Rate(kEnd, 1), 0.4) << "by waiting for one request and giving up";
  EXPECT_LT(model.Rate(kEnd, 2), 0.01);
}

TEST(ReuseModelTest, EachKindAndUseCountHasItsOwnLaw) {
  ReuseModel model;
  const Subject branch{.kind = ReuseKind::kBranch, .uses = 3, .fresh = 100};
  End(model, kEnd, 1000, false, 300);
  End(model, branch, 4, true, 300);
  model.Refresh();
  EXPECT_GT(model.Rate(branch, 1), 50 * model.Rate(kEnd, 1));
  // A subject with an unknown number of uses falls back to its kind, and not to other kinds.
  EXPECT_GT(model.Rate({ReuseKind::kBranch, 0, 100}, 1), 10 * model.Rate({ReuseKind::kRequestEnd, 3, 100}, 1));
  EXPECT_EQ(model.Rate({ReuseKind::kPlaced, 0, 100}, 1), ReuseModel().Rate({ReuseKind::kPlaced, 0, 100}, 1));
  // Numbers of uses are distinguished if they are known.
  End(model, {ReuseKind::kBranch, 0, 100}, 1000, false, 3000);
  model.Refresh();
  EXPECT_GT(model.Rate(branch, 1), 10 * model.Rate({ReuseKind::kBranch, 0, 100}, 1));
}

// Long turns are continued differently from short ones, whatever the age.
TEST(ReuseModelTest, SizesHaveAFactor) {
  ReuseModel model;
  const Subject small{ReuseKind::kRequestEnd, 0, 10}, large{ReuseKind::kRequestEnd, 0, 5000};
  const Subject unknown{ReuseKind::kRequestEnd, 0, 1'000'000};
  for (int i = 0; i < 100; ++i) {
    End(model, small, 11, true, 4);
    End(model, small, 64, false, 1);
    End(model, large, 11, true, 1);
    End(model, large, 64, false, 4);
    model.Refresh();
  }
  for (const uint64_t age : {1u, 8u, 100u}) {
    EXPECT_GT(model.Rate(small, age), 2 * model.Rate(large, age));
    EXPECT_GT(model.Rate(unknown, age), model.Rate(large, age)) << "no factor where nothing is known";
    EXPECT_LT(model.Rate(unknown, age), model.Rate(small, age));
    EXPECT_EQ(model.Rate({ReuseKind::kRequestEnd, 0, 4500}, age), model.Rate(large, age)) << "of the same octave";
  }
  EXPECT_EQ(model.Rate({ReuseKind::kBranch, 0, 10}, 1), model.Rate({ReuseKind::kBranch, 0, 5000}, 1));
}

TEST(ReuseModelTest, FactorsAreBounded) {
  ReuseModel model;
  const Subject never{ReuseKind::kRequestEnd, 0, 10}, always{ReuseKind::kRequestEnd, 0, 5000};
  for (int i = 0; i < 200; ++i) {
    End(model, never, 64, false, 30);
    End(model, always, 22, true, 3);
    model.Refresh();
  }
  EXPECT_LE(model.Rate(always, 1), 100 * model.Rate(never, 1) * (1 + 1e-9)) << "ten times more, ten times less";
  EXPECT_GT(model.Rate(always, 1), 20 * model.Rate(never, 1));
}

// Counts are halved when there are many, so old observations lose weight.
TEST(ReuseModelTest, ForgetsOldSpells) {
  ReuseModel model;
  End(model, kEnd, 4, false, 60'000);
  model.Refresh();
  const double unused = model.Rate(kEnd, 1);
  End(model, kEnd, 4, true, 60'000);
  model.Refresh();
  const double once = model.Rate(kEnd, 1);
  for (int i = 0; i < 8; ++i) End(model, kEnd, 4, true, 60'000);
  model.Refresh();
  EXPECT_GT(once, 100 * unused);
  // About three in four: used in the bucket that two to four requests make. All of them are used later.
  EXPECT_GT(model.Rate(kEnd, 4), 0.95 * ReuseModel().Rate(kEnd, 4) * 0.99 / 0.05);
}

TEST(ReuseModelTest, IsDeterministic) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ReuseModel models[2];
  for (ReuseModel& model : models) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 2000; ++i) {
      const Subject subject{static_cast<ReuseKind>(random() % kReuseKinds), static_cast<uint32_t>(random() % 15),
                            random() % 100'000};
      const uint64_t age = random() % (1 + random() % 100'000);
      if (random() % 3 == 0) model.GoesOn(subject, age);
      model.Ended(subject, age, random() % 2 == 0);
      if (i % 100 == 0) model.Refresh();
      ASSERT_TRUE(std::isfinite(model.Rate(subject, age)));
      ASSERT_GT(model.Rate(subject, age), 0);
    }
  }
  for (uint64_t age = 1; age < 1000; ++age) EXPECT_EQ(models[0].Rate(kEnd, age), models[1].Rate(kEnd, age));
}

TEST(ReuseModelTest, EvictedCountsAsUnusedUntilRequestedAgain) {
  ReuseModel model;
  const Subject segment{.kind = ReuseKind::kSegment};
  for (int i = 0; i < 500; ++i) model.GivenUp(segment);
  model.Refresh();
  const double never = model.Rate(segment, 100);
  EXPECT_LT(never, ReuseModel().Rate(segment, 100) / 10);
  for (int i = 0; i < 500; ++i) model.AskedForAgain(segment, 150);
  model.Refresh();
  EXPECT_GT(model.Rate(segment, 100), 0.4 / 100) << "all of them would have been used within the next hundred";
  EXPECT_LT(model.Rate(segment, 100'000), model.Rate(segment, 100));
}

TEST(ReuseModelTest, APartlyForgottenLawStillAnswers) {
  ReuseModel model;
  const Subject segment{.kind = ReuseKind::kSegment};
  model.GivenUp(segment);
  for (int i = 0; i < 100; ++i) model.AskedForAgain(segment, 10);
  model.Refresh();
  for (uint64_t age = 1; age < 1 << 20; age *= 3) {
    EXPECT_GT(model.Rate(segment, age), 0);
    EXPECT_TRUE(std::isfinite(model.Rate(segment, age)));
  }
}

}  // namespace
}  // namespace ashlar::storage
