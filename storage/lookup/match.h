// SPDX-License-Identifier: Apache-2.0
// Match: the result of a look-up.
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

// The result of one query, or of one object of a prefix. `header` and `slot` live as long as the lease.
struct Found {
  MissReason reason = MissReason::kNone;  // kNone: hit
  TierKind tier = TierKind::kNone;
  const ObjectHeader* header = nullptr;
  const Slot* slot = nullptr;
};

// The indices of a prefix's objects in the match, each by its name.
struct PrefixObjects {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t begin = kNone;  // behind the prompt's segments; kNone: all that was found is segments
  uint32_t blocks = 0;     // its keys and values, in order from `begin` on
  uint32_t checkpoint = kNone;
  uint32_t span = kNone;

  uint32_t size() const { return blocks + (checkpoint != kNone ? 1 : 0) + (span != kNone ? 1 : 0); }
  bool Has(size_t object) const { return object - begin < blocks || object == checkpoint || object == span; }
  // Calls visit(index) for each, in the order in which they are landed: blocks, checkpoint, span.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (uint32_t i = 0; i < blocks; ++i) visit(begin + i);
    if (checkpoint != kNone) visit(checkpoint);
    if (span != kNone) visit(span);
  }
  bool operator==(const PrefixObjects&) const = default;
};

// The exact prefix that a prompt is best resumed from.
struct MatchedPrefix {
  uint64_t depth = 0;  // tokens; 0: none
  bool own = false;    // its conversation's, else its namespace's
  Provenance provenance = Provenance::kExact;
  uint32_t span_tokens = 0;  // the last ones, whose states are rebuilt from a span; 0: the checkpoint is at `depth`
  PrefixObjects objects;

  uint64_t checkpoint_depth() const { return depth - span_tokens; }
  // Returns how many of an object's stored tokens belong to the prefix: of its span span_tokens, of any other object
  // all.
  uint64_t RowsOf(size_t object) const { return object == objects.span ? span_tokens : UINT64_MAX; }
};
struct FoundPrefix : MatchedPrefix {
  std::vector<uint64_t> resumable;      // depths that could have been chosen, rising
  std::vector<uint64_t> checkpoint_at;  // that are worth capturing, rising, behind the prefix
};

struct Match {
  LeaseId lease{};           // all zero when nothing was found
  std::vector<Found> found;  // one a query, in order, then the prefix's objects
  FoundPrefix prefix;        // of a match that was attached to: without depths
};

// Returns whether the answer has room for one more hit.
using HasRoom = std::function<bool(const Found& hit)>;

}  // namespace ashlar::storage
