// SPDX-License-Identifier: Apache-2.0
// The engine API on two tensor-parallel ranks: a scheduler plans, and each rank publishes and lands its shards of
// segments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "tests/integration/content.h"
#include "tests/integration/corrupt.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_options.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::Code;
using engine::Request;
using testing::Each;
using testing::ElementsAre;

class EngineRanks : public testing::Test {
 protected:
  struct Rank {
    Rank(const DaemonProcess& daemon, uint32_t number, bool pages = true)
        : test(daemon.client_options(), {.shard = {.rank = number, .size = 2}}),
          cache(OpenSharing(test, {.rank = number, .size = 2}, {}, pages)) {}
    TestEngine test;
    Cache cache;
  };

  // Expects `lacking` segments whose shard of this rank is not in the cache, and publishes the first `published`.
  void Fill(Rank& rank, uint32_t lacking, uint32_t published) {
    Asked asked(segments_);
    asked.prompt.fill = asked.prompt.store_only = true;
    Request request;
    ASSERT_GOOD(rank.cache.Begin(&asked.prompt, 1, &request));
    uint32_t count;
    const engine::Run* const missing = request.missing(&count);
    ASSERT_EQ(count, lacking);
    for (uint32_t i = 0; i < published; ++i) {
      uint8_t outcome = 0;
      ASSERT_GOOD(request.Publish(i, Computed(rank.test, missing[i]).run_parts, &outcome));
      EXPECT_STREQ(engine::PublishName(outcome), "published");
    }
  }
  std::vector<std::string> LookUp() {
    Request request;
    const engine::Status begun = scheduler_.cache.Begin(&asked_.prompt, 1, &request);
    EXPECT_TRUE(begun.ok()) << begun.message;
    return ReasonsOf(request);
  }
  // Begins a request on the scheduler, which holds its lease, and returns its plan.
  std::vector<uint8_t> MakePlan(Request* request) {
    const engine::Status begun = scheduler_.cache.Begin(&asked_.prompt, 1, request);
    EXPECT_TRUE(begun.ok()) << begun.message;
    std::vector<uint8_t> bytes(request->PlanBytes(nullptr, 0));
    request->PlanBytes(bytes.data(), bytes.size());
    return bytes;
  }
  static void Land(Rank& rank, const std::vector<uint8_t>& plan, Request* request) {
    rank.test.FillTargets(kPoison);
    const engine::PlanToLand to_land{.plan = plan.data(),
                                     .plan_bytes = plan.size(),
                                     .page_table = rank.test.target_table().data(),
                                     .page_count = rank.test.target_table().size()};
    ASSERT_GOOD(rank.cache.Land(&to_land, 1, request));
  }
  // Expects this rank's heads in the pages, the tuples and the states of a landed plan.
  void ExpectLanded(Rank& rank, Request& request) {
    constexpr uint32_t kLinear = 0, kInteriorStep = 2;
    std::vector<float> states(kValueHeads * kDk * kDv);
    ASSERT_GOOD(request.Advance({.layer = kLinear, .begin = 0, .end = 50, .state = {.data = states.data()}}));
    engine::Tuple tuple;
    ASSERT_GOOD(request.StepTuple(kInteriorStep, kLinear, &tuple));
    ASSERT_EQ(tuple.head_count, kValueHeads);
    for (uint32_t head = 0; head < kValueHeads; ++head) {
      const std::string prefix = rank.test.StateOfHead(ObjectKind::kCheckpoint, segments_[0], kLinear, head);
      EXPECT_EQ(std::memcmp(states.data() + head * kDk * kDv, prefix.data(), prefix.size()), 0);
      const std::string interior = rank.test.StateOfHead(ObjectKind::kSegment, segments_[1], kLinear, head);
      EXPECT_EQ(std::memcmp(tuple.heads[head].state, interior.data(), interior.size()), 0);
    }
    ASSERT_GOOD(request.Finish());
    rank.test.ExpectLanded(ObjectKind::kCheckpoint, segments_[0], 0, kPoison);
    rank.test.ExpectLanded(ObjectKind::kSegment, segments_[1], 50, kPoison);
    rank.test.ExpectLanded(ObjectKind::kSegment, segments_[2], 140, kPoison);
  }

  const std::vector<Tokens> segments_ = {MakeRun(1, 50), MakeRun(2, 90), MakeRun(3, 40)};
  const Asked asked_{segments_};
  DaemonProcess daemon_;
  Rank scheduler_{daemon_, 0, false};
  Rank first_{daemon_, 0};
  std::optional<Rank> second_{std::in_place, daemon_, 1u};
};

TEST_F(EngineRanks, SegmentsHitOnceEveryRankHasPublished) {
  EXPECT_THAT(LookUp(), Each("never_seen"));
  Fill(first_, 3, 3);
  EXPECT_THAT(LookUp(), Each("being_published"));
  Request planned;
  EXPECT_TRUE(MakePlan(&planned).empty());
  Fill(*second_, 3, 3);

  const std::vector<uint8_t> plan = MakePlan(&planned);
  EXPECT_EQ(StepsOf(planned), "checkpoint 0-50 run 50-54 interior 54-137 run 137-144 interior 144-177 run 177-187 ");
  for (Rank* const rank : {&first_, &*second_}) {
    Request request;
    Land(*rank, plan, &request);
    EXPECT_EQ(StepsOf(request), StepsOf(planned));
    ExpectLanded(*rank, request);
  }
}

TEST_F(EngineRanks, ARankThatFailedPublishesOnlyWhatItLacks) {
  Fill(first_, 3, 3);
  Fill(*second_, 3, 1);
  second_.reset();
  EXPECT_THAT(LookUp(), ElementsAre("none", "being_published", "being_published"));
  ASSERT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_reservations_pending") == 0; }));
  second_.emplace(daemon_, 1u);
  Fill(first_, 0, 0);
  Fill(*second_, 2, 2);
  EXPECT_THAT(LookUp(), Each("none"));
}

TEST_F(EngineRanks, AShardThatFailsToLandIsDroppedByAllRanks) {
  Fill(first_, 3, 3);
  Fill(*second_, 3, 3);
  ASSERT_EQ(FlipInArenas(daemon_.pid(), second_->test.ValueRow(ObjectKind::kSegment, segments_[1], 3, 50)), 1);
  Request planned, whole, failed;
  const std::vector<uint8_t> plan = MakePlan(&planned);
  Land(first_, plan, &whole);
  ASSERT_GOOD(whole.Finish());
  Land(*second_, plan, &failed);
  EXPECT_EQ(failed.Finish().code, Code::kRestart);
  EXPECT_EQ(StepsOf(failed), "checkpoint 0-50 run 50-144 interior 144-177 run 177-187 ");
  const uint32_t lost[] = {1};
  EXPECT_EQ(whole.DropSegments(lost, 1).code, Code::kRestart);
  EXPECT_EQ(StepsOf(whole), StepsOf(failed));
  for (Request* const request : {&whole, &failed}) ASSERT_GOOD(request->Finish());

  EXPECT_THAT(LookUp(), ElementsAre("none", "checksum_failed", "none"));
  Fill(first_, 1, 1);
  EXPECT_THAT(LookUp(), ElementsAre("none", "being_published", "none"));
  Fill(*second_, 1, 1);
  EXPECT_THAT(LookUp(), Each("none"));
}

}  // namespace
}  // namespace ashlar::integration
