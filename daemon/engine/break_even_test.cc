// SPDX-License-Identifier: Apache-2.0
// Break-even check for hits: the engine's declared cost of computing against the measured cost of landing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BreakEvenTest : public ::testing::Test {
 protected:
  // Opens the engine's model again with a prefill rate.
  uint64_t OpenModel(double tokens_per_second) {
    auto request = engine_.Make<v1::OpenModelRequest>();
    request.set_identity(EncodeIdentity(SmallIdentity()));
    request.set_layout(EncodeLayout(SmallLayout()));
    request.mutable_cost()->set_tokens_per_second(tokens_per_second);
    v1::OpenModelReply reply;
    EXPECT_TRUE(engine_.Call(request, &reply).ok());
    return reply.model();
  }
  uint32_t Reserve(uint64_t model, const std::vector<int32_t>& tokens) {
    auto request = engine_.Make<v1::ReserveRequest>();
    request.set_model(model);
    v1::ObjectName* name = request.add_objects();
    name->set_kind(static_cast<uint32_t>(ObjectKind::kCheckpoint));
    name->set_tokens(PackTokens(tokens));
    v1::ReserveReply reply;
    EXPECT_TRUE(engine_.Call(request, &reply).ok());
    return reply.results(0).outcome();
  }
  uint32_t Reason(uint64_t model, const std::vector<int32_t>& tokens) {
    auto request = engine_.Make<v1::MatchRequest>();
    request.set_model(model);
    v1::Prompt* prompt = request.add_prompts();
    prompt->set_tokens(PackTokens(tokens));
    prompt->add_segment_lengths(tokens.size());
    v1::MatchReply reply;
    EXPECT_TRUE(engine_.Call(request, &reply).ok());
    return reply.prompts(0).segments(0).miss_reason();
  }

  TestNode node_{"", "metrics_address: 127.0.0.1:0"};
  TestEngine engine_{node_};
  const std::vector<int32_t> here_ = Ascending(24, 7), offered_ = Ascending(24, 1000);
};

TEST_F(BreakEvenTest, FastEngineIsToldToCompute) {
  engine_.FillMemory();
  ASSERT_EQ(engine_.PublishRun(ObjectKind::kCheckpoint, here_), PublishOutcome::kPublished);
  const uint64_t fast = OpenModel(1e12), slow = OpenModel(1e-3), silent = engine_.model();
  EXPECT_EQ(Reason(fast, here_), 0u) << "nothing is known yet of landings";
  const auto landed = engine_.Land(engine_.LandRequest(engine_.Match(here_, {24})->lease(), {At(0, 0)}));
  ASSERT_TRUE(landed.ok());
  ASSERT_THAT(*landed, ElementsAre(MissReason::kNone));

  EXPECT_EQ(Reason(fast, here_), static_cast<uint32_t>(MissReason::kSlowerThanRecompute));
  EXPECT_EQ(Reason(slow, here_), 0u);
  EXPECT_EQ(Reason(silent, here_), 0u);
  EXPECT_EQ(Reserve(fast, here_), static_cast<uint32_t>(ReserveOutcome::kAlreadyPresent));
  EXPECT_EQ(Reserve(fast, offered_), static_cast<uint32_t>(ReserveOutcome::kDeclined));
  EXPECT_EQ(Reason(slow, offered_), static_cast<uint32_t>(MissReason::kDeclined));
  EXPECT_THAT(Scrape(node_.daemon().metrics_port()),
              HasSubstr("ashlar_reservations_total{kind=\"checkpoint\",outcome=\"declined\",tenant=\"default\"} 1"));
  EXPECT_EQ(Reserve(slow, offered_), static_cast<uint32_t>(ReserveOutcome::kGranted));
}

}  // namespace
}  // namespace ashlar::daemon
