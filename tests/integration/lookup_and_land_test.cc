// SPDX-License-Identifier: Apache-2.0
// Lookup and landing in one call: the same results as with two calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "proto/limits.h"
#include "tests/integration/corrupt.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/prefix_engine.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using std::chrono::milliseconds;
using testing::Contains;
using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::byte kPoison{0x5a}, kOwn{0xa5};

std::vector<MissReason> ReasonsOf(const Match& match) {
  std::vector<MissReason> reasons;
  for (const SegmentResult& segment : match.segments()) reasons.push_back(segment.reason);
  return reasons;
}

class LookupAndLand : public testing::Test {
 protected:
  bool NoLeaseIsLeft() const {
    return Eventually([&] { return daemon_.Metric("ashlar_leases") == 0; });
  }

  DaemonProcess daemon_;
  TestEngine engine_{daemon_.client_options()};
  const std::vector<Tokens> prompt_ = {MakeRun(1, 50), MakeRun(2, 90), MakeRun(3, 40)};
};

TEST_F(LookupAndLand, EmptyPromptLandsNothing) {
  engine_.FillTargets(kPoison);
  auto [match, segments, landing] = engine_.LookupAndLand(prompt_);
  EXPECT_THAT(ReasonsOf(match), Each(MissReason::kNeverSeen));
  EXPECT_THAT(match.checkpoint_positions(), ElementsAre(prompt_[0].size()));
  EXPECT_THAT(segments, IsEmpty());
  EXPECT_THAT(landing.Wait(kPatience), IsEmpty());
  EXPECT_TRUE(landing.quiesced());
  EXPECT_EQ(match.lease(), "");
  EXPECT_TRUE(engine_.TargetsAre(kPoison));
}

TEST_F(LookupAndLand, LandsEverySegmentAtItsPosition) {
  engine_.PublishPrompt(prompt_);
  engine_.FillTargets(kPoison);
  {
    auto [match, segments, landing] = engine_.LookupAndLand(prompt_);
    EXPECT_THAT(ReasonsOf(match), Each(MissReason::kNone));
    EXPECT_EQ(match.prefix_depth(), prompt_[0].size());
    EXPECT_TRUE(landing.WaitLayers(4, kPatience));
    EXPECT_THAT(landing.Wait(kPatience), ElementsAre(MissReason::kNone, MissReason::kNone, MissReason::kNone));
    EXPECT_TRUE(landing.quiesced());
    EXPECT_TRUE(match.valid());
    ASSERT_EQ(segments.size(), prompt_.size());
    for (size_t i = 0; i < prompt_.size(); ++i) {
      EXPECT_EQ(segments[i].segment, i);
      EXPECT_EQ(segments[i].first_position, match.segments()[i].start);
      engine_.ExpectTuples(match, i, prompt_[i]);
      engine_.ExpectLanded(KindOfSegment(i), prompt_[i], match.segments()[i].start, kPoison);
    }
    // A lease like any other: another session makes its own match from it.
    TestEngine second(daemon_.client_options());
    const std::vector<uint64_t> lengths = {50, 90, 40};
    EXPECT_THAT(ReasonsOf(second.model().Attach(match.lease(), lengths)), Each(MissReason::kNone));
    // It can be landed again.
    EXPECT_THAT(engine_.Land(match, prompt_).Wait(kPatience), Each(MissReason::kNone));
  }
  EXPECT_TRUE(NoLeaseIsLeft());
}

TEST_F(LookupAndLand, LeavesTheSlotsOfMissesToTheEngine) {
  engine_.Publish(ObjectKind::kSegment, prompt_[1]);
  engine_.FillTargets(kPoison);
  auto [match, segments, landing] = engine_.LookupAndLand(prompt_);
  EXPECT_THAT(ReasonsOf(match), ElementsAre(MissReason::kNeverSeen, MissReason::kNone, MissReason::kNeverSeen));
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_EQ(segments[0].segment, 1u);
  EXPECT_THAT(landing.Wait(kPatience), ElementsAre(MissReason::kNone));
  engine_.ExpectLanded(ObjectKind::kSegment, prompt_[1], prompt_[0].size(), kPoison);
}

TEST_F(LookupAndLand, ReportsCorruptSegment) {
  engine_.PublishPrompt(prompt_);
  ASSERT_EQ(FlipInArenas(daemon_.pid(), engine_.ValueRow(ObjectKind::kSegment, prompt_[1], 3, 50)), 1);
  {
    auto [match, segments, landing] = engine_.LookupAndLand(prompt_);
    EXPECT_THAT(ReasonsOf(match), Each(MissReason::kNone)) << "the daemon has not read the bytes yet";
    EXPECT_THAT(landing.Wait(kPatience),
                ElementsAre(MissReason::kNone, MissReason::kChecksumFailed, MissReason::kNone));
  }
  const MatchAndLanding after = engine_.LookupAndLand(prompt_);
  EXPECT_THAT(ReasonsOf(after.match), ElementsAre(MissReason::kNone, MissReason::kChecksumFailed, MissReason::kNone));
}

TEST_F(LookupAndLand, ShortPageTableIsRefusedWithoutLease) {
  engine_.PublishPrompt(prompt_);
  engine_.FillTargets(kPoison);
  Tokens tokens;
  for (const Tokens& segment : prompt_) tokens.insert(tokens.end(), segment.begin(), segment.end());
  const std::vector<uint64_t> lengths = {50, 90, 40};
  const auto with = [&](std::vector<int32_t> page_table) {
    auto [match, segments, landing] = engine_.model().LookupAndLand({tokens, lengths}, page_table);
    EXPECT_THAT(ReasonsOf(match), Each(MissReason::kInvalidRequest));
    EXPECT_THAT(segments, IsEmpty());
    EXPECT_TRUE(landing.WaitQuiesced(kPatience));
  };
  const std::span<const int32_t> table = engine_.target_table();
  with({table.begin(), table.begin() + 2});
  std::vector<int32_t> foreign(table.begin(), table.end());
  foreign[1] = static_cast<int32_t>(engine_.pages().pages);
  with(foreign);
  foreign[1] = foreign[0];
  with(foreign);
  EXPECT_TRUE(engine_.TargetsAre(kPoison));
  EXPECT_TRUE(NoLeaseIsLeft());
}

TEST_F(LookupAndLand, LongPromptTakesTwoCalls) {
  engine_.PublishPrompt(prompt_);
  engine_.FillTargets(kPoison);
  Tokens tokens;
  for (const Tokens& segment : prompt_) tokens.insert(tokens.end(), segment.begin(), segment.end());
  tokens.resize(limits::kMaxPromptTokens);
  const std::vector<uint64_t> lengths = {50, 90, 40};
  // Entries through which nothing is written may be arbitrary.
  std::vector<int32_t> page_table(limits::kMaxPromptTokens, INT32_MAX);
  std::ranges::copy(engine_.target_table(), page_table.begin());
  auto [match, segments, landing] = engine_.model().LookupAndLand({tokens, lengths}, page_table);
  EXPECT_THAT(ReasonsOf(match), Each(MissReason::kNone));
  EXPECT_EQ(segments.size(), 3u);
  EXPECT_THAT(landing.Wait(kPatience), ElementsAre(MissReason::kNone, MissReason::kNone, MissReason::kNone));
  engine_.ExpectLanded(ObjectKind::kSegment, prompt_[1], prompt_[0].size(), kPoison);
  EXPECT_GT(daemon_.Metric("ashlar_rpcs_total{code=\"OK\",method=\"Land\"}"), 0);
  EXPECT_EQ(daemon_.Metric("ashlar_rpcs_total{code=\"OK\",method=\"LookupAndLand\"}"), 0);
}

TEST_F(LookupAndLand, TimedOutCallLandsNothingAndLeavesNoLease) {
  ClientOptions options = daemon_.client_options();
  options.timeout = milliseconds(1000);
  TestEngine engine(options);
  engine.PublishPrompt(prompt_);
  daemon_.Freeze();
  std::optional<MatchAndLanding> both = engine.LookupAndLand(prompt_);
  EXPECT_THAT(ReasonsOf(both->match), Each(MissReason::kTimedOut));
  EXPECT_THAT(both->segments, IsEmpty());
  EXPECT_FALSE(both->landing.quiesced()) << "the daemon may be landing";
  daemon_.Thaw();
  ASSERT_TRUE(both->landing.WaitQuiesced(kPatience));
  engine.FillTargets(kOwn);
  EXPECT_FALSE(Eventually([&] { return !engine.TargetsAre(kOwn); }, milliseconds(300))) << "a late write";
  both.reset();
  EXPECT_TRUE(NoLeaseIsLeft());
}

TEST_F(LookupAndLand, DroppedCallQuiescesSlots) {
  engine_.PublishPrompt(prompt_);
  for (int i = 0; i < 20; ++i) {
    { const MatchAndLanding dropped = engine_.LookupAndLand(prompt_); }
    engine_.FillTargets(kOwn);
    EXPECT_TRUE(engine_.TargetsAre(kOwn));
  }
  EXPECT_FALSE(Eventually([&] { return !engine_.TargetsAre(kOwn); }, milliseconds(200))) << "a late write";
  EXPECT_TRUE(NoLeaseIsLeft());
}

// 32 MB of keys and values in many layers: long enough to be caught half-way.
TEST(LookupAndLandOfMuch, SurvivesTheDaemonsDeathDuringTheCall) {
  DaemonProcess daemon({.dram = "256MiB", .arena = "16MiB", .tenants = "", .threads = 1});
  TestEngine engine(daemon.client_options(),
                    {.layers = 16, .kv_heads = 4, .key_dim = 64, .value_dim = 64, .tokens = 1200});
  const std::vector<Tokens> prompt = {MakeRun(1, 100), MakeRun(2, 1000)};
  engine.PublishPrompt(prompt);
  auto [match, segments, landing] = engine.LookupAndLand(prompt);
  ASSERT_THAT(ReasonsOf(match), Each(MissReason::kNone));
  ASSERT_TRUE(landing.WaitLayers(1, kPatience));
  daemon.Kill();
  EXPECT_THAT(landing.Wait(kPatience), Contains(MissReason::kDaemonUnavailable));
  EXPECT_TRUE(landing.WaitQuiesced(kPatience));
  EXPECT_THAT(ReasonsOf(engine.LookupAndLand(prompt).match), Each(MissReason::kDaemonUnavailable));
}

TEST(LookupAndLandOfAPrefix, LandsItAndTheSegmentsBehindIt) {
  DaemonProcess daemon;
  PrefixEngine engine(daemon.client_options());
  const Tokens text = MakeRun(1, 603), section = MakeRun(2, 80);
  EXPECT_THAT(engine.Commit({text, {text.size()}}), Each(CommitOutcome::kKept));
  engine.Publish(ObjectKind::kSegment, section);
  Tokens prompt = text;
  prompt.insert(prompt.end(), section.begin(), section.end());
  const std::vector<uint64_t> lengths = {500, 103, 80};
  engine.FillTargets(kPoison);
  auto [match, segments, landing] = engine.model().LookupAndLand({prompt, lengths}, engine.target_table());
  EXPECT_EQ(match.prefix().depth, text.size());
  EXPECT_THAT(ReasonsOf(match), ElementsAre(MissReason::kCovered, MissReason::kCovered, MissReason::kNone));
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].segment, LandSegment::kPrefix);
  EXPECT_EQ(segments[1].segment, 2u);
  EXPECT_EQ(segments[1].first_position, 603u);
  EXPECT_THAT(landing.Wait(kPatience), ElementsAre(MissReason::kNone, MissReason::kNone));
  engine.ExpectTuples(match, 2, section);
  engine.ExpectResumed(match, prompt, kPoison);
  // The prompt had landed an interior, so it is composed: the lease does not allow an exact commit.
  EXPECT_THAT(engine.Commit({prompt, {prompt.size()}}, &match), Each(CommitOutcome::kBadSource));
}

// The tokens before the first interior, including the head of its segment, are exact even if the rest of the prompt is
// not: committed as a separate text, they save the next prompt the head.
TEST(LookupAndLandOfAPrefix, MayEndInHeadOfNextSegment) {
  DaemonProcess daemon;
  PrefixEngine engine(daemon.client_options());
  const Tokens section = MakeRun(2, 80), other = MakeRun(3, 90);
  Tokens prompt = MakeRun(1, 603);
  prompt.insert(prompt.end(), section.begin(), section.end());
  prompt.insert(prompt.end(), other.begin(), other.end());
  const std::vector<uint64_t> lengths = {603, 80, 90};
  // The head has 4 tokens, so one row remains in which nothing may land.
  const Tokens exact(prompt.begin(), prompt.begin() + 603 + 3);
  engine.Publish(ObjectKind::kSegment, section);
  EXPECT_THAT(engine.Commit({exact, {exact.size()}}), Each(CommitOutcome::kKept));
  engine.FillTargets(kPoison);
  auto [match, segments, landing] = engine.model().LookupAndLand({prompt, lengths}, engine.target_table());
  EXPECT_EQ(match.prefix().depth, exact.size());
  EXPECT_THAT(ReasonsOf(match), ElementsAre(MissReason::kCovered, MissReason::kNone, MissReason::kNeverSeen));
  EXPECT_THAT(landing.Wait(kPatience), ElementsAre(MissReason::kNone, MissReason::kNone));
  engine.ExpectTuples(match, 1, section);
  engine.ExpectResumed(match, prompt, kPoison);
}

}  // namespace
}  // namespace ashlar::integration
