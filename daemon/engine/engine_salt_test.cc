// SPDX-License-Identifier: Apache-2.0
// Salts over gRPC: the same tokens under another salt are another text.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/expect_refusals.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/key.h"
#include "proto/outcome.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

const std::vector<std::string> kSalts = {"", "one", "another"};

class EngineSaltTest : public ::testing::Test {
 protected:
  v1::Prompt Prompt(const std::vector<int32_t>& tokens, const std::vector<uint64_t>& lengths, const std::string& salt) {
    v1::Prompt prompt;
    prompt.set_tokens(PackTokens(tokens));
    prompt.mutable_segment_lengths()->Assign(lengths.begin(), lengths.end());
    prompt.set_salt(PackSalt(MakeSalt(salt)));
    return prompt;
  }
  v1::PromptMatch Match(const v1::Prompt& prompt, uint64_t model) {
    auto request = engine_.Make<v1::MatchRequest>();
    request.set_model(model);
    *request.add_prompts() = prompt;
    v1::MatchReply reply;
    const absl::Status status = engine_.Call(request, &reply);
    EXPECT_TRUE(status.ok()) << status;
    return reply.prompts_size() == 1 ? reply.prompts(0) : v1::PromptMatch();
  }
  v1::ReserveRequest ReserveRequest(ObjectKind kind, const std::vector<int32_t>& run, const std::string& salt) {
    auto request = engine_.Make<v1::ReserveRequest>();
    request.set_model(engine_.model());
    v1::ObjectName& name = *request.add_objects();
    name.set_kind(static_cast<uint32_t>(kind));
    name.set_tokens(PackTokens(run));
    name.set_salt(PackSalt(MakeSalt(salt)));
    return request;
  }
  PublishOutcome Publish(ObjectKind kind, const std::vector<int32_t>& run, const std::string& salt) {
    v1::ReserveReply reply;
    const absl::Status status = engine_.Call(ReserveRequest(kind, run, salt), &reply);
    EXPECT_TRUE(status.ok()) << status;
    if (reply.results_size() != 1) return PublishOutcome::kUnavailable;
    return engine_.Publish(engine_.Sources(kind, reply.results(0).reservation(), run.size()));
  }
  CommitOutcome Commit(v1::CommitRequest request, const std::string& salt) {
    request.set_salt(PackSalt(MakeSalt(salt)));
    v1::CommitReply reply;
    const absl::Status status = engine_.Call(request, &reply);
    EXPECT_TRUE(status.ok()) << status;
    return reply.outcomes_size() == 1 ? static_cast<CommitOutcome>(reply.outcomes(0)) : CommitOutcome::kUnavailable;
  }

  TestNode node_;
  TestEngine engine_{node_};
};

TEST_F(EngineSaltTest, SegmentsAreFoundOnlyUnderTheirSalt) {
  const std::vector<int32_t> first = Ascending(20, 1), second = Ascending(40, 100);
  std::vector<int32_t> prompt = first;
  prompt.insert(prompt.end(), second.begin(), second.end());
  prompt.push_back(7);
  for (size_t published = 0; published < kSalts.size(); ++published) {
    for (size_t i = 0; i < kSalts.size(); ++i) {
      const v1::PromptMatch match = Match(Prompt(prompt, {20, 40}, kSalts[i]), engine_.model());
      ASSERT_EQ(match.segments_size(), 2);
      for (const v1::SegmentMatch& segment : match.segments()) {
        // The miss has no reason that depends on another salt's text, because that would reveal the text.
        const MissReason expected = i < published ? MissReason::kNone : MissReason::kNeverSeen;
        EXPECT_EQ(static_cast<MissReason>(segment.miss_reason()), expected) << kSalts[i] << " of " << published;
      }
    }
    ASSERT_EQ(Publish(ObjectKind::kCheckpoint, first, kSalts[published]), PublishOutcome::kPublished);
    ASSERT_EQ(Publish(ObjectKind::kSegment, second, kSalts[published]), PublishOutcome::kPublished);
  }
}

TEST_F(EngineSaltTest, PrefixesAreFoundOnlyUnderTheirSalt) {
  const TestEngine::Opened opened = engine_.OpenWithPrefixes();
  for (const int tokens : {5, 40}) {  // less than a block with the salt, and more
    const std::vector<int32_t> text = Ascending(tokens, 100 * tokens), longer = Ascending(tokens + 10, 100 * tokens);
    for (size_t committed = 0; committed < kSalts.size(); ++committed) {
      for (size_t i = 0; i < kSalts.size(); ++i) {
        EXPECT_EQ(Match(Prompt(longer, {}, kSalts[i]), opened.model).prefix().depth(),
                  i < committed ? static_cast<uint64_t>(tokens) : 0);
      }
      ASSERT_EQ(Commit(engine_.CommitRequest(opened, text), kSalts[committed]), CommitOutcome::kKept);
    }
  }
}

// The engine names a conversation; with two salts, one name means two conversations.
TEST_F(EngineSaltTest, ConversationsAreFoundOnlyUnderTheirSalt) {
  const TestEngine::Opened opened = engine_.OpenWithPrefixes();
  const std::vector<int32_t> text = Ascending(40, 7), longer = Ascending(50, 7);
  const std::string conversation(16, 'c');
  v1::CommitRequest commit = engine_.CommitRequest(opened, text);
  commit.set_provenance(static_cast<uint32_t>(Provenance::kComposed));
  commit.set_conversation(conversation);
  for (size_t committed = 0; committed < kSalts.size(); ++committed) {
    for (size_t i = 0; i < kSalts.size(); ++i) {
      v1::Prompt prompt = Prompt(longer, {}, kSalts[i]);
      prompt.set_conversation(conversation);
      EXPECT_EQ(Match(prompt, opened.model).prefix().depth(), i < committed ? 40u : 0u);
    }
    ASSERT_EQ(Commit(commit, kSalts[committed]), CommitOutcome::kKept);
  }
}

TEST_F(EngineSaltTest, MalformedSaltsAreRefusedByName) {
  auto match = engine_.Make<v1::MatchRequest>();
  match.set_model(engine_.model());
  *match.add_prompts() = Prompt(Ascending(20, 1), {}, "");
  ExpectRefusals<v1::MatchRequest, v1::MatchReply>(
      engine_, match, absl::StatusCode::kInvalidArgument,
      {{"prompts[0].salt: wrong length; expected 32 bytes, or empty",
        [](auto& r) { r.mutable_prompts(0)->set_salt("x"); }},
       {"prompts[0].salt: all zero", [](auto& r) { r.mutable_prompts(0)->set_salt(std::string(32, '\0')); }}});
  ExpectRefusals<v1::ReserveRequest, v1::ReserveReply>(
      engine_, ReserveRequest(ObjectKind::kSegment, Ascending(20, 1), ""), absl::StatusCode::kInvalidArgument,
      {{"objects[0].salt: wrong length; expected 32 bytes", [](auto& r) { r.mutable_objects(0)->set_salt("x"); }}});
  ExpectRefusals<v1::CommitRequest, v1::CommitReply>(
      engine_, engine_.CommitRequest(engine_.OpenWithPrefixes(), Ascending(20, 1)), absl::StatusCode::kInvalidArgument,
      {{"salt: wrong length; expected 32 bytes", [](auto& r) { r.set_salt("x"); }}});
}

}  // namespace
}  // namespace ashlar::daemon
