// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "storage/testing/other_node.h"

namespace ashlar::daemon {
namespace {

using storage::OtherNode;
using storage::TestPlan;
using testing::Each;
using testing::ElementsAre;
using testing::SizeIs;
using enum PlannedSegmentState;

constexpr storage::Nanos kSecond = 1'000'000'000;
constexpr storage::SessionId kAsker = 1, kHelper = 2;
constexpr storage::TenantId kTenant = 1;
constexpr uint64_t kDram = 128;  // extents

// Another node's workers, controlled by the test.
class FakeElsewhere final : public PrefillElsewhere {
 public:
  struct Asked {
    RemoteWorker worker;
    PrefillWork work;
    storage::Nanos patience;
    std::function<void(absl::Status)> done;
  };
  void Find(storage::TenantId, const NamespaceId&, std::function<void(std::vector<RemoteWorker>)> done) override {
    waiting.push_back(std::move(done));
    if (!holds) Answer();
  }
  void Answer() {
    for (const auto& done : std::exchange(waiting, {})) done(workers);
  }
  void Prefill(const RemoteWorker& worker, const PrefillWork& work, storage::Nanos patience,
               std::function<void(absl::Status)> done) override {
    asked.push_back({worker, work, patience, std::move(done)});
  }
  storage::Nanos Estimate(const RemoteWorker&, uint64_t) const override { return 0; }
  void Probe(storage::TenantId, const NamespaceId&, std::shared_ptr<const v1::Prompt>,
             std::function<void(std::vector<v1::NodeProbe>)> done) override {
    done(nodes);
  }

  std::vector<v1::NodeProbe> nodes;

  bool holds = false;  // answers when the test says so
  std::vector<RemoteWorker> workers;
  std::vector<Asked> asked;
  std::vector<std::function<void(std::vector<RemoteWorker>)>> waiting;
};

class RouterTest : public testing::Test {
 protected:
  RouterTest() {
    rig_.cache->OpenSession(kAsker, kTenant);
    rig_.cache->OpenSession(kHelper, kTenant);
    router_.Attach(&elsewhere_);
  }
  ~RouterTest() override {
    router_.Stop();
    for (const storage::SessionId session : {kAsker, kHelper}) rig_.cache->CloseSession(session, [] {});
    other_.Settle(rig_);
    EXPECT_EQ(other_.leased(), 0u);
    const storage::Cache::Stats left = rig_.cache->stats();
    EXPECT_EQ(left.leases + left.reservations + left.copies_under_way, 0u);
    EXPECT_EQ(router_.figures().plans + router_.figures().pending, 0u);
  }

  static ColdSegment Cold(uint64_t text, uint64_t tokens = 64) {
    const ObjectHeader plan = TestPlan(text, tokens);
    return {.work = {.tenant = kTenant, .ns = plan.ns, .key = plan.key, .kind = plan.kind, .tokens = plan.tokens},
            .shard = plan.shard,
            .bytes = plan.bytes};
  }
  void OfferRemote(std::vector<std::string> nodes, double rate = 1000) {
    for (const std::string& node : nodes) {
      auto member = std::make_shared<const Member>(Member{.node = node});
      elsewhere_.workers.push_back(
          {.member = std::move(member), .worker = 1, .tokens_per_second = rate, .capacity = 8});
    }
  }
  Router::Planned Plan(std::vector<ColdSegment> cold, bool computes = true, storage::SessionId session = kAsker,
                       double rate = 1000) {
    absl::StatusOr<Router::Planned> planned = absl::UnknownError("not answered");
    router_.Plan({.session = session, .tenant = kTenant, .tokens_per_second = rate, .computes = computes},
                 std::move(cold), [&](absl::StatusOr<Router::Planned> answer) { planned = std::move(answer); });
    EXPECT_TRUE(planned.ok()) << planned.status();
    return planned.ok() ? *std::move(planned) : Router::Planned{};
  }
  // A requester's answer; nothing while it waits.
  using Answered = std::shared_ptr<std::optional<absl::StatusOr<Router::States>>>;
  Answered Await(uint64_t plan, storage::Nanos wait = 3600 * kSecond, storage::SessionId session = kAsker) {
    const auto answered = std::make_shared<std::optional<absl::StatusOr<Router::States>>>();
    router_.Await(session, plan, wait, [answered](absl::StatusOr<Router::States> states) { *answered = states; });
    return answered;
  }
  Router::States Now(uint64_t plan) {
    const Answered answered = Await(plan, 0);
    return answered->has_value() && (*answered)->ok() ? ***answered : Router::States{};
  }

  // The other node computes the requested segment, and this node is told.
  void Complete(size_t asked, uint64_t text) {
    const ObjectHeader plan = TestPlan(text, 64);
    ASSERT_TRUE(other_.rig.Publish(OtherNode::kItself, plan, text));
    other_.rig.Settle();
    const storage::Query query{.kind = plan.kind, .key = plan.key, .shard = plan.shard, .tokens = plan.tokens};
    ASSERT_TRUE(other_.Offer(*rig_.cache, query));
    const auto done = std::move(elsewhere_.asked.at(asked).done);
    done(absl::OkStatus());
    rig_.cache->adoption().SettleRemote(kTenant, plan.key, plan.shard);
  }
  // Fills the free space of this node's memory with objects that an engine leases.
  void FillAll() {
    for (uint64_t text = 1000; rig_.Publish(kHelper, TestPlan(text, 64), text); ++text) {
      ASSERT_EQ(rig_.Lookup(kHelper, TestPlan(text, 64)).found[0].reason, MissReason::kNone);
    }
  }
  bool Has(uint64_t text) { return !rig_.cache->upkeep().inventory().Where(kTenant, TestPlan(text, 64).key).empty(); }

  OtherNode other_;
  storage::TieredRig rig_{{.hbm = 0, .dram = kDram, .ssd = 0, .remote = &other_}};
  FakeElsewhere elsewhere_;
  Router router_{
      rig_.clock, *rig_.cache, {.patience = 2, .least_patience = kSecond, .tries = 2, .drop_after = 60 * kSecond}};
};

TEST_F(RouterTest, FallsBackToRequesterWithoutWorkers) {
  const Router::Planned planned = Plan({Cold(1), Cold(2)});
  EXPECT_EQ(planned.plan, 0u);
  EXPECT_THAT(planned.elsewhere, Each(false));
  EXPECT_EQ(router_.figures().alone, 1u);
}

TEST_F(RouterTest, RemoteResultIsLoadedAndKept) {
  OfferRemote({"b"});
  const Router::Planned planned = Plan({Cold(1), Cold(2)});
  EXPECT_THAT(planned.elsewhere, ElementsAre(false, true));
  ASSERT_THAT(elsewhere_.asked, SizeIs(1));
  EXPECT_EQ(elsewhere_.asked[0].work.key, TestPlan(2, 64).key);
  // 64 tokens at 1000 per second, twice, plus a second.
  EXPECT_EQ(elsewhere_.asked[0].patience, kSecond + 2 * 64'000'000);
  const Answered waits = Await(planned.plan);
  EXPECT_FALSE(waits->has_value());
  Complete(0, 2);
  EXPECT_FALSE(waits->has_value()) << "its bytes are on their way";
  other_.Settle(rig_);
  ASSERT_TRUE(waits->has_value());
  EXPECT_THAT(***waits, ElementsAre(kFallback, kPresent));
  EXPECT_TRUE(Has(2));
  EXPECT_EQ(rig_.cache->stats().leases, 1u);
  router_.End(kAsker, planned.plan);
  EXPECT_EQ(rig_.cache->stats().leases, 0u);
}

TEST_F(RouterTest, AnEngineOfThisNodeComputesAsWell) {
  std::vector<uint64_t> given;
  const PrefillWorkers::Engine engine{.session = kHelper, .model = 1, .tenant = kTenant, .ns = TestPlan(1, 64).ns};
  const auto answer = [&](absl::StatusOr<PrefillWorkers::Given> work) {
    if (work.ok()) given.push_back(work->assignment);
  };
  router_.workers().Serve(engine, {}, 10 * kSecond, answer);
  const Router::Planned planned = Plan({Cold(1), Cold(2)});
  EXPECT_THAT(planned.elsewhere, ElementsAre(false, true));
  ASSERT_THAT(given, SizeIs(1));
  ASSERT_TRUE(rig_.Publish(kHelper, TestPlan(2, 64), 2));
  const PrefillWorkers::Result result{given[0], true};
  router_.workers().Serve(engine, {&result, 1}, 10 * kSecond, answer);
  EXPECT_THAT(Now(planned.plan), ElementsAre(kFallback, kPresent));
  // An engine is not its own worker.
  EXPECT_EQ(Plan({Cold(3), Cold(4)}, true, kHelper).plan, 0u);
  router_.End(kAsker, planned.plan);
}

TEST_F(RouterTest, ALostWorkersSegmentGoesToAnotherThenToTheRequester) {
  OfferRemote({"b", "c"}, 100'000);
  const Router::Planned planned = Plan({Cold(1)});
  EXPECT_THAT(planned.elsewhere, ElementsAre(true));
  const Answered waits = Await(planned.plan);
  std::exchange(elsewhere_.asked[0].done, nullptr)(absl::UnavailableError("gone"));
  router_.Tick();
  ASSERT_THAT(elsewhere_.asked, SizeIs(2));
  EXPECT_NE(elsewhere_.asked[0].worker.member->node, elsewhere_.asked[1].worker.member->node);
  EXPECT_FALSE(waits->has_value());
  std::exchange(elsewhere_.asked[1].done, nullptr)(absl::AbortedError("it does not want to"));
  router_.Tick();
  ASSERT_TRUE(waits->has_value());
  EXPECT_THAT(***waits, ElementsAre(kFallback));
  EXPECT_EQ(router_.figures().given_back, 1u);
  router_.End(kAsker, planned.plan);
}

TEST_F(RouterTest, AStalledWorkersResultIsFenced) {
  OfferRemote({"b"}, 100'000);
  const Router::Planned planned = Plan({Cold(1)});
  const Answered waits = Await(planned.plan);
  rig_.clock.Advance(elsewhere_.asked[0].patience);
  router_.Tick();
  ASSERT_TRUE(waits->has_value());
  EXPECT_THAT(***waits, ElementsAre(kFallback));
  Complete(0, 1);
  other_.Settle(rig_);
  EXPECT_EQ(router_.figures().late, 1u);
  EXPECT_EQ(rig_.cache->stats().leases, 0u);
  EXPECT_FALSE(Has(1)) << "the asker no longer waits for the segment";
  router_.End(kAsker, planned.plan);
}

TEST_F(RouterTest, AHolderThatDiesDuringTheFetchIsALostWorker) {
  OfferRemote({"b"}, 100'000);
  const Router::Planned planned = Plan({Cold(1)});
  Complete(0, 1);
  ASSERT_GT(other_.pending(), 0u);
  while (other_.pending() > 0) other_.End(0, absl::UnavailableError("gone"));
  other_.Settle(rig_);
  router_.Tick();
  EXPECT_THAT(Now(planned.plan), ElementsAre(kFallback));
  router_.End(kAsker, planned.plan);
}

TEST_F(RouterTest, TwoRequestersShareASegment) {
  OfferRemote({"b"}, 100'000);
  const Router::Planned first = Plan({Cold(1)});
  const Router::Planned second = Plan({Cold(1)}, true, kHelper);
  EXPECT_THAT(elsewhere_.asked, SizeIs(1));
  EXPECT_THAT(second.elsewhere, ElementsAre(true));
  router_.End(kAsker, first.plan);
  const Answered waits = Await(second.plan, kSecond, kHelper);
  Complete(0, 1);
  other_.Settle(rig_);
  EXPECT_THAT(***waits, ElementsAre(kPresent));
  EXPECT_EQ(rig_.cache->stats().leases, 1u);
  router_.SessionEnded(kHelper);
}

TEST_F(RouterTest, ARequesterThatDiesKeepsNothing) {
  OfferRemote({"b"}, 100'000);
  const Router::Planned planned = Plan({Cold(1)});
  const Answered waits = Await(planned.plan);
  router_.SessionEnded(kAsker);
  EXPECT_TRUE(absl::IsNotFound((*waits)->status()));
  Complete(0, 1);
  EXPECT_EQ(router_.figures().late, 1u);
  EXPECT_TRUE(absl::IsNotFound((*Await(planned.plan))->status()));
}

TEST_F(RouterTest, PlansBelongToASessionAndAreBounded) {
  OfferRemote({"b"}, 1e9);
  const Router::Planned planned = Plan({Cold(1)});
  EXPECT_TRUE(absl::IsNotFound((*Await(planned.plan, 0, kHelper))->status()));
  router_.End(kHelper, planned.plan);
  EXPECT_EQ(router_.figures().plans, 1u);
  Complete(0, 1);
  other_.Settle(rig_);
  rig_.clock.Advance(61 * kSecond);
  router_.Tick();
  EXPECT_EQ(router_.figures().plans, 0u);
  // The segments assigned to a node are bounded; the requester computes the rest.
  uint64_t open = 0;
  for (uint64_t text = 2; text < 66; ++text) open += Plan({Cold(text)}).plan != 0 ? 1 : 0;
  EXPECT_EQ(open, 24u);
  router_.SessionEnded(kAsker);
}

TEST_F(RouterTest, AWarmUpWithoutWorkersIsNotComputed) {
  EXPECT_EQ(Plan({Cold(1)}, /*computes=*/false).plan, 0u);
  OfferRemote({"b"}, 1);
  const Router::Planned planned = Plan({Cold(1), Cold(2)}, /*computes=*/false);
  EXPECT_THAT(planned.elsewhere, Each(true)) << "however slow";
  Complete(0, 1);
  other_.Settle(rig_);
  std::exchange(elsewhere_.asked[1].done, nullptr)(absl::AbortedError("no"));
  router_.Tick();
  EXPECT_THAT(Now(planned.plan), ElementsAre(kPresent, kFallback));
  router_.End(kAsker, planned.plan);
}

TEST_F(RouterTest, AnOperatorsWarmUpEndsWithItsSegments) {
  OfferRemote({"b"});
  const auto warm = [this] {
    Router::States states;
    router_.Warm(kTenant, {Cold(1), Cold(2)}, [&](absl::StatusOr<Router::States> answer) { states = *answer; });
    return states;
  };
  EXPECT_THAT(warm(), Each(kPending));
  EXPECT_THAT(warm(), Each(kPending)) << "asked again, not begun again";
  EXPECT_THAT(elsewhere_.asked, SizeIs(2));
  EXPECT_EQ(router_.figures().plans, 1u);
  Complete(0, 1);
  other_.Settle(rig_);
  EXPECT_THAT(warm(), ElementsAre(kPresent, kPending));
  std::exchange(elsewhere_.asked[1].done, nullptr)(absl::AbortedError("no"));
  router_.Tick();
  EXPECT_EQ(router_.figures().plans, 0u);
  EXPECT_EQ(rig_.cache->stats().leases, 0u);
  elsewhere_.workers.clear();
  EXPECT_THAT(warm(), ElementsAre(kPresent, kFallback));
}

TEST_F(RouterTest, AFailedWarmUpIsReportedBeforeItIsStartedAgain) {
  OfferRemote({"b"});
  const auto warm = [this] {
    Router::States states;
    router_.Warm(kTenant, {Cold(1), Cold(2)}, [&](absl::StatusOr<Router::States> answer) { states = *answer; });
    return states;
  };
  const auto fail = [this](size_t assignment, const absl::Status& why) {
    std::exchange(elsewhere_.asked[assignment].done, nullptr)(why);
    router_.Tick();
  };
  EXPECT_THAT(warm(), Each(kPending));
  fail(0, absl::AbortedError("it is busy"));
  fail(1, absl::OutOfRangeError("it is too long"));
  EXPECT_THAT(warm(), ElementsAre(kFallback, kRefused));
  EXPECT_THAT(elsewhere_.asked, SizeIs(2)) << "nothing is started again";
  EXPECT_THAT(warm(), Each(kPending));
  EXPECT_THAT(elsewhere_.asked, SizeIs(4));
  fail(2, absl::OutOfRangeError("it is too long"));
  fail(3, absl::OutOfRangeError("it is too long"));
  rig_.clock.Advance(Router::Options().drop_after + 1);
  router_.Tick();
  EXPECT_THAT(warm(), Each(kPending)) << "old failures are not reported";
  fail(4, absl::CancelledError("the test ends"));
  fail(5, absl::CancelledError("the test ends"));
}

TEST_F(RouterTest, AWarmUpIsRefusedIfAllEnginesThatWereAskedRefuse) {
  OfferRemote({"b", "c"});
  const auto warm = [this] {
    Router::States states;
    router_.Warm(kTenant, {Cold(1)}, [&](absl::StatusOr<Router::States> answer) { states = *answer; });
    return states;
  };
  for (const bool second_is_busy : {false, true}) {
    const size_t first = elsewhere_.asked.size();
    EXPECT_THAT(warm(), Each(kPending));
    std::exchange(elsewhere_.asked[first].done, nullptr)(absl::OutOfRangeError("it is too long"));
    router_.Tick();
    EXPECT_THAT(warm(), Each(kPending)) << "the other engine has it";
    ASSERT_THAT(elsewhere_.asked, SizeIs(first + 2));
    const absl::Status why =
        second_is_busy ? absl::AbortedError("it is busy") : absl::OutOfRangeError("it is too long");
    std::exchange(elsewhere_.asked[first + 1].done, nullptr)(why);
    router_.Tick();
    EXPECT_THAT(warm(), Each(second_is_busy ? kFallback : kRefused));
  }
}

TEST_F(RouterTest, ANodeGetsItsShareForAnyNumberOfWorkers) {
  const auto member = std::make_shared<const Member>(Member{.node = "b"});
  for (uint64_t worker = 1; worker <= 8; ++worker) {
    elsewhere_.workers.push_back({.member = member, .worker = worker, .tokens_per_second = 1e5, .capacity = 8});
  }
  std::vector<ColdSegment> cold;
  for (uint64_t text = 1; text <= 40; ++text) cold.push_back(Cold(text));
  const Router::Planned planned = Plan(cold, /*computes=*/false);
  EXPECT_THAT(elsewhere_.asked, SizeIs(Router::Options().given_to_a_node));
  router_.End(kAsker, planned.plan);
  for (const FakeElsewhere::Asked& asked : elsewhere_.asked) asked.done(absl::CancelledError("it is late"));
}

// No engine polls the plan, however long it takes.
TEST_F(RouterTest, AWarmUpIsNotErasedWhileItIsComputed) {
  OfferRemote({"b"}, 1);  // one token per second
  const auto warm = [this] {
    Router::States states;
    router_.Warm(kTenant, {Cold(1, 600)}, [&](absl::StatusOr<Router::States> answer) { states = *answer; });
    return states;
  };
  EXPECT_THAT(warm(), Each(kPending));
  rig_.clock.Advance(300 * kSecond);
  router_.Tick();
  EXPECT_EQ(router_.figures().plans, 1u);
  EXPECT_THAT(warm(), Each(kPending));
  EXPECT_THAT(elsewhere_.asked, SizeIs(1)) << "it is not begun again";
  EXPECT_EQ(router_.figures().failed, 0u);
}

TEST_F(RouterTest, SpaceIsReservedBeforeTheComputation) {
  OfferRemote({"b"}, 100'000);
  const Router::Planned planned = Plan({Cold(1)});
  EXPECT_EQ(rig_.cache->stats().reservations, 1u);
  FillAll();
  Complete(0, 1);
  other_.Settle(rig_);
  EXPECT_THAT(Now(planned.plan), ElementsAre(kPresent));
  EXPECT_EQ(rig_.cache->stats().reservations, 0u);
  EXPECT_EQ(Plan({Cold(2)}).plan, 0u) << "a segment without space is not assigned";
  EXPECT_THAT(elsewhere_.asked, SizeIs(1));
  router_.End(kAsker, planned.plan);
}

TEST_F(RouterTest, SpaceIsYieldedToALocalPublisher) {
  const PrefillWorkers::Engine engine{.session = kHelper, .model = 1, .tenant = kTenant, .ns = TestPlan(1, 64).ns};
  uint64_t given = 0;
  const auto answer = [&](absl::StatusOr<PrefillWorkers::Given> work) {
    if (work.ok() && work->assignment != 0) given = work->assignment;
  };
  router_.workers().Serve(engine, {}, 10 * kSecond, answer);
  const Router::Planned planned = Plan({Cold(1), Cold(2)});
  ASSERT_THAT(planned.elsewhere, ElementsAre(false, true));
  FillAll();
  EXPECT_FALSE(rig_.Publish(kHelper, TestPlan(2, 64), 2)) << "the last space is held";
  router_.YieldSpace(kTenant, TestPlan(2, 64).key);
  EXPECT_TRUE(rig_.Publish(kHelper, TestPlan(2, 64), 2));
  const PrefillWorkers::Result result{given, true};
  router_.workers().Serve(engine, {&result, 1}, 10 * kSecond, answer);
  EXPECT_THAT(Now(planned.plan), ElementsAre(kFallback, kPresent));
  router_.End(kAsker, planned.plan);
}

TEST_F(RouterTest, SpaceIsReleasedWithThePlan) {
  OfferRemote({"b", "c"}, 100'000);
  const Router::Planned planned = Plan({Cold(1), Cold(2)});
  const Key key = TestPlan(1, 64).key;
  EXPECT_EQ(rig_.cache->stats().reservations, 2u);
  std::exchange(elsewhere_.asked[0].done, nullptr)(absl::UnavailableError("gone"));
  router_.Tick();
  ASSERT_THAT(elsewhere_.asked, SizeIs(3));
  EXPECT_EQ(rig_.cache->stats().reservations, 2u) << "the space stays reserved for the next worker";
  router_.End(kAsker, planned.plan);
  EXPECT_EQ(rig_.cache->stats().reservations, 0u);
  EXPECT_EQ(rig_.Lookup(kHelper, TestPlan(1, 64)).found[0].reason, MissReason::kNeverSeen);
  EXPECT_FALSE(rig_.cache->adoption().Knows(kTenant, key));
}

TEST_F(RouterTest, ASessionThatEndsDuringTheSearchHasNoPlan) {
  OfferRemote({"b"}, 100'000);
  elsewhere_.holds = true;
  std::optional<absl::Status> answered;
  router_.Plan({.session = kAsker, .tenant = kTenant}, {Cold(1)},
               [&](const absl::StatusOr<Router::Planned>& planned) { answered = planned.status(); });
  router_.SessionEnded(kAsker);
  elsewhere_.Answer();
  ASSERT_TRUE(answered.has_value());
  EXPECT_TRUE(absl::IsCancelled(*answered));
  EXPECT_THAT(elsewhere_.asked, SizeIs(0));
  EXPECT_EQ(router_.figures().plans, 0u);
}

TEST_F(RouterTest, ASegmentThatEndsDuringTheSearchIsPlannedAgain) {
  OfferRemote({"b"}, 100'000);
  const Router::Planned first = Plan({Cold(1)});
  elsewhere_.holds = true;
  std::optional<Router::Planned> second;
  router_.Plan({.session = kHelper, .tenant = kTenant, .tokens_per_second = 1000}, {Cold(1)},
               [&](const absl::StatusOr<Router::Planned>& planned) { second = *planned; });
  router_.End(kAsker, first.plan);
  elsewhere_.Answer();
  ASSERT_TRUE(second.has_value());
  EXPECT_THAT(second->elsewhere, ElementsAre(true));
  ASSERT_THAT(elsewhere_.asked, SizeIs(2));
  Complete(1, 1);
  other_.Settle(rig_);
  EXPECT_EQ(router_.figures().pending, 0u);
  router_.End(kHelper, second->plan);
}

TEST_F(RouterTest, WorkForAnotherNodeEndsWithThatNode) {
  const PrefillWorkers::Engine engine{.session = kHelper, .model = 1, .tenant = kTenant, .ns = TestPlan(1, 64).ns};
  std::optional<PrefillWorkers::Given> given;
  const auto answer = [&](absl::StatusOr<PrefillWorkers::Given> work) {
    if (work.ok()) given = *work;
  };
  router_.workers().Serve(engine, {}, 10 * kSecond, answer);
  const uint64_t worker = router_.workers().Offers(kTenant, engine.ns).at(0).worker;
  std::vector<absl::Status> told;
  const auto done = [&](absl::Status status) { told.push_back(std::move(status)); };
  router_.for_nodes().Compute("b", worker, Cold(1).work, 10 * kSecond, done);
  router_.for_nodes().Compute("b", worker, Cold(2).work, 10 * kSecond, done);
  router_.for_nodes().Compute("b", worker + 1, Cold(3).work, 10 * kSecond, done);
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_TRUE(absl::IsResourceExhausted(told[0])) << "there is no such worker";
  router_.for_nodes().NodeGone("c");
  EXPECT_THAT(told, SizeIs(1));
  router_.for_nodes().NodeGone("b");
  ASSERT_THAT(told, SizeIs(3));
  EXPECT_EQ(router_.figures().given, 0u);
  // A segment that is here already need not be computed.
  ASSERT_TRUE(rig_.Publish(kHelper, TestPlan(4, 64), 4));
  router_.for_nodes().Compute("b", worker, Cold(4).work, 10 * kSecond, done);
  EXPECT_EQ(told.back(), absl::OkStatus());
}

}  // namespace
}  // namespace ashlar::daemon
