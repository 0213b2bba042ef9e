#include "storage/policy/reuse_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>

namespace ashlar::storage {
namespace {

using Subject = ReuseLaw::Subject;

constexpr Subject kEnd{.kind = ReuseKind::kRequestEnd, .uses = 0, .fresh = 100};

void End(ReuseLaw& law, const Subject& subject, uint64_t age, bool used, int times = 1) {
  for (int i = 0; i < times; ++i) law.Ended(subject, age, used);
}

// Nothing known: the order is that of least recent use, and the price falls as 1/age.
TEST(ReuseLawTest, IsLeastRecentUseWhereNothingIsKnown) {
  const ReuseLaw law;
  for (size_t kind = 0; kind < kReuseKinds; ++kind) {
    for (const uint32_t uses : {0u, 1u, 7u, 100u}) {
      const Subject subject{static_cast<ReuseKind>(kind), uses, 1000};
      double before = 1;
      for (uint64_t age = 1; age < uint64_t{1} << 30; age *= 2) {
        const double rate = law.Rate(subject, age);
        EXPECT_GT(rate, 0);
        EXPECT_LT(rate, before) << "at age " << age;
        if (age > 1) {
          EXPECT_NEAR(rate / before, 0.5, 1e-9);
        }
        EXPECT_EQ(rate, law.Rate(kEnd, age)) << "all are alike";
        before = rate;
      }
    }
  }
  EXPECT_LE(law.Rate(kEnd, 1001), law.Rate(kEnd, 1000)) << "of two ages in a bucket, too";
}

TEST(ReuseLawTest, HasARateAtEveryAge) {
  const ReuseLaw law;
  for (const uint64_t age : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 31, uint64_t{1} << 40, UINT64_MAX}) {
    EXPECT_GT(law.Rate(kEnd, age), 0);
    EXPECT_TRUE(std::isfinite(law.Rate(kEnd, age)));
  }
  EXPECT_GT(law.Rate({ReuseKind::kEdge, UINT32_MAX, UINT64_MAX}, 3), 0);
}

TEST(ReuseLawTest, ChangesAtRefreshAlone) {
  ReuseLaw law;
  const double before = law.Rate(kEnd, 1);
  End(law, kEnd, 1, true, 100);
  EXPECT_EQ(law.Rate(kEnd, 1), before);
  law.Refresh();
  EXPECT_GT(law.Rate(kEnd, 1), 2 * before);
}

TEST(ReuseLawTest, WhatIsNeverUsedAgainGetsCheap) {
  ReuseLaw law;
  const double before = law.Rate(kEnd, 4);
  End(law, kEnd, 1000, false, 500);
  law.Refresh();
  EXPECT_LT(law.Rate(kEnd, 4), before / 20);
}

// A spell that has not ended counts as far as it has come, and while it goes on.
TEST(ReuseLawTest, WhatGoesOnCountsAsFarAsItHasCome) {
  ReuseLaw law;
  const double before = law.Rate(kEnd, 1);
  for (int i = 0; i < 500; ++i) law.GoesOn(kEnd, 1000);
  EXPECT_EQ(law.Rate(kEnd, 1), before);
  law.Refresh();
  const double unused = law.Rate(kEnd, 1);
  EXPECT_LT(unused, before / 5);
  EXPECT_NEAR(law.Rate(kEnd, 4096), ReuseLaw().Rate(kEnd, 4096), 1e-3 * before) << "nothing came to that age";
  // Nobody tells of them any longer.
  law.Refresh();
  EXPECT_EQ(law.Rate(kEnd, 1), before);
}

// Used half of the time an age comes: censored spells must not count as unused beyond where they have come.
TEST(ReuseLawTest, ShortSpellsSayNothingOfLaterAges) {
  ReuseLaw with, without;
  for (ReuseLaw* law : {&with, &without}) {
    End(*law, kEnd, 256, true, 50);
    End(*law, kEnd, 1024, false, 50);
  }
  const Subject other_size{.kind = kEnd.kind, .uses = kEnd.uses, .fresh = 100'000};
  for (int i = 0; i < 5000; ++i) with.GoesOn(other_size, 8);
  with.Refresh();
  without.Refresh();
  EXPECT_NEAR(with.Rate(kEnd, 256), without.Rate(kEnd, 256), 1e-12);
}

// What comes back every hundred requests is worth more the nearer that is, and little when it did not come.
TEST(ReuseLawTest, WhatIsPeriodicStaysUntilItsPeriodHasPassed) {
  ReuseLaw law;
  for (int i = 0; i < 40; ++i) {
    End(law, kEnd, 120, true, 12);
    End(law, kEnd, 127, true, 12);
    End(law, kEnd, 10'000, false);
    law.Refresh();
  }
  const double young = law.Rate(kEnd, 1), nearly = law.Rate(kEnd, 91), late = law.Rate(kEnd, 200);
  EXPECT_GT(nearly, 2 * young);
  EXPECT_GT(young, 10 * late) << "even the young ones are worth more than those that were not used";
  EXPECT_NEAR(young, 1.0 / 100, 0.005) << "a use a hundred requests of waiting";
}

// Gittins' index looks ahead: a use that is certain later on counts now, one that is not waited for does not.
TEST(ReuseLawTest, GivesUpWhenThatIsBest) {
  ReuseLaw law;
  End(law, kEnd, 1, true, 500);           // half at once
  End(law, kEnd, 1'000'000, false, 500);  // half never
  law.Refresh();
  EXPECT_GT(law.Rate(kEnd, 1), 0.4) << "by waiting for one request and giving up";
  EXPECT_LT(law.Rate(kEnd, 2), 0.01);
}

TEST(ReuseLawTest, KindsAndUsesHaveLawsOfTheirOwn) {
  ReuseLaw law;
  const Subject branch{.kind = ReuseKind::kBranch, .uses = 3, .fresh = 100};
  End(law, kEnd, 1000, false, 300);
  End(law, branch, 4, true, 300);
  law.Refresh();
  EXPECT_GT(law.Rate(branch, 1), 50 * law.Rate(kEnd, 1));
  // One of whose number of uses nothing is known leans on its kind, not on others.
  EXPECT_GT(law.Rate({ReuseKind::kBranch, 0, 100}, 1), 10 * law.Rate({ReuseKind::kRequestEnd, 3, 100}, 1));
  EXPECT_EQ(law.Rate({ReuseKind::kPlaced, 0, 100}, 1), ReuseLaw().Rate({ReuseKind::kPlaced, 0, 100}, 1));
  // Numbers of uses are told apart where they are known.
  End(law, {ReuseKind::kBranch, 0, 100}, 1000, false, 3000);
  law.Refresh();
  EXPECT_GT(law.Rate(branch, 1), 10 * law.Rate({ReuseKind::kBranch, 0, 100}, 1));
}

// Long turns are followed differently from short ones, whatever the age.
TEST(ReuseLawTest, SizesHaveAFactor) {
  ReuseLaw law;
  const Subject small{ReuseKind::kRequestEnd, 0, 10}, large{ReuseKind::kRequestEnd, 0, 5000};
  const Subject unknown{ReuseKind::kRequestEnd, 0, 1'000'000};
  for (int i = 0; i < 100; ++i) {
    End(law, small, 11, true, 4);
    End(law, small, 64, false, 1);
    End(law, large, 11, true, 1);
    End(law, large, 64, false, 4);
    law.Refresh();
  }
  for (const uint64_t age : {1u, 8u, 100u}) {
    EXPECT_GT(law.Rate(small, age), 2 * law.Rate(large, age));
    EXPECT_GT(law.Rate(unknown, age), law.Rate(large, age)) << "no factor where nothing is known";
    EXPECT_LT(law.Rate(unknown, age), law.Rate(small, age));
    EXPECT_EQ(law.Rate({ReuseKind::kRequestEnd, 0, 4500}, age), law.Rate(large, age)) << "of the same octave";
  }
  EXPECT_EQ(law.Rate({ReuseKind::kBranch, 0, 10}, 1), law.Rate({ReuseKind::kBranch, 0, 5000}, 1));
}

TEST(ReuseLawTest, FactorsAreBounded) {
  ReuseLaw law;
  const Subject never{ReuseKind::kRequestEnd, 0, 10}, always{ReuseKind::kRequestEnd, 0, 5000};
  for (int i = 0; i < 200; ++i) {
    End(law, never, 64, false, 30);
    End(law, always, 22, true, 3);
    law.Refresh();
  }
  EXPECT_LE(law.Rate(always, 1), 100 * law.Rate(never, 1) * (1 + 1e-9)) << "ten times more, ten times less";
  EXPECT_GT(law.Rate(always, 1), 20 * law.Rate(never, 1));
}

// Counts are halved when there are many, so what was true long ago gives way.
TEST(ReuseLawTest, ForgetsWhatWasLongAgo) {
  ReuseLaw law;
  End(law, kEnd, 4, false, 60'000);
  law.Refresh();
  const double unused = law.Rate(kEnd, 1);
  End(law, kEnd, 4, true, 60'000);
  law.Refresh();
  const double once = law.Rate(kEnd, 1);
  for (int i = 0; i < 8; ++i) End(law, kEnd, 4, true, 60'000);
  law.Refresh();
  EXPECT_GT(once, 100 * unused);
  // Three in four or so: used in the bucket that two to four requests make. All of them, later.
  EXPECT_GT(law.Rate(kEnd, 4), 0.95 * ReuseLaw().Rate(kEnd, 4) * 0.99 / 0.05);
}

TEST(ReuseLawTest, IsTheSameForTheSameSpells) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ReuseLaw laws[2];
  for (ReuseLaw& law : laws) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 2000; ++i) {
      const Subject subject{static_cast<ReuseKind>(random() % kReuseKinds), static_cast<uint32_t>(random() % 15),
                            random() % 100'000};
      const uint64_t age = random() % (1 + random() % 100'000);
      if (random() % 3 == 0) law.GoesOn(subject, age);
      law.Ended(subject, age, random() % 2 == 0);
      if (i % 100 == 0) law.Refresh();
      ASSERT_TRUE(std::isfinite(law.Rate(subject, age)));
      ASSERT_GT(law.Rate(subject, age), 0);
    }
  }
  for (uint64_t age = 1; age < 1000; ++age) EXPECT_EQ(laws[0].Rate(kEnd, age), laws[1].Rate(kEnd, age));
}

TEST(ReuseLawTest, WhatWasGivenUpCountsAsNeverUsedUntilItIsAskedForAgain) {
  ReuseLaw law;
  const Subject segment{.kind = ReuseKind::kSegment};
  for (int i = 0; i < 500; ++i) law.GivenUp(segment);
  law.Refresh();
  const double never = law.Rate(segment, 100);
  EXPECT_LT(never, ReuseLaw().Rate(segment, 100) / 10);
  for (int i = 0; i < 500; ++i) law.AskedForAgain(segment, 150);
  law.Refresh();
  EXPECT_GT(law.Rate(segment, 100), 0.4 / 100) << "all of them would have been used within the next hundred";
  EXPECT_LT(law.Rate(segment, 100'000), law.Rate(segment, 100));
}

TEST(ReuseLawTest, AskingForWhatTheLawHasForgottenInPartDoesNoHarm) {
  ReuseLaw law;
  const Subject segment{.kind = ReuseKind::kSegment};
  law.GivenUp(segment);
  for (int i = 0; i < 100; ++i) law.AskedForAgain(segment, 10);
  law.Refresh();
  for (uint64_t age = 1; age < 1 << 20; age *= 3) {
    EXPECT_GT(law.Rate(segment, age), 0);
    EXPECT_TRUE(std::isfinite(law.Rate(segment, age)));
  }
}

}  // namespace
}  // namespace ashlar::storage
