// SPDX-License-Identifier: Apache-2.0
// SegmentCosts: the bytes of a cached segment, and whether a hit on it pays.
#pragma once

#include <cstdint>

#include "tools/replay/models.h"

namespace ashlar::replay {

// Types of states and transitions, as adapters store them.
enum class StateType : uint8_t { kBf16, kFp32 };

// Models have 16-bit numbers. Returns the model with its states and transitions in `type`.
Model Stored(Model model, StateType type);

// A segment is stored and moved as one object: keys, values and tuple. Not implemented: objects without tuples, whose
// states are recomputed; several passages per object; cheaper tiers for the tails of segments.
class SegmentCosts {
 public:
  // `adaptive`: heads whose transitions vanish over the segment are not stored.
  SegmentCosts(const Model& model, bool adaptive) : model_(model), adaptive_(adaptive) {}

  uint64_t Transitions(uint64_t tokens) const;  // bytes
  uint64_t TupleBytes(uint64_t tokens) const { return model_.costs.checkpoint_bytes + Transitions(tokens); }
  uint64_t Bytes(uint64_t tokens) const { return PageBytes(tokens) + TupleBytes(tokens); }
  uint64_t PageBytes(uint64_t tokens) const {
    return (tokens + model_.costs.page_tokens - 1) / model_.costs.page_tokens * model_.costs.page_bytes;
  }
  // Returns whether moving the segment takes less time than computing its tokens at [begin, end) of a prompt.
  bool Pays(uint64_t begin, uint64_t end, double link_bytes_per_second) const;
  bool Pays(uint64_t begin, uint64_t end) const { return Pays(begin, end, model_.link_bytes_per_second); }

 private:
  const Model& model_;
  const bool adaptive_;
};

}  // namespace ashlar::replay
