// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/report.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace ashlar::rag {
namespace {

RequestResult Request(uint64_t sections, uint64_t misses, double full_ms, double ashlar_ms) {
  RequestResult request{.segments = sections + 1, .hits = sections + 1 - misses, .misses = misses};
  request.landed = request.hits;
  request.full_flops_ratio = 0.5;
  for (const char* way : {"full", "prefix", "naive"}) request.ways[way] = {.ttft_ms = full_ms};
  request.ways["ashlar"] = {.ttft_ms = ashlar_ms};
  return request;
}

TEST(Report, TimesCoverAllHitRequestsOfFullLength) {
  RunResult run{.sections_per_prompt = 16};
  run.requests = {Request(16, 0, 1000, 100),  // 10×
                  Request(16, 0, 1000, 50),   // 20×
                  Request(16, 0, 1200, 100),  // 12×
                  Request(16, 1, 1000, 1),    // a miss
                  Request(3, 0, 30, 29)};     // few sections were found
  // Every segment was found, but one failed to land.
  run.requests.push_back(Request(16, 0, 1000, 2));
  --run.requests.back().landed;

  const nlohmann::json summary = ToJson(run)["summary"];
  EXPECT_EQ(summary["all_hit_requests"], 3);
  EXPECT_DOUBLE_EQ(summary["speedup_vs_full"], 12);
  EXPECT_DOUBLE_EQ(summary["ttft_ms"]["full"], 1000);
  EXPECT_DOUBLE_EQ(summary["ttft_ms"]["ashlar"], 100);
  EXPECT_DOUBLE_EQ(summary["full_flops_ratio"], 0.5);
  EXPECT_DOUBLE_EQ(summary["next_token_agreement"]["ashlar"], 1);
}

TEST(Report, SegmentsAreCountedByTierAndByReason) {
  RunResult run{.sections_per_prompt = 16};
  run.requests = {Request(16, 3, 1000, 100), Request(16, 2, 1000, 100)};
  run.requests[0].hit_tiers = {{TierKind::kHbm, 14}};
  run.requests[0].miss_reasons = {{MissReason::kNeverSeen, 3}};
  run.requests[1].hit_tiers = {{TierKind::kHbm, 9}, {TierKind::kSsd, 6}};
  run.requests[1].miss_reasons = {{MissReason::kNeverSeen, 1}, {MissReason::kSlowerThanRecompute, 1}};

  const nlohmann::json json = ToJson(run);
  EXPECT_EQ(json["summary"]["hit_tiers"], nlohmann::json({{"hbm", 23}, {"ssd", 6}}));
  EXPECT_EQ(json["summary"]["miss_reasons"], nlohmann::json({{"never_seen", 4}, {"slower_than_recompute", 1}}));
  EXPECT_EQ(json["requests"][1]["hit_tiers"], nlohmann::json({{"hbm", 9}, {"ssd", 6}}));
  EXPECT_EQ(json["requests"][1]["miss_reasons"], nlohmann::json({{"never_seen", 1}, {"slower_than_recompute", 1}}));
}

TEST(Report, RemoteHitsAreReportedWithSeveralNodes) {
  RunResult run{.sections_per_prompt = 16, .nodes = 3};
  run.requests = {Request(16, 3, 1000, 100), Request(16, 2, 1000, 100)};
  run.requests[1].node = 2;
  run.requests[1].logits_digest = 0xab;
  run.requests[0].hit_tiers = {{TierKind::kDram, 14}};
  const nlohmann::json json = ToJson(run);
  EXPECT_EQ(json["summary"]["nodes"], 3);
  EXPECT_EQ(json["summary"]["hit_tiers"], nlohmann::json({{"dram", 14}, {"remote", 0}}));
  EXPECT_EQ(json["requests"][1]["node"], 2);
  EXPECT_EQ(json["requests"][1]["logits_digest"], "00000000000000ab");
  run.requests[1].hit_tiers = {{TierKind::kRemote, 15}};
  EXPECT_EQ(ToJson(run)["summary"]["hit_tiers"], nlohmann::json({{"dram", 14}, {"remote", 15}}));
}

TEST(Report, NoFigureWithoutRequestsOfFullLength) {
  RunResult run{.sections_per_prompt = 16};
  run.requests = {Request(3, 0, 30, 3)};
  const nlohmann::json summary = ToJson(run)["summary"];
  EXPECT_EQ(summary["all_hit_requests"], 0);
  EXPECT_EQ(summary["speedup_vs_full"].dump(), "null") << "not a number";
}

}  // namespace
}  // namespace ashlar::rag
