// SPDX-License-Identifier: Apache-2.0
// Invalid fields of Advance: each is refused by name and changes nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/compose_fixture.h"

namespace ashlar::daemon {
namespace {

using ::testing::StartsWith;

class EngineAdvanceRefusalTest : public EngineComposeTest {
 protected:
  using Request = v1::AdvanceRequest;
  struct Case {
    const char* error;
    std::function<void(Request&)> spoil;
  };

  // Expects every corrupted request to be refused with an error with this prefix, and the memory to be unchanged.
  void ExpectRefusals(const std::vector<Case>& cases) {
    const std::vector<std::byte> before = Memory();
    for (const Case& c : cases) {
      Request request = AdvanceRequest();
      c.spoil(request);
      v1::CompositionReply reply;
      const absl::Status status = engine_.Call(request, &reply);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.error;
      EXPECT_THAT(std::string(status.message()), StartsWith(c.error));
    }
    EXPECT_EQ(before, Memory());
  }
};

TEST_F(EngineAdvanceRefusalTest, AMalformedChainIsRefusedByName) {
  ExpectRefusals({
      {"model: unknown handle 999", [](Request& r) { r.set_model(999); }},
      {"lease: wrong length; expected 16 bytes", [](Request& r) { r.set_lease("short"); }},
      {"lease: empty; expected", [](Request& r) { r.clear_lease(); }},
      {"layer: 1 is not a linear layer", [](Request& r) { r.set_layer(1); }},
      {"layer: out of range; the layout has 2", [](Request& r) { r.set_layer(2); }},
      {"steps: empty", [](Request& r) { r.clear_steps(); }},
      {"steps: too many; expected at most 4096",
       [](Request& r) {
         for (int i = 0; i < 4096; ++i) *r.add_steps() = r.steps(1);
       }},
      {"steps[3]: empty; expected a segment or a run", [](Request& r) { r.mutable_steps(3)->clear_step(); }},
      {"steps[2].segment.segment: must come after segment 0",
       [](Request& r) { r.mutable_steps(2)->mutable_segment()->set_segment(0); }},
      {"steps[4].segment.first_position: out of range",
       [](Request& r) { r.mutable_steps(4)->mutable_segment()->set_first_position(~uint64_t{0}); }},
      {"steps[4].segment.segment: out of range; the match has 3",
       [](Request& r) { r.mutable_steps(4)->mutable_segment()->set_segment(3); }},
      {"steps[0].segment.first_position: must be 0 for a prefix",
       [](Request& r) { r.mutable_steps(0)->mutable_segment()->set_first_position(1); }},
      {"steps[1].run.begin: must be less than run.end",
       [](Request& r) { r.mutable_steps(1)->mutable_run()->set_end(0); }},
      {"steps[3].run.begin: overlaps an earlier run",
       [](Request& r) { r.mutable_steps(3)->mutable_run()->set_begin(2); }},
      {"steps[5].run.end: out of range; the request has 12 tokens",
       [](Request& r) { r.mutable_steps(5)->mutable_run()->set_end(13); }},
      {"tokens: too many; expected at most 65536", [](Request& r) { r.set_tokens(65537); }},
      {"tokens: no step has a run",
       [](Request& r) {
         for (int step : {5, 3, 1}) r.mutable_steps()->DeleteSubrange(step, 1);
       }},
  });
}

TEST_F(EngineAdvanceRefusalTest, MalformedPlacesAreRefusedByName) {
  const uint64_t end = TestEngine::kRegionBytes;
  ExpectRefusals({
      {"state.dtype: expected", [](Request& r) { r.mutable_state()->set_dtype(4); }},
      {"state.dtype: expected", [](Request& r) { r.clear_state(); }},
      {"state.region: unknown handle 999", [](Request& r) { r.mutable_state()->set_region(999); }},
      {"state.offset: must be aligned to 4", [](Request& r) { r.mutable_state()->set_offset(kState + 2); }},
      {"state.offset: exceeds the region", [&](Request& r) { r.mutable_state()->set_offset(end - 1024); }},
      {"state.offset: exceeds the region", [](Request& r) { r.mutable_state()->set_offset(~uint64_t{0} - 3); }},
      {"state.exponents_offset: must be 0; only f16 states have exponents",
       [](Request& r) { r.mutable_state()->set_exponents_offset(64); }},
      {"state.exponents.offset: must be aligned",
       [](Request& r) {
         r.mutable_state()->set_dtype(static_cast<uint32_t>(DType::kF16));
         r.mutable_state()->set_exponents_offset(kExponents + 1);
       }},
      {"steps[4].checkpoint.region: unknown handle",
       [](Request& r) { r.mutable_steps(4)->mutable_checkpoint()->set_region(77); }},
      {"steps[4].checkpoint.offset: overlaps state",
       [](Request& r) { r.mutable_steps(4)->mutable_checkpoint()->set_offset(kState + 4); }},
      {"q: missing", [](Request& r) { r.clear_q(); }},
      {"k: missing", [](Request& r) { r.clear_k(); }},
      {"v: missing", [](Request& r) { r.clear_v(); }},
      {"g: missing", [](Request& r) { r.clear_g(); }},
      {"beta: missing", [](Request& r) { r.clear_beta(); }},
      {"k: must be absent; the request has no tokens",
       [](Request& r) {
         r.clear_q();
         r.clear_out();
         r.set_tokens(0);
       }},
      {"k.offset: must be aligned", [](Request& r) { r.mutable_k()->set_offset(kInputs + 1); }},
      {"v.stride: must be aligned", [](Request& r) { r.mutable_v()->set_stride(2001); }},
      {"v.stride: rows of 640 bytes overlap", [](Request& r) { r.mutable_v()->set_stride(636); }},
      {"g.offset: the last row exceeds", [&](Request& r) { r.mutable_g()->set_offset(end - 64); }},
      {"g.offset: the last row exceeds", [](Request& r) { r.mutable_g()->set_stride(~uint64_t{0} - 3); }},
      {"beta.region: unknown handle 999", [](Request& r) { r.mutable_beta()->set_region(999); }},
      {"out.offset: overlaps v",
       [](Request& r) {
         *r.mutable_out() = r.v();
         r.mutable_out()->set_offset(r.v().offset() + 4);
       }},
      {"out.offset: overlaps state", [](Request& r) { r.mutable_out()->set_offset(kState - 1024); }},
      {"q.offset: overlaps state", [](Request& r) { r.mutable_q()->set_offset(kState); }},
  });
}

TEST_F(EngineAdvanceRefusalTest, AnotherSessionOrModelIsRefused) {
  const std::vector<std::byte> before = Memory();
  Request request = AdvanceRequest();
  request.set_session(std::string(16, 'x'));
  v1::CompositionReply reply;
  EXPECT_EQ(engine_.Call(request, &reply).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(before, Memory());

  // Another model of the same tenant.
  Layout other = layout_;
  other.tail = 3;
  auto open = engine_.Make<v1::OpenModelRequest>();
  open.set_identity(EncodeIdentity(SmallIdentity()));
  open.set_layout(EncodeLayout(other));
  v1::OpenModelReply opened;
  ASSERT_TRUE(engine_.Call(open, &opened).ok());
  request = AdvanceRequest();
  request.set_model(opened.model());
  EXPECT_THAT(std::string(engine_.Call(request, &reply).message()),
              StartsWith("model: differs from the model of the lease"));
}

}  // namespace
}  // namespace ashlar::daemon
