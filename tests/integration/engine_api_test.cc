// SPDX-License-Identifier: Apache-2.0
// The engine API over a real daemon: assembling prompts, filling misses, restarts, and refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/engine/handles.h"
#include "proto/outcome.h"
#include "tests/integration/corrupt.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_options.h"
#include "tests/integration/prefix_engine.h"

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::Code;
using engine::Request;
using engine::StepKind;
using testing::Each;
using testing::ElementsAre;
using testing::StartsWith;

class EngineApi : public testing::Test {
 protected:
  Asked WithPages(const std::vector<Tokens>& segments) { return Asked(segments, test_.target_table()); }
  void ExpectLanded(TestEngine& test) {
    uint64_t start = 0;
    for (size_t i = 0; i < segments_.size(); start += segments_[i++].size()) {
      test.ExpectLanded(KindOfSegment(i), segments_[i], start, kPoison);
    }
  }
  bool NoLeaseIsLeft() const {
    return Eventually([&] { return daemon_.Metric("ashlar_leases") == 0; });
  }
  bool NoReservationIsLeft() const {
    return Eventually([&] { return daemon_.Metric("ashlar_reservations_pending") == 0; });
  }

  const std::vector<Tokens> segments_ = {MakeRun(1, 50), MakeRun(2, 90), MakeRun(3, 40)};
  const std::string cached_ = "checkpoint 0-50 run 50-54 interior 54-137 run 137-144 interior 144-177 run 177-187 ";
  DaemonProcess daemon_;
  TestEngine test_{daemon_.client_options()};
};

TEST_F(EngineApi, SetsAPromptFromCachedSegments) {
  test_.PublishPrompt(segments_);
  test_.FillTargets(kPoison);
  Cache cache = OpenSharing(test_);
  const Asked asked = WithPages(segments_);
  {
    Request request;
    ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
    EXPECT_EQ(StepsOf(request), cached_);
    EXPECT_FALSE(request.plan().exact);
    uint32_t missing = 9;
    request.missing(&missing);
    EXPECT_EQ(missing, 0u);
    for (uint32_t layer = 0; layer < 4; ++layer) ASSERT_GOOD(request.WaitLayer(layer));
    engine::Tuple tuple;
    ASSERT_GOOD(request.StepTuple(2, 0, &tuple));
    ASSERT_EQ(tuple.head_count, 4u);
    EXPECT_EQ(tuple.position, 50u);
    const std::string state = test_.StateOfHead(ObjectKind::kSegment, segments_[1], 0, 1);
    EXPECT_EQ(std::memcmp(tuple.heads[1].state, state.data(), state.size()), 0);
    EXPECT_EQ(tuple.heads[1].form, TransitionForm::kDense);
    ASSERT_GOOD(request.Finish());
    ExpectLanded(test_);
  }
  EXPECT_TRUE(NoLeaseIsLeft());
}

// A medium whose rotary positions are fewer or more than its tokens shifts the keys of the segments after it.
TEST_F(EngineApi, KeysAreRotatedToShiftedPositions) {
  test_.PublishPrompt(segments_);
  test_.FillTargets(kPoison);
  Cache scheduler = OpenSharing(test_), cache = OpenSharing(test_);
  const int64_t shifts[] = {0, -13, 29};
  const auto expect_shifted = [&] {
    test_.ExpectLanded(ObjectKind::kCheckpoint, segments_[0], 0, kPoison);
    test_.ExpectLanded(ObjectKind::kSegment, segments_[1], 50, kPoison, shifts[1]);
    test_.ExpectLanded(ObjectKind::kSegment, segments_[2], 140, kPoison, shifts[2]);
  };
  Asked asked = WithPages(segments_);
  asked.prompt.rotary_shifts = shifts;
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  EXPECT_EQ(StepsOf(request), cached_);
  ASSERT_GOOD(request.WaitLayer(3));
  ASSERT_GOOD(request.Finish());
  expect_shifted();

  // The same by a plan from another process.
  test_.FillTargets(kPoison);
  const Asked planned(segments_);
  Request begun, landed;
  ASSERT_GOOD(scheduler.Begin(&planned.prompt, 1, &begun));
  std::vector<uint8_t> bytes(begun.PlanBytes(nullptr, 0));
  begun.PlanBytes(bytes.data(), bytes.size());
  engine::PlanToLand plan = {.plan = bytes.data(),
                             .plan_bytes = bytes.size(),
                             .page_table = asked.prompt.page_table,
                             .page_count = asked.prompt.page_count,
                             .rotary_shifts = shifts,
                             .rotary_shift_count = 2};
  EXPECT_THAT(Say(cache.Land(&plan, 1, &landed)), StartsWith("3 plans[0].rotary_shift_count: 2; expected 3"));
  plan.rotary_shift_count = 3;
  ASSERT_GOOD(cache.Land(&plan, 1, &landed));
  ASSERT_GOOD(landed.Finish());
  expect_shifted();

  const int64_t wrong[][3] = {{1, 0, 0}, {0, -51, 0}};
  asked.prompt.rotary_shifts = wrong[0];
  EXPECT_THAT(Say(cache.Begin(&asked.prompt, 1, &request)), StartsWith("3 prompts[0].rotary_shifts[0]: 1; expected 0"));
  asked.prompt.rotary_shifts = wrong[1];
  EXPECT_THAT(Say(cache.Begin(&asked.prompt, 1, &request)),
              StartsWith("3 prompts[0].rotary_shifts[1]: -51 is out of range; expected at least -50"));
}

TEST_F(EngineApi, PublishesMissingSegmentsAndFindsThem) {
  Cache cache = OpenSharing(test_);
  Asked asked = WithPages(segments_);
  asked.prompt.fill = true;
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  uint32_t count;
  const engine::Run* const missing = request.missing(&count);
  ASSERT_EQ(count, 3u);
  EXPECT_FALSE(missing[0].transition) << "the first segment is a prefix";
  EXPECT_EQ(missing[1].capture_begin, 4u);
  EXPECT_EQ(missing[1].capture_end, 87u);
  EXPECT_EQ(request.Finish().code, Code::kFailedPrecondition) << "missing() is not done";
  for (uint32_t i = 0; i < count; ++i) {
    uint8_t outcome = 0;
    ASSERT_GOOD(request.Publish(i, Computed(test_, missing[i]).run_parts, &outcome));
    EXPECT_STREQ(engine::PublishName(outcome), "published");
  }
  test_.FillTargets(kPoison);
  ASSERT_GOOD(request.LookAgain());
  EXPECT_EQ(StepsOf(request), cached_);
  ASSERT_GOOD(request.Finish());
  ExpectLanded(test_);
  engine::StoredSegments stored;
  cache.StoredSegments(&stored);
  EXPECT_EQ(stored.segments, 2u);
  EXPECT_EQ(stored.heads[static_cast<size_t>(TransitionForm::kDense)], 2u * 2 * 4);
}

TEST_F(EngineApi, UnfilledSegmentsPassToOtherRequests) {
  Cache cache = OpenSharing(test_);
  Asked asked = WithPages(segments_);
  asked.prompt.fill = true;
  uint32_t count;
  {
    Request request;
    ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
    request.missing(&count);
    ASSERT_EQ(count, 3u);
    Request second;
    ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &second));
    second.missing(&count);
    EXPECT_EQ(count, 0u) << "another engine computes them";
    EXPECT_THAT(ReasonsOf(second), Each("being_published"));
    ASSERT_GOOD(second.Finish());
  }
  EXPECT_TRUE(NoReservationIsLeft());
}

// The engine takes longer for one segment than a reservation lasts: the segment is reserved again when it is published.
TEST(EngineApiWithShortReservations, SlowSegmentsArePublished) {
  DaemonOptions options;
  options.more = "leases: {reservation_seconds: 1}\n";
  DaemonProcess daemon(options);
  TestEngine test(daemon.client_options());
  Cache cache = OpenSharing(test);
  Asked asked({MakeRun(1, 50), MakeRun(2, 90), MakeRun(3, 40)}, test.target_table());
  asked.prompt.fill = true;
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  uint32_t count;
  const engine::Run* const missing = request.missing(&count);
  ASSERT_EQ(count, 3u);
  ASSERT_TRUE(Eventually([&] { return daemon.Metric("ashlar_reservations_pending") == 0; })) << "they have ended";
  for (uint32_t i = 0; i < count; ++i) {
    uint8_t outcome = 0;
    ASSERT_GOOD(request.Publish(i, Computed(test, missing[i]).run_parts, &outcome));
    EXPECT_STREQ(engine::PublishName(outcome), "published") << i;
  }
  ASSERT_GOOD(request.LookAgain());
  EXPECT_EQ(request.plan().cached_tokens, 50u + 83 + 33);
  ASSERT_GOOD(request.Finish());
}

TEST_F(EngineApi, ALateMissRestartsThePlan) {
  test_.PublishPrompt(segments_);
  ASSERT_EQ(FlipInArenas(daemon_.pid(), test_.ValueRow(ObjectKind::kSegment, segments_[1], 3, 50)), 1);
  Cache cache = OpenSharing(test_);
  const Asked asked = WithPages(segments_);
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  EXPECT_EQ(StepsOf(request), cached_) << "the daemon has not read the bytes yet";
  EXPECT_EQ(request.Finish().code, Code::kRestart);
  EXPECT_EQ(StepsOf(request), "checkpoint 0-50 run 50-144 interior 144-177 run 177-187 ");
  EXPECT_THAT(ReasonsOf(request), ElementsAre("none", "checksum_failed", "none"));
  ASSERT_GOOD(request.WaitLayer(3));
  ASSERT_GOOD(request.Finish());
}

TEST_F(EngineApi, UnresolvedPagesAreKeptUntilTheyAreQuiesced) {
  ClientOptions options = daemon_.client_options();
  options.timeout = std::chrono::milliseconds(1000);
  TestEngine impatient(options);
  impatient.PublishPrompt(segments_);
  Cache cache = OpenSharing(impatient, {}, {}, true, /*land_ms=*/200, /*quiet_ms=*/200);
  const Asked asked(segments_, impatient.target_table());
  daemon_.Freeze();
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  EXPECT_THAT(ReasonsOf(request), Each("timed_out"));
  EXPECT_EQ(StepsOf(request), "run 0-187 ");
  EXPECT_EQ(request.Finish().code, Code::kOtherPages);
  EXPECT_TRUE(request.pages_kept());
  std::vector<int32_t> back(impatient.target_table().size());
  EXPECT_EQ(cache.TakeQuiescedPages(back.data(), back.size(), 0), 0u);
  EXPECT_EQ(request.Finish().code, Code::kOtherPages) << "until it has moved";
  std::vector<int32_t> others(asked.prompt.page_count);
  for (size_t i = 0; i < others.size(); ++i) others[i] = static_cast<int32_t>(i);
  ASSERT_GOOD(request.Move(others.data(), others.size()));
  ASSERT_GOOD(request.Finish());
  daemon_.Thaw();
  EXPECT_EQ(cache.TakeQuiescedPages(back.data(), back.size(), 20'000), back.size());
  std::vector<int32_t> all(impatient.target_table().begin(), impatient.target_table().end());
  EXPECT_THAT(back, testing::UnorderedElementsAreArray(all));
}

TEST(EngineApiOfMuch, TheDaemonsDeathDuringALandingIsAMiss) {
  DaemonProcess daemon({.dram = "256MiB", .arena = "16MiB", .tenants = "", .threads = 1});
  TestEngine test(daemon.client_options(),
                  {.layers = 16, .kv_heads = 4, .key_dim = 64, .value_dim = 64, .tokens = 1200});
  const std::vector<Tokens> segments = {MakeRun(1, 100), MakeRun(2, 1000)};
  test.PublishPrompt(segments);
  Cache cache = OpenSharing(test);
  const Asked asked(segments, test.target_table());
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  ASSERT_EQ(request.plan().cached_tokens, 100u + 993);
  ASSERT_GOOD(request.WaitLayer(0));
  daemon.Kill();
  EXPECT_EQ(request.Finish().code, Code::kRestart);
  EXPECT_EQ(StepsOf(request), "run 0-1107 ");
  ASSERT_GOOD(request.Finish());
  Request after;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &after));
  EXPECT_THAT(ReasonsOf(after), Each("daemon_unavailable"));
  ASSERT_GOOD(after.Finish());
}

// The leases end with the session: bytes read in place since then may have changed.
TEST_F(EngineApi, ACutSessionRestartsWithoutHits) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  const Asked asked = WithPages(segments_);
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  for (uint32_t layer = 0; layer < 4; ++layer) ASSERT_GOOD(request.WaitLayer(layer));
  BreakConnections(daemon_.client_options().session_socket);
  EXPECT_EQ(request.Finish().code, Code::kRestart);
  EXPECT_EQ(StepsOf(request), "run 0-187 ");
  ASSERT_GOOD(request.Finish());
}

TEST_F(EngineApi, EveryWaitingCallHasANonBlockingForm) {
  Cache cache = OpenSharing(test_);
  test_.FillTargets(kPoison);
  Asked asked = WithPages(segments_);
  asked.prompt.fill = true;
  Request request;
  const auto until = [](auto poll) {
    engine::Status status;
    EXPECT_TRUE(Eventually([&] { return (status = poll()).code != Code::kPending; }));
    return status;
  };
  ASSERT_GOOD(cache.StartBegin(&asked.prompt, 1, &request));
  ASSERT_GOOD(until([&] { return request.PollPlan(); }));
  uint32_t count;
  const engine::Run* const missing = request.missing(&count);
  ASSERT_EQ(count, 3u);
  for (uint32_t i = 0; i < count; ++i) {
    const Computed computed(test_, missing[i]);
    engine::Job job;
    uint8_t outcome = 0;
    ASSERT_GOOD(request.StartPublish(i, computed.run_parts, &outcome, &job));
    ASSERT_GOOD(until([&] { return job.Poll(); }));
    EXPECT_STREQ(engine::PublishName(outcome), "published");
  }
  ASSERT_GOOD(request.StartLookAgain());
  ASSERT_GOOD(until([&] { return request.PollPlan(); }));
  EXPECT_EQ(StepsOf(request), cached_);
  for (uint32_t layer = 0; layer < 4; ++layer) ASSERT_GOOD(until([&] { return request.PollLayer(layer); }));
  ASSERT_GOOD(until([&] { return request.PollFinish(); }));
}

TEST_F(EngineApi, APlanCanBeCancelled) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  const Asked asked = WithPages(segments_);
  Request request;
  ASSERT_GOOD(cache.StartBegin(&asked.prompt, 1, &request));
  request.Cancel();
  EXPECT_TRUE(Eventually([&] { return request.PollQuiesced().ok(); }));
  test_.FillTargets(kPoison);
  EXPECT_FALSE(Eventually([&] { return !test_.TargetsAre(kPoison); }, std::chrono::milliseconds(200)));
  EXPECT_TRUE(NoLeaseIsLeft());
}

TEST_F(EngineApi, ALookupInFlightCanBeCancelled) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  const Asked asked = WithPages(segments_);
  Request request;
  daemon_.Freeze();
  ASSERT_GOOD(cache.StartBegin(&asked.prompt, 1, &request));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the call is in flight
  request.Cancel();
  EXPECT_EQ(request.PollQuiesced().code, Code::kPending);
  daemon_.Thaw();
  EXPECT_TRUE(Eventually([&] { return request.PollQuiesced().ok(); }));
  EXPECT_TRUE(NoLeaseIsLeft()) << "while the request is still there";
}

TEST_F(EngineApi, OneCallBeginsManyRequests) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  const Asked all(segments_), first({segments_[0]}), none({MakeRun(8, 30)});
  const engine::Prompt prompts[] = {all.prompt, first.prompt, none.prompt};
  Request requests[3];
  ASSERT_GOOD(cache.Begin(prompts, 3, requests));
  EXPECT_EQ(StepsOf(requests[0]), cached_);
  EXPECT_EQ(StepsOf(requests[1]), "checkpoint 0-50 run 50-57 ");
  EXPECT_EQ(StepsOf(requests[2]), "run 0-37 ");
}

TEST(EngineApiOnPrefixes, ATextIsCommittedAndResumed) {
  DaemonProcess daemon;
  PrefixEngine test(daemon.client_options());
  Cache cache = OpenSharing(test, {}, {.capture_tokens = 1});
  const Tokens text = MakeRun(1, 603);
  const CommitParts parts = test.Compute({text, {300, text.size()}});
  std::vector<std::vector<engine::LinearTensors>> linear;
  std::vector<engine::Checkpoint> checkpoints;
  for (const CapturedState& captured : parts.checkpoints) {
    auto& tensors = linear.emplace_back();
    for (const auto& part : captured.linear) {
      tensors.push_back({.layer = part.layer, .state = part.state, .conv_tail = part.conv_tail});
    }
    checkpoints.push_back({captured.depth, tensors.data(), static_cast<uint32_t>(tensors.size())});
  }
  uint8_t outcomes[2];
  engine::Text committed{.tokens = text.data(),
                         .token_count = text.size(),
                         .prompt_tokens = text.size(),
                         .checkpoints = checkpoints.data(),
                         .checkpoint_count = 2,
                         .page_table = parts.page_table.data(),
                         .page_count = parts.page_table.size(),
                         .outcomes = outcomes};
  engine::Job job;
  ASSERT_GOOD(cache.StartCommit(&committed, 1, &job));
  ASSERT_GOOD(job.Wait());
  EXPECT_STREQ(engine::CommitName(outcomes[1]), "kept");

  test.FillTargets(kPoison);
  const Asked asked({text}, test.target_table());
  engine::Prompt prompt = asked.prompt;
  prompt.segment_count = 0;
  Request request;
  ASSERT_GOOD(cache.Begin(&prompt, 1, &request));
  EXPECT_EQ(request.plan().prefix_tokens, 603u);
  EXPECT_TRUE(request.plan().exact);
  std::vector<float> state(4 * 32 * 24, -1);
  ASSERT_GOOD(request.Advance({.layer = 0, .begin = 0, .end = 603, .state = {.data = state.data()}}));
  const std::string expected = test.StateAfter(text, 0);
  EXPECT_EQ(std::memcmp(state.data(), expected.data(), expected.size()), 0);
  ASSERT_GOOD(request.Finish());
  test.ExpectResumed(*engine::Access::Of(request)->match().get(), asked.tokens, kPoison);
}

TEST_F(EngineApi, RefusesInvalidFields) {
  Cache cache = OpenSharing(test_);
  Asked asked = WithPages(segments_);
  Request request;
  const auto begin = [&](auto change) {
    engine::Prompt prompt = asked.prompt;
    change(prompt);
    return Say(cache.Begin(&prompt, 1, &request));
  };
  EXPECT_EQ(begin([](engine::Prompt& p) { p.tokens = nullptr; }), "3 prompts[0].tokens: null");
  EXPECT_THAT(begin([](engine::Prompt& p) { p.token_count = 100; }), StartsWith("3 prompts[0].segment_lengths[1]: "));
  EXPECT_THAT(begin([](engine::Prompt& p) { p.page_count = 2; }), StartsWith("3 prompts[0].page_count: "));
  std::vector<int32_t> pages(asked.prompt.page_table, asked.prompt.page_table + asked.prompt.page_count);
  const size_t used = (asked.tokens.size() + test_.pages().page_tokens - 1) / test_.pages().page_tokens;
  const auto existing = static_cast<int32_t>(test_.pages().pages);
  for (const int32_t page : {-1, existing}) {
    const std::vector<int32_t> good = pages;
    pages[used - 1] = page;
    EXPECT_EQ(begin([&](engine::Prompt& p) { p.page_table = pages.data(); }),
              "3 prompts[0].page_table[" + std::to_string(used - 1) + "]: page " + std::to_string(page) +
                  " is out of range; the cache has " + std::to_string(existing) + " pages");
    pages = good;
  }
  EXPECT_EQ(Say(request.Finish()), "9 the request was not begun");
  pages.push_back(-1);  // after the prompt a table may be padded
  asked.prompt.page_table = pages.data();
  asked.prompt.page_count = pages.size();
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  EXPECT_THAT(Say(request.WaitLayer(4)), StartsWith("3 layer: 4"));
  std::vector<float> numbers(187 * 4 * 32);
  engine::LayerAdvance advance{.layer = 1, .end = 187, .state = {.data = numbers.data()}};
  EXPECT_THAT(Say(request.Advance(advance)), StartsWith("3 advance.layer: 1 is not a linear layer"));
  advance.layer = 0;
  EXPECT_THAT(Say(request.Advance(advance)), StartsWith("3 advance.inputs.tokens: 0; expected 187"));
  EXPECT_THAT(Say(request.Publish(0, {}, nullptr)), StartsWith("3 missing: 0 is out of range"));
  engine::Text text{};
  EXPECT_EQ(Say(cache.Commit(&text, 1)), "9 the cache was opened without capture_tokens");
  EngineOptions with(test_, {}, {});
  with.options.model.head = 1 << 20;
  engine::Cache refused;
  EXPECT_THAT(Say(OpenOn(test_.client(), test_.region(), with.options, &refused)), StartsWith("3 model.head: "));
  with.options.model.head = 4;
  with.options.model.weights_digest = "";
  EXPECT_THAT(Say(OpenOn(test_.client(), test_.region(), with.options, &refused)),
              StartsWith("3 model.weights_digest: "));
}

}  // namespace
}  // namespace ashlar::integration
