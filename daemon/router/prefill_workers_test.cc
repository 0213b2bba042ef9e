// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/prefill_workers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "storage/testing/manual_clock.h"

namespace ashlar::daemon {
namespace {

using testing::IsEmpty;
using testing::SizeIs;

constexpr storage::Nanos kWorkerSecond = 1'000'000'000;
constexpr NamespaceId kNs{};

class PrefillWorkersTest : public testing::Test {
 protected:
  // An engine's answer; nothing while it waits.
  using Answered = std::shared_ptr<std::optional<absl::StatusOr<PrefillWorkers::Given>>>;
  Answered Serve(storage::SessionId session, std::vector<PrefillWorkers::Result> results = {},
                 storage::Nanos wait = kWorkerSecond, double rate = 1000) {
    const auto answered = std::make_shared<std::optional<absl::StatusOr<PrefillWorkers::Given>>>();
    workers_.Serve({.session = session, .model = 1, .tenant = 0, .ns = kNs, .tokens_per_second = rate}, results, wait,
                   [answered](absl::StatusOr<PrefillWorkers::Given> given) { *answered = std::move(given); });
    return answered;
  }
  PrefillWork Work(uint64_t tokens = 1000, storage::TenantId tenant = 0) const {
    return {.tenant = tenant, .ns = kNs, .tokens = tokens};
  }
  // The result reported to the segment's requester; nothing while it is pending.
  using Told = std::shared_ptr<std::optional<absl::Status>>;
  std::pair<uint64_t, Told> Assign(uint64_t worker, PrefillWork work, storage::Nanos within = 10 * kWorkerSecond) {
    const auto told = std::make_shared<std::optional<absl::Status>>();
    const uint64_t number = workers_.Assign(worker, std::move(work), clock_.Now() + within,
                                            [told](absl::Status status) { *told = std::move(status); });
    return {number, told};
  }
  uint64_t OnlyWorker() const {
    const auto offers = workers_.Offers(0, kNs);
    EXPECT_THAT(offers, SizeIs(1));
    return offers.empty() ? 0 : offers[0].worker;
  }

  storage::ManualClock clock_;
  PrefillWorkers workers_{clock_};
};

TEST_F(PrefillWorkersTest, AssignsSegmentsInOrder) {
  const Answered first = Serve(1);
  EXPECT_FALSE(first->has_value());
  const auto [one, told_one] = Assign(OnlyWorker(), Work(1000));
  const auto [two, told_two] = Assign(OnlyWorker(), Work(500));
  ASSERT_TRUE(first->has_value());
  EXPECT_EQ((**first)->assignment, one);
  EXPECT_EQ((**first)->due_in, 10 * kWorkerSecond);
  EXPECT_EQ(workers_.Offers(0, kNs)[0].queued_tokens, 1500u);
  clock_.Advance(kWorkerSecond / 2);
  EXPECT_EQ(workers_.Offers(0, kNs)[0].queued_tokens, 1000u) << "half of the first one is done by now";
  const Answered second = Serve(1, {{one, true}});
  EXPECT_EQ(*told_one, absl::OkStatus());
  ASSERT_TRUE(second->has_value());
  EXPECT_EQ((**second)->assignment, two);
  EXPECT_FALSE(told_two->has_value());
  EXPECT_DOUBLE_EQ(workers_.Offers(0, kNs)[0].tokens_per_second, 2000) << "measured, where it has declared 1000";
}

TEST_F(PrefillWorkersTest, NoWorkInTimeReturnsNone) {
  const Answered waits = Serve(1, {}, kWorkerSecond);
  clock_.Advance(kWorkerSecond - 1);
  workers_.Tick();
  EXPECT_FALSE(waits->has_value());
  clock_.Advance(1);
  workers_.Tick();
  ASSERT_TRUE(waits->has_value());
  EXPECT_EQ((**waits)->assignment, 0u);
}

TEST_F(PrefillWorkersTest, ASecondRequestEndsTheFirst) {
  const Answered first = Serve(1), second = Serve(1);
  ASSERT_TRUE(first->has_value());
  EXPECT_EQ((**first)->assignment, 0u);
  EXPECT_FALSE(second->has_value());
  EXPECT_THAT(workers_.Offers(0, kNs), SizeIs(1));
}

TEST_F(PrefillWorkersTest, ALateWorkersSegmentsAreReassignedAndItsResultIsFenced) {
  const Answered first = Serve(1);
  const auto [one, told_one] = Assign(OnlyWorker(), Work(), 2 * kWorkerSecond);
  const auto [two, told_two] = Assign(OnlyWorker(), Work(), 60 * kWorkerSecond);
  clock_.Advance(2 * kWorkerSecond);
  workers_.Tick();
  EXPECT_TRUE(absl::IsDeadlineExceeded(**told_one));
  EXPECT_TRUE(absl::IsDeadlineExceeded(**told_two)) << "it would wait behind the stalled one";
  EXPECT_THAT(workers_.Offers(0, kNs), IsEmpty());
  EXPECT_EQ(workers_.stats().late, 0u);
  Serve(1, {{one, true}});
  EXPECT_EQ(workers_.stats().late, 1u);
  EXPECT_THAT(workers_.Offers(0, kNs), SizeIs(1)) << "it is back";
  EXPECT_EQ(workers_.stats().given, 0u);
}

TEST_F(PrefillWorkersTest, AssignmentWithoutASegmentHasAReason) {
  Serve(1);
  const auto [one, told] = Assign(OnlyWorker(), Work());
  Serve(1, {{one, false}});
  EXPECT_TRUE(absl::IsAborted(**told));
  const auto [two, told_two] = Assign(OnlyWorker(), Work());
  Serve(1);
  EXPECT_TRUE(absl::IsAborted(**told_two));
  const auto [three, told_three] = Assign(OnlyWorker(), Work());
  Serve(1, {{three, false, /*refused=*/true}});
  EXPECT_TRUE(absl::IsOutOfRange(**told_three));
}

TEST_F(PrefillWorkersTest, ADeadEngineLosesAll) {
  const Answered waits = Serve(2);
  Serve(1);
  const uint64_t worker = workers_.Offers(0, kNs)[1].worker;
  const auto [one, told_one] = Assign(worker, Work());
  const auto [two, told_two] = Assign(worker, Work());
  workers_.SessionEnded(1);
  EXPECT_TRUE(absl::IsUnavailable(**told_one));
  EXPECT_TRUE(absl::IsUnavailable(**told_two));
  EXPECT_THAT(workers_.Offers(0, kNs), SizeIs(1));
  EXPECT_EQ(Assign(worker, Work()).first, 0u);
  workers_.SessionEnded(2);
  ASSERT_TRUE(waits->has_value()) << "its call is answered";
  EXPECT_EQ(workers_.stats().workers + workers_.stats().given, 0u);
}

TEST_F(PrefillWorkersTest, WithdrawnAssignmentCallsNothing) {
  Serve(1);
  const auto [one, told_one] = Assign(OnlyWorker(), Work());
  const auto [two, told_two] = Assign(OnlyWorker(), Work());
  workers_.Withdraw(two);
  workers_.Withdraw(one);
  workers_.Cancel(one, absl::CancelledError(""));
  Serve(1, {{one, true}});
  EXPECT_FALSE(told_one->has_value() || told_two->has_value());
  EXPECT_EQ(workers_.stats().late, 1u);
}

TEST_F(PrefillWorkersTest, RefusesOtherTenantsWorkAndTooMuchWork) {
  Serve(1);
  const uint64_t worker = OnlyWorker();
  EXPECT_EQ(Assign(worker, Work(10, /*tenant=*/1)).first, 0u);
  EXPECT_THAT(workers_.Offers(1, kNs), IsEmpty());
  NamespaceId other{};
  other.bytes[0] = 1;
  EXPECT_THAT(workers_.Offers(0, other), IsEmpty());
  for (size_t i = 0; i < PrefillWorkers::kMostGiven; ++i) EXPECT_NE(Assign(worker, Work()).first, 0u);
  EXPECT_EQ(Assign(worker, Work()).first, 0u);
  EXPECT_THAT(workers_.Offers(0, kNs), IsEmpty()) << "it has no capacity";
}

TEST_F(PrefillWorkersTest, SilentWorkerIsDropped) {
  Serve(1, {}, 0);
  workers_.Tick();
  EXPECT_THAT(workers_.Offers(0, kNs), SizeIs(1));
  clock_.Advance(PrefillWorkers::kPause + 1);
  EXPECT_THAT(workers_.Offers(0, kNs), IsEmpty());
  clock_.Advance(PrefillWorkers::kDropAfter);
  workers_.Tick();
  EXPECT_EQ(workers_.stats().workers, 0u);
}

TEST_F(PrefillWorkersTest, WorkersPerTenantAreBounded) {
  PrefillWorkers workers(clock_, /*tenants=*/2);
  const auto serve = [&](storage::TenantId tenant, uint64_t model, storage::Nanos wait) {
    absl::Status status;
    workers.Serve({.session = 1 + tenant, .model = model, .tenant = tenant, .ns = kNs}, {}, wait,
                  [&status](const absl::StatusOr<PrefillWorkers::Given>& given) { status = given.status(); });
    if (wait == 0) workers.Tick();  // which answers it
    return status;
  };
  const size_t share = PrefillWorkers::kMostWorkers / 2;
  for (uint64_t model = 1; model <= 2 * share; ++model) {
    ASSERT_EQ(serve(0, model, 0), absl::OkStatus());
    clock_.Advance(1000);
  }
  EXPECT_EQ(workers.stats().workers, share) << "its latest ones took the places of its oldest ones";
  EXPECT_EQ(workers.Offers(0, kNs).front().worker, share + 1);
  EXPECT_EQ(serve(1, 1, 0), absl::OkStatus());
  EXPECT_THAT(workers.Offers(1, kNs), SizeIs(1));
}

TEST_F(PrefillWorkersTest, WaitingWorkersKeepTheirOrder) {
  PrefillWorkers workers(clock_, /*tenants=*/1000);
  const auto answers = std::make_shared<std::vector<absl::Status>>();
  const auto serve = [&](uint64_t model) {
    workers.Serve(
        {.session = 1, .model = model, .tenant = 0, .ns = kNs}, {}, kWorkerSecond,
        [answers](const absl::StatusOr<PrefillWorkers::Given>& given) { answers->push_back(given.status()); });
  };
  for (uint64_t model = 1; model <= PrefillWorkers::kLeastWorkers; ++model) serve(model);
  EXPECT_THAT(*answers, IsEmpty());
  serve(PrefillWorkers::kLeastWorkers + 1);
  ASSERT_THAT(*answers, SizeIs(1));
  EXPECT_TRUE(absl::IsResourceExhausted(answers->front()));
  workers.Stop();
}

TEST_F(PrefillWorkersTest, AClosedModelOffersNothing) {
  const Answered waits = Serve(1);
  const uint64_t worker = OnlyWorker();
  workers_.ModelClosed(1, 2);
  workers_.ModelClosed(2, 1);
  EXPECT_EQ(OnlyWorker(), worker);
  const auto [assignment, told] = Assign(worker, Work());
  workers_.ModelClosed(1, 1);
  EXPECT_THAT(workers_.Offers(0, kNs), IsEmpty());
  EXPECT_TRUE(absl::IsUnavailable(**told)) << "its segment goes to another one at once";
}

TEST_F(PrefillWorkersTest, NoCallWaitsAfterTheStop) {
  const Answered waits = Serve(1);
  const auto [one, told] = Assign(OnlyWorker(), Work());
  const Answered second = Serve(2);
  workers_.Stop();
  EXPECT_TRUE(absl::IsUnavailable(**told));
  EXPECT_TRUE(absl::IsUnavailable((*second)->status()));
  EXPECT_TRUE(absl::IsUnavailable((*Serve(3))->status()));
}

}  // namespace
}  // namespace ashlar::daemon
