// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/spacing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ashlar::replay {
namespace {

using testing::ElementsAre;

TEST(SpaceTest, PutsCheckpointsByTheHeuristics) {
  EXPECT_THAT(Space(Spacing::kBalanced, 100, 1, 3), ElementsAre(25, 50, 75));
  EXPECT_THAT(Space(Spacing::kBalanced, 100, 10, 3), ElementsAre(20, 50, 70));
  EXPECT_THAT(Space(Spacing::kBlock, 100, 16, 3), ElementsAre(32, 64, 96)) << "16 would take six";
  EXPECT_THAT(Space(Spacing::kBlock, 96, 16, 2), ElementsAre(32, 64)) << "none at the end";
  EXPECT_THAT(Space(Spacing::kBlock, 100, 16, 6), ElementsAre(16, 32, 48, 64, 80, 96));
  EXPECT_THAT(Space(Spacing::kRoot, 100, 1, 3), ElementsAre(50, 70, 86)) << "√¼, √½, √¾";
  EXPECT_THAT(Space(Spacing::kLogarithmic, 128, 1, 3), ElementsAre(16, 32, 64));
}

TEST(SpaceTest, StaysWithinLengthPageAndNumber) {
  for (const Spacing spacing : {Spacing::kBalanced, Spacing::kBlock, Spacing::kRoot, Spacing::kLogarithmic}) {
    for (const uint64_t length : {0u, 1u, 15u, 16u, 17u, 64u, 1000u}) {
      for (const uint64_t page : {1u, 16u}) {
        for (const size_t checkpoints : {0u, 1u, 2u, 5u, 40u}) {
          const std::vector<uint64_t> positions = Space(spacing, length, page, checkpoints);
          EXPECT_LE(positions.size(), checkpoints);
          uint64_t before = 0;
          for (const uint64_t at : positions) {
            EXPECT_GT(at, before);
            EXPECT_LT(at, length);
            EXPECT_EQ(at % page, 0u);
            before = at;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ashlar::replay
