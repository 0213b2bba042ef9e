// SPDX-License-Identifier: Apache-2.0
// PrefixEntry: the record of one prefix in the tree, and whether it is kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "proto/key.h"
#include "storage/policy/compute_cost.h"
#include "storage/policy/reuse_model.h"
#include "storage/prefix/prefix_tree.h"

namespace ashlar::storage {

// Time in requests to the cache.
using RequestTime = uint64_t;

// The new part of one prompt: all tokens after its common beginning with earlier prompts.
struct PromptTail {
  RequestTime came = 0;
  uint64_t begin = 0, prompt_end = 0, end = 0;  // depths; decoded tokens are after prompt_end
  bool parted = false;                          // another prompt has diverged from it, or it is erased
};

// The keys of the stored bytes of a prefix (proto/prefix.h).
struct StoredKeys {
  std::optional<Key> checkpoint;
  std::optional<Key> span;
  std::vector<Key> blocks;  // all blocks that end in the prefix's edge, in order; empty if unknown
};

struct PrefixEntry;
using PrefixNode = PrefixTree<PrefixEntry>::Node;

// KeptSpan: a span that replaces the states of a prefix. It rebuilds them from the states of a shorter prefix.
struct KeptSpan {
  PrefixNode* base = nullptr;  // its states are kept as long as this span
  uint64_t bytes = 0;
};

struct PrefixEntry {
  // The prefix.
  std::optional<ReuseKind> kind;     // empty: nothing would resume here
  uint32_t uses = 0;                 // requests that resumed here, or would have if it had been kept
  uint64_t fresh = 0;                // tokens after the previous request end
  RequestTime used = 0;              // last use or arrival
  bool kept = false;                 // its checkpoint or the span that replaces it is kept
  uint32_t leases = 0;               // users that resume there; it is not evicted meanwhile
  uint32_t needs = 0;                // number of users of the edge's pages: its checkpoint, and children with needs
  std::unique_ptr<KeptSpan> span;    // null: kept by states, or not kept
  std::vector<PrefixNode*> hanging;  // spans that begin here; this prefix stays while there are any
  size_t place = 0, kept_place = 0;  // indices in the cache's lists

  // The edge.
  std::shared_ptr<PromptTail> brought;  // prompt that brought the edge; edges that were one share it
  RequestTime visited = 0;              // last pass of any prompt
  uint64_t serial = 0;                  // order of arrival

  std::unique_ptr<StoredKeys> stored;  // null: nothing is stored
};

// The bytes of a model's state, and the FLOPs to compute it.
struct PrefixCosts {
  uint64_t page_tokens = 1;
  uint64_t page_bytes = 0;        // keys and values of a page, all full-attention layers
  uint64_t checkpoint_bytes = 0;  // states of all linear layers
  double flops_per_token = 0, flops_per_square = 0;

  // Includes a partial last page, so that a prompt resumes at the exact token.
  uint64_t StateBytes(uint64_t depth) const { return checkpoint_bytes + (depth % page_tokens != 0 ? page_bytes : 0); }
  double Flops(uint64_t depth) const {  // prefill from the start
    return ComputeCost{flops_per_token, flops_per_square}.Flops(depth);
  }
  double Flops(uint64_t begin, uint64_t end) const { return Flops(end) - Flops(begin); }
};

}  // namespace ashlar::storage
