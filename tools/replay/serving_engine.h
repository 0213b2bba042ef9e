// SPDX-License-Identifier: Apache-2.0
// ServingEngine: an engine of a trace's requests whose prefill sleeps. Calls to the daemon, and bytes, are real.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ashlar/engine.h"
#include "examples/testing/local_daemon.h"
#include "kernels/mutex.h"
#include "tools/replay/models.h"
#include "tools/replay/prefill_time.h"

namespace ashlar::replay {

// The model's bytes per token and per checkpoint, divided by `scale`, are those of opaque layers. Prompts land
// concurrently, and are computed one at a time in the order in which they have landed. Decoding takes no time.
class ServingEngine {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    uint64_t scale = 1;
    uint64_t capture_tokens = 1;
    size_t running = 1;        // requests at a time
    uint64_t most_tokens = 0;  // most tokens of a request, including decoded ones
  };
  ServingEngine(const Model& model, const PrefillTime& prefill, const Options& options)
      : model_(model), prefill_(prefill), options_(options) {}

  // Without it, no prompt is looked up.
  absl::Status Open(const tools::DaemonSockets& daemon);

  struct Served {
    uint64_t cached_tokens = 0;
    Clock::time_point first_token;
  };
  // Serves one request: `tokens` begin with the prompt. Returns when the text is committed. Thread-safe for different
  // `slot`s below Options::running.
  absl::StatusOr<Served> Serve(size_t slot, std::span<const int32_t> tokens, uint64_t prompt);

 private:
  static constexpr uint32_t kLayers = 4, kPageTokens = 16;

  uint64_t PagesPerRequest() const { return (options_.most_tokens + kPageTokens - 1) / kPageTokens; }
  void Compute(uint64_t begin, uint64_t end) ABSL_LOCKS_EXCLUDED(mutex_);
  // False: a hit did not arrive.
  absl::StatusOr<bool> Land(engine::Request& request, std::vector<uint8_t>& state) const;
  absl::Status Commit(const engine::Request& request, std::span<const int32_t> tokens, uint64_t prompt,
                      std::span<const int32_t> pages);

  const Model& model_;
  const PrefillTime& prefill_;
  const Options options_;
  bool cached_ = false;
  engine::Cache cache_;
  std::vector<int32_t> pages_;                // all slots'
  std::vector<std::vector<uint8_t>> landed_;  // indexed by slot: the state of a layer
  std::vector<uint8_t> state_;                // committed
  std::vector<engine::LinearTensors> tensors_;
  Mutex mutex_;
  Clock::time_point idle_at_ ABSL_GUARDED_BY(mutex_);  // when the prompts that wait will have been computed
};

}  // namespace ashlar::replay
