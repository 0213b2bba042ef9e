// SPDX-License-Identifier: Apache-2.0
// Exact prefixes: a text resumes from the checkpoint of an earlier text with the same beginning, with the same bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "tests/integration/corrupt.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/prefix_engine.h"

namespace ashlar::integration {
namespace {

using testing::Contains;
using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr ConversationId kConversation{1, 2, 3}, kAnother{4, 5, 6};

class Prefix : public testing::Test {
 protected:
  // Commits states at the end, and at the depths before it.
  void Keep(PrefixEngine& engine, const Tokens& tokens, std::vector<uint64_t> depths = {}) {
    depths.push_back(tokens.size());
    EXPECT_THAT(engine.Commit({tokens, depths}), Each(CommitOutcome::kKept));
  }

  // Longer than two blocks, and not a whole number of pages. At this depth, branches are at even positions.
  const Tokens instructions_ = MakeRun(1, 602);
  const Tokens first_ = Join(instructions_, MakeRun(2, 100)), second_ = Join(instructions_, MakeRun(3, 90)),
               third_ = Join(instructions_, MakeRun(4, 120));
  DaemonProcess daemon_;
};

TEST_F(Prefix, DivergingTextsResumeWhereTheyDiverge) {
  PrefixEngine engine(daemon_.client_options());
  const Match cold = engine.Lookup(first_);
  EXPECT_EQ(cold.prefix().depth, 0u);
  EXPECT_EQ(cold.prefix_states(), nullptr);
  Keep(engine, first_);

  // They diverge inside the first one's last part, where nothing was kept: worth capturing now.
  const Match second = engine.Lookup(second_);
  EXPECT_EQ(second.prefix().depth, 0u);
  EXPECT_THAT(second.checkpoint_positions(), Contains(instructions_.size()));
  EXPECT_THAT(engine.Commit({second_, {instructions_.size(), second_.size()}}, &second), Each(CommitOutcome::kKept));

  const Match third = engine.Lookup(third_);
  EXPECT_FALSE(third.prefix().own);
  EXPECT_EQ(third.prefix().provenance, Provenance::kExact);
  EXPECT_EQ(third.prefix().tier, TierKind::kDram);
  EXPECT_GT(third.prefix().bytes, 0u);
  EXPECT_THAT(third.resumable(), Contains(instructions_.size()));
  engine.ExpectResumes(third, third_, instructions_.size());
  EXPECT_TRUE(third.valid());

  const Tokens more = Join(first_, MakeRun(5, 40));
  engine.ExpectResumes(engine.Lookup(more), more, first_.size());
  EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_prefix_checkpoints{tenant=\"default\"}") == 3; }));
  EXPECT_EQ(daemon_.Metric("ashlar_prefix_commits_total{outcome=\"kept\",source=\"tree\",tenant=\"default\"}"), 3);
  EXPECT_EQ(daemon_.Metric("ashlar_prefix_lookups_total{tenant=\"default\"}"), 4);
  EXPECT_EQ(daemon_.Metric("ashlar_prefix_resumed_tokens_sum{source=\"tree\",tenant=\"default\"}"),
            static_cast<double>(instructions_.size() + first_.size()));
}

TEST_F(Prefix, AWholeNumberOfBlocksAndAShortTextResume) {
  PrefixEngine engine(daemon_.client_options());
  for (const size_t depth : {size_t{512}, size_t{256}, size_t{17}, size_t{1}}) {
    const Tokens text = MakeRun(depth, depth), more = Join(text, MakeRun(9, 30));
    Keep(engine, text);
    engine.ExpectResumes(engine.Lookup(more), more, depth);
  }
}

// A prompt's last token is always computed, because its logits are needed.
TEST_F(Prefix, TheSamePromptResumesBeforeItsEnd) {
  PrefixEngine engine(daemon_.client_options());
  Keep(engine, first_, {300});
  engine.ExpectResumes(engine.Lookup(first_), first_, 300);
}

TEST_F(Prefix, ExistingStateIsNotKeptTwice) {
  PrefixEngine engine(daemon_.client_options());
  Keep(engine, first_);
  EXPECT_THAT(engine.Commit({first_, {first_.size()}}), ElementsAre(CommitOutcome::kAlreadyPresent));
}

TEST_F(Prefix, AnotherModelSeesNothing) {
  PrefixEngine engine(daemon_.client_options());
  Keep(engine, first_);
  Identity identity = TestEngine::identity();
  identity.weights_digest = "other";
  auto other = engine.client().OpenModel(identity, engine.Whole(), {}, {}, {.capture_tokens = 1});
  ASSERT_TRUE(other.ok()) << other.status();
  const Tokens more = Join(first_, MakeRun(5, 40));
  EXPECT_EQ(other->Lookup(Prompt{.tokens = more, .segment_lengths = {}}).prefix().depth, 0u);
  EXPECT_EQ(engine.Lookup(more).prefix().depth, first_.size());
}

TEST_F(Prefix, ComposedStatesBelongToTheConversation) {
  PrefixEngine engine(daemon_.client_options());
  const Text text{first_, {first_.size()}, Provenance::kComposed, kConversation};
  EXPECT_THAT(engine.Commit(text), ElementsAre(CommitOutcome::kKept));
  const Tokens more = Join(first_, MakeRun(5, 40));
  EXPECT_EQ(engine.Lookup(more).prefix().depth, 0u);
  EXPECT_EQ(engine.Lookup(more, kAnother).prefix().depth, 0u);
  const Match match = engine.Lookup(more, kConversation);
  EXPECT_TRUE(match.prefix().own);
  EXPECT_EQ(match.prefix().provenance, Provenance::kComposed);
  engine.ExpectResumes(match, more, first_.size());
  // A text that continues it is composed, too.
  EXPECT_THAT(engine.Commit({more, {more.size()}}, &match), ElementsAre(CommitOutcome::kBadSource));
  EXPECT_THAT(engine.Commit({more, {more.size()}, Provenance::kComposed, kConversation}, &match),
              ElementsAre(CommitOutcome::kKept));
  const Tokens most = Join(more, MakeRun(6, 20));
  engine.ExpectResumes(engine.Lookup(most, kConversation), most, more.size());
}

TEST_F(Prefix, CoversSegmentsAndCombinesWithLaterOnes) {
  PrefixEngine engine(daemon_.client_options());
  const Tokens behind = MakeRun(7, 120);
  Keep(engine, first_);
  engine.Publish(ObjectKind::kSegment, behind);
  const Tokens prompt = Join(first_, behind);
  const std::vector<uint64_t> lengths = {500, first_.size() - 500, behind.size()};
  const Match match = engine.Lookup(prompt, {}, lengths);
  ASSERT_EQ(match.prefix().depth, first_.size());
  EXPECT_EQ(match.segments()[0].reason, MissReason::kCovered);
  EXPECT_EQ(match.segments()[1].reason, MissReason::kCovered);
  ASSERT_TRUE(match.segments()[2].hit());
  const LandSegment both[] = {{.segment = 2, .first_position = first_.size()}, {.segment = LandSegment::kPrefix}};
  EXPECT_THAT(engine.model().Land(match, engine.target_table(), both).Wait(kPatience), Each(MissReason::kNone));
  // An interior was landed: what follows is composed.
  EXPECT_THAT(engine.Commit({prompt, {prompt.size()}}, &match), ElementsAre(CommitOutcome::kBadSource));
  const Text composed{prompt, {prompt.size()}, Provenance::kComposed, kConversation};
  EXPECT_THAT(engine.Commit(composed, &match), ElementsAre(CommitOutcome::kKept));
}

TEST_F(Prefix, TheDaemonComposesFromItsStates) {
  PrefixEngine engine(daemon_.client_options());
  const Tokens behind = MakeRun(7, 120), prompt = Join(first_, behind);
  Keep(engine, first_);
  engine.Publish(ObjectKind::kSegment, behind);
  const std::vector<uint64_t> lengths = {first_.size(), behind.size()};
  const Match match = engine.Lookup(prompt, {}, lengths);
  ASSERT_EQ(match.prefix().depth, first_.size());
  const LandSegment prefix{.segment = LandSegment::kPrefix}, segment{.segment = 1, .first_position = first_.size()};
  const auto advance = [&](std::vector<AdvanceStep> steps) {
    auto* const state = reinterpret_cast<std::byte*>(engine.StatePlace());
    return engine.model().Advance(&match, {.layer = 2, .steps = steps, .region = engine.region(), .state = {state}});
  };
  ASSERT_EQ(advance({{.segment = prefix}}).reason(), MissReason::kNone);
  const std::string expected = engine.StateAfter(first_, 2);
  EXPECT_EQ(std::memcmp(engine.StatePlace(), expected.data(), expected.size()), 0);
  const Composition both = advance({{.segment = prefix}, {.segment = segment}});
  EXPECT_EQ(both.reason(), MissReason::kNone);
  EXPECT_THAT(both.segments(), ElementsAre(MissReason::kNone, MissReason::kNone));
  EXPECT_NE(std::memcmp(engine.StatePlace(), expected.data(), expected.size()), 0);
  EXPECT_EQ(advance({{.segment = segment}, {.segment = prefix}}).reason(), MissReason::kInvalidRequest);
  EXPECT_EQ(advance({{.segment = prefix}, {.segment = prefix}}).reason(), MissReason::kInvalidRequest);
}

TEST_F(Prefix, LandingsThatAreInvalidAreMissed) {
  PrefixEngine engine(daemon_.client_options());
  Keep(engine, first_);
  const Tokens more = Join(first_, MakeRun(5, 40));
  const Match match = engine.Lookup(more), nothing = engine.Lookup(MakeRun(9, 40));
  const LandSegment elsewhere[] = {{.segment = LandSegment::kPrefix, .first_position = 16}};
  const LandSegment prefix[] = {{.segment = LandSegment::kPrefix}};
  const auto verdict = [&](const Match& of, std::span<const int32_t> table, std::span<const LandSegment> segments) {
    return engine.model().Land(of, table, segments).Wait(kPatience);
  };
  EXPECT_THAT(verdict(match, engine.target_table(), elsewhere), ElementsAre(MissReason::kInvalidRequest));
  EXPECT_THAT(verdict(match, engine.target_table().first(20), prefix), ElementsAre(MissReason::kInvalidRequest));
  EXPECT_THAT(verdict(nothing, engine.target_table(), prefix), ElementsAre(MissReason::kInvalidRequest));
}

TEST_F(Prefix, BadSourcesAreNotKept) {
  PrefixEngine engine(daemon_.client_options());
  const Text text{first_, {first_.size()}};
  const CommitParts good = engine.Compute(text);
  const auto outcome = [&](CommitParts parts) { return engine.model().Commit(nullptr, parts).front(); };
  CommitParts parts = good;
  parts.checkpoints[0].linear[1].state = engine.region().data() + engine.region().size() - 4;
  EXPECT_EQ(outcome(parts), CommitOutcome::kBadSource);
  parts = good;
  parts.checkpoints[0].linear.pop_back();
  EXPECT_EQ(outcome(parts), CommitOutcome::kBadSource);
  parts = good;
  parts.page_table = parts.page_table.first(first_.size() / 16);
  EXPECT_EQ(outcome(parts), CommitOutcome::kBadSource);
  parts = good;
  parts.checkpoints[0].depth -= 1;  // not the text's end
  EXPECT_EQ(outcome(parts), CommitOutcome::kBadSource);
  parts = good;
  parts.provenance = Provenance::kComposed;  // without a conversation
  EXPECT_EQ(outcome(parts), CommitOutcome::kBadSource);
  EXPECT_EQ(engine.Lookup(Join(first_, MakeRun(5, 40))).prefix().depth, 0u);
  EXPECT_EQ(outcome(good), CommitOutcome::kKept);
}

TEST_F(Prefix, ModelsOpenedWithoutPrefixesUseNone) {
  PrefixEngine engine(daemon_.client_options());
  auto plain = engine.client().OpenModel(TestEngine::identity(), engine.Whole());
  ASSERT_TRUE(plain.ok()) << plain.status();
  ASSERT_EQ(plain->ns(), engine.model().ns());
  Keep(engine, first_);
  const Tokens more = Join(first_, MakeRun(5, 40));
  const std::vector<uint64_t> lengths = {40};
  const Match match = plain->Lookup(Prompt{.tokens = more, .segment_lengths = lengths, .conversation = kConversation});
  EXPECT_EQ(match.prefix().depth, 0u);
  EXPECT_THAT(match.checkpoint_positions(), ElementsAre(40u));
  EXPECT_THAT(plain->Commit(nullptr, engine.Compute({first_, {first_.size()}})),
              ElementsAre(CommitOutcome::kBadSource));
}

TEST_F(Prefix, ACorruptBlockIsMissedAndDropped) {
  PrefixEngine engine(daemon_.client_options());
  Keep(engine, first_, {200});
  const Tokens more = Join(first_, MakeRun(5, 40));
  const Match match = engine.Lookup(more);
  ASSERT_EQ(match.prefix().depth, first_.size());
  ASSERT_GE(FlipInArenas(daemon_.pid(), engine.ValuesAt(first_, 300, 1)), 1);
  EXPECT_THAT(engine.LandPrefix(match).Wait(kPatience), ElementsAre(MissReason::kChecksumFailed));
  // The block before it, and everything that needs no more, still exist.
  engine.ExpectResumes(engine.Lookup(more), more, 200);
  // The states exist as long as the match holds them; the block is written again.
  EXPECT_THAT(engine.Commit({first_, {first_.size()}}),
              Each(testing::AnyOf(CommitOutcome::kKept, CommitOutcome::kAlreadyPresent)));
  engine.ExpectResumes(engine.Lookup(more), more, first_.size());
}

TEST_F(Prefix, ACorruptStateIsMissedAndDropped) {
  PrefixEngine engine(daemon_.client_options());
  Keep(engine, first_, {200});
  const Tokens more = Join(first_, MakeRun(5, 40));
  const Match match = engine.Lookup(more);
  ASSERT_EQ(FlipInArenas(daemon_.pid(), engine.StateAfter(first_, 2)), 1);
  EXPECT_THAT(engine.LandPrefix(match).Wait(kPatience), ElementsAre(MissReason::kChecksumFailed));
  engine.ExpectResumes(engine.Lookup(more), more, 200);
}

// A commit that the client abandoned must not leave torn bytes.
TEST_F(Prefix, ACommitThatTimesOutIsNeverFound) {
  ClientOptions options = daemon_.client_options();
  options.timeout = std::chrono::milliseconds(500);
  PrefixEngine engine(options);
  const Text text{first_, {first_.size()}};
  const CommitParts parts = engine.Compute(text);
  daemon_.Freeze();
  EXPECT_THAT(engine.model().Commit(nullptr, parts), ElementsAre(CommitOutcome::kUnavailable));
  const Text other{third_, {third_.size()}};
  engine.Compute(other);  // the engine uses the memory for something else
  daemon_.Thaw();
  PrefixEngine patient(daemon_.client_options());
  const Tokens more = Join(first_, MakeRun(5, 40));
  EXPECT_EQ(patient.Lookup(more).prefix().depth, 0u);
  Keep(patient, first_);
  patient.ExpectResumes(patient.Lookup(more), more, first_.size());
}

TEST_F(Prefix, OtherProcessesAttach) {
  PrefixEngine engine(daemon_.client_options()), other(daemon_.client_options());
  Keep(engine, first_);
  const Tokens more = Join(first_, MakeRun(5, 40));
  std::optional<Match> match = engine.Lookup(more);
  const Match attached = other.model().Attach(match->lease(), {});
  match.reset();
  other.ExpectResumes(attached, more, first_.size());
}

TEST_F(Prefix, RanksOfABundleResumeTogether) {
  PrefixEngine zero(daemon_.client_options(), {.rank = 0, .size = 2}), one(daemon_.client_options(), {1, 2});
  const Tokens more = Join(first_, MakeRun(5, 40));
  EXPECT_THAT(one.Commit({first_, {first_.size()}}), ElementsAre(CommitOutcome::kKept));
  EXPECT_EQ(zero.Lookup(more).prefix().depth, 0u);
  EXPECT_THAT(zero.Commit({first_, {first_.size()}}), ElementsAre(CommitOutcome::kKept));
  const Match match = zero.Lookup(more);
  zero.ExpectResumes(match, more, first_.size());
  one.ExpectResumes(one.model().Attach(match.lease(), {}), more, first_.size());
}

TEST_F(Prefix, ManyPromptsOfACallResumeEach) {
  PrefixEngine engine(daemon_.client_options());
  Keep(engine, first_, {100});
  const std::vector<Tokens> tokens = {Join(first_, {1}), MakeRun(9, 50), Join(first_, {2, 3}), {}};
  std::vector<Prompt> prompts;
  for (const Tokens& prompt : tokens) prompts.push_back({.tokens = prompt, .segment_lengths = {}});
  const std::vector<Match> matches = engine.model().Lookup(prompts);
  ASSERT_EQ(matches.size(), 4u);
  engine.ExpectResumes(matches[0], tokens[0], first_.size());
  EXPECT_EQ(matches[1].lease(), "");
  engine.ExpectResumes(matches[2], tokens[2], first_.size());
  EXPECT_THAT(matches[3].resumable(), IsEmpty());
}

class PrefixOnDisk : public Prefix {
 protected:
  PrefixOnDisk() {
    daemon_.Terminate();
    daemon_.Configure({.ssd = "256MiB", .admission = "all"});
    daemon_.Start();
  }
};

TEST_F(PrefixOnDisk, ResumesAfterTheDaemonHasRestarted) {
  PrefixEngine engine(daemon_.client_options());
  Keep(engine, first_, {instructions_.size()});
  EXPECT_EQ(daemon_.Terminate(), 0);
  daemon_.Start();
  ASSERT_TRUE(Eventually([&] { return engine.client().connected(); }));
  const Tokens more = Join(first_, MakeRun(5, 40));
  std::optional<Match> match;
  ASSERT_TRUE(Eventually([&] { return (match = engine.Lookup(more))->prefix().depth > 0; }));
  EXPECT_EQ(match->prefix().tier, TierKind::kSsd);
  engine.ExpectResumes(*match, more, first_.size());
  engine.ExpectResumes(engine.Lookup(third_), third_, instructions_.size());
  Keep(engine, Join(third_, MakeRun(8, 10)));  // the model was opened again with the same options
}

}  // namespace
}  // namespace ashlar::integration
