// SPDX-License-Identifier: Apache-2.0
// PromptText: a request's prompt, from the engine's arguments or from another process's plan.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/plan_bytes.h"
#include "client/session/match.h"
#include "proto/key.h"

namespace ashlar::engine {

class PromptText {
 public:
  // Check and take the arguments of a call. `field` names them in errors.
  Status Take(const CacheState& cache, const Prompt& prompt, const std::string& field);
  Status Take(const CacheState& cache, const PlanToLand& plan, const std::string& field);
  // Takes the tokens of a segment to compute for another engine.
  void Take(std::vector<int32_t> tokens);
  // Keeps a copy of the prompt's tokens: the caller's may go before they are read.
  void OwnTokens();

  bool begun() const { return begun_; }                        // taken from a Prompt
  std::span<const int32_t> tokens() const { return tokens_; }  // empty of a plan
  uint64_t token_count() const { return token_count_; }
  const std::vector<uint64_t>& lengths() const { return lengths_; }  // tokens of each segment
  int64_t rotary_shift(uint32_t segment) const { return rotary_shifts_[segment]; }
  bool shifted() const;  // whether any segment has a rotary shift
  std::span<const MediaHash> media() const { return media_; }
  const Salt& salt() const { return salt_; }
  const PlannedLanding* planned() const { return planned_.has_value() ? &*planned_ : nullptr; }  // null: no plan
  uint64_t present_tokens() const { return present_tokens_; }  // tokens of the plan's prefix that pages already have
  // The prompt in the form that the client looks up.
  ashlar::Prompt Asked() const;

 private:
  Status TakeShifts(const CacheState& cache, const int64_t* shifts, uint64_t count, const std::string& field);

  std::span<const int32_t> tokens_;
  uint64_t token_count_ = 0;
  std::vector<uint64_t> lengths_;
  std::vector<int64_t> rotary_shifts_;  // one shift per segment
  std::vector<int32_t> own_tokens_;
  std::vector<MediaHash> media_;
  Salt salt_;
  ConversationId conversation_{};
  std::chrono::nanoseconds needed_in_{0};
  bool begun_ = false;
  std::optional<PlannedLanding> planned_;
  uint64_t present_tokens_ = 0;
};

}  // namespace ashlar::engine
