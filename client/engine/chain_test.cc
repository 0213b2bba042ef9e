// SPDX-License-Identifier: Apache-2.0
#include "client/engine/chain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ashlar::engine {
namespace {

// Written "run 0-8* cached 1 8-20 run 20-30"; a star marks a run at whose end states are captured.
std::string Say(const std::vector<Step>& steps) {
  return absl::StrJoin(steps, " ", [](std::string* out, const Step& step) {
    const char* const kind = step.kind == StepKind::kCompute      ? "run"
                             : step.kind == StepKind::kCheckpoint ? "checkpoint"
                                                                  : "interior";
    absl::StrAppend(out, kind);
    if (step.kind != StepKind::kCompute) absl::StrAppend(out, " ", static_cast<int32_t>(step.segment));
    absl::StrAppend(out, " ", step.begin, "-", step.end, step.capture ? "*" : "");
  });
}

std::string Steps(uint64_t tokens, const std::vector<CachedRun>& cached, const std::vector<uint64_t>& captures = {}) {
  return Say(BuildSteps(tokens, cached, captures));
}

TEST(Chain, IsOneRunIfNothingIsCached) {
  EXPECT_EQ(Steps(30, {}), "run 0-30");
}

TEST(Chain, ComputesBetweenCachedSegments) {
  EXPECT_EQ(Steps(60, {{0, true, 0, 10}, {1, false, 14, 27}, {2, false, 34, 50}}),
            "checkpoint 0 0-10 run 10-14 interior 1 14-27 run 27-34 interior 2 34-50 run 50-60");
}

TEST(Chain, StartsWithAPrefixThatEndsAtAnInterior) {
  EXPECT_EQ(Steps(60, {{Step::kPrefix, true, 0, 14}, {1, false, 14, 27}}),
            "checkpoint -1 0-14 interior 1 14-27 run 27-60");
}

TEST(Chain, OmitsOverlapsAndSegmentsBeyondThePrompt) {
  EXPECT_EQ(Steps(60, {{Step::kPrefix, true, 0, 20}, {1, false, 14, 27}, {2, false, 34, 61}, {3, false, 30, 30}}),
            "checkpoint -1 0-20 run 20-60");
}

TEST(Chain, SplitsWhereStatesAreRequested) {
  EXPECT_EQ(Steps(60, {{1, false, 14, 27}}, {4, 14, 20, 27, 40, 60}),
            "run 0-4* run 4-14* interior 1 14-27* run 27-40* run 40-60*");
  EXPECT_EQ(Steps(60, {}, {70}), "run 0-60");
  EXPECT_EQ(Steps(60, {{Step::kPrefix, true, 0, 20}}, {10, 59}), "checkpoint -1 0-20 run 20-59* run 59-60");
}

}  // namespace
}  // namespace ashlar::engine
