// SPDX-License-Identifier: Apache-2.0
// The composition service over gRPC: results equal the kernels' bit for bit, and missing objects are reported.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/composition_plan.h"
#include "daemon/testing/compose_fixture.h"
#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "kernels/layer_shape.h"

namespace ashlar::daemon {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(EngineComposeTest, AdvancesWithTheKernelsBits) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(static_cast<int>(dtype));
    FillMemory();
    const v1::AdvanceRequest request = AdvanceRequest(dtype);
    const std::vector<std::byte> before = Memory();
    const v1::CompositionReply reply = Ask(request);
    EXPECT_EQ(Outcome(reply), MissReason::kNone);
    EXPECT_THAT(reply.segments(), ElementsAre(0, 0, 0));
    EXPECT_NE(before, Memory());
    for (const int threads : {1, 2, 5}) {
      kernels::ThreadPool pool(threads);
      std::vector<std::byte> expected = before;
      Expect(request, expected.data(), &pool);
      EXPECT_EQ(expected, Memory()) << threads << " threads";
    }
  }
}

class EngineComposeMetricsTest : public EngineComposeTest {
 protected:
  EngineComposeMetricsTest() : EngineComposeTest(WideLayout(4, 2), "metrics_address: '127.0.0.1:0'") {}
};

TEST_F(EngineComposeMetricsTest, CountsByOutcome) {
  Ask(AdvanceRequest());
  Ask(AdvanceRequest());
  v1::AdvanceRequest lost = AdvanceRequest();
  lost.set_lease(std::string(16, 'x'));
  Ask(lost);
  const std::string metrics = Scrape(node_.daemon().metrics_port());
  EXPECT_THAT(metrics, HasSubstr("ashlar_compositions_total{outcome=\"completed\",tenant=\"default\"} 2"));
  EXPECT_THAT(metrics, HasSubstr("ashlar_compositions_total{outcome=\"lease_lost\",tenant=\"default\"} 1"));
  EXPECT_THAT(metrics, HasSubstr("ashlar_composition_duration_seconds_count 2"));
}

TEST_F(EngineComposeTest, RunsNeedNoLease) {
  v1::AdvanceRequest request = AdvanceRequest();
  request.clear_lease();
  for (int step : {4, 2, 0}) request.mutable_steps()->DeleteSubrange(step, 1);
  std::vector<std::byte> expected = Memory();
  EXPECT_EQ(Outcome(Ask(request)), MissReason::kNone);
  Expect(request, expected.data(), nullptr);
  EXPECT_EQ(expected, Memory());
}

TEST_F(EngineComposeTest, MissingInteriorChangesNothing) {
  const std::vector<std::byte> before = Memory();
  v1::AdvanceRequest request = AdvanceRequest();
  request.set_lease(std::string(16, 'x'));
  v1::CompositionReply reply = Ask(request);
  EXPECT_EQ(Outcome(reply), MissReason::kLeaseLost);
  EXPECT_THAT(reply.segments(), Each(static_cast<uint32_t>(MissReason::kLeaseLost)));

  // A prompt of which only some segments are stored.
  const std::vector<int32_t> other = Ascending(72, 7);
  std::vector<int32_t> partly(other.begin(), other.end());
  partly[60] = 9999;
  request = AdvanceRequest();
  request.set_lease(engine_.Match(partly, {24, 24, 24})->lease());
  reply = Ask(request);
  EXPECT_EQ(Outcome(reply), MissReason::kNeverSeen);
  EXPECT_THAT(reply.segments(), ElementsAre(0, 0, static_cast<uint32_t>(MissReason::kNeverSeen)));
  EXPECT_EQ(before, Memory());
}

TEST_F(EngineComposeTest, AnotherSessionsLeaseIsLost) {
  TestEngine stranger(node_, layout_);
  v1::AdvanceRequest request = AdvanceRequest();
  request.set_session(stranger.secret());  // each session numbers its handles from the start
  request.set_model(stranger.model());
  v1::CompositionReply reply;
  ASSERT_TRUE(stranger.Call(request, &reply).ok());
  EXPECT_EQ(Outcome(reply), MissReason::kLeaseLost);
}

TEST_F(EngineComposeTest, AQuiesceBeforeItsCallPreventsWrites) {
  const std::vector<std::byte> before = Memory();
  const v1::AdvanceRequest request = AdvanceRequest();
  v1::QuiesceReply quiesced;
  ASSERT_TRUE(engine_.Call(engine_.QuiesceRequest(request.number()), &quiesced).ok());
  EXPECT_EQ(Outcome(Ask(request)), MissReason::kCancelled);
  EXPECT_EQ(before, Memory());
  EXPECT_EQ(Outcome(Ask(AdvanceRequest())), MissReason::kNone);
}

// Every field of the layout reaches the kernels.
TEST(ShapeOf, CopiesAllLayoutFields) {
  LinearLayer layer{.family = Family::kLightning,
                    .key_heads = 2,
                    .value_heads = 4,
                    .d_k = 8,
                    .d_v = 6,
                    .decay_table = {-1, -2, -3, -4},
                    .transition = TransitionForm::kScalar,
                    .order = StateOrder::kValueFirst};
  layer.rope = {.kind = RopeStyle::kInterleaved, .rotary_dim = 4, .frequencies = {1.0, 0.1}};
  const kernels::LinearShape shape = kernels::ShapeOf(layer);
  EXPECT_EQ(shape.family, Family::kLightning);
  EXPECT_EQ(shape.order, StateOrder::kValueFirst);
  EXPECT_EQ(shape.decay_table, layer.decay_table.data());
  EXPECT_EQ(shape.rotation.style, RopeStyle::kInterleaved);
  EXPECT_EQ(shape.rotation.rotary_dim, 4);
  EXPECT_EQ(shape.rotation.frequencies, layer.rope.frequencies.data());
  EXPECT_EQ(shape.heads, 4);
  EXPECT_EQ(shape.key_heads, 2);
}

}  // namespace
}  // namespace ashlar::daemon
