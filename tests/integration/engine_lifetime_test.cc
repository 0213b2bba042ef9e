// SPDX-License-Identifier: Apache-2.0
// The engine API when processes fork, memory runs out and connections break.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_options.h"

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMemoryRunsOut = false;  // a sanitizer's own operators must stay
#else
constexpr bool kMemoryRunsOut = true;
#endif

// Allocations of this size and more fail on this thread.
thread_local size_t no_memory_for = SIZE_MAX;

}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// If inlined, malloc and free would look mismatched to the compiler.
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const memory = bytes >= no_memory_for ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
#endif

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::Code;
using engine::Request;

const std::vector<Tokens> kSegments = {MakeRun(1, 50), MakeRun(2, 90), MakeRun(3, 40)};

// Calls of every kind in a child, which must neither succeed nor hang. Returns the process's exit code.
int TryEverything(Cache cache, Request landing, Request starting, engine::Job job, const engine::Prompt& prompt) {
  const auto refused = [](const engine::Status& status) {
    EXPECT_EQ(status.code, Code::kFailedPrecondition) << status.message;
  };
  Request another;
  refused(cache.Begin(&prompt, 1, &another));
  refused(cache.StartBegin(&prompt, 1, &another));
  refused(cache.Land(nullptr, 0, nullptr));
  refused(cache.Commit(nullptr, 0));
  refused(cache.ComputeAlone({}));
  EXPECT_FALSE(cache.connected());
  int32_t page;
  EXPECT_EQ(cache.TakeQuiescedPages(&page, 1, 60'000), 0u);
  engine::OpenOptions sharing;
  sharing.share_with = &cache;
  Cache other;
  refused(Cache::Open(sharing, &other));

  refused(landing.WaitLayer(0));
  refused(landing.Finish());
  refused(landing.LookAgain());
  landing.Cancel();
  landing.Release();
  landing.Abandon(0);
  refused(landing.PollQuiesced());
  EXPECT_EQ(landing.plan().step_count, 0u);
  EXPECT_EQ(landing.PlanBytes(nullptr, 0), 0u);
  refused(starting.WaitPlan());
  refused(job.Wait());
  refused(job.Poll());

  job = {};
  landing = {};
  starting = {};
  cache = {};
  return testing::Test::HasFailure() ? 1 : 0;
}

TEST(EngineFork, AChildIsRefusedAndItsParentContinues) {
  DaemonProcess daemon;
  TestEngine test(daemon.client_options());
  test.PublishPrompt(kSegments);
  Cache cache = OpenSharing(test);
  const Asked asked(kSegments, test.target_table()), elsewhere(kSegments);
  Request landing;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &landing));
  daemon.Freeze();  // all threads wait, and the job waits after them
  Request starting[4];
  for (Request& request : starting) ASSERT_GOOD(cache.StartBegin(&elsewhere.prompt, 1, &request));
  engine::Job job;
  ASSERT_GOOD(cache.StartCommit(nullptr, 0, &job));
  ASSERT_EQ(job.Poll().code, Code::kPending);

  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);  // a call that hangs counts as a failure
    ::_exit(TryEverything(std::move(cache), std::move(landing), std::move(starting[0]), std::move(job), asked.prompt));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;

  daemon.Thaw();
  for (Request& request : starting) ASSERT_GOOD(request.WaitPlan());
  ASSERT_GOOD(job.Wait());
  ASSERT_GOOD(landing.Finish());
  EXPECT_EQ(landing.plan().cached_tokens, 50u + 83 + 33);
}

class EngineLifetime : public testing::Test {
 protected:
  DaemonProcess daemon_;
  TestEngine test_{daemon_.client_options()};
};

TEST_F(EngineLifetime, ACountOfPagesThatWrapsIsRefused) {
  Cache cache = OpenSharing(test_, {}, {.capture_tokens = 1});
  const int32_t token = 1, page = 0;
  const engine::Checkpoint end{.depth = 1};
  uint8_t outcome = 0;
  const engine::Text text{.tokens = &token,
                          .token_count = 1,
                          .prompt_tokens = 1,
                          .checkpoints = &end,
                          .checkpoint_count = 1,
                          .page_table = &page,
                          .page_count = UINT64_MAX / test_.pages().page_tokens + 100,
                          .outcomes = &outcome};
  EXPECT_STREQ(cache.Commit(&text, 1).message, "texts[0].page_count: too many");
}

TEST_F(EngineLifetime, OutOfMemoryIsAStatus) {
  if (!kMemoryRunsOut) GTEST_SKIP() << "a sanitizer has its own operator new";
  Cache cache = OpenSharing(test_);
  const std::vector<int32_t> many(400'000);
  const Asked vast(kSegments, many), asked(kSegments, test_.target_table());
  Request request;
  no_memory_for = 1 << 20;
  const engine::Status begun = cache.Begin(&vast.prompt, 1, &request);
  const engine::Status started = cache.StartBegin(&vast.prompt, 1, &request);
  no_memory_for = SIZE_MAX;
  EXPECT_EQ(begun.code, Code::kResourceExhausted);
  EXPECT_EQ(started.code, Code::kResourceExhausted);
  EXPECT_EQ(request.Finish().code, Code::kFailedPrecondition) << "nothing was begun";
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  ASSERT_GOOD(request.Finish());
}

TEST_F(EngineLifetime, ARequestMayEndWithoutMemory) {
  if (!kMemoryRunsOut) GTEST_SKIP() << "a sanitizer has its own operator new";
  Cache cache = OpenSharing(test_);
  Asked asked(kSegments, test_.target_table());
  asked.prompt.fill = true;
  Request filling;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &filling));
  uint32_t count;
  filling.missing(&count);
  ASSERT_EQ(count, 3u) << "reservations to abandon";
  no_memory_for = 1;
  filling = {};
  no_memory_for = SIZE_MAX;
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  ASSERT_GOOD(request.Finish());
}

TEST_F(EngineLifetime, HandlesEndInAnyOrder) {
  test_.PublishPrompt(kSegments);
  Cache cache = OpenSharing(test_);
  const Asked asked(kSegments, test_.target_table()), elsewhere(kSegments);
  Request request, starting;
  engine::Job job;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  ASSERT_GOOD(cache.StartBegin(&elsewhere.prompt, 1, &starting));
  ASSERT_GOOD(cache.StartCommit(nullptr, 0, &job));
  cache = {};
  ASSERT_GOOD(starting.WaitPlan());
  ASSERT_GOOD(job.Wait());
  ASSERT_GOOD(request.Finish());
  EXPECT_EQ(request.plan().cached_tokens, 50u + 83 + 33);
}

TEST_F(EngineLifetime, EmptyHandlesAnswer) {
  Cache cache;
  Request request;
  int32_t page;
  engine::StoredSegments stored{.segments = 1};
  EXPECT_EQ(cache.data(), nullptr);
  EXPECT_EQ(cache.bytes(), 0u);
  EXPECT_EQ(cache.places(nullptr), nullptr);
  EXPECT_FALSE(cache.connected());
  EXPECT_EQ(cache.Commit(nullptr, 0).code, Code::kFailedPrecondition);
  EXPECT_EQ(cache.TakeQuiescedPages(&page, 1, 60'000), 0u);
  cache.StoredSegments(nullptr);
  cache.StoredSegments(&stored);
  EXPECT_EQ(stored.segments, 0u);
  EXPECT_EQ(request.missing(nullptr), nullptr);
  EXPECT_EQ(request.Finish().code, Code::kFailedPrecondition);
  request.Abandon(0);
  request.Cancel();
  cache = OpenSharing(test_);
  EXPECT_EQ(cache.TakeQuiescedPages(nullptr, 1, 0), 0u);
}

TEST_F(EngineLifetime, AnEngineWithoutPagesReservesNothing) {
  Cache cache = OpenSharing(test_, {}, {}, /*memory=*/false);
  Asked asked(kSegments);
  asked.prompt.fill = true;
  Request request;
  EXPECT_STREQ(cache.Begin(&asked.prompt, 1, &request).message,
               "prompts[0].fill: the cache has no pages to publish from; expected cold_parallel");
}

// The lookup in progress holds the last reference to the request: its end abandons the reservations.
TEST_F(EngineLifetime, ACacheMayEndWhileEndedRequestsAreStillStarting) {
  for (uint64_t round = 0; round < 20; ++round) {
    Cache cache = OpenSharing(test_);
    Asked asked({MakeRun(100 + round, 50)}, test_.target_table());
    asked.prompt.fill = true;
    Request request;
    ASSERT_GOOD(cache.StartBegin(&asked.prompt, 1, &request));
    request = {};
    cache = {};
  }
}

TEST_F(EngineLifetime, PollingReturnsPagesAfterACutConnection) {
  ClientOptions options = daemon_.client_options();
  options.timeout = std::chrono::milliseconds(1000);
  TestEngine impatient(options);
  Cache cache = OpenSharing(impatient, {}, {}, true, /*land_ms=*/200, /*quiet_ms=*/200);
  const Asked asked(kSegments, impatient.target_table());
  daemon_.Freeze();
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  EXPECT_EQ(request.Finish().code, Code::kOtherPages);
  BreakConnections(options.rpc_socket);  // the question whether the pages are quiesced is lost
  std::vector<int32_t> back(impatient.target_table().size());
  EXPECT_EQ(cache.TakeQuiescedPages(back.data(), back.size(), 0), 0u);
  daemon_.Thaw();
  EXPECT_TRUE(Eventually([&] { return cache.TakeQuiescedPages(back.data(), back.size(), 0) == back.size(); }));
}

}  // namespace
}  // namespace ashlar::integration
