// SPDX-License-Identifier: Apache-2.0
// The differences between a prompt that was assembled from segments and one that was fully computed.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/rag/cached_serving.h"
#include "examples/rag/serving.h"

namespace ashlar::rag {

// ‖a − b‖₂ / ‖b‖₂; infinite where that is not a number.
double RelativeL2(std::span<const float> a, std::span<const float> b);

// Relative L2 error of the first linear layer's states against one pass over the whole prompt: the largest over heads
// and over the positions after each landed interior. With `ashlar`, interiors are composed; with `naive`, states are
// added (T := I); with `zero_transition`, the state before an interior is erased (T := 0).
struct Layer0Error {
  double ashlar = 0, naive = 0, zero_transition = 0;
};

class Layer0Fidelity {
 public:
  explicit Layer0Fidelity(const Runtime& runtime, kernels::Workers& workers, int64_t longest_prompt);

  // `set` is a served prompt, which is advanced again from position 0 with the same landed keys. Prompts without a
  // landed interior have no error.
  absl::StatusOr<std::optional<Layer0Error>> Measure(const RagPrompt& prompt, SetPrompt& set, refengine::KvPages& pool);

 private:
  // States of layer 0 after every cached step of `chain` (or after step `i` if wanted[i]).
  absl::StatusOr<std::vector<std::vector<float>>> States(refengine::Sequence& sequence,
                                                         std::vector<refengine::Step> chain,
                                                         const std::vector<bool>& wanted);
  double WorstHead(const std::vector<std::vector<float>>& states, const std::vector<std::vector<float>>& truth) const;

  const Runtime runtime_;
  refengine::Engine engine_;  // takes any prompt in one pass, so that it can stop after layer 0
  refengine::ReplacedTransitions identity_, zero_;
};

}  // namespace ashlar::rag
