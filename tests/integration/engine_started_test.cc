// SPDX-License-Identifier: Apache-2.0
// The engine API over a real daemon: lookups that are started while the daemon hangs, prompts that are stored without a
// lookup, and handoffs without a cluster.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "tests/integration/grouped_engine.h"

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::Code;
using engine::Request;
using testing::StartsWith;

class EngineStarted : public testing::Test {
 protected:
  double Calls(const std::string& method) const {
    return daemon_.Metric("ashlar_rpcs_total{code=\"OK\",method=\"" + method + "\"}");
  }
  DaemonProcess daemon_;
};

// If calls hang, expired lookups are abandoned: processing four at a time would take 16 seconds.
TEST_F(EngineStarted, LookupsEndInTimeIfTheDaemonHangs) {
  constexpr std::chrono::milliseconds kTimeout{500};
  constexpr size_t kRequests = 128;
  GroupedEngine with(daemon_, Grouping::kOne);
  const std::string rpc = daemon_.client_options().rpc_socket, session = daemon_.client_options().session_socket;
  engine::OpenOptions options = with.Options(rpc, session);
  options.timeout_ms = static_cast<uint32_t>(kTimeout.count());
  options.memory = {.kind = engine::MemoryKind::kNone};
  Cache cache;
  // A busy machine may take longer.
  ASSERT_TRUE(Eventually([&] { return Cache::Open(options, &cache).code == engine::Code::kOk; }));
  daemon_.Freeze();
  std::vector<Asked> asked;
  for (size_t i = 0; i < kRequests; ++i) asked.emplace_back(std::vector<Tokens>{{static_cast<int32_t>(i), 1, 2, 3}});
  std::vector<Request> requests(kRequests);
  const auto began = std::chrono::steady_clock::now();
  for (size_t i = 0; i < kRequests; ++i) ASSERT_GOOD(cache.StartBegin(&asked[i].prompt, 1, &requests[i]));
  for (Request& request : requests) ASSERT_GOOD(request.WaitPlan());
  const auto took = std::chrono::steady_clock::now() - began;
  daemon_.Thaw();
  EXPECT_LT(took, kRequests / 4 * kTimeout / 2) << "each would wait for its turn";
  size_t abandoned = 0;
  for (const Request& request : requests) {
    EXPECT_FALSE(request.plan().segments[0].used);
    abandoned += engine::MissName(request.plan().segments[0].reason) == std::string("busy");
    EXPECT_EQ(request.plan().step_count, 1u) << "all of it is computed";
  }
  EXPECT_GE(abandoned, kRequests / 2);
}

TEST_F(EngineStarted, AStoringEngineMakesNoLookups) {
  GroupedEngine writer(daemon_, Grouping::kApart);
  const std::vector<Tokens> segments = {{1, 2, 3, 4, 5, 6, 7, 8}, Tokens(40, 9), Tokens(50, 11)};
  const auto ask = [&segments] {
    Asked asked(segments, {}, 5);
    asked.prompt.fill = asked.prompt.store_only = true;
    return asked;
  };
  Asked asked = ask();
  Request request;
  ASSERT_GOOD(writer.cache.Begin(&asked.prompt, 1, &request));
  uint32_t missing = 0;
  request.missing(&missing);
  ASSERT_EQ(missing, 3u);
  EXPECT_THAT(Say(request.Finish()), StartsWith("9 ")) << "missing() is not done";
  writer.PublishMissing(request);
  request = Request();
  EXPECT_EQ(Calls("Match") + Calls("LookupAndLand"), 0);
  EXPECT_EQ(Calls("Reserve"), 1);

  // Segments that are published are no longer missing, and afterwards such a request behaves like one that found
  // nothing.
  ASSERT_GOOD(writer.cache.StartBegin(&asked.prompt, 1, &request));
  ASSERT_GOOD(request.WaitPlan());
  request.missing(&missing);
  EXPECT_EQ(missing, 0u);
  EXPECT_EQ(request.plan().cached_tokens, 0u);
  ASSERT_GOOD(request.Finish());
  EXPECT_EQ(Calls("Match") + Calls("LookupAndLand"), 0);

  GroupedEngine reader(daemon_, Grouping::kOne);
  asked.prompt.fill = asked.prompt.store_only = false;
  const GroupedEngine::Tables pages = reader.Take(asked.tokens.size());
  reader.Put(pages, asked.prompt);
  ASSERT_GOOD(reader.cache.Begin(&asked.prompt, 1, &request));
  EXPECT_EQ(request.plan().cached_tokens, 8u + 32 + 42);
  ASSERT_GOOD(request.Finish());
  reader.ExpectLanded(pages, segments[0], 0);

  // Such a request may still look again; without fill it may not.
  Asked other = ask();
  for (int32_t& token : other.tokens) token += 100;
  const GroupedEngine::Tables own = writer.Take(other.tokens.size());
  writer.Put(own, other.prompt);
  ASSERT_GOOD(writer.cache.Begin(&other.prompt, 1, &request));
  writer.PublishMissing(request);
  ASSERT_GOOD(writer.LookAgain(request, own));
  EXPECT_EQ(request.plan().cached_tokens, 8u + 32 + 42);
  ASSERT_GOOD(request.Finish());
  other.prompt.fill = false;
  EXPECT_EQ(Say(writer.cache.Begin(&other.prompt, 1, &request)), "3 prompts[0].store_only: requires fill");
}

// One after another, each would take its full time with a daemon that hangs.
TEST_F(EngineStarted, RunsAreAbandonedTogether) {
  constexpr int32_t kRuns = 70;  // a call takes 64
  std::vector<Tokens> segments;
  for (int32_t i = 0; i < kRuns; ++i) segments.emplace_back(16, 100 + i);
  {
    GroupedEngine with(daemon_, Grouping::kOne);
    Asked asked(segments, {}, 1);
    asked.prompt.fill = asked.prompt.store_only = true;
    Request request;
    ASSERT_GOOD(with.cache.Begin(&asked.prompt, 1, &request));
    uint32_t missing = 0;
    request.missing(&missing);
    ASSERT_EQ(missing, 70u);
  }  // the cache's end waits for it
  EXPECT_TRUE(Eventually([&] { return Calls("Abandon") == 2; })) << "a call counts once it has been answered";
}

TEST_F(EngineStarted, HandoffsWithoutAClusterAreRefused) {
  GroupedEngine writer(daemon_, Grouping::kOne);
  const Tokens tokens = {1, 2, 3};
  engine::Text text{.tokens = tokens.data(), .token_count = tokens.size()};
  EXPECT_EQ(Say(writer.cache.Handoff(text, "node1", 100)), "14 unavailable");
  uint8_t outcome = 0;
  engine::Job job;
  ASSERT_GOOD(writer.cache.StartHandoff(text, "node1", 100, &outcome, &job));
  ASSERT_GOOD(job.Wait());
  EXPECT_STREQ(engine::HandoffName(outcome), "unavailable");
  EXPECT_EQ(Say(writer.cache.StartHandoff(text, "", 100, &outcome, &job)), "3 node: expected a name of 1 to 253 bytes");
  EXPECT_EQ(Say(writer.cache.StartHandoff(text, "node1", 100, nullptr, &job)), "3 outcome: null");
  EXPECT_EQ(Say(writer.cache.StartHandoff(text, "node1", 100, &outcome, nullptr)), "3 job: null");
  text.tokens = nullptr;
  EXPECT_EQ(Say(writer.cache.StartHandoff(text, "node1", 100, &outcome, &job)), "3 text.tokens: empty");
  EXPECT_STREQ(engine::HandoffName(99), "unknown");
}

// Begins prompts of eight cold segments, until other engines are given a part of one.
void BeginBesideOthers(GroupedEngine& asking, Asked& asked, Request& request) {
  for (int32_t first = 1; request.segments_computed_elsewhere() == 0 && first < 10'000; first += 10) {
    std::vector<Tokens> segments;
    for (int32_t i = 0; i < 8; ++i) segments.emplace_back(40, first + i);
    request = Request();
    asked = Asked(segments, {}, 1);
    asked.prompt.fill = asked.prompt.cold_parallel = true;
    ASSERT_GOOD(asking.cache.Begin(&asked.prompt, 1, &request));
  }
  ASSERT_GT(request.segments_computed_elsewhere(), 0u);
}

// One thread polls both engines: neither waits for the other.
TEST_F(EngineStarted, SegmentsAreComputedForAnotherEngineWithoutWaiting) {
  GroupedEngine asking(daemon_, Grouping::kOne), serving(daemon_, Grouping::kOne);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  Request work;
  engine::Job serves;
  size_t served = 0;
  const auto serve = [&] {
    ASSERT_GOOD(serves.Wait());
    if (serves.Result().code == Code::kOk) {
      uint32_t count = 0;
      work.missing(&count);
      ASSERT_EQ(count, 1u);
      serving.PublishMissing(work);
      ++served;
    } else {
      ASSERT_EQ(serves.Result().code, Code::kPending);
    }
    ASSERT_GOOD(serving.cache.StartServePrefill(200, &work, &serves));
  };
  ASSERT_GOOD(serving.cache.StartServePrefill(10'000, &work, &serves));
  EXPECT_EQ(serves.Poll().code, Code::kPending);
  ASSERT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_prefill_workers") == 1; }));

  Asked asked({}, {}, 0);
  Request request;
  ASSERT_NO_FATAL_FAILURE(BeginBesideOthers(asking, asked, request));
  asking.PublishMissing(request);
  EXPECT_EQ(Say(request.StartWaitCold(1000, nullptr)), "3 job: null");
  engine::Job waits;
  ASSERT_GOOD(request.StartWaitCold(30'000, &waits));
  if (waits.Poll().code == Code::kPending && served == 0) {
    EXPECT_EQ(request.PollPlan().code, Code::kPending) << "the request is the job's";
  }
  while (waits.Poll().code == Code::kPending) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    if (serves.Poll().ok()) serve();
  }
  ASSERT_GOOD(waits.Result());
  EXPECT_GT(served, 0u);
  const GroupedEngine::Tables pages = asking.Take(asked.tokens.size());
  ASSERT_GOOD(asking.LookAgain(request, pages));
  EXPECT_EQ(request.plan().cached_tokens, 40u + 7 * (40 - 2 * GroupedEngine::kSeam)) << "all is there";
  ASSERT_GOOD(request.Finish());
}

// No engine computes the segment assigned to the other engine: the wait ends with its timeout, or with the request.
TEST_F(EngineStarted, AWaitForOtherEnginesEndsAtItsTimeoutOrWithItsRequest) {
  GroupedEngine asking(daemon_, Grouping::kOne), idle(daemon_, Grouping::kOne);
  Request work, request;
  engine::Job serves, waits;
  ASSERT_GOOD(idle.cache.StartServePrefill(60'000, &work, &serves));
  ASSERT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_prefill_workers") == 1; }));
  Asked asked({}, {}, 0);
  ASSERT_NO_FATAL_FAILURE(BeginBesideOthers(asking, asked, request));
  ASSERT_GOOD(request.StartWaitCold(1, &waits));
  ASSERT_GOOD(waits.Wait());
  EXPECT_THAT(waits.Result().code, testing::AnyOf(Code::kPending, Code::kRestart));
  const auto began = std::chrono::steady_clock::now();
  ASSERT_GOOD(request.StartWaitCold(60'000, &waits));
  request = Request();
  ASSERT_GOOD(waits.Wait());
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
}

// A request, and its prompt's tokens, may end while a call that it started continues.
TEST_F(EngineStarted, AStartedCallKeepsTheTokens) {
  GroupedEngine asking(daemon_, Grouping::kOne), serving(daemon_, Grouping::kOne);
  Request work, request;
  engine::Job serves, waits;
  ASSERT_GOOD(serving.cache.StartServePrefill(60'000, &work, &serves));
  ASSERT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_prefill_workers") == 1; }));
  Asked asked({}, {}, 0);
  ASSERT_NO_FATAL_FAILURE(BeginBesideOthers(asking, asked, request));
  const Tokens tokens = asked.tokens;
  uint32_t own = 0, all = 0;
  request.missing(&own);
  ASSERT_GOOD(serves.Wait());
  ASSERT_GOOD(request.StartWaitCold(30'000, &waits));
  std::ranges::fill(asked.tokens, 77'777);
  work = Request();  // it is not computed there
  while (!waits.Poll().ok()) {
    serving.cache.ServePrefill(20, &work);  // reports it, and may get more work
    work = Request();
  }
  EXPECT_EQ(waits.Result().code, Code::kRestart);
  const engine::Run* const runs = request.missing(&all);
  ASSERT_GT(all, own);
  for (uint32_t i = 0; i < all; ++i) {
    EXPECT_EQ(Tokens(runs[i].tokens, runs[i].tokens + runs[i].token_count),
              Tokens(tokens.begin() + 40 * runs[i].segment, tokens.begin() + 40 * (runs[i].segment + 1)));
  }
}

// If the daemon refuses the call that reports an outcome, the next call reports it.
TEST(EngineServes, AnOutcomeIsReportedAfterARefusedCall) {
  const auto with = [](const std::string& rate) {
    return DaemonOptions{.tenants = "tenants:\n  - {name: alpha, uids: [" + std::to_string(::getuid()) +
                                    "], dram_bytes: 64MiB" + rate + "}\n",
                         .more = "prefill: {min_patience_milliseconds: 600000}\n"};
  };
  DaemonProcess daemon(with(""));
  size_t reloads = 0;
  const auto reload = [&](const std::string& rate) {
    daemon.Configure(with(rate));
    daemon.Signal(SIGHUP);
    ++reloads;
    return Eventually([&] {
      size_t count = 0;
      const std::string log = daemon.log();
      for (size_t at = 0; (at = log.find("configuration reloaded", at)) != std::string::npos; ++at) ++count;
      return count == reloads;
    });
  };
  GroupedEngine asking(daemon, Grouping::kOne), serving(daemon, Grouping::kOne);
  Request work, request;
  engine::Job serves;
  ASSERT_GOOD(serving.cache.StartServePrefill(60'000, &work, &serves));
  ASSERT_TRUE(Eventually([&] { return daemon.Metric("ashlar_prefill_workers") == 1; }));
  Asked asked({}, {}, 0);
  ASSERT_NO_FATAL_FAILURE(BeginBesideOthers(asking, asked, request));
  ASSERT_GOOD(serves.Wait());
  ASSERT_GOOD(serves.Result());
  serving.PublishMissing(work);
  ASSERT_TRUE(reload(", calls_per_second: 1"));
  for (int32_t i = 0; i < 20; ++i) {
    const Asked other({Tokens(40, 20'000 + i)});
    Request lookup;
    ASSERT_GOOD(serving.cache.Begin(&other.prompt, 1, &lookup));
  }
  const Code refused = serving.cache.ServePrefill(0, &work).code;
  if (refused == Code::kOk || refused == Code::kPending) GTEST_SKIP() << "the rate has allowed the call";
  ASSERT_TRUE(reload(""));
  const auto outcome = [&](const std::string& name) {
    return daemon.Metric("ashlar_prefill_assignments_total{outcome=\"" + name + "\"}");
  };
  const Code asks = serving.cache.ServePrefill(0, &work).code;
  EXPECT_TRUE(asks == Code::kOk || asks == Code::kPending);
  EXPECT_TRUE(Eventually([&] { return outcome("completed") + outcome("failed") > 0; }));
  EXPECT_EQ(outcome("failed"), 0);
}

TEST_F(EngineStarted, ARestartedLookupKeepsTheTokens) {
  GroupedEngine with(daemon_, Grouping::kOne);
  Asked asked({Tokens(40, 5), Tokens(50, 6)}, {}, 5);
  asked.prompt.fill = true;
  Request request;
  ASSERT_GOOD(with.cache.Begin(&asked.prompt, 1, &request));
  with.PublishMissing(request);
  daemon_.Freeze();
  // Their arguments are not read before a thread is free.
  std::vector<Asked> others;
  for (int32_t i = 0; i < 4; ++i) others.emplace_back(std::vector<Tokens>{{i, 1, 2, 3}});
  std::vector<Request> busy(others.size());
  for (size_t i = 0; i < others.size(); ++i) ASSERT_GOOD(with.cache.StartBegin(&others[i].prompt, 1, &busy[i]));
  ASSERT_GOOD(request.StartLookAgain());
  std::ranges::fill(asked.tokens, 77'777);
  daemon_.Thaw();
  ASSERT_GOOD(request.WaitPlan());
  EXPECT_EQ(request.plan().cached_tokens, 40u + 50 - 2 * GroupedEngine::kSeam);
}

// Even with unresolved pages: an engine polls between two steps.
TEST_F(EngineStarted, PollingForManyUnresolvedPagesDoesNotWait) {
  constexpr int32_t kUnresolved = 50;
  GroupedEngine with(daemon_, Grouping::kOne);
  const std::string rpc = daemon_.client_options().rpc_socket, session = daemon_.client_options().session_socket;
  engine::OpenOptions options = with.Options(rpc, session);
  options.timeout_ms = options.land_ms = options.quiet_ms = 50;
  Cache cache;
  ASSERT_TRUE(Eventually([&] { return Cache::Open(options, &cache).code == engine::Code::kOk; }));
  daemon_.Freeze();
  for (int32_t i = 0; i < kUnresolved; ++i) {
    const std::vector<int32_t> pages = {i};
    const Asked asked({{i, 1, 2, 3}}, pages);
    Request request;
    ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  }
  std::vector<int32_t> back(kUnresolved);
  auto fastest = std::chrono::nanoseconds::max();
  for (int i = 0; i < 10; ++i) {
    const auto began = std::chrono::steady_clock::now();
    EXPECT_EQ(cache.TakeQuiescedPages(back.data(), back.size(), 0), 0u);
    fastest = std::min<std::chrono::nanoseconds>(fastest, std::chrono::steady_clock::now() - began);
  }
  EXPECT_LT(fastest, std::chrono::milliseconds(kUnresolved / 2)) << "a millisecond for each is a wait";
  daemon_.Thaw();
  size_t taken = 0;
  EXPECT_TRUE(
      Eventually([&] { return (taken += cache.TakeQuiescedPages(back.data(), back.size(), 0)) == back.size(); }));
}

TEST_F(EngineStarted, ACacheIsOpenedWithoutWaiting) {
  GroupedEngine described(daemon_, Grouping::kApart);
  const std::string rpc = daemon_.client_options().rpc_socket, session = daemon_.client_options().session_socket;
  engine::OpenOptions options = described.Options(rpc, session);
  Cache cache;
  engine::Job job;
  EXPECT_EQ(Say(Cache::StartOpen(options, nullptr, &job)), "3 out: null");
  EXPECT_EQ(Say(Cache::StartOpen(options, &cache, nullptr)), "3 job: null");
  options.timeout_ms = 1500;
  daemon_.Freeze();
  const auto began = std::chrono::steady_clock::now();
  ASSERT_GOOD(Cache::StartOpen(options, &cache, &job));
  EXPECT_EQ(job.Poll().code, Code::kPending);
  EXPECT_EQ(job.Result().code, Code::kPending);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(1000)) << "it does not wait";
  ASSERT_GOOD(job.Wait());
  EXPECT_NE(job.Result().code, Code::kOk) << "the daemon hangs";
  EXPECT_NE(job.Result().code, Code::kPending);
  daemon_.Thaw();

  options.model.weights_digest = "";
  ASSERT_GOOD(Cache::StartOpen(options, &cache, &job));
  ASSERT_GOOD(job.Wait());
  EXPECT_THAT(Say(job.Result()), testing::HasSubstr("weights_digest: ")) << "as Open says it";
  EXPECT_THAT(Say(cache.Begin(nullptr, 0, nullptr)), StartsWith("9 the cache is not open"));
  options.model.weights_digest = "1";
  options.timeout_ms = 10'000;
  ASSERT_GOOD(Cache::StartOpen(options, &cache, &job));
  EXPECT_TRUE(Eventually([&] { return job.Poll().ok(); }));
  ASSERT_GOOD(job.Result());
  EXPECT_TRUE(cache.connected());
  uint32_t places = 0;
  cache.places(&places);
  EXPECT_EQ(places, 2u);
}

}  // namespace
}  // namespace ashlar::integration
