// SPDX-License-Identifier: Apache-2.0
// A published object is found and landed, byte for byte.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;
using testing::ElementsAre;

constexpr std::byte kPoison{0x5a};

std::vector<MissReason> ReasonsOf(const Match& match) {
  std::vector<MissReason> reasons;
  for (const SegmentResult& segment : match.segments()) reasons.push_back(segment.reason);
  return reasons;
}

class Roundtrip : public testing::TestWithParam<TestEngine::Memory> {};

TEST_P(Roundtrip, LandsWhatWasPublishedInAnyOrder) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options(), {}, GetParam());
  std::vector<Tokens> prompt;
  for (size_t i = 0; i < 6; ++i) prompt.push_back(MakeRun(random(), 20 + random() % 120));

  const Match cold = engine.Lookup(prompt);
  EXPECT_THAT(ReasonsOf(cold), Each(MissReason::kNeverSeen));
  EXPECT_EQ(cold.prefix_depth(), 0u);
  EXPECT_THAT(cold.checkpoint_positions(), ElementsAre(prompt[0].size()));
  engine.PublishPrompt(prompt);

  for (int order = 0; order < 3; ++order) {
    const Match match = engine.Lookup(prompt);
    ASSERT_THAT(ReasonsOf(match), Each(MissReason::kNone));
    EXPECT_EQ(match.prefix_depth(), prompt[0].size());
    engine.FillTargets(kPoison);
    Landing landing = engine.Land(match, prompt);
    EXPECT_THAT(landing.Wait(kPatience), Each(MissReason::kNone));
    EXPECT_TRUE(landing.quiesced());
    uint64_t position = 0;
    for (size_t i = 0; i < prompt.size(); ++i) {
      EXPECT_EQ(match.segments()[i].start, position);
      EXPECT_EQ(match.segments()[i].tier, TierKind::kDram);
      EXPECT_GT(match.segments()[i].bytes, 0u);
      engine.ExpectTuples(match, i, prompt[i]);
      engine.ExpectLanded(KindOfSegment(i), prompt[i], position, kPoison);
      position += prompt[i].size();
    }
    std::shuffle(prompt.begin() + 1, prompt.end(), random);
  }
}

INSTANTIATE_TEST_SUITE_P(Memory, Roundtrip,
                         testing::Values(TestEngine::Memory::kRegistered, TestEngine::Memory::kHosted),
                         [](const auto& instance) {
                           return instance.param == TestEngine::Memory::kHosted ? "Hosted" : "Registered";
                         });

TEST(Lookup, AnswersABatchWithALeaseForEachPrompt) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const std::vector<Tokens> runs = MakePrompt(1, 3, 40);
  engine.PublishPrompt(runs);
  const Tokens other = MakeRun(9, 40);
  const auto concatenate = [](const Tokens& a, const Tokens& b) {
    Tokens all = a;
    all.insert(all.end(), b.begin(), b.end());
    return all;
  };
  const std::vector<Tokens> tokens = {concatenate(runs[0], runs[1]), concatenate(other, runs[2]), other};
  const std::vector<std::vector<uint64_t>> lengths = {{40, 40}, {40, 40}, {40}};
  std::vector<Prompt> prompts;
  for (size_t i = 0; i < tokens.size(); ++i) prompts.push_back({tokens[i], lengths[i]});
  const std::vector<Match> matches = engine.model().Lookup(prompts);
  ASSERT_EQ(matches.size(), 3u);
  EXPECT_THAT(ReasonsOf(matches[0]), ElementsAre(MissReason::kNone, MissReason::kNone));
  EXPECT_THAT(ReasonsOf(matches[1]), ElementsAre(MissReason::kNeverSeen, MissReason::kNone));
  EXPECT_THAT(ReasonsOf(matches[2]), ElementsAre(MissReason::kNeverSeen));
  EXPECT_NE(matches[0].lease(), matches[1].lease());
  EXPECT_EQ(matches[2].lease(), "");
  engine.ExpectTuples(matches[1], 1, runs[2]);
  EXPECT_EQ(matches[1].tuples(0), nullptr);
}

TEST(Lookup, ReportsTooShortSegment) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const Match match = engine.Lookup({MakeRun(1, 30), MakeRun(2, 7)});  // head + tail = 7
  EXPECT_EQ(match.segments()[1].reason, MissReason::kTooShort);
  EXPECT_EQ(engine.Reserve(ObjectKind::kSegment, MakeRun(2, 7)).outcome, ReserveOutcome::kTooShort);
  engine.PublishPrompt({MakeRun(1, 30), MakeRun(2, 8)});  // an interior of one token
  EXPECT_THAT(ReasonsOf(engine.Lookup({MakeRun(1, 30), MakeRun(2, 8)})), Each(MissReason::kNone));
}

TEST(Lookup, RefusesWhatIsInvalid) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const Tokens tokens = MakeRun(1, 30);
  const std::vector<uint64_t> beyond = {20, 20};
  EXPECT_THAT(ReasonsOf(engine.model().Lookup(Prompt{tokens, beyond})), Each(MissReason::kInvalidRequest));
}

TEST(Lookup, MayPrecedeNeed) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const Tokens tokens = MakeRun(1, 30);
  engine.Publish(ObjectKind::kCheckpoint, tokens);
  const std::vector<uint64_t> lengths = {30};
  const auto reason = [&](std::chrono::nanoseconds needed_in) {
    return engine.model().Lookup(Prompt{tokens, lengths, needed_in}).segments()[0].reason;
  };
  EXPECT_EQ(reason(std::chrono::minutes(10)), MissReason::kNone);
  EXPECT_EQ(reason(std::chrono::minutes(11)), MissReason::kInvalidRequest);
  EXPECT_EQ(reason(std::chrono::nanoseconds(-1)), MissReason::kInvalidRequest);
}

// A prompt of a million tokens does not fit into gRPC's default message.
TEST(Lookup, AcceptsMillionTokens) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options(), {.tokens = 2048});
  std::vector<Tokens> prompt = MakePrompt(3, 512, 2048);
  engine.Publish(ObjectKind::kSegment, prompt[300]);
  const Match match = engine.Lookup(prompt);
  ASSERT_EQ(match.segments().size(), 512u);
  for (size_t i = 0; i < prompt.size(); ++i) {
    EXPECT_EQ(match.segments()[i].reason, i == 300 ? MissReason::kNone : MissReason::kNeverSeen) << i;
  }
  engine.ExpectTuples(match, 300, prompt[300]);
}

TEST(Publish, ASecondPublisherIsRefused) {
  DaemonProcess daemon;
  TestEngine first(daemon.client_options()), second(daemon.client_options());
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 50);
  const Reservation reservation = first.Reserve(ObjectKind::kSegment, prompt[1]);
  ASSERT_TRUE(reservation.granted());
  EXPECT_EQ(second.Reserve(ObjectKind::kSegment, prompt[1]).outcome, ReserveOutcome::kBeingPublished);
  EXPECT_EQ(second.Lookup(prompt).segments()[1].reason, MissReason::kBeingPublished);

  first.model().Abandon(reservation);
  EXPECT_EQ(second.Lookup(prompt).segments()[1].reason, MissReason::kAbandoned);
  EXPECT_EQ(first.model().Publish(reservation, first.Compute(ObjectKind::kSegment, prompt[1])),
            PublishOutcome::kUnknownReservation);

  second.Publish(ObjectKind::kSegment, prompt[1]);
  EXPECT_EQ(first.Reserve(ObjectKind::kSegment, prompt[1]).outcome, ReserveOutcome::kAlreadyPresent);
  const Match match = first.Lookup(prompt);
  ASSERT_TRUE(match.segments()[1].hit());
  first.ExpectTuples(match, 1, prompt[1]);
}

TEST(Publish, RefusesSourcesOutsideTheRegion) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const Tokens run = MakeRun(1, 50);
  const PublishParts good = engine.Compute(ObjectKind::kSegment, run);
  const auto outcome = [&](PublishParts parts) {
    const Reservation reservation = engine.Reserve(ObjectKind::kSegment, run);
    EXPECT_TRUE(reservation.granted());
    return engine.model().Publish(reservation, parts);  // which ends the reservation in any case
  };
  PublishParts parts = good;
  parts.linear[1].state = engine.region().data() + engine.region().size() - 4;
  EXPECT_EQ(outcome(parts), PublishOutcome::kBadSource);
  parts = good;
  parts.linear.pop_back();
  EXPECT_EQ(outcome(parts), PublishOutcome::kBadSource);
  parts = good;
  const std::vector<int32_t> elsewhere(good.page_table.size(), 1 << 30);
  parts.page_table = elsewhere;
  EXPECT_EQ(outcome(parts), PublishOutcome::kBadSource);
  parts = good;
  parts.page_table = {};
  EXPECT_EQ(outcome(parts), PublishOutcome::kBadSource);
  EXPECT_EQ(outcome(good), PublishOutcome::kPublished);
}

TEST(Land, RefusesTargetsOutsideThePages) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  const std::vector<Tokens> prompt = MakePrompt(1, 2, 50);
  engine.PublishPrompt(prompt);
  const Match match = engine.Lookup(prompt);
  engine.FillTargets(kPoison);
  const LandSegment far[] = {{1, 100'000}};
  const std::vector<int32_t> table(4, 1 << 30);
  const LandSegment near[] = {{1, 0}};
  const LandSegment unknown[] = {{7, 0}};
  EXPECT_THAT(engine.model().Land(match, {}, far).Wait(kPatience), ElementsAre(MissReason::kInvalidRequest));
  EXPECT_THAT(engine.model().Land(match, table, near).Wait(kPatience), ElementsAre(MissReason::kInvalidRequest));
  EXPECT_THAT(engine.model().Land(match, table, unknown).Wait(kPatience), ElementsAre(MissReason::kInvalidRequest));
  EXPECT_TRUE(engine.TargetsAre(kPoison));
}

TEST(Regions, ShrinkableMemfdsAreRefused) {
  DaemonProcess daemon;
  auto client = Client::Connect(daemon.client_options());
  ASSERT_TRUE(client.ok()) << client.status();
  std::FILE* file = std::tmpfile();  // no memfd, no seals
  EXPECT_EQ((*client)->RegisterRegion(fileno(file), 4096).status().code(), absl::StatusCode::kInvalidArgument);
  std::fclose(file);
}

}  // namespace
}  // namespace ashlar::integration
