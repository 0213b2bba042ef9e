// SPDX-License-Identifier: Apache-2.0
// The report of the conversations: one line per turn, a summary, and the same numbers in JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "nlohmann/json.hpp"
#include "proto/layout.h"

namespace ashlar::rag {

// The source of the states from which the first token was computed.
enum class Source : uint8_t {
  kNothing,
  kSegments,  // sections that other prompts share
  kTree,      // an exact prefix that any prompt may begin with
  kOwn,       // the conversation's own states
};
const char* Name(Source source);

struct TurnResult {
  int64_t conversation = 0, turn = 0;  // numbered from 1
  bool composed = false;
  uint64_t tokens = 0;   // tokens of the prompt
  uint64_t resumed = 0;  // tokens of the landed prefix
  Source source = Source::kNothing;
  uint64_t computed_tokens = 0;
  double ttft_ms = 0, full_ttft_ms = 0;  // Ashlar's, and full recompute's
  double flop_floor_speedup = 0;         // FLOPs of full recompute divided by the computed FLOPs; no fills
  double full_rel_l2 = 0;                // error of the logits, against full recompute in the largest passes
  // Against the same text computed with the same cuts without a cache: an exact one from its first token, a composed
  // one by the sequence that was never left. The first turn of a composed text has no reference.
  std::optional<double> logits_rel_l2;
  bool bit_identical = false;
  uint64_t checkpoints_offered = 0, kept = 0;
  uint64_t span_tokens = 0;  // resumed tokens whose states were rebuilt from a span
  // For an exact turn's rebuilt states, against full recompute: the worst layer's error.
  std::optional<double> state_rel_l2;
  uint64_t saved_bytes = 0;  // bytes saved by keeping a span instead of states
  double commit_ms = 0;
};

// Bounds of exact turns' full_rel_l2, and of rebuilt states with fp32 spans. Spans of 16 bits round what they store, so
// that states, and everything after them, have that error: about 3e-4 for fp16, and eight times that for bf16.
inline constexpr double kExactBound = 1e-5, kHalfBound = 3e-4, kBFloat16Bound = 24e-4;

struct ConversationResult {
  int64_t conversations = 0, turns = 0;
  int threads = 0;
  std::optional<DType> spans;  // type of their keys and values, if next turns diverge inside answers
  std::vector<TurnResult> results;

  double WorstExact() const;    // full_rel_l2 of exact turns
  double WorstRebuilt() const;  // state_rel_l2
  bool Holds() const;           // the bounds above
};

void PrintTurnHeader();
void PrintTurn(const TurnResult& turn);
void PrintSummary(const ConversationResult& run);
nlohmann::json ToJson(const ConversationResult& run);

}  // namespace ashlar::rag
