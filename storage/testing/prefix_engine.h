// SPDX-License-Identifier: Apache-2.0
// An engine for tests whose every number tells of which text it is: rows and states are functions of all tokens up to
// where they stand, so that nothing can be taken for something else.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "storage/cache.h"
#include "storage/testing/engine.h"

namespace ashlar::storage {

class PrefixEngine {
 public:
  explicit PrefixEngine(TenantId tenant = 1, uint32_t capture_tokens = 1, uint64_t span_tokens = 0,
                        const ComputeCost& declared = {.flops_per_token = 1e9});

  const std::shared_ptr<const PrefixModel>& model() const { return model_; }
  // The engine's segments are in the namespace of TestPlan's objects of this tenant.
  PrefixText Text(std::vector<int32_t> tokens, const ConversationId& conversation = {}, const Salt& salt = {}) const {
    return PrefixText(model_, std::move(tokens), conversation, {}, salt);
  }

  // Everything of a text, with its states at `depths` and at its end, and the span from `span_begin`, whatever its
  // length; 0: none.
  PrefixCommit Offer(const std::vector<int32_t>& tokens, uint64_t prompt, std::vector<uint64_t> depths,
                     const ConversationId& conversation = {}, uint64_t span_begin = 0, const Salt& salt = {}) const;

  // Pages for a whole text, and a landing of a match's prefix into them.
  static LandTarget Target(const TestPages& pages, const MatchedPrefix& prefix);
  // Largest absolute difference between the expected numbers and the landed ones, the checkpoint's, and those of the
  // matched part of the span.
  double Error(const TestPages& pages, const Tier& top, const Match& match, std::span<const int32_t> tokens) const;

 private:
  std::shared_ptr<const PrefixModel> model_;
};

}  // namespace ashlar::storage
