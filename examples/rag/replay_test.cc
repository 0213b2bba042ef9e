// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/replay.h"

#include <gtest/gtest.h>

namespace ashlar::rag {
namespace {

using Calls = std::vector<std::vector<int64_t>>;

TEST(Cuts, ATextThatContinuesWhereItEndedKeepsItsCuts) {
  Cuts cuts;
  cuts.Resume(0);
  cuts.Add({128, 256, 300});
  cuts.Add({301});
  cuts.Resume(301);
  cuts.Add({400});
  EXPECT_EQ(cuts.calls(), (Calls{{128, 256, 300}, {301}, {400}}));
  EXPECT_EQ(cuts.end(), 400u);
}

TEST(Cuts, CutsAfterTheResumptionAreErased) {
  Cuts cuts;
  cuts.Add({128, 256, 300});
  cuts.Add({301});
  cuts.Resume(256);
  EXPECT_EQ(cuts.calls(), (Calls{{128, 256}}));
  cuts.Resume(200);
  EXPECT_EQ(cuts.calls(), (Calls{{128}, {200}}));
  cuts.Resume(0);
  EXPECT_TRUE(cuts.calls().empty());
}

TEST(Cuts, TextComputedElsewhereCountsAsOneRun) {
  Cuts cuts;
  cuts.Add({50});
  cuts.Resume(128);
  EXPECT_EQ(cuts.calls(), (Calls{{128}}));
}

}  // namespace
}  // namespace ashlar::rag
