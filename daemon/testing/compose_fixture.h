// SPDX-License-Identifier: Apache-2.0
// For tests of the composition service: an engine with three published runs, and the expected result computed by the
// kernels.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/composition_plan.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "kernels/kernels.h"
#include "kernels/layer_shape.h"

namespace ashlar::daemon {

inline constexpr uint64_t kTokens = 12;
// Offsets of a call's memory in the region, after the published tensors.
inline constexpr uint64_t kState = TestEngine::kTensors + (128 << 10), kExponents = kState + (32 << 10);
inline constexpr uint64_t kCheckpoint = kExponents + 1024, kCheckpointExponents = kCheckpoint + (32 << 10);
inline constexpr uint64_t kInputs = kCheckpointExponents + 1024, kOut = kInputs + (64 << 10);

inline Layout WideLayout(uint32_t head, uint32_t tail) {
  Layout layout = SmallLayout();
  auto& linear = std::get<LinearLayer>(layout.layers[0]);
  linear.key_heads = 2;
  linear.value_heads = 4;
  linear.d_k = 16;
  linear.d_v = 40;
  if (head == 0) linear.conv_channels = linear.conv_kernel = 0;  // otherwise a seam would have to cover the convolution
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
  kernels::LinearShape shape() const { return kernels::ShapeOf(linear()); }
  size_t StateFloats() const { return size_t{linear().value_heads} * linear().d_k * linear().d_v; }

  // Returns the tuple of the last publish, copied from the engine's memory.
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
      head.form = kind == ObjectKind::kSegment ? TransitionForm::kDense : TransitionForm::kZero;
    }
    return heads;
  }

  void FillMemory() {
    std::uniform_real_distribution<float> uniform(-0.2f, 0.2f);
    auto* floats = reinterpret_cast<float*>(engine_.memory());
    for (size_t i = 0; i < TestEngine::kRegionBytes / sizeof(float); ++i) floats[i] = uniform(random_);
    std::memset(engine_.memory() + kExponents, 0, 64);
  }

  // Steps: prefix, run, segment, run, segment with a checkpoint, run.
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
    // q, k, v, g and β of a token are adjacent.
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

  // Performs the request on `memory`, a copy of the engine's memory.
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
                                .dtype = TypeOf(request),
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

}  // namespace ashlar::daemon
