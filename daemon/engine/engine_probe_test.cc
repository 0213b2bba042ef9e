// SPDX-License-Identifier: Apache-2.0
// Probe over a daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/expect_refusals.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

class EngineProbeTest : public ::testing::Test {
 protected:
  v1::ProbeRequest RequestOf(const std::vector<int32_t>& tokens, const std::vector<uint64_t>& lengths = {}) {
    auto request = router_.Make<v1::ProbeRequest>();
    request.mutable_prompt()->set_tokens(PackTokens(tokens));
    for (const uint64_t length : lengths) request.mutable_prompt()->add_segment_lengths(length);
    return request;
  }
  v1::NodeProbe Probe(const v1::ProbeRequest& request) {
    v1::ProbeReply reply;
    const absl::Status status = router_.Call(request, &reply);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(reply.nodes_size(), 1);
    EXPECT_EQ(reply.cheapest(), 0u);
    return reply.nodes_size() == 1 ? reply.nodes(0) : v1::NodeProbe();
  }
  void Commit(const std::vector<int32_t>& tokens) {
    v1::CommitReply reply;
    ASSERT_TRUE(engine_.Call(engine_.CommitRequest(prefixes_, tokens), &reply).ok());
  }

  TestNode node_;
  TestEngine engine_{node_}, router_{node_};
  const TestEngine::Opened prefixes_ = engine_.OpenWithPrefixes();
};

TEST_F(EngineProbeTest, FindsAPrefixAndTakesNoLease) {
  const std::vector<int32_t> tokens = Ascending(40, 7);
  EXPECT_EQ(Probe(RequestOf(tokens)).prefix_tokens(), 0u);
  Commit(tokens);
  const v1::NodeProbe found = Probe(RequestOf(Ascending(50, 7)));
  EXPECT_EQ(found.prompt_tokens(), 50u);
  EXPECT_EQ(found.prefix_tokens(), 40u);
  EXPECT_EQ(found.segment_tokens(), 0u);
  ASSERT_EQ(found.tiers_size(), 1);
  EXPECT_EQ(found.tiers(0).tier(), static_cast<uint32_t>(TierKind::kDram));
  EXPECT_EQ(found.tiers(0).tokens(), 40u);
  EXPECT_EQ(found.sessions(), 2u);  // TestEngine opens the model in both sessions
  EXPECT_EQ(found.queued_tokens(), 0u);
  EXPECT_FALSE(found.draining());
  EXPECT_EQ(Probe(RequestOf(Ascending(50, 9000))).prefix_tokens(), 0u);
}

TEST_F(EngineProbeTest, FindsSegmentsWithoutTheirSeams) {
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kSegment, Ascending(24, 1007)), PublishOutcome::kPublished);
  std::vector<int32_t> tokens = Ascending(24, 7);
  for (const int32_t token : Ascending(24, 1007)) tokens.push_back(token);
  tokens.push_back(3);
  const v1::NodeProbe found = Probe(RequestOf(tokens, {24, 24}));
  EXPECT_EQ(found.prefix_tokens(), 0u);
  EXPECT_GT(found.segment_tokens(), 0u);
  EXPECT_LE(found.segment_tokens(), 24u);
}

TEST_F(EngineProbeTest, ALookupQueuesTheTokensThatItMisses) {
  auto request = engine_.Make<v1::MatchRequest>();
  request.set_model(prefixes_.model);
  request.add_prompts()->set_tokens(PackTokens(Ascending(2000, 7)));
  v1::MatchReply reply;
  ASSERT_TRUE(engine_.Call(request, &reply).ok());
  const v1::NodeProbe busy = Probe(RequestOf(Ascending(50, 7)));
  EXPECT_GT(busy.queued_tokens(), 0u);
  EXPECT_LE(busy.queued_tokens(), 2000u);
}

TEST_F(EngineProbeTest, MalformedProbesAreRefusedByName) {
  using R = v1::ProbeRequest;
  const R good = RequestOf(Ascending(24, 7), {24});
  ExpectRefusals<R, v1::ProbeReply>(
      router_, good, absl::StatusCode::kInvalidArgument,
      {
          {"ns: wrong length; expected 2 to 32 bytes", [](R& r) { r.set_ns("a"); }},
          {"ns: wrong length; expected 2 to 32 bytes", [](R& r) { r.set_ns(std::string(33, 'a')); }},
          {"prompt.tokens: length is not a multiple of 4 bytes",
           [](R& r) { r.mutable_prompt()->mutable_tokens()->append("x"); }},
          {"prompt.segment_lengths[0]: exceeds the tokens left in the prompt",
           [](R& r) { r.mutable_prompt()->set_segment_lengths(0, 25); }},
          {"prompt.conversation: wrong length", [](R& r) { r.mutable_prompt()->set_conversation("abc"); }},
      });
  ExpectRefusals<R, v1::ProbeReply>(router_, good, absl::StatusCode::kNotFound,
                                    {
                                        {"ns: no engine of this tenant has opened such a model on this node",
                                         [](R& r) { r.set_ns(std::string(32, 'a')); }},
                                        {"model_id: no engine of this tenant has opened such a model on this node",
                                         [](R& r) { r.set_model_id("nobody/has-it"); }},
                                    });
  ExpectRefusals<R, v1::ProbeReply>(router_, good, absl::StatusCode::kUnauthenticated,
                                    {{"session: unknown", [](R& r) { r.set_session(std::string(16, 'a')); }}});
}

// Every user probes what the own tenant caches.
TEST(EngineProbeTenants, AnotherTenantFindsNothing) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  TestNode node("tenants: [{name: a, uids: [0], dram_bytes: 8MiB}, {name: b, uids: [12345], dram_bytes: 8MiB}]");
  TestEngine engine(node);
  const TestEngine::Opened opened = engine.OpenWithPrefixes();
  v1::CommitReply committed;
  ASSERT_TRUE(engine.Call(engine.CommitRequest(opened, Ascending(40, 7)), &committed).ok());
  const auto probe = [](TestEngine& router) {
    auto request = router.Make<v1::ProbeRequest>();
    request.mutable_prompt()->set_tokens(PackTokens(Ascending(50, 7)));
    v1::ProbeReply reply;
    EXPECT_TRUE(router.Call(request, &reply).ok());
    return reply.nodes_size() == 1 ? reply.nodes(0).prefix_tokens() : 999;
  };
  EXPECT_EQ(probe(engine), 40u);
  AsUser(12345, [&] {
    TestEngine other(node);
    other.OpenWithPrefixes();
    EXPECT_EQ(probe(other), 0u);
  });
}

}  // namespace
}  // namespace ashlar::daemon
