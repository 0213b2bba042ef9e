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

// Of one query, or of one object of a prefix. `header` and `slot` live as long as the lease.
struct Found {
  MissReason reason = MissReason::kNone;  // kNone: hit
  TierKind tier = TierKind::kNone;
  const ObjectHeader* header = nullptr;
  const Slot* slot = nullptr;
};

// The exact prefix that a prompt is best resumed from.
struct MatchedPrefix {
  uint64_t depth = 0;  // tokens; 0: none
  bool own = false;    // its conversation's, else its namespace's
  Provenance provenance = Provenance::kExact;
  uint32_t span_tokens = 0;  // the last ones, whose states are rebuilt from a span; 0: the checkpoint is at `depth`
  // Its objects among what was found: the blocks in order, the checkpoint, and the span where there is one.
  size_t first = 0, count = 0;

  uint64_t checkpoint_depth() const { return depth - span_tokens; }
  // Returns the index of the prefix's checkpoint among the match's objects. Only for a match with a prefix.
  size_t checkpoint() const { return first + count - (span_tokens > 0 ? 2 : 1); }
  // Returns how many of an object's stored tokens belong to the prefix: of its span span_tokens, of any other object
  // all.
  uint64_t RowsOf(size_t object) const {
    return span_tokens > 0 && object == first + count - 1 ? span_tokens : UINT64_MAX;
  }
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
