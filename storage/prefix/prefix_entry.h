// SPDX-License-Identifier: Apache-2.0
// PrefixEntry: the record of one prefix in the tree, and how it is kept.
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

// Time counts a cache's requests.
using RequestTime = uint64_t;

// The new part of one prompt: all tokens behind its common beginning with earlier prompts.
struct PromptTail {
  RequestTime came = 0;
  uint64_t begin = 0, prompt_end = 0, end = 0;  // depths; decoded tokens are behind the prompt's end
  bool parted = false;                          // another prompt has parted from it, or it is erased
};

// Under which keys bytes of a prefix are stored (proto/prefix.h), where they are.
struct StoredKeys {
  std::optional<Key> checkpoint;
  std::optional<Key> span;
  std::vector<Key> blocks;  // all that end in the prefix's edge, in order; or none of them, as it is not known
};

struct PrefixEntry;
using PrefixNode = PrefixTree<PrefixEntry>::Node;

// KeptSpan: a prefix without states of its own is kept by a span, which rebuilds its states from those of a shorter
// prefix.
struct KeptSpan {
  PrefixNode* base = nullptr;  // its states are kept as long as this span
  uint64_t bytes = 0;
};

struct PrefixEntry {
  // About the prefix.
  std::optional<ReuseKind> kind;  // none: nothing would resume here
  uint32_t uses = 0;              // requests that resumed here, or would have, had it been kept
  uint64_t fresh = 0;             // tokens behind the request end before it
  RequestTime used = 0;           // last, or when it came
  bool kept = false;              // its checkpoint, or the span that stands for it
  uint32_t leases = 0;            // those who resume there: it stays
  uint32_t needs = 0;  // for how many the pages of its edge are kept: its checkpoint, and children that have needs
  std::unique_ptr<KeptSpan> span;    // null: it is kept by states, or not at all
  std::vector<PrefixNode*> hanging;  // spans that begin here: this prefix stays while they do
  size_t place = 0, kept_place = 0;  // in the cache's lists

  // About the edge.
  std::shared_ptr<PromptTail> brought;  // by which it came; edges that were one share it
  RequestTime visited = 0;              // last, by any prompt that passed
  uint64_t serial = 0;                  // of its coming

  std::unique_ptr<StoredKeys> stored;  // null: nothing
};

// The bytes of a model's state, and the FLOPs of computing it.
struct PrefixCosts {
  uint64_t page_tokens = 1;
  uint64_t page_bytes = 0;        // keys and values of a page, all full-attention layers
  uint64_t checkpoint_bytes = 0;  // states of all linear layers
  double flops_per_token = 0, flops_per_square = 0;

  // With the last page if it is partial, so that a prompt resumes at the exact token.
  uint64_t StateBytes(uint64_t depth) const { return checkpoint_bytes + (depth % page_tokens != 0 ? page_bytes : 0); }
  double Flops(uint64_t depth) const {  // of prefill from the start
    return ComputeCost{flops_per_token, flops_per_square}.Flops(depth);
  }
  double Flops(uint64_t begin, uint64_t end) const { return Flops(end) - Flops(begin); }
};

}  // namespace ashlar::storage
