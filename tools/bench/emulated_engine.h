// SPDX-License-Identifier: Apache-2.0
// EmulatedEngine: an engine that sleeps as long as its GPU would compute. All else of it is real: tuples, keys and
// values in pages, compositions, and the calls to the daemon of its node.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ashlar/engine.h"
#include "examples/testing/local_daemon.h"

namespace ashlar::bench {

// Layers of qwen3-next: periods of three linear layers and one attention layer. The linear layers have `heads` of its
// 32 heads; keys and values of an attention layer are complete.
struct EmulatedSize {
  uint32_t periods = 1, heads = 4;
  DType dtype = DType::kF32;     // type of states and tuples: kF32 or kBF16
  uint64_t tuple_bytes() const;  // bytes of a segment's tuples in all layers
};

class EmulatedEngine {
 public:
  // Segments of a prompt, unless a benchmark says otherwise; 6 MiB of a segment are cached.
  static constexpr uint64_t kSegments = 11, kSegmentTokens = 2400, kQuestionTokens = 64;
  static constexpr uint32_t kPageTokens = 16;
  static constexpr EmulatedSize kScaled{}, kWhole{.periods = 12, .heads = 32, .dtype = DType::kBF16};
  static constexpr double kTokensPerSecond = 6000;
  static constexpr uint64_t kPromptPages = (kSegments * kSegmentTokens + kQuestionTokens) / kPageTokens;
  static constexpr uint64_t kSegmentPages = kSegmentTokens / kPageTokens;
  static constexpr uint64_t PagesOf(uint64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

  // With space for this many pages. A rate of 0 is not declared: then every hit is taken, however long it takes.
  absl::Status Open(const tools::DaemonSockets& daemon, uint64_t pages, double tokens_per_second = kTokensPerSecond,
                    EmulatedSize size = kScaled);
  // Computes and publishes what a request misses, starting with run `filled`.
  absl::Status Fill(engine::Request& request, uint32_t& filled);
  // Serves others until told to stop.
  void Serve(const std::atomic<bool>& stop);

  struct Times {
    // Until the first token; from the last segment's end; of that, until all hits have landed, and composing.
    double ttft_ms = 0, combine_ms = 0, landing_ms = 0, composing_ms = 0;
    uint64_t elsewhere = 0, hits = 0, seam_tokens = 0;  // seam_tokens: with the question
  };
  // A cold prompt, to its first token: the linear layers are composed, with the recurrence of seams and question; the
  // rest of these tokens is emulated. Without `lengths`, each segment has kSegmentTokens.
  absl::StatusOr<Times> Ask(std::span<const int32_t> tokens, bool parallel, std::span<const uint64_t> lengths = {});

  struct Landed {
    double landed_ms = 0;  // from the call until all hits have landed
    uint64_t hits = 0, bytes = 0;
    std::vector<uint64_t> tiers = std::vector<uint64_t>(5);  // hits, by TierKind
    std::string missed;                                      // reason of the last miss; empty: there was none
  };
  // Lands a prompt without computing missed segments. `lengths` as above.
  absl::StatusOr<Landed> Land(std::span<const int32_t> tokens, std::span<const uint64_t> lengths = {});

 private:
  // The linear layers of a landed prompt; `computed`: its tokens outside the hits.
  absl::Status Compose(engine::Request& request, uint64_t prompt_tokens, uint64_t computed);

  EmulatedSize size_;
  double seconds_per_token_ = 1 / kTokensPerSecond;
  engine::Cache cache_;
  std::vector<std::byte> state_, tail_;  // have the type size_.dtype
  std::vector<float> transition_;
  std::vector<engine::LinearTensors> tensors_;
  std::vector<int32_t> pages_;
};

// Random tokens, the same in each run.
class Prompts {
 public:
  explicit Prompts(uint64_t seed = 2) : random_(seed) {}
  std::vector<int32_t> Next(uint64_t tokens = EmulatedEngine::kSegments * EmulatedEngine::kSegmentTokens +
                                              EmulatedEngine::kQuestionTokens);

 private:
  std::mt19937_64 random_;
};

}  // namespace ashlar::bench
