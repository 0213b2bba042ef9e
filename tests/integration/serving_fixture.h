// SPDX-License-Identifier: Apache-2.0
// The common fixture of tests of a whole engine over a real daemon: a model, prompts, engines that serve.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "examples/rag/baselines.h"
#include "examples/rag/cached_serving.h"
#include "examples/rag/fidelity.h"
#include "kernels/host/thread_pool.h"
#include "tests/integration/daemon_process.h"

namespace ashlar::integration {

using rag::RagPrompt;
using refengine::ModelConfig;

inline constexpr int32_t kPageTokens = 16;
inline constexpr int32_t kPages = 192;  // enough for one prompt, not for two
inline constexpr refengine::SeamWidths kSeams{8, 8};
inline constexpr double kSame = 1e-4;  // tolerance of two ways of computing the same in fp32
inline constexpr float kPoison = -12345.0f;

// Wide keys and values, so that a landing takes long enough to be interrupted, with little else to compute.
inline ModelConfig WideConfig() {
  ModelConfig config = refengine::TinyConfig(/*seed=*/3, /*blocks=*/4);
  config.attention = {.query_heads = 8, .kv_heads = 8, .head_dim = 128, .rotary_dim = 32};
  return config;
}

inline RagPrompt MakeTestPrompt(const std::vector<int32_t>& order) {
  RagPrompt prompt;
  auto append = [&](int32_t seed, size_t count) {
    for (size_t i = 0; i < count; ++i)
      prompt.tokens.push_back(static_cast<int32_t>((i * 31 + seed * 17 + i * i) % 251));
  };
  append(0, 40);
  prompt.segment_lengths.push_back(40);
  for (int32_t section : order) {
    append(section, 330);
    prompt.segment_lengths.push_back(330);
  }
  append(99, 12);
  return prompt;
}

inline rag::ServingOptions OptionsFor(const ClientOptions& daemon) {
  return {.rpc_socket = daemon.rpc_socket,
          .session_socket = daemon.session_socket,
          .timeout = std::chrono::seconds(2),
          .seams = kSeams,
          .pages = kPages};
}

// One engine process: a session with hosted pages, and an engine that serves.
struct ServingEngine {
  ServingEngine(const ClientOptions& options, const rag::Runtime& runtime, const rag::Patience& patience = {},
                rag::ComposeBy compose = rag::ComposeBy::kEngine, bool cold_parallel = false) {
    rag::ServingOptions serving_options = OptionsFor(options);
    serving_options.patience = patience;
    serving_options.compose = compose;
    serving_options.cold_parallel = cold_parallel;
    auto opened = rag::CachedServing::Open(runtime, serving_options);
    EXPECT_TRUE(opened.ok()) << opened.status();
    serving = std::move(*opened);
  }

  rag::Served Serve(const RagPrompt& prompt) {
    absl::StatusOr<rag::Served> served = serving->Serve(prompt);
    EXPECT_TRUE(served.ok()) << served.status();
    return served.ok() ? *std::move(served) : rag::Served{};
  }

  std::unique_ptr<rag::CachedServing> serving;
};

class Serving : public testing::Test {
 protected:
  explicit Serving(const ModelConfig& config = WideConfig()) : config_(config) {}

  rag::Runtime runtime() { return {model_, engine_, kernels_, *queue_, pool_}; }

  std::vector<float> FullRecompute(const RagPrompt& prompt) {
    std::vector<std::max_align_t> memory(
        refengine::KvPages::RequiredBytes(config_, kPageTokens, kPages) / sizeof(std::max_align_t) + 64);
    void* aligned = memory.data();
    size_t space = memory.size() * sizeof(std::max_align_t);
    const size_t bytes = refengine::KvPages::RequiredBytes(config_, kPageTokens, kPages);
    std::align(64, bytes, aligned, space);
    refengine::KvPages pages(config_, kPageTokens, kPages, {static_cast<std::byte*>(aligned), bytes});
    const auto served = rag::FullRecompute(runtime(), pages).Serve(prompt);
    EXPECT_TRUE(served.ok()) << served.status();
    return served->logits;
  }

  // A process that signals the daemon as soon as it writes into the first attention layer's pages of `engine`, all of
  // which are free.
  pid_t SignalWhenItLands(ServingEngine& engine, int signal) {
    engine.serving->last() = {};  // its pages too
    return SignalWhenItLands(engine.serving->cache(), engine.serving->pages(), signal);
  }
  pid_t SignalWhenItLands(const engine::Cache& cache, const refengine::KvPages& pool, int signal) {
    const uint64_t bytes = refengine::KvPages::RequiredBytes(config_, kPageTokens, kPages);
    float* floats = reinterpret_cast<float*>(cache.data());
    std::fill(floats, floats + bytes / sizeof(float), kPoison);
    const refengine::PagedLayerGeometry layer = pool.Geometry(0);
    const pid_t child = fork();
    if (child != 0) return child;
    alarm(30);
    for (;;) {
      for (int32_t page = 0; page < kPages; ++page) {
        const volatile float* value =
            reinterpret_cast<float*>(cache.data() + layer.key_offset + page * layer.page_stride);
        if (*value != kPoison) {
          kill(daemon_.pid(), signal);
          _exit(0);
        }
      }
    }
  }

  const ModelConfig config_;
  const refengine::Model model_{config_};
  kernels::ThreadPool pool_{2};
  const kernels::Kernels& kernels_ = kernels::Host();
  const std::unique_ptr<kernels::Queue> queue_ = kernels_.MakeQueue(&pool_);
  refengine::Engine engine_{model_, kernels_, pool_};
  DaemonProcess daemon_{{.dram = "512MiB", .arena = "64MiB", .tenants = "", .threads = 1}};
};

}  // namespace ashlar::integration
