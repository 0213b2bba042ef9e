// SPDX-License-Identifier: Apache-2.0
// The engine API over a real daemon: one call that publishes many missing runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "proto/outcome.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_options.h"

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::Code;
using engine::Request;
using testing::Each;
using testing::StartsWith;

// An engine of one linear and one attention layer whose numbers identify their run and token.
class PublishMany : public testing::Test {
 protected:
  static constexpr uint32_t kHeads = 2, kDim = 8, kSlots = 16, kLinear = 0, kAttention = 1, kSeam = 4;
  static constexpr uint32_t kRunPages = 3, kPromptPages = 64, kRegionPages = 160;
  static constexpr float kDecays[kHeads] = {-0.3F, -0.01F};

  PublishMany() {
    engine::Layer layers[2];
    layers[kLinear] = {.kind = engine::LayerKind::kLinear, .family = Family::kRetnet, .decay_table = kDecays};
    layers[kLinear].key_heads = layers[kLinear].value_heads = kHeads;
    layers[kLinear].d_k = layers[kLinear].d_v = kDim;
    layers[kAttention] = {.kind = engine::LayerKind::kGqa, .kv_heads = kHeads, .key_dim = kDim, .value_dim = kDim};
    const std::string rpc = daemon_.client_options().rpc_socket, session = daemon_.client_options().session_socket;
    engine::OpenOptions options = {.rpc_socket = rpc.c_str(), .session_socket = session.c_str()};
    options.model = {.model_id = "many",
                     .weights_digest = "1",
                     .page_tokens = kSlots,
                     .head = kSeam,
                     .tail = kSeam,
                     .layers = layers,
                     .layer_count = 2};
    options.memory.pages = kRegionPages;
    const engine::Status opened = Cache::Open(options, &cache_);
    EXPECT_EQ(opened.code, Code::kOk) << opened.message;
    place_ = *cache_.places(nullptr);
    table_.resize(kRegionPages);
    std::iota(table_.begin(), table_.end(), 0);
    for (uint64_t i = 0; i < 16; ++i) segments_.push_back(MakeRun(10 + i, 40));
  }

  Asked Prompt() {
    Asked asked(segments_, std::span(table_).first(kPromptPages));
    asked.prompt.fill = true;
    return asked;
  }
  float* Row(int32_t page, uint64_t slot, uint64_t offset) {
    return reinterpret_cast<float*>(cache_.data() + offset + static_cast<uint64_t>(page) * place_.page_stride +
                                    slot * place_.token_stride);
  }
  // "Computes" a segment in separate pages, after the ones of the prompt.
  engine::ComputedRun Compute(uint32_t segment) {
    std::vector<float>& numbers = numbers_[segment];
    numbers.assign(kHeads * kDim * kDim + kHeads, static_cast<float>(segment) + 0.5F);
    float* const transition = numbers.data() + kHeads * kDim * kDim;
    for (uint32_t head = 0; head < kHeads; ++head) transition[head] = kDecays[head] * (40 - 2 * kSeam);
    tensors_[segment] = {.layer = kLinear, .state = numbers.data(), .transition = transition};
    const int32_t* const pages = table_.data() + kPromptPages + uint64_t{segment} * kRunPages;
    for (uint64_t token = 0; token < segments_[segment].size(); ++token) {
      for (const uint64_t offset : {place_.key_offset, place_.value_offset}) {
        std::fill_n(Row(pages[token / kSlots], token % kSlots, offset), kHeads * kDim, Number(segment, token));
      }
    }
    return {.linear = &tensors_[segment], .linear_count = 1, .page_table = pages, .page_count = kRunPages};
  }
  static float Number(uint32_t segment, uint64_t token) { return static_cast<float>(1000 * segment + token); }

  // All runs, the last one first.
  void ComputeAll(const Request& request, std::vector<uint32_t>& missing, std::vector<engine::ComputedRun>& computed) {
    uint32_t count;
    const engine::Run* const runs = request.missing(&count);
    for (uint32_t i = count; i-- > 0;) {
      missing.push_back(i);
      computed.push_back(Compute(runs[i].segment));
    }
  }
  // Every segment lands with its own numbers.
  void ExpectAllLands(Request& request) {
    ASSERT_GOOD(request.LookAgain());
    uint64_t start = 0;
    ASSERT_EQ(request.plan().segment_count, segments_.size());
    for (uint32_t i = 0; i < segments_.size(); start += segments_[i++].size()) {
      EXPECT_TRUE(request.plan().segments[i].used) << i << " " << engine::MissName(request.plan().segments[i].reason);
    }
    for (uint32_t step = 0; step < request.plan().step_count; ++step) {
      const engine::Step& at = request.plan().steps[step];
      if (at.kind != engine::StepKind::kInterior) continue;
      engine::Tuple tuple;
      ASSERT_GOOD(request.WaitLayer(kLinear));
      ASSERT_GOOD(request.StepTuple(step, kLinear, &tuple));
      EXPECT_EQ(*static_cast<const float*>(tuple.heads[0].state), static_cast<float>(at.segment) + 0.5F);
    }
    ASSERT_GOOD(request.Finish());
    start = 0;
    for (uint32_t i = 0; i < segments_.size(); start += segments_[i++].size()) {
      for (uint64_t token = kSeam; token < segments_[i].size() - kSeam; ++token) {
        const uint64_t position = start + token;
        ASSERT_EQ(*Row(table_[position / kSlots], position % kSlots, place_.value_offset), Number(i, token));
      }
    }
  }
  double PublishCalls() const { return daemon_.Metric("ashlar_rpcs_total{code=\"OK\",method=\"Publish\"}"); }

  DaemonProcess daemon_;
  Cache cache_;
  engine::PagePlace place_;
  std::vector<int32_t> table_;
  std::vector<Tokens> segments_;
  std::vector<float> numbers_[16];
  engine::LinearTensors tensors_[16];
};

TEST_F(PublishMany, UsesOneCall) {
  const Asked asked = Prompt();
  Request request;
  ASSERT_GOOD(cache_.Begin(&asked.prompt, 1, &request));
  std::vector<uint32_t> missing;
  std::vector<engine::ComputedRun> computed;
  ComputeAll(request, missing, computed);
  ASSERT_EQ(missing.size(), 16u);
  std::vector<uint8_t> outcomes(16);
  ASSERT_GOOD(request.Publish(missing.data(), computed.data(), 16, outcomes.data()));
  EXPECT_THAT(outcomes, Each(static_cast<uint8_t>(PublishOutcome::kPublished)));
  EXPECT_TRUE(Eventually([&] { return PublishCalls() == 1; }));
  ExpectAllLands(request);
  engine::StoredSegments stored;
  cache_.StoredSegments(&stored);
  EXPECT_EQ(stored.segments, 15u) << "the first segment is a prefix";
}

TEST_F(PublishMany, DoesNotWait) {
  const Asked asked = Prompt();
  Request request;
  ASSERT_GOOD(cache_.Begin(&asked.prompt, 1, &request));
  std::vector<uint8_t> outcomes(16);
  engine::Job job;
  {
    std::vector<uint32_t> missing;
    std::vector<engine::ComputedRun> computed;
    ComputeAll(request, missing, computed);
    ASSERT_EQ(missing.size(), 16u);
    ASSERT_GOOD(request.StartPublish(missing.data(), computed.data(), 16, outcomes.data(), &job));
    std::ranges::fill(missing, 99);  // the names are copied
    std::ranges::fill(computed, engine::ComputedRun{});
  }
  ASSERT_GOOD(job.Wait());
  EXPECT_THAT(outcomes, Each(static_cast<uint8_t>(PublishOutcome::kPublished)));
  EXPECT_TRUE(Eventually([&] { return PublishCalls() == 1; }));
  ExpectAllLands(request);
}

TEST_F(PublishMany, RefusesAllIfOneIsInvalid) {
  const Asked asked = Prompt();
  Request request;
  ASSERT_GOOD(cache_.Begin(&asked.prompt, 1, &request));
  std::vector<uint32_t> missing;
  std::vector<engine::ComputedRun> computed;
  ComputeAll(request, missing, computed);
  ASSERT_EQ(missing.size(), 16u);
  std::vector<uint8_t> outcomes(16, 77);
  const auto publish = [&] { return Say(request.Publish(missing.data(), computed.data(), 16, outcomes.data())); };
  EXPECT_EQ(Say(request.Publish(nullptr, computed.data(), 16, nullptr)), "3 missing: null");
  EXPECT_EQ(Say(request.Publish(missing.data(), nullptr, 16, nullptr)), "3 computed: null");
  missing[15] = 16;
  EXPECT_EQ(publish(), "3 missing[15]: 16 is out of range; the request has 16 missing runs");
  missing[15] = missing[3];
  EXPECT_THAT(publish(), StartsWith("3 missing[15]: 12 is given twice"));
  missing[15] = 0;
  const engine::ComputedRun right = std::exchange(computed[7], engine::ComputedRun{});
  EXPECT_THAT(publish(), StartsWith("3 computed[7].page_count: "));
  computed[7] = right;
  EXPECT_THAT(outcomes, Each(77));
  EXPECT_EQ(PublishCalls(), 0);
  ASSERT_GOOD(request.Publish(missing.data(), computed.data(), 0, nullptr));
  ASSERT_GOOD(request.Publish(missing.data(), computed.data(), 16, outcomes.data()));
  EXPECT_EQ(publish(), "3 missing[0]: 15 was already published or abandoned");
  ExpectAllLands(request);
}

// Publishes some runs one by one and the rest together; a run that was abandoned meanwhile is computed in its place.
TEST_F(PublishMany, RunsConcurrentlyWithSinglePublishes) {
  const Asked asked = Prompt();
  Request request;
  ASSERT_GOOD(cache_.Begin(&asked.prompt, 1, &request));
  std::vector<uint32_t> missing;
  std::vector<engine::ComputedRun> computed;
  ComputeAll(request, missing, computed);
  ASSERT_EQ(missing.size(), 16u);
  ASSERT_GOOD(request.Publish(missing[0], computed[0], nullptr));
  request.Abandon(missing[1]);
  std::vector<uint8_t> outcomes(14);
  ASSERT_GOOD(request.Publish(missing.data() + 2, computed.data() + 2, 14, outcomes.data()));
  EXPECT_THAT(outcomes, Each(static_cast<uint8_t>(PublishOutcome::kPublished)));
  ASSERT_GOOD(request.LookAgain());
  for (uint32_t i = 0; i < 16; ++i) EXPECT_EQ(request.plan().segments[i].used, i != missing[1]) << i;
  ASSERT_GOOD(request.Finish());
}

// A lost daemon gives outcomes, and no error.
TEST_F(PublishMany, ADeadDaemonIsAnOutcome) {
  const Asked asked = Prompt();
  Request request;
  ASSERT_GOOD(cache_.Begin(&asked.prompt, 1, &request));
  std::vector<uint32_t> missing;
  std::vector<engine::ComputedRun> computed;
  ComputeAll(request, missing, computed);
  daemon_.Kill();
  std::vector<uint8_t> outcomes(16);
  ASSERT_GOOD(request.Publish(missing.data(), computed.data(), 16, outcomes.data()));
  for (const uint8_t outcome : outcomes) EXPECT_STRNE(engine::PublishName(outcome), "published");
  ASSERT_GOOD(request.LookAgain());
  EXPECT_EQ(request.plan().cached_tokens, 0u);
  ASSERT_GOOD(request.Finish());
}

}  // namespace
}  // namespace ashlar::integration
