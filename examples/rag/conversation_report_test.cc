// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/conversation_report.h"

#include <gtest/gtest.h>

namespace ashlar::rag {
namespace {

TurnResult Resumed(Source source, double full_ms, double ashlar_ms) {
  return {.composed = source == Source::kSegments,
          .source = source,
          .ttft_ms = ashlar_ms,
          .full_ttft_ms = full_ms,
          .logits_rel_l2 = 0.0,
          .bit_identical = true};
}

TEST(ConversationReport, MediansAreByKindOfResumption) {
  ConversationResult run{.conversations = 2, .turns = 2};
  run.results = {Resumed(Source::kTree, 100, 50), Resumed(Source::kTree, 300, 100), Resumed(Source::kOwn, 400, 10)};
  const nlohmann::json from = ToJson(run)["summary"]["from"];
  EXPECT_EQ(from.size(), 2u);
  EXPECT_DOUBLE_EQ(from["tree"]["ttft_ms"], 75);
  EXPECT_DOUBLE_EQ(from["tree"]["full_ttft_ms"], 200);
  EXPECT_DOUBLE_EQ(from["tree"]["speedup"], 2.5);
  EXPECT_DOUBLE_EQ(from["own"]["speedup"], 40);
}

TEST(ConversationReport, OnlyExactTurnsMustEqualFullRecompute) {
  ConversationResult run;
  run.results = {Resumed(Source::kTree, 1, 1), Resumed(Source::kSegments, 1, 1)};
  run.results[0].full_rel_l2 = 2e-6;
  run.results[1].full_rel_l2 = 0.03;  // the error that seams leave
  EXPECT_DOUBLE_EQ(run.WorstExact(), 2e-6);
}

TEST(ConversationReport, NoFigureWithoutAComparison) {
  ConversationResult run;
  run.results = {Resumed(Source::kTree, 1, 1), Resumed(Source::kTree, 1, 1), Resumed(Source::kSegments, 1, 1)};
  run.results[1].bit_identical = false;
  run.results[1].logits_rel_l2 = 1e-6;
  run.results[2].logits_rel_l2.reset();
  const nlohmann::json json = ToJson(run);
  EXPECT_EQ(json["turns"][2]["logits_rel_l2"].dump(), "null");
  EXPECT_EQ(json["summary"]["bit_identical"]["exact"].dump(), R"({"of":2,"same":1})");
  EXPECT_EQ(json["summary"]["bit_identical"]["composed"].dump(), R"({"of":0,"same":0})");
}

}  // namespace
}  // namespace ashlar::rag
