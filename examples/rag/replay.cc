// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/replay.h"

#include <algorithm>

#include "examples/refengine/sequence.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::rag {

using refengine::Sequence;
using refengine::Step;

void Cuts::Resume(uint64_t depth) {
  const auto at = static_cast<int64_t>(depth);
  if (depth > end()) calls_.clear();  // calls of another text
  while (!calls_.empty()) {
    std::vector<int64_t>& last = calls_.back();
    std::erase_if(last, [&](int64_t position) { return position > at; });
    if (!last.empty()) break;
    calls_.pop_back();
  }
  if (end() < depth) calls_.push_back({at});
}

absl::StatusOr<std::vector<float>> RunOn(const Runtime& runtime, Sequence& sequence, std::span<const int32_t> tokens,
                                         std::span<const int64_t> ends) {
  std::vector<float> logits(refengine::kVocabulary);
  std::vector<Step> chain;
  int64_t position = sequence.length();
  for (const int64_t end : ends) {
    chain.push_back(Step::Compute(tokens.subspan(position, end - position)));
    position = end;
  }
  const absl::Status status = runtime.engine.Advance(sequence, chain, {.last_logits = logits.data()});
  if (!status.ok()) return status;
  return logits;
}

absl::StatusOr<std::vector<float>> Replay(const Runtime& runtime, refengine::KvPages& pool,
                                          std::span<const int32_t> tokens, const Cuts& cuts) {
  Sequence sequence(runtime.model.config(), pool);
  absl::StatusOr<std::vector<float>> logits;
  for (const std::vector<int64_t>& ends : cuts.calls()) {
    logits = RunOn(runtime, sequence, tokens, ends);
    if (!logits.ok()) return logits;
  }
  return logits;
}

}  // namespace ashlar::rag
