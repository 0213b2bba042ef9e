// SPDX-License-Identifier: Apache-2.0
// The composition service with the reference engine: results equal the engine's kernels bit for bit, also if a daemon
// dies or hangs during a call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/integration/engine_internals.h"
#include "tests/integration/serving_fixture.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using rag::ComposeBy;
using std::chrono::milliseconds;

// Without a pause, because the wait is over within microseconds.
bool SpinUntil(const std::function<bool()>& holds) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

class Composing : public Serving {
 protected:
  ServingEngine Engine(const DaemonProcess& daemon, ComposeBy compose, const rag::Patience& patience = {}) {
    return ServingEngine(daemon.client_options(), runtime(), patience, compose);
  }

  void ExpectSameBits(const refengine::RecurrentState& a, const refengine::RecurrentState& b) const {
    for (int32_t layer = 0; layer < config_.linear_layers(); ++layer) {
      EXPECT_TRUE(std::ranges::equal(a.State(layer), b.State(layer))) << "state of linear layer " << layer;
      EXPECT_TRUE(std::ranges::equal(a.ConvWindow(layer), b.ConvWindow(layer))) << "window of linear layer " << layer;
    }
  }
};

TEST_F(Composing, EngineAndDaemonGiveEqualBits) {
  DaemonProcess wide({.dram = "512MiB", .arena = "64MiB", .tenants = "", .threads = 3});
  ServingEngine own = Engine(daemon_, ComposeBy::kEngine), asked = Engine(daemon_, ComposeBy::kDaemon);
  ServingEngine elsewhere = Engine(wide, ComposeBy::kDaemon);
  const std::vector<std::vector<int32_t>> orders = {{1, 2, 3}, {3, 1, 2}, {2}, {1, 4, 3, 2}};
  uint64_t advances = 0;
  for (const std::vector<int32_t>& order : orders) {
    const RagPrompt prompt = MakeTestPrompt(order);
    own.Serve(prompt);  // so that all engines find it
    elsewhere.Serve(prompt);
    const rag::Served by_engine = own.Serve(prompt);
    const uint64_t before = DaemonAdvances(asked.serving->cache());
    const rag::Served by_daemon = asked.Serve(prompt), with_more_threads = elsewhere.Serve(prompt);
    advances = DaemonAdvances(asked.serving->cache()) - before;
    EXPECT_EQ(advances, static_cast<uint64_t>(config_.linear_layers())) << "one call a layer";
    EXPECT_EQ(by_daemon.hits, order.size() + 1);
    EXPECT_EQ(by_engine.logits, by_daemon.logits);
    EXPECT_EQ(by_engine.logits, with_more_threads.logits);
    ExpectSameBits(own.serving->last().sequence->recurrent(), asked.serving->last().sequence->recurrent());
    ExpectSameBits(own.serving->last().sequence->recurrent(), elsewhere.serving->last().sequence->recurrent());
  }
  EXPECT_GE(daemon_.Metric("ashlar_compositions_total{outcome=\"completed\",tenant=\"default\"}"),
            static_cast<double>(advances));
}

// A frozen daemon has the call, and then dies with it.
TEST_F(Composing, ADaemonThatDiesDuringAnAdvanceOnlyCostsTime) {
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3});
  const std::vector<float> full = FullRecompute(prompt);
  ServingEngine engine = Engine(daemon_, ComposeBy::kDaemon);
  engine.Serve(prompt);
  const rag::Served cached = engine.Serve(prompt);
  ASSERT_GT(rag::RelativeL2(cached.logits, full), 10 * kSame) << "the two answers must be told apart";

  const uint64_t before = DaemonAdvances(engine.serving->cache());
  std::thread killer([&] {
    ASSERT_TRUE(SpinUntil([&] { return DaemonAdvances(engine.serving->cache()) >= before + 2; }));
    daemon_.Freeze();
    std::this_thread::sleep_for(milliseconds(200));
    daemon_.Kill();
  });
  const rag::Served served = engine.Serve(prompt);
  killer.join();
  EXPECT_EQ(served.hits, 4u) << "the match came before the end";
  EXPECT_LT(DaemonAdvances(engine.serving->cache()) - before, static_cast<uint64_t>(config_.linear_layers()));
  // Tuples that a verdict vouched for before the daemon's end may still be used, by the engine's own kernels.
  const bool landed = served.computed_tokens == cached.computed_tokens;
  EXPECT_TRUE(landed || served.computed_tokens == prompt.tokens.size());
  EXPECT_LT(rag::RelativeL2(served.logits, landed ? cached.logits : full), kSame);

  daemon_.Start();
  ASSERT_TRUE(Eventually([&] { return engine.serving->cache().connected(); }));
  engine.Serve(prompt);
  const uint64_t restarted = DaemonAdvances(engine.serving->cache());
  EXPECT_EQ(engine.Serve(prompt).logits, cached.logits);
  EXPECT_GT(DaemonAdvances(engine.serving->cache()), restarted) << "a new life of the daemon composes again";
}

// The engine continues without the daemon; it does not use the memory shared with the daemon until the daemon has
// released it.
TEST_F(Composing, AFrozenDaemonDuringAnAdvanceIsAbandoned) {
  const rag::Patience hasty{.land = milliseconds(500)};
  const RagPrompt prompt = MakeTestPrompt({1, 2});
  ServingEngine engine = Engine(daemon_, ComposeBy::kDaemon, hasty);
  engine.Serve(prompt);
  const rag::Served cached = engine.Serve(prompt);
  const std::vector<float> full = FullRecompute(prompt);

  const uint64_t before = DaemonAdvances(engine.serving->cache());
  std::thread freezer([&] {
    ASSERT_TRUE(SpinUntil([&] { return DaemonAdvances(engine.serving->cache()) >= before + 2; }));
    daemon_.Freeze();
  });
  const rag::Served served = engine.Serve(prompt);
  freezer.join();
  const bool landed = served.computed_tokens == cached.computed_tokens;
  EXPECT_LT(rag::RelativeL2(served.logits, landed ? cached.logits : full), kSame);
  daemon_.Thaw();
  ASSERT_TRUE(Eventually([&] {
    const uint64_t so_far = DaemonAdvances(engine.serving->cache());
    const bool same = engine.Serve(prompt).logits == cached.logits;
    return same && DaemonAdvances(engine.serving->cache()) > so_far;
  }));
}

// The client's calls by themselves, without a model.
class AdvanceCall : public testing::Test {
 protected:
  static constexpr int64_t kTokens = 60'000;                              // enough to be interrupted
  static constexpr int64_t kKeys = 2 * 32, kValues = 4 * 24, kHeads = 4;  // widths of the test engine's layout
  static constexpr float kPoison = -12345.0f;

  void SetUp() override {
    auto region = engine_.client().HostRegion((kTokens * (2 * kKeys + 2 * kValues + 2 * kHeads) + 4096) * 4);
    ASSERT_TRUE(region.ok()) << region.status();
    region_ = *region;
    auto* at = reinterpret_cast<float*>(region_.data());
    const auto take = [&](int64_t floats) { return std::exchange(at, at + floats); };
    float* const state = take(kHeads * 32 * 24);
    float* const inputs = at;
    advance_.inputs = {.tokens = kTokens,
                       .q = take(kTokens * kKeys),
                       .k = take(kTokens * kKeys),
                       .v = take(kTokens * kValues),
                       .g = take(kTokens * kHeads),
                       .beta = take(kTokens * kHeads),
                       .q_stride = kKeys,
                       .k_stride = kKeys,
                       .v_stride = kValues,
                       .g_stride = kHeads,
                       .beta_stride = kHeads};
    for (float* value = inputs; value < at; ++value) *value = 1e-3f * static_cast<float>((value - inputs) % 97 - 96);
    advance_.region = region_;
    advance_.state.data = reinterpret_cast<std::byte*>(state);
    advance_.out = take(kTokens * kValues);
    advance_.out_stride = kValues;
    advance_.steps = {&run_, 1};
    std::fill(advance_.out, advance_.out + kTokens * kValues, kPoison);
  }
  bool Written(int64_t token) const {
    return *const_cast<const volatile float*>(advance_.out + token * kValues) != kPoison;
  }

  DaemonProcess daemon_{{.dram = "64MiB", .arena = "4MiB", .tenants = "", .threads = 1}};
  TestEngine engine_{daemon_.client_options()};
  Region region_;
  LayerAdvance advance_;
  AdvanceStep run_{.begin = 0, .end = kTokens};
};

TEST_F(AdvanceCall, IsQuiescedAfterDaemonExit) {
  std::thread killer([&] {
    ASSERT_TRUE(SpinUntil([&] { return Written(0); }));
    daemon_.Kill();
  });
  Composition composition = engine_.model().Advance(nullptr, advance_);
  killer.join();
  ASSERT_EQ(composition.reason(), MissReason::kDaemonUnavailable) << "it was over before the daemon was killed";
  EXPECT_TRUE(composition.WaitQuiesced(kPatience));
  EXPECT_FALSE(Written(kTokens - 1));
  std::fill(advance_.out, advance_.out + kTokens * kValues, kPoison);
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_TRUE(std::all_of(advance_.out, advance_.out + kTokens * kValues, [](float v) { return v == kPoison; }));
}

TEST_F(AdvanceCall, StaysUnresolvedWhileTheDaemonIsFrozen) {
  ClientOptions hasty = daemon_.client_options();
  hasty.timeout = milliseconds(1000);
  TestEngine engine(hasty);
  auto region = engine.client().HostRegion(region_.size());
  ASSERT_TRUE(region.ok()) << region.status();
  std::memcpy(region->data(), region_.data(), region_.size());
  const auto moved = [&](auto*& pointer) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(
        region->data() + (reinterpret_cast<const std::byte*>(pointer) - region_.data()));
  };
  for (const float** rows :
       {&advance_.inputs.q, &advance_.inputs.k, &advance_.inputs.v, &advance_.inputs.g, &advance_.inputs.beta}) {
    moved(*rows);
  }
  moved(advance_.out);
  moved(advance_.state.data);
  advance_.region = *region;

  daemon_.Freeze();
  Composition composition = engine.model().Advance(nullptr, advance_);
  EXPECT_EQ(composition.reason(), MissReason::kTimedOut);
  EXPECT_FALSE(composition.quiesced());
  EXPECT_FALSE(composition.WaitQuiesced(milliseconds(50)));
  daemon_.Thaw();
  EXPECT_TRUE(composition.WaitQuiesced(kPatience));
  EXPECT_EQ(composition.reason(), MissReason::kTimedOut) << "the answer does not change any more";
  std::fill(advance_.out, advance_.out + kTokens * kValues, kPoison);
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(Written(0)) << "a late write";
  const AdvanceStep few_tokens{
      .segment = {}, .begin = 0, .end = 64};  // under a sanitizer all of them may outlast the client
  advance_.steps = {&few_tokens, 1};
  EXPECT_EQ(engine.model().Advance(nullptr, advance_).reason(), MissReason::kNone);
  EXPECT_TRUE(Written(63));
}

TEST_F(AdvanceCall, IsInvalidOutsideItsRegionOrLayout) {
  const auto reason = [&](auto spoil) {
    LayerAdvance advance = advance_;
    spoil(advance);
    return engine_.model().Advance(nullptr, advance).reason();
  };
  EXPECT_EQ(reason([](LayerAdvance& a) { a.layer = 1; }), MissReason::kInvalidRequest);
  EXPECT_EQ(reason([](LayerAdvance& a) { a.region = {}; }), MissReason::kInvalidRequest);
  std::vector<float> elsewhere(kValues);
  EXPECT_EQ(reason([&](LayerAdvance& a) { a.out = elsewhere.data(); }), MissReason::kInvalidRequest);
  EXPECT_EQ(reason([](LayerAdvance& a) { a.out += kTokens * kValues - 1; }), MissReason::kInvalidRequest);
  const AdvanceStep interior{.segment = LandSegment{0, 0}};
  EXPECT_EQ(reason([&](LayerAdvance& a) { a.steps = {&interior, 1}; }), MissReason::kInvalidRequest);
  EXPECT_FALSE(Written(0));
}

}  // namespace
}  // namespace ashlar::integration
