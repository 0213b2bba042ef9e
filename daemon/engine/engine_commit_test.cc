// SPDX-License-Identifier: Apache-2.0
// Exact prefixes through the calls of ashlar.v1.Cache.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/compose_fixture.h"
#include "daemon/testing/expect_refusals.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;

class EngineCommitTest : public ::testing::Test {
 protected:
  CommitOutcome Commit(const v1::CommitRequest& request) {
    v1::CommitReply reply;
    const absl::Status status = engine_.Call(request, &reply);
    EXPECT_TRUE(status.ok()) << status;
    return reply.outcomes_size() == 1 ? static_cast<CommitOutcome>(reply.outcomes(0)) : CommitOutcome::kUnavailable;
  }
  v1::PromptMatch Match(const std::vector<int32_t>& tokens) {
    auto request = engine_.Make<v1::MatchRequest>();
    request.set_model(prefixes_.model);
    request.add_prompts()->set_tokens(PackTokens(tokens));
    v1::MatchReply reply;
    const absl::Status status = engine_.Call(request, &reply);
    EXPECT_TRUE(status.ok()) << status;
    return reply.prompts_size() == 1 ? reply.prompts(0) : v1::PromptMatch();
  }

  TestNode node_;
  TestEngine engine_{node_};
  const TestEngine::Opened prefixes_ = engine_.OpenWithPrefixes();
};

TEST_F(EngineCommitTest, MalformedCommitsAreRefusedByName) {
  v1::CommitRequest good = engine_.CommitRequest(prefixes_, Ascending(40, 7));
  v1::CapturedState inside = good.checkpoints(0);
  inside.set_depth(24);
  *good.mutable_checkpoints()->Add() = good.checkpoints(0);
  *good.mutable_checkpoints(0) = inside;
  using R = v1::CommitRequest;
  constexpr auto kComposed = static_cast<uint32_t>(Provenance::kComposed);
  ExpectRefusals<R, v1::CommitReply>(
      engine_, good, absl::StatusCode::kInvalidArgument,
      {
          {"model: unknown handle", [](R& r) { r.set_model(999); }},
          {"model: was opened without prefixes; set prefixes when opening the model",
           [this](R& r) { r.set_model(engine_.model()); }},
          {"tokens: empty", [](R& r) { r.clear_tokens(); }},
          {"tokens: length is not a multiple of 4 bytes", [](R& r) { r.mutable_tokens()->append("x"); }},
          {"tokens: too many; expected at most",
           [](R& r) { r.set_tokens(std::string((limits::kMaxPromptTokens + 1) * 4, 'x')); }},
          {"prompt_tokens: out of range; expected 1 to 4194304", [](R& r) { r.set_prompt_tokens(0); }},
          {"prompt_tokens: out of range; expected 1 to 4194304", [](R& r) { r.set_prompt_tokens(4194305); }},
          {"provenance: 0 is unknown; expected 1 (exact) or 2 (composed)", [](R& r) { r.set_provenance(0); }},
          {"provenance: 257 is unknown; expected 1 (exact) or 2 (composed)", [](R& r) { r.set_provenance(257); }},
          {"conversation: wrong length; expected 16 bytes", [](R& r) { r.set_conversation("abc"); }},
          {"conversation: required", [](R& r) { r.set_provenance(kComposed); }},
          {"conversation: required",
           [](R& r) {
             r.set_provenance(kComposed);
             r.set_conversation(std::string(16, '\0'));
           }},
          {"checkpoints: empty; expected at least one", [](R& r) { r.clear_checkpoints(); }},
          {"checkpoints: too many; expected at most",
           [](R& r) {
             for (uint64_t i = 0; i < limits::kMaxCheckpointsPerCommit; ++i) *r.add_checkpoints() = r.checkpoints(1);
           }},
          {"checkpoints[0].depth: must be greater", [](R& r) { r.mutable_checkpoints(0)->set_depth(0); }},
          {"checkpoints[1].depth: must be greater", [](R& r) { r.mutable_checkpoints(1)->set_depth(24); }},
          {"checkpoints[1].depth: must not exceed", [](R& r) { r.mutable_checkpoints(1)->set_depth(41); }},
          {"checkpoints[1].depth: the last checkpoint", [](R& r) { r.mutable_checkpoints(1)->set_depth(39); }},
          {"checkpoints[1].parts[0].form: expected a tensor",
           [](R& r) { r.mutable_checkpoints(1)->mutable_parts(0)->set_form(4); }},
          {"checkpoints[1].parts[0].form: a checkpoint has no transitions",
           [](R& r) { r.mutable_checkpoints(1)->mutable_parts(0)->set_form(1); }},
          {"checkpoints[0].parts[2]: the same part",
           [](R& r) { *r.mutable_checkpoints(0)->add_parts() = r.checkpoints(0).parts(0); }},
          {"page_table: too many; expected at most",
           [](R& r) { r.mutable_page_table()->Resize(limits::kMaxPromptTokens + 1, 0); }},
          {"lease: wrong length; expected 16 bytes", [](R& r) { r.set_lease("abc"); }},
          {"deadline_ns: negative; expected 0 or more", [](R& r) { r.set_deadline_ns(-1); }},
      });
}

TEST_F(EngineCommitTest, MalformedSpansAreRefusedByName) {
  const TestEngine::Opened opened = engine_.OpenWithPrefixes(1, 20);
  v1::CommitRequest good = engine_.CommitRequest(opened, Ascending(40, 7));
  v1::CapturedSpan* const span = good.mutable_span();
  span->set_begin(24);
  for (const PartForm form : {PartForm::kSpanKeys, PartForm::kSpanValues}) {
    v1::PartSource* const part = span->add_parts();
    *part = good.checkpoints(0).parts(0);
    part->set_form(static_cast<uint32_t>(form));
  }
  using R = v1::CommitRequest;
  ExpectRefusals<R, v1::CommitReply>(
      engine_, good, absl::StatusCode::kInvalidArgument,
      {
          {"span: the model was opened without", [this](R& r) { r.set_model(prefixes_.model); }},
          {"span.begin: out of range", [](R& r) { r.mutable_span()->set_begin(0); }},
          {"span.begin: out of range", [](R& r) { r.mutable_span()->set_begin(40); }},
          {"span.begin: the span has 21 tokens; the model was opened with at most 20",
           [](R& r) { r.mutable_span()->set_begin(19); }},
          {"span.parts[1].form: a span has only rows of inputs",
           [](R& r) { r.mutable_span()->mutable_parts(1)->set_form(2); }},
          {"span.parts[1].form: expected a tensor", [](R& r) { r.mutable_span()->mutable_parts(1)->set_form(4); }},
          {"span.parts[2]: the same part", [](R& r) { *r.mutable_span()->add_parts() = r.span().parts(0); }},
          {"checkpoints[0].parts[0].form: only spans",
           [](R& r) { r.mutable_checkpoints(0)->mutable_parts(0)->set_form(14); }},
      });
  EXPECT_EQ(Commit(good), CommitOutcome::kBadSource) << "the family has β, too";
}

TEST_F(EngineCommitTest, MissingSourcesAreOutcomes) {
  const v1::CommitRequest good = engine_.CommitRequest(prefixes_, Ascending(40, 7));
  const struct {
    const char* name;
    std::function<void(v1::CommitRequest&)> spoil;
  } kCases[] = {
      {"outside the region",
       [](auto& r) { r.mutable_checkpoints(0)->mutable_parts(0)->set_offset(TestEngine::kRegionBytes - 4); }},
      {"not aligned",
       [](auto& r) { r.mutable_checkpoints(0)->mutable_parts(0)->set_offset(TestEngine::kTensors + 2); }},
      {"unknown region", [](auto& r) { r.mutable_checkpoints(0)->mutable_parts(1)->set_region(999); }},
      {"a part is missing", [](auto& r) { r.mutable_checkpoints(0)->mutable_parts()->RemoveLast(); }},
      {"a part too many",
       [](auto& r) {
         *r.mutable_checkpoints(0)->add_parts() = r.checkpoints(0).parts(0);
         r.mutable_checkpoints(0)->mutable_parts()->rbegin()->set_layer(7);
       }},
      {"unknown pages", [](auto& r) { r.set_pages_id(999); }},
      {"short page table", [](auto& r) { r.mutable_page_table()->RemoveLast(); }},
      {"page too high", [](auto& r) { r.set_page_table(0, TestEngine::kPages); }},
      {"negative page", [](auto& r) { r.set_page_table(9, -1); }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    v1::CommitRequest request = good;
    c.spoil(request);
    EXPECT_EQ(Commit(request), CommitOutcome::kBadSource);
  }
  EXPECT_EQ(Match(Ascending(41, 7)).prefix().depth(), 0u);
  EXPECT_EQ(Commit(good), CommitOutcome::kKept);
  EXPECT_EQ(Match(Ascending(41, 7)).prefix().depth(), 40u);
}

TEST_F(EngineCommitTest, CommittedTextLandsAtItsPositions) {
  engine_.FillMemory();
  const float value = *engine_.Value(9, 3, 1);  // value of token 39
  ASSERT_EQ(Commit(engine_.CommitRequest(prefixes_, Ascending(40, 7))), CommitOutcome::kKept);
  const v1::PromptMatch match = Match(Ascending(50, 7));
  EXPECT_EQ(match.prefix_depth(), 40u);
  EXPECT_EQ(match.segments_size(), 0);
  EXPECT_EQ(match.prefix().blocks_size(), 0);
  EXPECT_FALSE(match.prefix().has_span());
  EXPECT_EQ(match.prefix().checkpoint().kind(), static_cast<uint32_t>(ObjectKind::kCheckpoint));
  EXPECT_EQ(match.prefix().checkpoint().object(), 0u);
  v1::LandRequest land = engine_.LandRequest(match.lease(), {At(0, 0)});
  land.set_pages_id(prefixes_.pages);
  std::reverse(land.mutable_page_table()->begin(), land.mutable_page_table()->end());
  *engine_.Value(TestEngine::kPages - 10, 3, 1) = 0;
  const auto verdict = engine_.Land(land);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_THAT(*verdict, ElementsAre(MissReason::kNone));
  EXPECT_EQ(*engine_.Value(TestEngine::kPages - 10, 3, 1), value);

  land.mutable_segments(0)->set_first_position(4);
  land.set_landing(land.landing() + 1'000'000);
  EXPECT_THAT(std::string(engine_.Land(land).status().message()),
              ::testing::StartsWith("segments[0].first_position: must be 0 for a prefix"));
}

// The blocks of the longest prompt for four ranks exceed the limit of a call. Its segments are still looked up.
TEST_F(EngineCommitTest, ServesAPromptThatIsTooLongToResume) {
  auto opening = engine_.Make<v1::OpenModelRequest>();
  opening.set_identity(EncodeIdentity(SmallIdentity()));
  opening.set_layout(EncodeLayout(WideLayout(4, 2)));
  opening.mutable_shard()->set_tensor_parallel_size(4);
  opening.mutable_prefixes();
  v1::OpenModelReply opened;
  ASSERT_TRUE(engine_.Call(opening, &opened).ok());
  auto match = engine_.Make<v1::MatchRequest>();
  match.set_model(opened.model());
  match.add_prompts()->set_tokens(std::string(limits::kMaxPromptTokens * sizeof(int32_t), 'x'));
  match.mutable_prompts(0)->add_segment_lengths(40);
  v1::MatchReply reply;
  const absl::Status status = engine_.Call(match, &reply);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(reply.prompts(0).segments(0).miss_reason(), static_cast<uint32_t>(MissReason::kNeverSeen));
  EXPECT_THAT(reply.prompts(0).checkpoint_positions(), ElementsAre(40u));
}

TEST(EngineCommitTenants, TextsOfOtherTenantsAreNotResumed) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be two users";
  const TestNode node("tenants: [{name: a, uids: [0], dram_bytes: 4MiB}, {name: b, uids: [54321], dram_bytes: 4MiB}]");
  TestEngine a(node);
  const TestEngine::Opened opened = a.OpenWithPrefixes();
  v1::CommitReply reply;
  ASSERT_TRUE(a.Call(a.CommitRequest(opened, Ascending(40, 7)), &reply).ok());
  ASSERT_EQ(reply.outcomes(0), static_cast<uint32_t>(CommitOutcome::kKept));
  std::unique_ptr<TestEngine> b;
  AsUser(54321, [&] { b = std::make_unique<TestEngine>(node); });
  ASSERT_EQ(b->tenant(), "b");
  const auto depth = [](TestEngine& engine, uint64_t model) {
    auto match = engine.Make<v1::MatchRequest>();
    match.set_model(model);
    match.add_prompts()->set_tokens(PackTokens(Ascending(50, 7)));
    v1::MatchReply found;
    EXPECT_TRUE(engine.Call(match, &found).ok());
    return found.prompts(0).prefix_depth();
  };
  EXPECT_EQ(depth(*b, b->OpenWithPrefixes().model), 0u);
  EXPECT_EQ(depth(a, opened.model), 40u);
}

TEST_F(EngineCommitTest, AnInvalidConversationIsRefusedByName) {
  auto match = engine_.Make<v1::MatchRequest>();
  match.set_model(prefixes_.model);
  match.add_prompts()->set_tokens(PackTokens(Ascending(20, 0)));
  match.mutable_prompts(0)->set_conversation(std::string(16, 'c'));
  v1::MatchReply reply;
  EXPECT_TRUE(engine_.Call(match, &reply).ok());
  using M = v1::MatchRequest;
  ExpectRefusals<M, v1::MatchReply>(
      engine_, match, absl::StatusCode::kInvalidArgument,
      {
          {"prompts[0].conversation: wrong length; expected 16 bytes",
           [](M& r) { r.mutable_prompts(0)->set_conversation("abc"); }},
          {"prompts[0].conversation: must be empty, because the model was opened without prefixes",
           [this](M& r) { r.set_model(engine_.model()); }},
      });
}

}  // namespace
}  // namespace ashlar::daemon
