// SPDX-License-Identifier: Apache-2.0
// Replay: a text that is computed from its first token without a cache, in the same steps as with one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/rag/serving.h"
#include "examples/refengine/kv_pages.h"

namespace ashlar::rag {

// The cuts of a text: each call of Engine::Advance is a list of the positions at which its runs ended, rising. A text
// computed in the same cuts has the same bits (refengine/held_checkpoint.h).
class Cuts {
 public:
  // The text was resumed at `depth`. Earlier cuts before the depth stay; the unknown rest before it counts as one run.
  void Resume(uint64_t depth);
  void Add(std::vector<int64_t> ends) { calls_.push_back(std::move(ends)); }
  uint64_t end() const { return calls_.empty() ? 0 : static_cast<uint64_t>(calls_.back().back()); }
  const std::vector<std::vector<int64_t>>& calls() const { return calls_; }

 private:
  std::vector<std::vector<int64_t>> calls_;
};

// Logits after the last of `tokens`, where `cuts` end.
absl::StatusOr<std::vector<float>> Replay(const Runtime& runtime, refengine::KvPages& pool,
                                          std::span<const int32_t> tokens, const Cuts& cuts);

// One call: the runs of `tokens` that end at `ends`, after `sequence`. Returns the logits after the last.
absl::StatusOr<std::vector<float>> RunOn(const Runtime& runtime, refengine::Sequence& sequence,
                                         std::span<const int32_t> tokens, std::span<const int64_t> ends);

}  // namespace ashlar::rag
