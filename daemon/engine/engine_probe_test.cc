// SPDX-License-Identifier: Apache-2.0
// Probe over a daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/expect_refusals.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/key.h"
#include "proto/layout.h"
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

Layout LayoutWithSeams(uint32_t head, uint32_t tail) {
  Layout layout = SmallLayout();
  layout.head = head;
  layout.tail = tail;
  return layout;
}

// Layouts for segments differ from those for prefixes in more than their seams.
Layout SegmentsLayout(uint32_t head, uint32_t tail) {
  Layout layout = LayoutWithSeams(head, tail);
  std::get<AttentionLayer>(layout.layers[1]).rope.frequencies = {1.0, 0.2};
  return layout;
}

// As vLLM's connector does, an engine opens its model with prefixes, with the head that the convolution needs, and
// again without them for its segments.
class EngineProbeLayoutsTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kConvolution = 3;  // conv_kernel - 1 of SmallLayout
  static constexpr int kFirst = 24, kSecond = 40, kQuery = 5;

  EngineProbeLayoutsTest() : EngineProbeLayoutsTest(8, 8) {}
  EngineProbeLayoutsTest(uint32_t head, uint32_t tail) : segments_(node_, SegmentsLayout(head, tail)) {}

  static std::vector<int32_t> PromptTokens() {
    std::vector<int32_t> tokens = Ascending(kFirst, 7);
    for (const int32_t token : Ascending(kSecond, 1007)) tokens.push_back(token);
    for (const int32_t token : Ascending(kQuery, 3007)) tokens.push_back(token);
    return tokens;
  }
  v1::ProbeRequest RequestOf(bool segmented, const std::string& model_id = "test") {
    auto request = exact_.Make<v1::ProbeRequest>();
    request.set_model_id(model_id);
    request.mutable_prompt()->set_tokens(PackTokens(PromptTokens()));
    if (segmented) {
      request.mutable_prompt()->add_segment_lengths(kFirst);
      request.mutable_prompt()->add_segment_lengths(kSecond);
    }
    return request;
  }
  absl::StatusOr<v1::ProbeReply> Ask(const v1::ProbeRequest& request) {
    v1::ProbeReply reply;
    if (absl::Status status = exact_.Call(request, &reply); !status.ok()) return status;
    return reply;
  }
  // Tokens of the prefix and of segments.
  using Found = std::pair<uint64_t, uint64_t>;
  Found Probe(const v1::ProbeRequest& request) {
    const absl::StatusOr<v1::ProbeReply> reply = Ask(request);
    EXPECT_TRUE(reply.ok()) << reply.status();
    if (!reply.ok() || reply->nodes_size() != 1) return {999, 999};
    EXPECT_EQ(reply->nodes(0).prompt_tokens(), static_cast<uint64_t>(kFirst + kSecond + kQuery));
    return {reply->nodes(0).prefix_tokens(), reply->nodes(0).segment_tokens()};
  }
  std::string NamespaceOf(const Layout& layout, const Identity& identity = SmallIdentity()) {
    const NamespaceId ns = MakeNamespace(exact_.tenant(), identity, layout);
    return std::string(ns.bytes.begin(), ns.bytes.end());
  }
  // Opens one more model without prefixes.
  void OpenSegments(const Identity& identity, const Layout& layout) {
    auto request = segments_.Make<v1::OpenModelRequest>();
    request.set_identity(EncodeIdentity(identity));
    request.set_layout(EncodeLayout(layout));
    v1::OpenModelReply reply;
    ASSERT_TRUE(segments_.Call(request, &reply).ok());
  }
  void PublishSecond() {
    ASSERT_EQ(segments_.PublishRun(ObjectKind::kSegment, Ascending(kSecond, 1007)), PublishOutcome::kPublished);
  }

  TestNode node_;
  TestEngine exact_{node_, LayoutWithSeams(kConvolution, 0)};
  TestEngine segments_;
  const TestEngine::Opened opened_ = exact_.OpenWithPrefixes();
};

TEST_F(EngineProbeLayoutsTest, PrefixAndSegmentsAreFoundInSeparateLayouts) {
  EXPECT_EQ(Probe(RequestOf(false)), Found(0, 0));
  EXPECT_EQ(Probe(RequestOf(true)), Found(0, 0));
  PublishSecond();
  EXPECT_EQ(Probe(RequestOf(false)), Found(0, 0));
  EXPECT_EQ(Probe(RequestOf(true)), Found(0, kSecond - 16));
  EXPECT_EQ(Probe(RequestOf(true, "")), Found(0, kSecond - 16));
  // The prefix ends inside the head of the second segment, whose interior follows it.
  constexpr int kPrefix = kFirst + 6;
  std::vector<int32_t> text = PromptTokens();
  text.resize(kPrefix);
  v1::CommitReply committed;
  ASSERT_TRUE(exact_.Call(exact_.CommitRequest(opened_, text), &committed).ok());
  EXPECT_EQ(Probe(RequestOf(false)), Found(kPrefix, 0));
  EXPECT_EQ(Probe(RequestOf(true)), Found(kPrefix, kSecond - 16));
}

TEST_F(EngineProbeLayoutsTest, ANamespaceOfSegmentsIsProbedAlone) {
  PublishSecond();
  v1::CommitReply committed;
  ASSERT_TRUE(exact_.Call(exact_.CommitRequest(opened_, Ascending(kFirst, 7)), &committed).ok());
  v1::ProbeRequest request = RequestOf(true);
  request.set_ns(NamespaceOf(SegmentsLayout(8, 8)));
  EXPECT_EQ(Probe(request), Found(0, kSecond - 16));
  request.set_ns(NamespaceOf(LayoutWithSeams(kConvolution, 0)));
  EXPECT_EQ(Probe(request), Found(kFirst, kSecond - 16));
  const absl::StatusOr<v1::ProbeReply> reply = Ask(RequestOf(true));
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->ns(), request.ns()) << "other nodes are asked for the layout with prefixes, and find its segments";
}

// Ranks above 0 have another model_id, and layouts of other weights are not of the same model.
TEST_F(EngineProbeLayoutsTest, LayoutsOfOtherRanksAndWeightsAreNotProbed) {
  PublishSecond();
  Identity rank = SmallIdentity(), weights = SmallIdentity();
  rank.model_id += " rank 1 of 2";
  weights.weights_digest = "sha256:1";
  OpenSegments(rank, SegmentsLayout(8, 8));
  OpenSegments(weights, SegmentsLayout(16, 16));
  EXPECT_EQ(Probe(RequestOf(false)), Found(0, 0));
  EXPECT_EQ(Probe(RequestOf(true)), Found(0, kSecond - 16));
  EXPECT_EQ(Probe(RequestOf(true, "")), Found(0, kSecond - 16));
}

TEST_F(EngineProbeLayoutsTest, SeveralLayoutsForSegmentsAreRefusedOnlyForSegments) {
  Identity dtype = SmallIdentity();
  dtype.dtype = "f16";
  OpenSegments(dtype, SegmentsLayout(8, 8));
  EXPECT_EQ(Probe(RequestOf(false)), Found(0, 0));
  const absl::Status refused = Ask(RequestOf(true)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), ::testing::StartsWith("ns: 2 open models match; expected one of "));
}

// Both layouts have the same seams.
class EngineProbeEqualSeamsTest : public EngineProbeLayoutsTest {
 protected:
  EngineProbeEqualSeamsTest() : EngineProbeLayoutsTest(kConvolution, 0) {}
};

TEST_F(EngineProbeEqualSeamsTest, LayoutsAreDistinguishedByPrefixUse) {
  PublishSecond();
  v1::CommitReply committed;
  ASSERT_TRUE(exact_.Call(exact_.CommitRequest(opened_, Ascending(kFirst, 7)), &committed).ok());
  EXPECT_EQ(Probe(RequestOf(false)), Found(kFirst, 0));
  EXPECT_EQ(Probe(RequestOf(true)), Found(kFirst, kSecond - kConvolution));
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
