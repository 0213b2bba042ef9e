// SPDX-License-Identifier: Apache-2.0
// The engine API with pages on a GPU: landings and publications give the same bytes as in host memory. Built twice,
// like gpu_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/gpu.h"
#include "tests/integration/grouped_engine.h"

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::ComposeBy;
using engine::Request;
using testing::HasSubstr;
using testing::StartsWith;
using Tables = GroupedEngine::Tables;

constexpr uint32_t kStateFloats = GroupedEngine::kHeads * GroupedEngine::kDim * GroupedEngine::kDim;

DaemonOptions With(const std::string& gpu) {
  return {.gpu = gpu, .program = GPU_ASHLARD};
}

class GpuEngine : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    gpu_ = kernels::FindGpu(0, &why);
    if (gpu_ == nullptr) GTEST_SKIP() << why;
    daemon_ = std::make_unique<DaemonProcess>(With("gpu: {device: 0}\n"));
  }
  // Tokens that occur in no other text.
  Tokens NewText(size_t tokens) {
    Tokens text(tokens);
    std::iota(text.begin(), text.end(), next_);
    next_ += static_cast<int32_t>(tokens);
    return text;
  }
  std::unique_ptr<GroupedEngine> Engine(bool on_gpu, Grouping grouping = Grouping::kOne,
                                        ComposeBy compose = ComposeBy::kProcess) {
    return std::make_unique<GroupedEngine>(*daemon_, grouping, true, on_gpu ? gpu_ : nullptr, compose);
  }
  static void PublishFrom(GroupedEngine& engine, const std::vector<Tokens>& segments) {
    Asked asked(segments, {}, 9);
    asked.prompt.fill = true;
    const Tables own = engine.Take(asked.tokens.size());
    engine.Put(own, asked.prompt);
    Request request;
    ASSERT_GOOD(engine.cache.Begin(&asked.prompt, 1, &request));
    engine.PublishMissing(request);
    ASSERT_GOOD(engine.LookAgain(request, own));
    ASSERT_GOOD(request.Finish());
  }
  static uint8_t Commit(GroupedEngine& engine, const Tokens& text) {
    const Tables own = engine.Take(text.size());
    engine.Compute(own, text);
    const engine::LinearTensors state = engine.State(static_cast<float>(text[0]));
    const engine::Checkpoint end = {text.size(), &state, 1};
    uint8_t outcome = 0;
    engine::Text committed{.tokens = text.data(),
                           .token_count = text.size(),
                           .prompt_tokens = text.size(),
                           .checkpoints = &end,
                           .checkpoint_count = 1,
                           .outcomes = &outcome};
    engine.Put(own, committed);
    const engine::Status status = engine.cache.Commit(&committed, 1);
    EXPECT_TRUE(status.ok()) << status.message;
    return outcome;
  }

  const kernels::Gpu* gpu_ = nullptr;
  std::unique_ptr<DaemonProcess> daemon_;
  int32_t next_ = 1;
};

// State and outputs after a prompt that is assembled from segments, whose keys and values are checked in their pages.
struct Set {
  std::vector<float> state = std::vector<float>(kStateFloats), out;
};
Set SetPrompt(GroupedEngine& engine, const std::vector<Tokens>& segments) {
  Set set;
  Asked asked(segments, {}, 9);
  const Tables pages = engine.Take(asked.tokens.size());
  engine.Poison(pages, asked.tokens.size());
  engine.Put(pages, asked.prompt);
  Request request;
  EXPECT_EQ(Say(engine.cache.Begin(&asked.prompt, 1, &request)), "0 ");
  const uint64_t computed = asked.tokens.size() - request.plan().cached_tokens;
  EXPECT_EQ(computed, 8u + 8 + 9) << StepsOf(request);
  constexpr uint32_t kWidth = GroupedEngine::kHeads * GroupedEngine::kDim;
  std::vector<float> rows(computed * kWidth);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 13) / 16;
  set.out.resize(rows.size());
  const engine::LayerAdvance advance{.layer = GroupedEngine::kLinear,
                                     .end = asked.tokens.size(),
                                     .inputs = {.tokens = computed,
                                                .q = rows.data(),
                                                .k = rows.data(),
                                                .v = rows.data(),
                                                .q_stride = kWidth,
                                                .k_stride = kWidth,
                                                .v_stride = kWidth},
                                     .state = {.data = set.state.data()},
                                     .out = set.out.data(),
                                     .out_stride = kWidth};
  EXPECT_EQ(Say(request.Advance(advance)), "0 ");
  EXPECT_EQ(Say(request.WaitLayer(GroupedEngine::kNarrow)), "0 ");
  EXPECT_EQ(Say(request.Finish()), "0 ");
  engine.ExpectLanded(pages, segments[0], 0);
  uint64_t start = segments[0].size();
  for (size_t i = 1; i < segments.size(); start += segments[i++].size()) {
    engine.ExpectLanded(pages, std::span(segments[i]).subspan(4, segments[i].size() - 8), start + 4);
    EXPECT_TRUE(engine.IsPoison(pages, start)) << "a seam is the engine's to compute";
  }
  EXPECT_TRUE(engine.IsPoison(pages, asked.tokens.size() - 1));
  return set;
}

TEST_F(GpuEngine, SegmentsAreTheSameFromAndToAnyMemory) {
  for (const Grouping grouping : {Grouping::kOne, Grouping::kCommon}) {
    for (const bool from_gpu : {true, false}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(grouping) << (from_gpu ? " from the GPU" : ""));
      const std::vector<Tokens> segments = {NewText(50), NewText(91), NewText(70)};
      PublishFrom(*Engine(from_gpu, grouping), segments);
      const Set near = SetPrompt(*Engine(false, grouping), segments),
                far = SetPrompt(*Engine(true, grouping), segments);
      EXPECT_EQ(near.state, far.state);
      EXPECT_EQ(near.out, far.out);
      EXPECT_NE(far.state, std::vector<float>(kStateFloats));
    }
  }
}

// The daemon composes in staged memory, although the pages are on the GPU.
TEST_F(GpuEngine, TheDaemonComposesForIt) {
  const std::vector<Tokens> segments = {NewText(50), NewText(91), NewText(70)};
  PublishFrom(*Engine(true), segments);
  const Set here = SetPrompt(*Engine(false), segments);
  const auto engine = Engine(true, Grouping::kOne, ComposeBy::kDaemon);
  const Set there = SetPrompt(*engine, segments);
  EXPECT_EQ(DaemonAdvances(engine->cache), 1u);
  EXPECT_EQ(here.state, there.state);
  EXPECT_EQ(here.out, there.out);
}

TEST_F(GpuEngine, PrefixesAreTheSameFromAndToAnyMemory) {
  for (const bool from_gpu : {true, false}) {
    const Tokens text = NewText(600);
    ASSERT_STREQ(engine::CommitName(Commit(*Engine(from_gpu, Grouping::kApart), text)), "kept");
    GroupedEngine scheduler(*daemon_, Grouping::kCommon, /*memory=*/false);
    Tokens longer = text;
    longer.push_back(-5);
    const engine::Prompt prompt{.tokens = longer.data(), .token_count = longer.size()};
    Request begun;
    ASSERT_GOOD(scheduler.cache.Begin(&prompt, 1, &begun));
    ASSERT_EQ(begun.plan().prefix_tokens, text.size());
    std::vector<uint8_t> bytes(begun.PlanBytes(nullptr, 0));
    begun.PlanBytes(bytes.data(), bytes.size());
    for (const bool to_gpu : {true, false}) {
      SCOPED_TRACE(testing::Message() << from_gpu << " to " << to_gpu);
      const auto reader = Engine(to_gpu, Grouping::kCommon);
      for (const uint64_t present : {0, 300}) {  // whole blocks of 256 tokens among these stay as they are
        const Tables pages = reader->Take(longer.size());
        reader->Poison(pages, longer.size());
        engine::PlanToLand plan{.plan = bytes.data(), .plan_bytes = bytes.size(), .present_tokens = present};
        reader->Put(pages, plan);
        Request landing;
        ASSERT_GOOD(reader->cache.Land(&plan, 1, &landing));
        std::vector<float> state(kStateFloats);
        const engine::LayerAdvance load{.end = text.size(), .state = {.data = state.data()}};
        ASSERT_GOOD(landing.Advance(load));
        ASSERT_GOOD(landing.Finish());
        EXPECT_EQ(state, std::vector<float>(kStateFloats, static_cast<float>(text[0])));
        const uint64_t kept = present / 256 * 256;
        reader->ExpectLanded(pages, std::span(text).subspan(kept), kept);
        EXPECT_EQ(reader->IsPoison(pages, 0), kept > 0);
        EXPECT_TRUE(reader->IsPoison(pages, text.size()));
      }
    }
  }
}

TEST_F(GpuEngine, ReconnectsAfterDaemonRestart) {
  const auto engine = Engine(true);
  const Tokens text = NewText(600);
  ASSERT_STREQ(engine::CommitName(Commit(*engine, text)), "kept");
  daemon_->Kill();
  daemon_->Start();
  ASSERT_TRUE(Eventually([&] { return engine->cache.connected(); }));
  EXPECT_STREQ(engine::CommitName(Commit(*engine, text)), "kept");
  const std::vector<Tokens> segments = {NewText(50), NewText(91), NewText(70)};
  PublishFrom(*engine, segments);
  SetPrompt(*engine, segments);
}

// All memory that this process would access is refused on the GPU, because accessing it by the CPU would crash.
TEST_F(GpuEngine, OnlyPagesAreOnTheGpu) {
  const auto engine = Engine(true);
  auto* const there = reinterpret_cast<float*>(engine->cache.data() + 4096);
  Asked asked({NewText(50), NewText(60)}, {}, 9);
  asked.prompt.fill = true;
  const Tables pages = engine->Take(asked.tokens.size());
  engine->Put(pages, asked.prompt);
  Request request;
  ASSERT_GOOD(engine->cache.Begin(&asked.prompt, 1, &request));
  engine::LinearTensors tensors = engine->State(1);
  engine::ComputedRun computed{.linear = &tensors, .linear_count = 1};
  engine->Put(pages, computed);
  const auto publish = [&](const std::function<void(engine::LinearTensors&)>& spoil) {
    tensors = engine->State(1);
    spoil(tensors);
    return Say(request.Publish(1, computed, nullptr));
  };
  EXPECT_THAT(publish([&](auto& t) { t.state = there; }), StartsWith("3 computed.linear[0].state: lies on the GPU"));
  EXPECT_THAT(publish([&](auto& t) { t.conv_tail = there; }), StartsWith("3 computed.linear[0].conv_tail: lies on "));
  EXPECT_THAT(publish([&](auto& t) { t.transition = there; }), StartsWith("3 computed.linear[0].transition: lies on "));
  EXPECT_THAT(publish([&](auto& t) { t.decay = there; }), StartsWith("3 computed.linear[0].decay: lies on the GPU"));

  const Tokens text = NewText(32);
  tensors = engine->State(1);
  tensors.state = there;
  const engine::Checkpoint end = {text.size(), &tensors, 1};
  uint8_t outcome = 0;
  engine::Text committed{.tokens = text.data(), .token_count = text.size(), .prompt_tokens = text.size()};
  committed.checkpoints = &end;
  committed.checkpoint_count = 1;
  committed.outcomes = &outcome;
  engine->Put(pages, committed);
  EXPECT_THAT(Say(engine->cache.Commit(&committed, 1)),
              StartsWith("3 texts[0].checkpoints[0].linear[0].state: lies on the GPU"));

  std::vector<float> near(9 * 16);
  engine::LayerAdvance good{.begin = 110, .end = 119, .state = {.data = near.data()}};
  good.inputs = {.tokens = 9, .q = near.data(), .k = near.data(), .v = near.data()};
  const engine::StateCopy copy{.position = 119, .state = {.data = there}};
  const auto advance = [&](const std::function<void(engine::LayerAdvance&)>& spoil) {
    engine::LayerAdvance given = good;
    spoil(given);
    return Say(request.Advance(given));
  };
  EXPECT_THAT(advance([&](auto& a) { a.state.data = there; }), StartsWith("3 advance.state.data: lies on the GPU"));
  EXPECT_THAT(advance([&](auto& a) { a.inputs.k = there, a.inputs.norm_epsilon = 1; }),
              StartsWith("3 advance.inputs.k: lies on the GPU"));
  EXPECT_THAT(advance([&](auto& a) { a.out = there; }), StartsWith("3 advance.out: lies on the GPU"));
  EXPECT_THAT(advance([&](auto& a) { a.copies = &copy, a.copy_count = 1; }),
              StartsWith("3 advance.copies[0].state.data: lies on the GPU"));
  uint32_t count = 0;
  const engine::Run* const runs = request.missing(&count);
  ASSERT_EQ(count, 2u);
  std::vector<float> rows(50 * 16), state(kStateFloats);
  engine::AloneLayer alone{.run = runs, .state = {.data = state.data()}};
  alone.inputs = {.tokens = 50, .q = rows.data(), .k = rows.data(), .v = rows.data()};
  alone.out = there;
  EXPECT_THAT(Say(engine->cache.ComputeAlone(alone)), StartsWith("3 alone.out: lies on the GPU"));
}

class GpuEngineOpens : public GpuEngine {
 protected:
  // The answer of Open to such a memory.
  std::string Open(
      const DaemonProcess& daemon, const std::function<void(engine::Memory&)>& spoil = [](auto&) {}) {
    GroupedEngine good(daemon, Grouping::kOne, /*memory=*/false, nullptr);
    const std::string rpc = daemon.client_options().rpc_socket, session = daemon.client_options().session_socket;
    engine::OpenOptions options = good.Options(rpc, session);
    kernels::ArenaError error;
    const auto arena = gpu_->MakeArena(2 << 20, &error);
    EXPECT_NE(arena, nullptr) << error.message;
    options.memory.kind = engine::MemoryKind::kGpu;
    options.memory.bytes = arena->bytes();
    options.memory.gpu_descriptor = arena->descriptor();
    options.memory.gpu_data = reinterpret_cast<uint8_t*>(arena->data());
    spoil(options.memory);
    Cache cache;
    return Say(Cache::Open(options, &cache));
  }
};

TEST_F(GpuEngineOpens, UsesTheNamedGpu) {
  EXPECT_EQ(Open(*daemon_), "0 ") << "the daemon's only one";
  const auto name = [](const kernels::Gpu& gpu) {
    return [&gpu](engine::Memory& memory) { std::memcpy(memory.gpu, gpu.id().data(), sizeof memory.gpu); };
  };
  EXPECT_EQ(Open(*daemon_, name(*gpu_)), "0 ");
  EXPECT_THAT(Open(*daemon_, [](auto& memory) { memory.gpu[3] = 0x77; }),
              StartsWith("9 memory: register_region.gpu: is not a GPU of this daemon"));
  std::string why;
  const kernels::Gpu* const second = kernels::FindGpu(1, &why);
  if (second == nullptr) GTEST_SKIP() << "two GPUs are needed: " << why;
  const DaemonProcess two(With("gpu: [{device: 0}, {device: 1}]\n"));
  EXPECT_EQ(Open(two, name(*gpu_)), "0 ");
  EXPECT_THAT(Open(two), StartsWith("3 memory: register_region.gpu: required, because the daemon serves 2 GPUs"));
}

TEST_F(GpuEngineOpens, RefusesByNameWhatItCannotServe) {
  EXPECT_THAT(Open(*daemon_, [](auto& memory) { memory.bytes = 4096; }),
              StartsWith("3 memory.bytes: 4096; the pages need "));
  EXPECT_THAT(Open(*daemon_, [](auto& memory) { memory.gpu_descriptor = -1; }), StartsWith("3 memory: descriptor: "));
  EXPECT_THAT(Open(*daemon_, [](auto& memory) { memory.gpu_data = nullptr; }), StartsWith("3 memory: data"));
  EXPECT_EQ(Open(*daemon_, [](auto& memory) { memory.kind = static_cast<engine::MemoryKind>(5); }),
            "3 memory.kind: 5 is unknown; expected 0 to 4");
  const DaemonProcess near;
  EXPECT_THAT(Open(near), StartsWith("9 memory: register_region.on_gpu: the daemon has no GPU"));
  const DaemonProcess tier(With("gpu: {device: 0}\nhbm: {capacity_bytes: 4MiB, arena_bytes: 2MiB}\n"));
  const std::string refused = Open(tier);
  EXPECT_THAT(refused,
              StartsWith("9 memory.gpu: states are staged in host memory, which this GPU's hbm tier excludes; "));
  EXPECT_THAT(refused, HasSubstr("a session with a region on a GPU must have all regions on that GPU"));
}

}  // namespace
}  // namespace ashlar::integration
