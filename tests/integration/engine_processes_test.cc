// SPDX-License-Identifier: Apache-2.0
// The engine API in several processes: plans as bytes, and a separate engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_options.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::Code;
using engine::Request;
using testing::HasSubstr;
using testing::StartsWith;

// A scheduler without pages, and one worker per rank, each with its own session.
TEST(EngineApiInProcesses, RanksLandASchedulersPlan) {
  DaemonProcess daemon;
  const std::vector<Tokens> segments = {MakeRun(1, 50), MakeRun(2, 90)};
  const auto shape = [](uint32_t rank) { return Shape{.shard = {.rank = rank, .size = 2}}; };
  TestEngine scheduler(daemon.client_options(), shape(0)), first(daemon.client_options(), shape(0)),
      second(daemon.client_options(), shape(1));
  first.PublishPrompt(segments);
  second.PublishPrompt(segments);
  Cache plans = OpenSharing(scheduler, {0, 2}, {}, false);
  const Asked asked(segments);
  std::optional<Request> planned(std::in_place);
  ASSERT_GOOD(plans.Begin(&asked.prompt, 1, &*planned));
  EXPECT_EQ(StepsOf(*planned), "checkpoint 0-50 run 50-54 interior 54-137 run 137-147 ");
  EXPECT_EQ(planned->Finish().code, Code::kFailedPrecondition) << "it has no pages";
  std::vector<uint8_t> bytes(planned->PlanBytes(nullptr, 0));
  ASSERT_EQ(planned->PlanBytes(bytes.data(), bytes.size()), bytes.size());

  for (TestEngine* const rank : {&first, &second}) {
    Cache cache = OpenSharing(*rank, {rank == &first ? 0u : 1u, 2});
    rank->FillTargets(kPoison);
    const engine::PlanToLand plan{bytes.data(), bytes.size(), rank->target_table().data(), rank->target_table().size()};
    Request request;
    ASSERT_GOOD(cache.Land(&plan, 1, &request));
    EXPECT_EQ(StepsOf(request), StepsOf(*planned));
    ASSERT_GOOD(request.Finish());
    rank->ExpectLanded(ObjectKind::kCheckpoint, segments[0], 0, kPoison);
    rank->ExpectLanded(ObjectKind::kSegment, segments[1], 50, kPoison);
    const uint32_t lost[] = {1};  // another rank reports it
    EXPECT_EQ(request.DropSegments(lost, 1).code, Code::kRestart);
    EXPECT_EQ(StepsOf(request), "checkpoint 0-50 run 50-147 ");
    ASSERT_GOOD(request.Finish());
  }
  // After a plan was abandoned, every worker that has not landed it misses.
  planned.reset();
  Cache cache = OpenSharing(first, {0, 2});
  const engine::PlanToLand plan{bytes.data(), bytes.size(), first.target_table().data(), first.target_table().size()};
  Request late;
  EXPECT_TRUE(Eventually([&] {  // the release is in flight
    EXPECT_TRUE(cache.Land(&plan, 1, &late).ok());
    if (late.plan().cached_tokens == 0) return true;
    late.Finish();     // the engine owns its pages again
    late = Request();  // and the lease may end
    return false;
  }));
  EXPECT_EQ(StepsOf(late), "run 0-147 ");
  EXPECT_EQ(late.Finish().code, Code::kRestart) << "other ranks compute by another plan";
  ASSERT_GOOD(late.Finish());
}

TEST(EngineApiInProcesses, AnInvalidPlanIsRefusedByName) {
  DaemonProcess daemon;
  TestEngine test(daemon.client_options());
  Cache cache = OpenSharing(test);
  const std::vector<Tokens> segments = {MakeRun(1, 50), MakeRun(2, 90)};
  test.PublishPrompt(segments);
  const Asked asked(segments);
  Request planned, request;
  ASSERT_GOOD(cache.Begin(&asked.prompt, 1, &planned));
  std::vector<uint8_t> bytes(planned.PlanBytes(nullptr, 0));
  planned.PlanBytes(bytes.data(), bytes.size());
  const auto land = [&](const std::vector<uint8_t>& plan) {
    const engine::PlanToLand given{plan.data(), plan.size(), test.target_table().data(), test.target_table().size()};
    return Say(cache.Land(&given, 1, &request));
  };
  EXPECT_THAT(land({1, 2, 3}), StartsWith("3 plans[0].magic: "));
  std::vector<uint8_t> other = bytes;
  other[30] ^= 1;
  EXPECT_THAT(land(other), StartsWith("3 plans[0].checksum: "));
  EXPECT_THAT(land(bytes), StartsWith("0 "));
  TestEngine wide(daemon.client_options(), {.layers = 3});
  Cache elsewhere = OpenSharing(wide);
  const engine::PlanToLand given{bytes.data(), bytes.size(), wide.target_table().data(), wide.target_table().size()};
  EXPECT_THAT(Say(elsewhere.Land(&given, 1, &request)), StartsWith("3 plans[0].namespace: "));
}

// Runs one of the engines shown in docs/integrate.md, and returns its output.
std::string OutputOf(const std::string& engine, const ClientOptions& options) {
  FILE* const said = ::popen((engine + " " + options.rpc_socket + " " + options.session_socket).c_str(), "r");
  if (said == nullptr) return "";
  std::string text(4096, 0);
  text.resize(std::fread(text.data(), 1, text.size(), said));
  EXPECT_EQ(::pclose(said), 0);
  return text;
}

TEST(ShortestEngine, HitsWhatItHasPublished) {
  DaemonProcess daemon;
  const std::string text = OutputOf(SHORTEST, daemon.client_options());
  EXPECT_THAT(text, StartsWith("0 of 3 segments hit, 34 of 117 tokens computed: "));
  EXPECT_THAT(text, HasSubstr("\n3 of 3 segments hit, 34 of 117 tokens computed: "));
}

// A turn only computes its own message.
TEST(ShortestEngine, ResumesItsConversation) {
  DaemonProcess daemon;
  const std::string text = OutputOf(SHORTEST_CONVERSATION, daemon.client_options());
  EXPECT_THAT(text, StartsWith("34 of 117 tokens computed, kept: "));
  EXPECT_THAT(text, HasSubstr("\nits own states, 21 of 150 tokens computed, kept: "));
  EXPECT_THAT(text, HasSubstr("\nits own states, 10 of 172 tokens computed, kept: "));
}

// The third prompt resumes where the first two diverge. In a second run all three resume, with the same answers.
TEST(ShortestEngine, ResumesPrefixes) {
  DaemonProcess daemon;
  const std::string first = OutputOf(SHORTEST_PREFIXES, daemon.client_options());
  EXPECT_THAT(first, StartsWith("64 of 64 tokens computed: "));
  EXPECT_THAT(first, HasSubstr("\n63 of 63 tokens computed: "));
  EXPECT_THAT(first, HasSubstr("\n16 of 65 tokens computed: "));
  const std::string second = OutputOf(SHORTEST_PREFIXES, daemon.client_options());
  EXPECT_THAT(second, StartsWith("15 of 64 tokens computed: "));
  EXPECT_THAT(second, HasSubstr("\n14 of 63 tokens computed: "));
  EXPECT_THAT(second, HasSubstr("\n16 of 65 tokens computed: "));
  const auto answers = [](const std::string& text) {
    std::vector<std::string> all;
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      all.emplace_back(line.substr(line.find(": ")));
    }
    return all;
  };
  EXPECT_EQ(answers(second), answers(first));
}

}  // namespace
}  // namespace ashlar::integration
