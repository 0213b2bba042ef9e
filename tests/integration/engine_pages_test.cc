// SPDX-License-Identifier: Apache-2.0
// The engine API: who owns a request's pages, and what a commit keeps of them, in any order of calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "client/engine/background.h"
#include "client/engine/handles.h"
#include "client/engine/plan_landing.h"
#include "proto/outcome.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_options.h"
#include "tests/integration/prefix_engine.h"

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::Code;
using engine::Request;
using std::chrono::milliseconds;
using testing::StartsWith;
using testing::UnorderedElementsAreArray;

// The arguments of Commit for a text that a test engine has computed.
struct Committed {
  Committed(PrefixEngine& test, const Text& its_text) : text(its_text), parts(test.Compute(text)) {
    for (const CapturedState& captured : parts.checkpoints) {
      auto& tensors = linear.emplace_back();
      for (const auto& part : captured.linear) {
        tensors.push_back({.layer = part.layer, .state = part.state, .conv_tail = part.conv_tail});
      }
    }
    for (size_t i = 0; i < linear.size(); ++i) {
      checkpoints.push_back({parts.checkpoints[i].depth, linear[i].data(), static_cast<uint32_t>(linear[i].size())});
    }
    pages.assign(parts.page_table.begin(), parts.page_table.end());
    outcomes.resize(checkpoints.size());
    given = {.tokens = text.tokens.data(),
             .token_count = text.tokens.size(),
             .prompt_tokens = text.tokens.size(),
             .checkpoints = checkpoints.data(),
             .checkpoint_count = static_cast<uint32_t>(checkpoints.size()),
             .page_table = pages.data(),
             .page_count = pages.size(),
             .outcomes = outcomes.data()};
    std::ranges::copy(text.conversation, given.conversation);
  }
  const Text text;
  CommitParts parts;
  std::vector<std::vector<engine::LinearTensors>> linear;
  std::vector<engine::Checkpoint> checkpoints;
  std::vector<int32_t> pages;
  std::vector<uint8_t> outcomes;
  engine::Text given;
};

class EnginePages : public testing::Test {
 protected:
  std::vector<int32_t> Targets() const { return {test_.target_table().begin(), test_.target_table().end()}; }
  std::vector<int32_t> TakenBack(Cache& cache) {
    std::vector<int32_t> back(Targets().size());
    back.resize(cache.TakeQuiescedPages(back.data(), back.size(), 20'000));
    return back;
  }
  bool WrittenLater() {
    test_.FillTargets(kPoison);
    return Eventually([&] { return !test_.TargetsAre(kPoison); }, milliseconds(200));
  }

  const std::vector<Tokens> segments_ = {MakeRun(1, 50), MakeRun(2, 90), MakeRun(3, 40)};
  DaemonProcess daemon_;
  TestEngine test_{[this] {
    ClientOptions options = daemon_.client_options();
    options.timeout = milliseconds(1000);
    return options;
  }()};
};

TEST_F(EnginePages, UnresolvedPagesReturnOnceWhenQuiesced) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_, {}, {}, true, /*land_ms=*/200, /*quiet_ms=*/200);
  const Asked asked(segments_, test_.target_table());
  daemon_.Freeze();
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  EXPECT_EQ(request.Finish().code, Code::kOtherPages);
  EXPECT_EQ(request.PollQuiesced().code, Code::kPending);
  daemon_.Thaw();
  std::vector<int32_t> back(Targets().size());
  EXPECT_TRUE(Eventually([&] {
    cache.TakeQuiescedPages(back.data(), 0, 10);  // asks the daemon again
    return request.PollQuiesced().code != Code::kPending;
  }));
  // The first one to ask gets them.
  const engine::Status said = request.PollQuiesced();
  const uint64_t taken = cache.TakeQuiescedPages(back.data(), back.size(), 0);
  EXPECT_TRUE(said.ok() ? taken == 0 : taken == back.size()) << said.message << ", " << taken << " pages";
}

TEST_F(EnginePages, UnfinishedRequestKeepsPagesUntilQuiesced) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  const Asked asked(segments_, test_.target_table());
  std::optional<Request> request(std::in_place);
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &*request));
  request.reset();
  Request next;
  EXPECT_THAT(Say(cache.Begin(&asked.prompt, 1, &next)), StartsWith("3 prompts[0].page_table[0]: page "));
  EXPECT_THAT(TakenBack(cache), UnorderedElementsAreArray(Targets()));
  EXPECT_FALSE(WrittenLater());
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &next));
  ASSERT_GOOD(next.Finish());
  next = Request();  // finished: the pages were the engine's
  EXPECT_TRUE(cache.TakeQuiescedPages(Targets().data(), Targets().size(), 0) == 0);
}

TEST_F(EnginePages, AreReturnedAtOnceWithoutLanding) {
  Cache cache = OpenSharing(test_);
  const Asked asked(segments_, test_.target_table());
  for (const bool waits : {true, false}) {
    Request request, next;
    ASSERT_GOOD(waits ? cache.Begin(&asked.prompt, 1, &request) : cache.StartBegin(&asked.prompt, 1, &request));
    ASSERT_GOOD(request.WaitPlan());
    EXPECT_EQ(request.plan().cached_tokens, 0u);
    if (waits) {
      ASSERT_GOOD(request.PollQuiesced());
    }
    request = Request();  // not finished
    EXPECT_TRUE(cache.TakeQuiescedPages(Targets().data(), Targets().size(), 0) == 0);
    ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &next));
    ASSERT_GOOD(next.Finish());
  }
}

TEST_F(EnginePages, PaddingAfterThePromptIsNotReturnedAsPages) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  const Asked asked(segments_, test_.target_table());
  const auto existing = static_cast<int32_t>(test_.pages().pages);
  const std::vector<int32_t> targets = Targets();
  ASSERT_FALSE(targets.empty());
  for (const int32_t padding : {-1, existing, targets.back()}) {
    std::vector<int32_t> padded = targets;
    padded.insert(padded.end(), 3, padding);
    engine::Prompt prompt = asked.prompt;
    prompt.page_table = padded.data();
    prompt.page_count = padded.size();
    {
      Request request;
      ASSERT_GOOD(cache.Begin(&prompt, 1, &request));
    }
    std::vector<int32_t> back(padded.size());
    back.resize(cache.TakeQuiescedPages(back.data(), back.size(), 20'000));
    EXPECT_THAT(back, UnorderedElementsAreArray(Targets())) << "padded with " << padding;
  }
}

TEST_F(EnginePages, ReturnWhenRequestEndsDuringStart) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  daemon_.Freeze();
  {
    Asked asked(segments_, test_.target_table());
    Request request;
    ASSERT_GOOD(cache.StartBegin(&asked.prompt, 1, &request));
    request = Request();
    std::ranges::fill(asked.tokens, -1);  // and overwrites its tokens
  }
  daemon_.Thaw();
  EXPECT_TRUE(Eventually([&] {
    std::vector<int32_t> back(Targets().size());
    return cache.TakeQuiescedPages(back.data(), back.size(), 100) == back.size();
  }));
  EXPECT_FALSE(WrittenLater());
  EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_leases") == 0; }));
}

// For example a landing of states only, of a model without attention.
TEST_F(EnginePages, ALandingWithoutPagesEndsWithoutWaiting) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  engine::CacheState& state = *engine::Access::Of(cache);
  const Asked asked(segments_);
  engine::PromptText text;
  ASSERT_GOOD(text.Take(state, asked.prompt, "prompt"));
  engine::LeasedMatch match;
  match.Take(state.model.Lookup(text.Asked()));
  ASSERT_TRUE(match->segments()[0].hit());
  engine::RequestPlan plan(state, text, match);
  engine::RequestPages pages(state);
  std::optional<engine::PlanLanding> landing(std::in_place, state, text, match, plan, pages);
  daemon_.Freeze();
  const std::vector<LandSegment> states = {{.segment = 0, .tuples_only = true}};
  landing->Adopt(state.model.Land(*match, {}, states), states);
  EXPECT_FALSE(landing->quiesced());
  std::future<void> ended = std::async(std::launch::async, [&landing] { landing.reset(); });
  EXPECT_EQ(ended.wait_for(std::chrono::seconds(5)), std::future_status::ready) << "it waits for the daemon";
  daemon_.Thaw();
  ended.get();
  match.Release();
  // The next request ends what is quiesced, and its lease.
  EXPECT_TRUE(Eventually([&] {
    {
      Request next;
      EXPECT_TRUE(cache.Begin(&asked.prompt, 1, &next).ok());
    }
    return daemon_.Metric("ashlar_leases") == 0;
  }));
}

TEST_F(EnginePages, PublishFromCachePagesIsRefused) {
  test_.PublishPrompt({segments_[0]});
  Cache cache = OpenSharing(test_);
  const Asked first({segments_[0]}, test_.target_table());
  {
    Request unfinished;
    ASSERT_GOOD(cache.Begin(&first.prompt, 1, &unfinished));
  }
  Asked asked(segments_);
  asked.prompt.fill = true;
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  const engine::ComputedRun run{.page_table = first.prompt.page_table, .page_count = first.prompt.page_count};
  EXPECT_THAT(Say(request.Publish(0, run, nullptr)), StartsWith("3 computed.page_table[0]: page "));
}

TEST_F(EnginePages, APromptsLastTokenIsComputed) {
  Cache cache = OpenSharing(test_);
  const Asked asked(segments_, test_.target_table(), /*query=*/0);
  Request request;
  EXPECT_THAT(Say(cache.Begin(&asked.prompt, 1, &request)),
              StartsWith("3 prompts[0].segment_lengths: the segments cover the whole prompt"));
}

TEST_F(EnginePages, ASessionCutAfterTheVerdictRestartsReaders) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  const Asked asked(segments_, test_.target_table());
  Request request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
  ASSERT_GOOD(request.Finish());
  BreakConnections(daemon_.client_options().session_socket);
  std::vector<float> state(4 * 32 * 24);
  const engine::LayerAdvance load{.layer = 0, .begin = 0, .end = 50, .state = {.data = state.data()}};
  EXPECT_EQ(request.Advance(load).code, Code::kRestart);
  EXPECT_EQ(request.Finish().code, Code::kRestart);
  EXPECT_EQ(StepsOf(request), "run 0-187 ");
  ASSERT_GOOD(request.Finish());
}

TEST_F(EnginePages, PublishOutlivesRequest) {
  Cache cache = OpenSharing(test_);
  Asked asked(segments_);
  asked.prompt.fill = true;
  engine::Job job;
  uint8_t outcome = 0;
  {
    Request request;
    ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &request));
    uint32_t count;
    const engine::Run* const missing = request.missing(&count);
    ASSERT_EQ(count, 3u);
    const PublishParts parts = test_.Compute(ObjectKind::kCheckpoint, segments_[0]);
    std::vector<engine::LinearTensors> linear;
    for (const auto& part : parts.linear) {
      linear.push_back({.layer = part.layer, .state = part.state, .conv_tail = part.conv_tail});
    }
    std::vector<int32_t> pages(parts.page_table.begin(), parts.page_table.end());
    ASSERT_FALSE(missing[0].transition);
    ASSERT_GOOD(request.StartPublish(
        0, {linear.data(), static_cast<uint32_t>(linear.size()), pages.data(), pages.size(), parts.first_position},
        &outcome, &job));
    std::ranges::fill(pages, -1);
    linear.clear();
    EXPECT_THAT(Say(request.Publish(0, {}, nullptr)), StartsWith("3 missing: 0 was already published or abandoned"));
    request.Cancel();
  }
  ASSERT_GOOD(job.Wait());
  EXPECT_STREQ(engine::PublishName(outcome), "published");
  Request found;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &found));
  EXPECT_EQ(found.plan().segments[0].reason, 0);
  EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_reservations_pending") <= 2; }));
}

// So many tasks wait that no more are accepted: a worker's plan is then not landed, and the result is not kOk.
TEST_F(EnginePages, APlanRefusedByAFullQueueRestarts) {
  test_.PublishPrompt(segments_);
  Cache cache = OpenSharing(test_);
  const Asked asked(segments_);
  Request planned;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &planned));
  std::vector<uint8_t> bytes(planned.PlanBytes(nullptr, 0));
  planned.PlanBytes(bytes.data(), bytes.size());
  const engine::PlanToLand plan{bytes.data(), bytes.size(), Targets().data(), Targets().size()};
  const std::vector<int32_t> pages = Targets();
  engine::PlanToLand to_land = plan;
  to_land.page_table = pages.data();
  daemon_.Freeze();
  std::vector<Request> waiting(1200);
  for (Request& request : waiting) {
    if (!cache.StartBegin(&asked.prompt, 1, &request).ok()) break;
  }
  // A thread that takes its first task only now makes space for one more.
  std::array<Request, 1 + engine::Background::kMostThreads> landed;
  auto refused = landed.begin();
  for (; refused != landed.end(); ++refused) {
    ASSERT_GOOD(cache.StartLand(&to_land, 1, &*refused));
    if (refused->PollPlan().ok()) break;
  }
  ASSERT_NE(refused, landed.end());
  EXPECT_EQ(StepsOf(*refused), "run 0-187 ");
  EXPECT_EQ(refused->Finish().code, Code::kRestart);
  daemon_.Thaw();
}

class EngineCommits : public testing::Test {
 protected:
  DaemonProcess daemon_;
  PrefixEngine test_{daemon_.client_options()};
  Cache cache_ = OpenSharing(test_, {}, {.capture_tokens = 1});
};

TEST_F(EngineCommits, AreReadAtTheCall) {
  const Tokens tokens = MakeRun(1, 603);
  Committed committed(test_, {tokens, {300, tokens.size()}});
  engine::Job job;
  ASSERT_GOOD(cache_.StartCommit(&committed.given, 1, &job));
  std::ranges::fill(committed.pages, -1);
  committed.linear.clear();
  committed.checkpoints.clear();
  ASSERT_GOOD(job.Wait());
  EXPECT_STREQ(engine::CommitName(committed.outcomes[1]), "kept");
  test_.ExpectResumes(test_.Lookup([&] {
    Tokens longer = tokens;
    longer.push_back(1);
    return longer;
  }()),
                      tokens, tokens.size());
}

TEST_F(EngineCommits, CommitFromCachePagesIsRefused) {
  const Tokens tokens = MakeRun(1, 603);
  Committed committed(test_, {tokens, {tokens.size()}});
  test_.Publish(ObjectKind::kCheckpoint, MakeRun(2, 50));
  const Asked asked({MakeRun(2, 50)}, committed.pages);
  {
    Request unfinished;
    ASSERT_GOOD(cache_.Begin(&asked.prompt, 1, &unfinished));
  }
  EXPECT_THAT(Say(cache_.Commit(&committed.given, 1)), StartsWith("3 texts[0].page_table[0]: page "));
  std::vector<int32_t> back(committed.pages.size());
  EXPECT_EQ(cache_.TakeQuiescedPages(back.data(), back.size(), 20'000), back.size());
  ASSERT_GOOD(cache_.Commit(&committed.given, 1));
  EXPECT_STREQ(engine::CommitName(committed.outcomes[0]), "kept");
}

TEST_F(EngineCommits, KeepAnExactTextWhoseInteriorWasDropped) {
  const Tokens begin = MakeRun(1, 300), section = MakeRun(2, 80);
  test_.Publish(ObjectKind::kSegment, section);
  const Asked asked({begin, section}, test_.target_table());
  Committed committed(test_, {asked.tokens, {asked.tokens.size()}});
  Request request;
  ASSERT_GOOD(cache_.Begin(&asked.prompt, 1, &request));
  ASSERT_FALSE(request.plan().exact);
  ASSERT_GOOD(request.Finish());
  const uint32_t lost[] = {1};
  EXPECT_EQ(request.DropSegments(lost, 1).code, Code::kRestart);
  EXPECT_TRUE(request.plan().exact);
  ASSERT_GOOD(request.Finish());
  committed.given.request = &request;
  ASSERT_GOOD(cache_.Commit(&committed.given, 1));
  EXPECT_STREQ(engine::CommitName(committed.outcomes[0]), "kept");
  Tokens longer = asked.tokens;
  longer.push_back(1);
  EXPECT_EQ(test_.Lookup(longer).prefix().depth, asked.tokens.size());
}

// After an interior, a text belongs only to its conversation, whatever the request did later.
TEST_F(EngineCommits, KeepTheStateOfTheirFinishedRequest) {
  const Tokens begin = MakeRun(1, 300), section = MakeRun(2, 80);
  test_.Publish(ObjectKind::kSegment, section);
  const Asked asked({begin, section}, test_.target_table());
  ConversationId conversation;
  conversation.fill(7);
  Committed committed(test_, {asked.tokens, {asked.tokens.size()}, Provenance::kComposed, conversation});
  Request request;
  ASSERT_GOOD(cache_.Begin(&asked.prompt, 1, &request));
  ASSERT_FALSE(request.plan().exact);
  committed.given.request = &request;
  EXPECT_EQ(Say(cache_.Commit(&committed.given, 1)), "9 texts[0].request: not finished");
  ASSERT_GOOD(request.Finish());
  engine::Job job;
  ASSERT_GOOD(cache_.StartCommit(&committed.given, 1, &job));
  request.Cancel();
  request.Release();
  ASSERT_GOOD(job.Wait());
  EXPECT_STREQ(engine::CommitName(committed.outcomes[0]), "kept");
  Tokens longer = asked.tokens;
  longer.push_back(1);
  EXPECT_EQ(test_.Lookup(longer).prefix().depth, 0u) << "another conversation does not find it";
  EXPECT_EQ(test_.Lookup(longer, conversation).prefix().depth, asked.tokens.size());
  // For a text without a request, or one that resumed from composed blocks, the engine declares that itself.
  const Tokens other = MakeRun(5, 300);
  Committed said(test_, {other, {other.size()}, Provenance::kComposed, conversation});
  said.given.composed = true;
  ASSERT_GOOD(cache_.Commit(&said.given, 1));
  Tokens behind = other;
  behind.push_back(1);
  EXPECT_EQ(test_.Lookup(behind).prefix().depth, 0u);
}

}  // namespace
}  // namespace ashlar::integration
