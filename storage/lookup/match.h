// SPDX-License-Identifier: Apache-2.0
// Match: the result of a lookup.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/ids.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// The result of one query, or of one object of a prefix. `header` and `slot` are valid as long as the lease.
struct Found {
  MissReason reason = MissReason::kNone;  // kNone: hit
  TierKind tier = TierKind::kNone;
  const ObjectHeader* header = nullptr;
  const Slot* slot = nullptr;
};

// The indices of a prefix's objects in the match.
struct PrefixObjects {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t begin = kNone;  // after the prompt's segments; kNone: only segments were found
  uint32_t blocks = 0;     // number of blocks, in order from `begin`
  uint32_t checkpoint = kNone;
  uint32_t span = kNone;

  uint32_t size() const { return blocks + (checkpoint != kNone ? 1 : 0) + (span != kNone ? 1 : 0); }
  bool Has(size_t object) const { return object - begin < blocks || object == checkpoint || object == span; }
  // Calls visit(index) for each object in landing order: blocks, checkpoint, span.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (uint32_t i = 0; i < blocks; ++i) visit(begin + i);
    if (checkpoint != kNone) visit(checkpoint);
    if (span != kNone) visit(span);
  }
  bool operator==(const PrefixObjects&) const = default;
};

// The best exact prefix to resume the prompt from.
struct MatchedPrefix {
  uint64_t depth = 0;  // tokens; 0: none
  bool own = false;    // private to the conversation; otherwise shared in the namespace
  Provenance provenance = Provenance::kExact;
  uint32_t span_tokens = 0;  // last tokens, whose states are rebuilt from a span; 0: the checkpoint is at `depth`
  PrefixObjects objects;

  uint64_t checkpoint_depth() const { return depth - span_tokens; }
  // Returns how many stored tokens of an object belong to the prefix: span_tokens for its span, all for other objects.
  uint64_t RowsOf(size_t object) const { return object == objects.span ? span_tokens : UINT64_MAX; }
};
struct FoundPrefix : MatchedPrefix {
  std::vector<uint64_t> resumable;      // alternative depths, ascending
  std::vector<uint64_t> checkpoint_at;  // depths after the prefix that are worth capturing, ascending
};

struct Match {
  LeaseId lease{};           // all zero if nothing was found
  std::vector<Found> found;  // one per query, in order, then the prefix's objects
  FoundPrefix prefix;        // without depths after Attach
};

// Returns whether the reply has space for another hit.
using HasSpace = std::function<bool(const Found& hit)>;

}  // namespace ashlar::storage
