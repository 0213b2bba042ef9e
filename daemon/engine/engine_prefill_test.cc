// SPDX-License-Identifier: Apache-2.0
// PlanPrefill, AwaitPrefill, EndPrefill and ServePrefill over a daemon: two engines, one computes for the other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/expect_refusals.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/limits.h"
#include "proto/prefill_limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;

constexpr uint32_t kPendingState = 1, kHereState = 2, kAskersState = 3;
constexpr int64_t kTenSeconds = 10'000'000'000;

class EnginePrefillTest : public ::testing::Test {
 protected:
  v1::PlanPrefillRequest PlanOf(std::vector<std::vector<int32_t>> runs) {
    auto request = asker_.Make<v1::PlanPrefillRequest>();
    request.set_model(asker_.model());
    for (const std::vector<int32_t>& run : runs) {
      v1::ObjectName* name = request.add_objects();
      name->set_kind(static_cast<uint32_t>(ObjectKind::kSegment));
      name->set_tokens(PackTokens(run));
    }
    return request;
  }
  v1::ServePrefillRequest ServeOf(int64_t wait_ns) {
    auto request = worker_.Make<v1::ServePrefillRequest>();
    request.set_model(worker_.model());
    request.set_wait_ns(wait_ns);
    return request;
  }
  v1::AwaitPrefillRequest AwaitOf(uint64_t plan, int64_t wait_ns) {
    auto request = asker_.Make<v1::AwaitPrefillRequest>();
    request.set_plan(plan);
    request.set_wait_ns(wait_ns);
    return request;
  }

  TestNode node_;
  TestEngine asker_{node_}, worker_{node_};
};

TEST_F(EnginePrefillTest, EngineComputesForAnotherEngine) {
  const std::vector<int32_t> first = Ascending(24, 7), second = Ascending(24, 1007);
  auto given = std::async(std::launch::async, [this] {
    v1::ServePrefillReply reply;
    EXPECT_TRUE(worker_.Call(ServeOf(kTenSeconds), &reply).ok());
    return reply;
  });
  v1::PlanPrefillReply planned;
  while (planned.plan() == 0) {  // until the worker has connected
    ASSERT_TRUE(asker_.Call(PlanOf({first, second}), &planned).ok());
  }
  EXPECT_THAT(planned.computed_elsewhere(), ElementsAre(false, true));
  const v1::ServePrefillReply work = given.get();
  EXPECT_NE(work.assignment(), 0u);
  EXPECT_EQ(work.object().tokens(), PackTokens(second));
  EXPECT_GT(work.due_in_ns(), 0);
  v1::AwaitPrefillReply states;
  ASSERT_TRUE(asker_.Call(AwaitOf(planned.plan(), 0), &states).ok());
  EXPECT_THAT(states.states(), ElementsAre(kAskersState, kPendingState));
  ASSERT_EQ(worker_.PublishRun(ObjectKind::kSegment, second), PublishOutcome::kPublished);
  auto result = ServeOf(0);
  result.add_results()->set_assignment(work.assignment());
  result.mutable_results(0)->set_published(true);
  v1::ServePrefillReply none;
  ASSERT_TRUE(worker_.Call(result, &none).ok());
  EXPECT_EQ(none.assignment(), 0u);
  ASSERT_TRUE(asker_.Call(AwaitOf(planned.plan(), kTenSeconds), &states).ok());
  EXPECT_THAT(states.states(), ElementsAre(kAskersState, kHereState));
  auto end = asker_.Make<v1::EndPrefillRequest>();
  end.set_plan(planned.plan());
  v1::EndPrefillReply ended;
  EXPECT_TRUE(asker_.Call(end, &ended).ok());
  EXPECT_TRUE(absl::IsNotFound(asker_.Call(AwaitOf(planned.plan(), 0), &states)));
}

// For a second after its request it would count as busy.
TEST_F(EnginePrefillTest, AClosedModelOffersNoPrefill) {
  v1::ServePrefillReply none;
  ASSERT_TRUE(worker_.Call(ServeOf(0), &none).ok());
  auto close = worker_.Make<v1::CloseModelRequest>();
  close.set_model(worker_.model());
  v1::CloseModelReply closed;
  ASSERT_TRUE(worker_.Call(close, &closed).ok());
  v1::PlanPrefillReply planned;
  ASSERT_TRUE(asker_.Call(PlanOf({Ascending(24, 7), Ascending(24, 1007)}), &planned).ok());
  EXPECT_EQ(planned.plan(), 0u);
}

TEST_F(EnginePrefillTest, FallsBackToRequesterWithoutWorkers) {
  v1::PlanPrefillReply planned;
  ASSERT_TRUE(asker_.Call(PlanOf({Ascending(24, 7), Ascending(24, 1007)}), &planned).ok());
  EXPECT_EQ(planned.plan(), 0u);
  EXPECT_THAT(planned.computed_elsewhere(), ElementsAre(false, false));
}

TEST_F(EnginePrefillTest, EveryFieldIsChecked) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  ExpectRefusals<v1::PlanPrefillRequest, v1::PlanPrefillReply>(
      asker_, PlanOf({Ascending(24, 7)}), kBad,
      {{"model: unknown handle 999", [](auto& r) { r.set_model(999); }},
       {"objects: empty; expected at least one", [](auto& r) { r.clear_objects(); }},
       {"objects[0].kind: expected segment or checkpoint", [](auto& r) { r.mutable_objects(0)->set_kind(9); }},
       {"objects[0].tokens: ", [](auto& r) { r.mutable_objects(0)->set_tokens("odd"); }},
       {"objects[0].tokens: empty", [](auto& r) { r.mutable_objects(0)->clear_tokens(); }},
       {"objects[0].tokens: too short", [](auto& r) { r.mutable_objects(0)->set_tokens(std::string(4, 'x')); }},
       {"objects[0].tokens: too many; expected at most ",
        [](auto& r) { r.mutable_objects(0)->set_tokens(std::string(4 * limits::kMaxPrefillTokens + 4, 'x')); }},
       {"objects[0].media: ", [](auto& r) { r.mutable_objects(0)->set_media(std::string(40, 'x')); }},
       {"objects[0].salt: ", [](auto& r) { r.mutable_objects(0)->set_salt(std::string(32, 'x')); }}});
  ExpectRefusals<v1::AwaitPrefillRequest, v1::AwaitPrefillReply>(
      asker_, AwaitOf(1, 0), kBad,
      {{"wait_ns: out of range", [](auto& r) { r.set_wait_ns(-1); }},
       {"wait_ns: out of range", [](auto& r) { r.set_wait_ns(limits::kMaxPrefillWaitNanos + 1); }}});
  ExpectRefusals<v1::ServePrefillRequest, v1::ServePrefillReply>(
      worker_, ServeOf(0), kBad,
      {{"model: unknown handle 999", [](auto& r) { r.set_model(999); }},
       {"wait_ns: out of range", [](auto& r) { r.set_wait_ns(-1); }},
       {"results: ", [](auto& r) {
          for (uint64_t i = 0; i <= limits::kMaxPrefillResults; ++i) r.add_results();
        }}});
}

}  // namespace
}  // namespace ashlar::daemon
