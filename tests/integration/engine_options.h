// SPDX-License-Identifier: Apache-2.0
// The test engines' models and memory in the form of the engine's API.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "tests/integration/engine_internals.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {

inline constexpr std::byte kPoison{0x5a};  // contents of targets before a landing

// The options that OpenOn takes besides a test engine's client and region. `options` points into this object.
class EngineOptions {
 public:
  EngineOptions(TestEngine& engine, const TensorShard& shard, const PrefixUse& prefixes);
  EngineOptions(const EngineOptions&) = delete;
  EngineOptions& operator=(const EngineOptions&) = delete;

  engine::OpenOptions options;

 private:
  const Layout layout_;
  const Identity identity_;
  std::vector<engine::Layer> layers_;
  std::vector<engine::PagePlace> places_;
};

// Opens a cache on a test engine's client, region and pages. `memory` false: without region and pages.
engine::Cache OpenSharing(TestEngine& engine, const TensorShard& shard = {}, const PrefixUse& prefixes = {},
                          bool memory = true, uint32_t land_ms = 5000, uint32_t quiet_ms = 10'000);

// Returns, for example, "3 prompts[0].tokens: null".
std::string Say(const engine::Status& status);
#define ASSERT_GOOD(call)                                                      \
  do {                                                                         \
    const engine::Status asserted = (call);                                    \
    ASSERT_EQ(asserted.code, ::ashlar::engine::Code::kOk) << asserted.message; \
  } while (false)

// The arrays that a prompt's struct points to.
struct Asked {
  explicit Asked(const std::vector<Tokens>& segments, std::span<const int32_t> table = {}, int query = 7) {
    for (const Tokens& segment : segments) {
      tokens.insert(tokens.end(), segment.begin(), segment.end());
      lengths.push_back(segment.size());
    }
    for (int i = 0; i < query; ++i) tokens.push_back(100 + i);
    prompt = {.tokens = tokens.data(),
              .token_count = tokens.size(),
              .segment_lengths = lengths.data(),
              .segment_count = lengths.size(),
              .page_table = table.data(),
              .page_count = table.size()};
  }
  Tokens tokens;
  std::vector<uint64_t> lengths;
  engine::Prompt prompt;
};

// The tensors and pages of a run, into which a test engine has written its numbers.
struct Computed {
  Computed(TestEngine& test, const engine::Run& run);
  Computed(const Computed&) = delete;
  Computed& operator=(const Computed&) = delete;

  PublishParts parts;
  std::vector<engine::LinearTensors> linear;
  engine::ComputedRun run_parts;
};

// Returns, for example, "checkpoint 0-50 run 50-54 interior 54-137 ".
std::string StepsOf(const engine::Request& request);
// Returns each segment's miss reason; "none": a hit.
std::vector<std::string> ReasonsOf(const engine::Request& request);

}  // namespace ashlar::integration
