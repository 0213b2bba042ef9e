// The composition service over gRPC: the kernels' bits, and every way to get a request wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/composition_plan.h"
#include "daemon/testing/node.h"
#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr uint64_t kTokens = 12;
// Where a call's memory lies in the region, behind the tensors that are published.
constexpr uint64_t kState = TestEngine::kTensors + (128 << 10), kExponents = kState + (32 << 10);
constexpr uint64_t kCheckpoint = kExponents + 1024, kCheckpointExponents = kCheckpoint + (32 << 10);
constexpr uint64_t kInputs = kCheckpointExponents + 1024, kOut = kInputs + (64 << 10);

Layout WideLayout(uint32_t head, uint32_t tail) {
  Layout layout = SmallLayout();
  auto& linear = std::get<LinearLayer>(layout.layers[0]);
  linear.key_heads = 2;
  linear.value_heads = 4;
  linear.d_k = 16;
  linear.d_v = 40;
  if (head == 0) linear.conv_channels = linear.conv_kernel = 0;  // which a seam would have to cover
  layout.head = head;
  layout.tail = tail;
  return layout;
}

class EngineComposeTest : public ::testing::Test {
 protected:
  explicit EngineComposeTest(const Layout& layout = WideLayout(4, 2), const std::string& listen = "")
      : layout_(layout), node_("", listen) {
    for (const ObjectKind kind : {ObjectKind::kCheckpoint, ObjectKind::kSegment, ObjectKind::kSegment}) {
      const std::span<const int32_t> run = std::span(prompt_).subspan(tuples_.size() * 24, 24);
      FillMemory();
      EXPECT_EQ(engine_.PublishRun(kind, run), PublishOutcome::kPublished);
      tuples_.push_back(Tuple(kind));
    }
    FillMemory();
    lease_ = engine_.Match(prompt_, {24, 24, 24})->lease();
  }

  const LinearLayer& linear() const { return std::get<LinearLayer>(layout_.layers[0]); }
  kernels::LinearShape shape() const { return ShapeOf(linear()); }
  size_t StateFloats() const { return size_t{linear().value_heads} * linear().d_k * linear().d_v; }

  // What was published last, copied out of the engine's memory.
  std::vector<kernels::HeadTuple> Tuple(ObjectKind kind) {
    std::vector<kernels::HeadTuple> heads(linear().value_heads);
    const v1::PublishObject sources = engine_.Sources(kind, 0, 24);
    for (const v1::PartSource& part : sources.parts()) {
      const bool state = part.form() == static_cast<uint32_t>(PartForm::kState);
      if (!state && part.form() != static_cast<uint32_t>(PartForm::kTransitionDense)) continue;
      const size_t floats = size_t{linear().d_k} * (state ? linear().d_v : linear().d_k);
      for (size_t head = 0; head < heads.size(); ++head) {
        const auto* at = reinterpret_cast<const float*>(engine_.memory() + part.offset()) + head * floats;
        copies_.emplace_back(at, at + floats);
        (state ? heads[head].state : heads[head].transition) = copies_.back().data();
      }
    }
    for (kernels::HeadTuple& head : heads) {
      head.form = kind == ObjectKind::kSegment ? kernels::TransitionForm::kDense : kernels::TransitionForm::kZero;
    }
    return heads;
  }

  void FillMemory() {
    std::uniform_real_distribution<float> uniform(-0.2f, 0.2f);
    auto* floats = reinterpret_cast<float*>(engine_.memory());
    for (size_t i = 0; i < TestEngine::kRegionBytes / sizeof(float); ++i) floats[i] = uniform(random_);
    std::memset(engine_.memory() + kExponents, 0, 64);
  }

  // prefix, run, segment, run, segment with a checkpoint, run.
  v1::AdvanceRequest AdvanceRequest(DType dtype = DType::kF32) {
    auto request = engine_.Make<v1::AdvanceRequest>();
    request.set_number(NextNumber());
    request.set_model(engine_.model());
    request.set_lease(lease_);
    for (uint32_t i = 0; i < 3; ++i) {
      *request.add_steps()->mutable_segment() = At(i, 24 * i);
      v1::TokenRun* run = request.add_steps()->mutable_run();
      run->set_begin(4 * i);
      run->set_end(4 * i + 3);
    }
    Place(kState, kExponents, dtype, request.mutable_state());
    Place(kCheckpoint, kCheckpointExponents, dtype, request.mutable_steps(4)->mutable_checkpoint());
    request.set_tokens(kTokens);
    // q, k, v, g and β of a token side by side.
    const uint64_t keys = linear().key_heads * linear().d_k, values = linear().value_heads * linear().d_v;
    uint64_t at = kInputs;
    const uint64_t stride = (2 * keys + values + 2 * linear().value_heads) * sizeof(float);
    const auto rows = [&](uint64_t floats, v1::TokenRows* out) {
      out->set_region(engine_.region());
      out->set_offset(at);
      out->set_stride(stride);
      at += floats * sizeof(float);
    };
    rows(keys, request.mutable_q());
    rows(keys, request.mutable_k());
    rows(values, request.mutable_v());
    rows(linear().value_heads, request.mutable_g());
    rows(linear().value_heads, request.mutable_beta());
    at = kOut;
    rows(values, request.mutable_out());
    request.mutable_out()->set_stride(values * sizeof(float) + 8);
    return request;
  }

  void Place(uint64_t offset, uint64_t exponents, DType dtype, v1::StatePlace* place) const {
    place->set_region(engine_.region());
    place->set_offset(offset);
    place->set_dtype(static_cast<uint32_t>(dtype));
    if (dtype == DType::kF16) place->set_exponents_offset(exponents);
  }

  // Does in `memory`, a copy of the engine's, what the request asks for.
  void Expect(const v1::AdvanceRequest& request, std::byte* memory, kernels::Workers* workers) const {
    const auto heads_at = [&](uint64_t offset) {
      std::vector<void*> heads;
      for (uint32_t head = 0; head < linear().value_heads; ++head) {
        heads.push_back(memory + offset + head * StateFloats() / linear().value_heads * ElementBytes(TypeOf(request)));
      }
      return heads;
    };
    const bool half = TypeOf(request) == DType::kF16;
    const auto view = [&](std::vector<void*>& heads, uint64_t exponents) {
      return kernels::StateView{.heads = heads.data(),
                                .dtype = static_cast<kernels::DType>(TypeOf(request)),
                                .exponents = half ? reinterpret_cast<int32_t*>(memory + exponents) : nullptr};
    };
    std::vector<void*> state = heads_at(kState), saved = heads_at(kCheckpoint);
    const kernels::StateView checkpoint = view(saved, kCheckpointExponents);
    std::vector<kernels::TupleView> views(3);
    std::vector<kernels::SeamStep> steps;
    for (const v1::AdvanceStep& step : request.steps()) {
      kernels::SeamStep& out = steps.emplace_back();
      if (step.has_segment()) {
        views[step.segment().segment()].heads = tuples_[step.segment().segment()].data();
        out.interior = &views[step.segment().segment()];
      } else {
        out.begin = static_cast<int64_t>(step.run().begin());
        out.end = static_cast<int64_t>(step.run().end());
      }
      if (step.has_checkpoint()) out.checkpoint = &checkpoint;
    }
    const auto at = [&](const v1::TokenRows& rows) { return reinterpret_cast<float*>(memory + rows.offset()); };
    const auto floats = [](const v1::TokenRows& rows) { return static_cast<int64_t>(rows.stride() / sizeof(float)); };
    const kernels::TokenInputs inputs{.tokens = kTokens,
                                      .q = at(request.q()),
                                      .k = at(request.k()),
                                      .v = at(request.v()),
                                      .g = at(request.g()),
                                      .beta = at(request.beta()),
                                      .q_stride = floats(request.q()),
                                      .k_stride = floats(request.k()),
                                      .v_stride = floats(request.v()),
                                      .g_stride = floats(request.g()),
                                      .beta_stride = floats(request.beta())};
    const auto queue = kernels::Host().MakeQueue(workers);
    kernels::Host()
        .AdvanceSeam({.shape = shape(),
                      .steps = steps,
                      .inputs = inputs,
                      .state = view(state, kExponents),
                      .out = at(request.out()),
                      .out_stride = floats(request.out())},
                     *queue)
        .Wait();
  }

  static DType TypeOf(const v1::AdvanceRequest& request) { return static_cast<DType>(request.state().dtype()); }
  uint64_t NextNumber() { return ++number_; }
  std::vector<std::byte> Memory() { return {engine_.memory(), engine_.memory() + TestEngine::kRegionBytes}; }

  template <typename Request>
  v1::CompositionReply Ask(const Request& request) {
    v1::CompositionReply reply;
    const absl::Status status = engine_.Call(request, &reply);
    EXPECT_TRUE(status.ok()) << status;
    return reply;
  }
  static MissReason Outcome(const v1::CompositionReply& reply) { return static_cast<MissReason>(reply.miss_reason()); }

  const uint32_t seed_ = std::random_device()();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, ::testing::Message() << "seed " << seed_};
  std::mt19937 random_{seed_};
  const Layout layout_;
  TestNode node_;
  TestEngine engine_{node_, layout_};
  const std::vector<int32_t> prompt_ = Ascending(72, 7);
  std::vector<std::vector<float>> copies_;
  std::vector<std::vector<kernels::HeadTuple>> tuples_;
  std::string lease_;
  uint64_t number_ = 0;
};

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
  EXPECT_THAT(metrics, HasSubstr("ashlar_compositions_total{outcome=\"done\",tenant=\"default\"} 2"));
  EXPECT_THAT(metrics, HasSubstr("ashlar_compositions_total{outcome=\"lease_lost\",tenant=\"default\"} 1"));
  EXPECT_THAT(metrics, HasSubstr("ashlar_composition_duration_seconds_count 3"));
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

TEST_F(EngineComposeTest, WhatCannotBeHadChangesNothing) {
  const std::vector<std::byte> before = Memory();
  v1::AdvanceRequest request = AdvanceRequest();
  request.set_lease(std::string(16, 'x'));
  v1::CompositionReply reply = Ask(request);
  EXPECT_EQ(Outcome(reply), MissReason::kLeaseLost);
  EXPECT_THAT(reply.segments(), Each(static_cast<uint32_t>(MissReason::kLeaseLost)));

  // A prompt of which only some segments are there.
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
  request.set_session(stranger.secret());  // handles are each session's own, and count up alike
  request.set_model(stranger.model());
  v1::CompositionReply reply;
  ASSERT_TRUE(stranger.Call(request, &reply).ok());
  EXPECT_EQ(Outcome(reply), MissReason::kLeaseLost);
}

TEST_F(EngineComposeTest, AQuiesceThatOvertakesItsCallKeepsItFromWriting) {
  const std::vector<std::byte> before = Memory();
  const v1::AdvanceRequest request = AdvanceRequest();
  v1::QuiesceReply quiet;
  ASSERT_TRUE(engine_.Call(engine_.QuiesceRequest(request.number()), &quiet).ok());
  EXPECT_EQ(Outcome(Ask(request)), MissReason::kCancelled);
  EXPECT_EQ(before, Memory());
  EXPECT_EQ(Outcome(Ask(AdvanceRequest())), MissReason::kNone);
}

TEST_F(EngineComposeTest, MalformedAdvanceIsRefusedByName) {
  using Request = v1::AdvanceRequest;
  const std::vector<std::byte> before = Memory();
  const uint64_t end = TestEngine::kRegionBytes;
  const struct {
    const char* error;
    std::function<void(Request&)> spoil;
  } kCases[] = {
      {"model: unknown handle 999", [](Request& r) { r.set_model(999); }},
      {"lease: not 16 bytes", [](Request& r) { r.set_lease("short"); }},
      {"lease: empty, but segments", [](Request& r) { r.clear_lease(); }},
      {"layer: 1 is an attention layer", [](Request& r) { r.set_layer(1); }},
      {"layer: the layout has 2", [](Request& r) { r.set_layer(2); }},
      {"steps: empty", [](Request& r) { r.clear_steps(); }},
      {"steps: more than 4096",
       [](Request& r) {
         for (int i = 0; i < 4096; ++i) *r.add_steps() = r.steps(1);
       }},
      {"steps[3]: neither a segment nor a run", [](Request& r) { r.mutable_steps(3)->clear_step(); }},
      {"steps[2].segment.segment: not behind segment 0",
       [](Request& r) { r.mutable_steps(2)->mutable_segment()->set_segment(0); }},
      {"steps[4].segment.first_position: out of range",
       [](Request& r) { r.mutable_steps(4)->mutable_segment()->set_first_position(~uint64_t{0}); }},
      {"steps[4].segment.segment: the match has 3",
       [](Request& r) { r.mutable_steps(4)->mutable_segment()->set_segment(3); }},
      {"steps[0].segment.first_position: a prefix stands at 0",
       [](Request& r) { r.mutable_steps(0)->mutable_segment()->set_first_position(1); }},
      {"steps[1].run.begin: not before its end", [](Request& r) { r.mutable_steps(1)->mutable_run()->set_end(0); }},
      {"steps[3].run.begin: inside or before", [](Request& r) { r.mutable_steps(3)->mutable_run()->set_begin(2); }},
      {"steps[5].run.end: there are 12 tokens", [](Request& r) { r.mutable_steps(5)->mutable_run()->set_end(13); }},
      {"tokens: more than 65536", [](Request& r) { r.set_tokens(65537); }},
      {"tokens: no step runs",
       [](Request& r) {
         for (int step : {5, 3, 1}) r.mutable_steps()->DeleteSubrange(step, 1);
       }},
      {"state.dtype: neither", [](Request& r) { r.mutable_state()->set_dtype(4); }},
      {"state.dtype: neither", [](Request& r) { r.clear_state(); }},
      {"state.region: unknown handle 999", [](Request& r) { r.mutable_state()->set_region(999); }},
      {"state.offset: not aligned to 4", [](Request& r) { r.mutable_state()->set_offset(kState + 2); }},
      {"state.offset: ends outside", [&](Request& r) { r.mutable_state()->set_offset(end - 1024); }},
      {"state.offset: ends outside", [](Request& r) { r.mutable_state()->set_offset(~uint64_t{0} - 3); }},
      {"state.exponents_offset: only for f16", [](Request& r) { r.mutable_state()->set_exponents_offset(64); }},
      {"state.exponents.offset: not aligned",
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
      {"k: there are no tokens",
       [](Request& r) {
         r.clear_q();
         r.clear_out();
         r.set_tokens(0);
       }},
      {"k.offset: not aligned", [](Request& r) { r.mutable_k()->set_offset(kInputs + 1); }},
      {"v.stride: not aligned", [](Request& r) { r.mutable_v()->set_stride(2001); }},
      {"v.stride: rows of 640 bytes overlap", [](Request& r) { r.mutable_v()->set_stride(636); }},
      {"g.offset: the last row ends outside", [&](Request& r) { r.mutable_g()->set_offset(end - 64); }},
      {"g.offset: the last row ends outside", [](Request& r) { r.mutable_g()->set_stride(~uint64_t{0} - 3); }},
      {"beta.region: unknown handle 999", [](Request& r) { r.mutable_beta()->set_region(999); }},
      {"out.offset: overlaps v",
       [](Request& r) {
         *r.mutable_out() = r.v();
         r.mutable_out()->set_offset(r.v().offset() + 4);
       }},
      {"out.offset: overlaps state", [](Request& r) { r.mutable_out()->set_offset(kState - 1024); }},
      {"q.offset: overlaps state", [](Request& r) { r.mutable_q()->set_offset(kState); }},
  };
  for (const auto& c : kCases) {
    Request request = AdvanceRequest();
    c.spoil(request);
    v1::CompositionReply reply;
    const absl::Status status = engine_.Call(request, &reply);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.error;
    EXPECT_THAT(std::string(status.message()), StartsWith(c.error));
  }
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
  EXPECT_THAT(std::string(engine_.Call(request, &reply).message()), StartsWith("model: another than the lease's"));
}

class EngineComposeSeamlessTest : public EngineComposeTest {
 protected:
  EngineComposeSeamlessTest() : EngineComposeTest(WideLayout(0, 0)) {}

  v1::ComposeRequest ComposeRequest() {
    auto request = engine_.Make<v1::ComposeRequest>();
    request.set_number(NextNumber());
    request.set_model(engine_.model());
    request.set_lease(lease_);
    for (uint32_t i = 0; i < 3; ++i) *request.add_segments() = At(i, 24 * i);
    Place(kState, 0, DType::kF32, request.add_states()->mutable_state());
    return request;
  }
};

TEST_F(EngineComposeSeamlessTest, ComposesAllLayersWithTheKernelsBits) {
  std::vector<std::byte> expected = Memory();
  EXPECT_EQ(Outcome(Ask(ComposeRequest())), MissReason::kNone);
  std::vector<void*> heads;
  for (uint32_t head = 0; head < linear().value_heads; ++head) {
    heads.push_back(expected.data() + kState + head * StateFloats() / linear().value_heads * sizeof(float));
  }
  std::vector<kernels::TupleView> interiors;
  for (const auto& tuple : tuples_) interiors.push_back({.heads = tuple.data()});
  const auto queue = kernels::Host().MakeQueue(nullptr);
  kernels::Host().Compose({.shape = shape(), .interiors = interiors, .state = {.heads = heads.data()}}, *queue).Wait();
  EXPECT_EQ(expected, Memory());
}

TEST_F(EngineComposeSeamlessTest, MalformedComposeIsRefusedByName) {
  using Request = v1::ComposeRequest;
  const std::vector<std::byte> before = Memory();
  TestEngine seams(node_, WideLayout(4, 2));
  const struct {
    const char* error;
    std::function<void(Request&)> spoil;
  } kCases[] = {
      {"model: unknown handle 999", [](Request& r) { r.set_model(999); }},
      {"lease: empty", [](Request& r) { r.clear_lease(); }},
      {"segments: empty", [](Request& r) { r.clear_segments(); }},
      {"segments[1].segment: not behind segment 0", [](Request& r) { r.mutable_segments(1)->set_segment(0); }},
      {"segments[2].first_position: out of range",
       [](Request& r) { r.mutable_segments(2)->set_first_position(~0ull); }},
      {"states: linear layer 0 is missing", [](Request& r) { r.clear_states(); }},
      {"states[0].layer: expected linear layer 0, got 1", [](Request& r) { r.mutable_states(0)->set_layer(1); }},
      {"states[1]: the layout has only 1", [](Request& r) { *r.add_states() = r.states(0); }},
      {"states[0].state.offset: ends outside",
       [](Request& r) { r.mutable_states(0)->mutable_state()->set_offset(TestEngine::kRegionBytes - 4); }},
  };
  for (const auto& c : kCases) {
    Request request = ComposeRequest();
    c.spoil(request);
    v1::CompositionReply reply;
    const absl::Status status = engine_.Call(request, &reply);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.error;
    EXPECT_THAT(std::string(status.message()), StartsWith(c.error));
  }
  Request request = ComposeRequest();
  request.set_session(seams.secret());
  request.set_model(seams.model());
  v1::CompositionReply reply;
  EXPECT_THAT(std::string(seams.Call(request, &reply).message()), StartsWith("model: its layout has seams"));
  EXPECT_EQ(before, Memory());
}

// Shapes of families that no model may have yet: what the layout says reaches the kernels.
TEST(ShapeOf, TakesEverythingFromTheLayout) {
  LinearLayer layer{.family = LinearFamily::kLightning,
                    .key_heads = 2,
                    .value_heads = 4,
                    .d_k = 8,
                    .d_v = 6,
                    .decay_table = {-1, -2, -3, -4},
                    .transition = TransitionKind::kScalar,
                    .order = StateOrderKind::kValueFirst};
  layer.rope = {.kind = RopeKind::kInterleaved, .rotary_dim = 4, .frequencies = {1.0, 0.1}};
  const kernels::LinearShape shape = ShapeOf(layer);
  EXPECT_EQ(shape.family, kernels::Family::kLightning);
  EXPECT_EQ(shape.order, kernels::StateOrder::kValueFirst);
  EXPECT_EQ(shape.decay_table, layer.decay_table.data());
  EXPECT_EQ(shape.rotation.style, kernels::RopeStyle::kInterleaved);
  EXPECT_EQ(shape.rotation.rotary_dim, 4);
  EXPECT_EQ(shape.rotation.frequencies, layer.rope.frequencies.data());
  EXPECT_EQ(shape.heads, 4);
  EXPECT_EQ(shape.key_heads, 2);
}

}  // namespace
}  // namespace ashlar::daemon
