// SPDX-License-Identifier: Apache-2.0
// HandOff over gRPC: malformed requests, and daemons without a cluster.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/expect_refusals.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

class EngineHandoffTest : public ::testing::Test {
 protected:
  v1::HandOffRequest Good() const {
    auto request = engine_.Make<v1::HandOffRequest>();
    request.set_model(prefixes_.model);
    request.set_tokens(PackTokens(Ascending(40, 7)));
    request.set_node("other");
    request.set_patience_ms(1000);
    return request;
  }

  TestNode node_;
  TestEngine engine_{node_};
  const TestEngine::Opened prefixes_ = engine_.OpenWithPrefixes();
};

TEST_F(EngineHandoffTest, MalformedOnesAreRefusedByName) {
  using R = v1::HandOffRequest;
  ExpectRefusals<R, v1::HandOffReply>(
      engine_, Good(), absl::StatusCode::kInvalidArgument,
      {
          {"model: unknown handle", [](R& r) { r.set_model(999); }},
          {"model: was opened without prefixes; set prefixes when opening the model",
           [this](R& r) { r.set_model(engine_.model()); }},
          {"tokens: empty", [](R& r) { r.clear_tokens(); }},
          {"tokens: ", [](R& r) { r.set_tokens("abc"); }},
          {"conversation: ", [](R& r) { r.set_conversation("short"); }},
          {"media: ", [](R& r) { r.set_media("x"); }},
          {"salt: ", [](R& r) { r.set_salt("x"); }},
          {"node: wrong length; expected 1 to", [](R& r) { r.clear_node(); }},
          {"node: wrong length; expected 1 to",
           [](R& r) { r.set_node(std::string(limits::kMaxPeerNameBytes + 1, 'n')); }},
          {"patience_ms: out of range; expected 1 to", [](R& r) { r.clear_patience_ms(); }},
          {"patience_ms: out of range; expected 1 to",
           [](R& r) { r.set_patience_ms(limits::kMaxPeerPatienceMillis + 1); }},
      });
}

TEST_F(EngineHandoffTest, HandoffFailsWithoutCluster) {
  v1::HandOffReply reply;
  const absl::Status status = engine_.Call(Good(), &reply);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(reply.outcome(), static_cast<uint32_t>(HandoffOutcome::kUnavailable));
  EXPECT_EQ(reply.bytes(), 0u);
}

}  // namespace
}  // namespace ashlar::daemon
