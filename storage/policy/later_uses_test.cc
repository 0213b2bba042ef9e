// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/later_uses.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace ashlar::storage {
namespace {

constexpr uint64_t kHorizon = 10'000;

Key Named(uint64_t number) {
  Key key;
  std::mt19937_64 random(number);
  for (size_t at = 0; at < key.bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(key.bytes.data() + at, &word, sizeof word);
  }
  return key;
}

class LaterUsesTest : public ::testing::Test {
 protected:
  static constexpr LaterUses::Subject kFirst{.kind = ReuseKind::kRequestEnd};
  static constexpr LaterUses::Subject kLater{.kind = ReuseKind::kRequestEnd, .uses = 3};

  double Evict(uint64_t number, const LaterUses::Subject& subject) {
    return later_.Evicted(Named(number), subject, 4, kHorizon);
  }
  // Evicts objects, of which one in `period` is used when `lag` more have been evicted. Returns the last likelihood.
  double Run(const LaterUses::Subject& subject, uint64_t objects, uint64_t period, uint64_t lag) {
    double likelihood = 0;
    for (uint64_t i = 0; i < objects; ++i, ++next_) {
      likelihood = Evict(next_, subject);
      if (i >= lag && i % period == 0) later_.Used(Named(next_ - lag));
    }
    return likelihood;
  }

  LaterUses later_;
  uint64_t next_ = 0;
};

TEST_F(LaterUsesTest, ExpectsATextThatWasContinuedToBeUsed) {
  EXPECT_EQ(Evict(1, kFirst), 0);
  EXPECT_EQ(Evict(2, kLater), 1);
  EXPECT_EQ(Evict(3, {.kind = ReuseKind::kContinued, .uses = 1}), 0) << "the next turn resumes at the new end";
}

TEST_F(LaterUsesTest, LearnsWhatIsNeverUsed) {
  EXPECT_LT(Run(kFirst, 1000, UINT64_MAX, 10), 0.02);
  EXPECT_LT(Run(kLater, 1000, UINT64_MAX, 10), 0.05);
}

TEST_F(LaterUsesTest, LearnsWhatIsUsed) {
  EXPECT_GT(Run(kFirst, 500, 1, 100), 0.6);
}

// Objects that have not had the time to be used do not count as unused.
TEST_F(LaterUsesTest, LearnsFromTheFirstUses) {
  EXPECT_GT(Run(kFirst, 430, 1, 400), 0.25);
}

TEST_F(LaterUsesTest, DistinguishesTextsByTheirUses) {
  Run(kFirst, 500, UINT64_MAX, 10);
  Run(kLater, 500, 1, 10);
  EXPECT_LT(Evict(next_++, kFirst), 0.25);
  EXPECT_GT(Evict(next_++, kLater), 0.6);
}

TEST_F(LaterUsesTest, IgnoresUsesBeyondTheHorizon) {
  EXPECT_LT(Run(kFirst, 4000, 1, kHorizon / 4 + 1), 0.02);
}

// A large disk's objects are sampled.
TEST_F(LaterUsesTest, FollowsASampleOfManyObjects) {
  double likelihood = 0;
  constexpr uint64_t kObjects = 60'000, kLag = 20'000;
  for (uint64_t i = 0; i < kObjects; ++i) {
    likelihood = later_.Evicted(Named(i), kFirst, 1, UINT64_MAX);
    if (i >= kLag) later_.Used(Named(i - kLag));
  }
  EXPECT_GT(likelihood, 0.6);
}

TEST_F(LaterUsesTest, ErasesKeysButNotWhatItLearned) {
  Run(kFirst, 500, 1, 10);
  later_.Erase();
  EXPECT_GT(Evict(next_, kFirst), 0.6);
}

}  // namespace
}  // namespace ashlar::storage
