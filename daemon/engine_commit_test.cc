// Exact prefixes through the calls of ashlar.v1.Cache.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/engine.h"
#include "daemon/testing/node.h"
#include "daemon/testing/refusals.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

class EngineCommitTest : public ::testing::Test {
 protected:
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
          {"model: opened without prefixes", [this](R& r) { r.set_model(engine_.model()); }},
          {"tokens: empty", [](R& r) { r.clear_tokens(); }},
          {"tokens: not a whole number", [](R& r) { r.mutable_tokens()->append("x"); }},
          {"tokens: more than", [](R& r) { r.set_tokens(std::string((limits::kMaxPromptTokens + 1) * 4, 'x')); }},
          {"prompt_tokens: not from 1 to 40", [](R& r) { r.set_prompt_tokens(0); }},
          {"prompt_tokens: not from 1 to 40", [](R& r) { r.set_prompt_tokens(41); }},
          {"provenance: unknown", [](R& r) { r.set_provenance(0); }},
          {"provenance: unknown", [](R& r) { r.set_provenance(257); }},
          {"conversation: not 16 bytes", [](R& r) { r.set_conversation("abc"); }},
          {"conversation: composed", [](R& r) { r.set_provenance(kComposed); }},
          {"conversation: composed",
           [](R& r) {
             r.set_provenance(kComposed);
             r.set_conversation(std::string(16, '\0'));
           }},
          {"checkpoints: none", [](R& r) { r.clear_checkpoints(); }},
          {"checkpoints: more than",
           [](R& r) {
             for (uint64_t i = 0; i < limits::kMaxCheckpointsPerCommit; ++i) *r.add_checkpoints() = r.checkpoints(1);
           }},
          {"checkpoints[0].depth: not behind", [](R& r) { r.mutable_checkpoints(0)->set_depth(0); }},
          {"checkpoints[1].depth: not behind", [](R& r) { r.mutable_checkpoints(1)->set_depth(24); }},
          {"checkpoints[1].depth: behind", [](R& r) { r.mutable_checkpoints(1)->set_depth(41); }},
          {"checkpoints[1].depth: the last one", [](R& r) { r.mutable_checkpoints(1)->set_depth(39); }},
          {"checkpoints[1].parts[0].form: not a tensor",
           [](R& r) { r.mutable_checkpoints(1)->mutable_parts(0)->set_form(4); }},
          {"checkpoints[1].parts[0].form: what is resumed",
           [](R& r) { r.mutable_checkpoints(1)->mutable_parts(0)->set_form(1); }},
          {"checkpoints[0].parts[2]: the same part",
           [](R& r) { *r.mutable_checkpoints(0)->add_parts() = r.checkpoints(0).parts(0); }},
          {"page_table: more than", [](R& r) { r.mutable_page_table()->Resize(limits::kMaxPromptTokens + 1, 0); }},
          {"lease: not 16 bytes", [](R& r) { r.set_lease("abc"); }},
          {"deadline_ns: negative", [](R& r) { r.set_deadline_ns(-1); }},
      });
}

TEST_F(EngineCommitTest, AConversationThatCannotBeIsRefusedByName) {
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
          {"prompts[0].conversation: not 16 bytes", [](M& r) { r.mutable_prompts(0)->set_conversation("abc"); }},
          {"prompts[0].conversation: the model was opened without prefixes",
           [this](M& r) { r.set_model(engine_.model()); }},
      });
}

}  // namespace
}  // namespace ashlar::daemon
