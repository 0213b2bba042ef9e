// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/copy_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace ashlar::storage {
namespace {

constexpr bool kIsLive = false, kIsGone = true;

struct Step {
  CopyEvent event;
  bool gone = kIsLive;
};

CopyState After(const std::vector<Step>& steps, CopyTransitionCounts* transition_counts = nullptr) {
  const CopyStates states(transition_counts);
  CopyState copy;
  for (const Step& step : steps) states.Apply(copy, step.event, step.gone);
  return copy;
}

// Events that lead from kNone to each phase.
std::vector<Step> PathTo(CopyPhase phase) {
  using enum CopyEvent;
  switch (phase) {
    case CopyPhase::kNone:
      return {};
    case CopyPhase::kCopying:
      return {{kAllocate}};
    case CopyPhase::kCommitting:
      return {{kAllocate}, {kWrite}};
    case CopyPhase::kWhole:
      return {{kAdopt}};
    case CopyPhase::kDraining:
      return {{kAllocate}, {kCancel}};
    case CopyPhase::kBroken:
      return {{kAllocate}, {kFail}};
  }
  return {};
}

// The table: each row is taken from its phase, under its guard.
TEST(CopyState, TakesEveryTransitionOfTheTable) {
  CopyTransitionCounts counts{};
  const CopyStates states(&counts);
  for (const CopyTransition& row : kCopyTransitions) {
    CopyState copy = After(PathTo(row.from));
    if ((row.guard & kHasUsers) != 0 || row.event == CopyEvent::kRemoveUser)
      states.Apply(copy, CopyEvent::kAddUser, false);
    if (row.event == CopyEvent::kRemoveReader) {
      // Readers arrive before the phase that refuses new ones.
      std::vector<Step> steps = PathTo(row.from);
      steps.insert(steps.begin() + 1, {CopyEvent::kAddReader});
      copy = After(steps);
    }
    const uint64_t before = counts[static_cast<size_t>(&row - kCopyTransitions.data())];
    states.Apply(copy, row.event, (row.guard & kGone) != 0);
    EXPECT_EQ(copy.phase(), row.to) << Describe(row);
    EXPECT_EQ(counts[static_cast<size_t>(&row - kCopyTransitions.data())], before + 1) << Describe(row);
  }
}

TEST(CopyState, HasNoTwoRowsForOneCase) {
  for (size_t i = 0; i < kCopyTransitions.size(); ++i) {
    for (size_t j = i + 1; j < kCopyTransitions.size(); ++j) {
      const CopyTransition &one = kCopyTransitions[i], &other = kCopyTransitions[j];
      if (one.event != other.event || one.from != other.from) continue;
      const uint8_t both = one.guard | other.guard;
      const bool apart =
          (both & (kLive | kGone)) == (kLive | kGone) || (both & (kHasUsers | kUnwanted)) == (kHasUsers | kUnwanted);
      EXPECT_TRUE(apart) << Describe(one) << " and " << Describe(other);
      EXPECT_TRUE(j == i + 1 || kCopyTransitions[j - 1].event == one.event) << "rows of one event are adjacent";
    }
  }
}

TEST(CopyState, CountsReadersAndUsers) {
  using enum CopyEvent;
  const CopyState copy = After({{kAllocate}, {kAddUser}, {kAddUser}, {kAddReader}, {kLoad}, {kRemoveUser, kIsGone}});
  EXPECT_EQ(copy.phase(), CopyPhase::kWhole);
  EXPECT_EQ(copy.users(), 1u);
  EXPECT_EQ(copy.readers(), 1u);
  EXPECT_TRUE(copy.busy());
}

TEST(CopyState, RefillsOnlyForAUserOfALiveObject) {
  using enum CopyEvent;
  EXPECT_EQ(After({{kAllocate}, {kCancel}, {kAddUser}, {kRefill}}).phase(), CopyPhase::kCopying);
  EXPECT_EQ(After({{kAllocate}, {kCancel}, {kAddUser}, {kDrain, kIsGone}}).phase(), CopyPhase::kBroken);
  EXPECT_DEATH(After({{kAllocate}, {kCancel}, {kAddUser}, {kDrain}}), "event \"drain\" is not allowed: phase draining");
  EXPECT_DEATH(After({{kAllocate}, {kCancel}, {kRefill}}), "event \"refill\" is not allowed");
  EXPECT_DEATH(After({{kAllocate}, {kCancel}, {kAddUser}, {kRefill, kIsGone}}), "object gone");
}

// Every event that the table does not list for a phase ends the process.
TEST(CopyState, RefusesEventsOutsideTheTable) {
  for (size_t event = 0; event < kCopyEvents; ++event) {
    for (size_t phase = 0; phase < kCopyPhases; ++phase) {
      const auto is_listed = [&](const CopyTransition& row) {
        return static_cast<size_t>(row.event) == event && static_cast<size_t>(row.from) == phase;
      };
      if (std::ranges::any_of(kCopyTransitions, is_listed)) continue;
      std::vector<Step> steps = PathTo(static_cast<CopyPhase>(phase));
      steps.push_back({static_cast<CopyEvent>(event)});
      EXPECT_DEATH(After(steps), "is not allowed") << "event " << event << " in phase " << phase;
    }
  }
}

TEST(CopyState, ReleasesNoCopyInUse) {
  using enum CopyEvent;
  EXPECT_DEATH(After({{kAdopt}, {kAddReader}, {kRelease}}), "event \"release\" is not allowed: phase whole, 1 readers");
  EXPECT_DEATH(After({{kAdopt}, {kAddUser}, {kRelease, kIsGone}}), "0 readers, 1 users, object gone");
  EXPECT_DEATH(After({{kAdopt}, {kRemoveReader}}), "event \"remove reader\" is not allowed");
  EXPECT_DEATH(After({{kAdopt}, {kRemoveUser}}), "event \"remove user\" is not allowed");
}

}  // namespace
}  // namespace ashlar::storage
