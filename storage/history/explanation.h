// SPDX-License-Identifier: Apache-2.0
// Query and Explanation: a lookup of one run of tokens, and what the cache knows about its result.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "proto/key.h"
#include "proto/outcome.h"
#include "proto/shard.h"
#include "storage/executor.h"
#include "storage/history/ghost_table.h"
#include "storage/ids.h"

namespace ashlar::storage {

// A run of tokens of a prompt that is looked up.
struct Query {
  ObjectKind kind = ObjectKind::kSegment;
  Key key;
  TensorShard shard{};  // the requested shard; a hit requires the complete bundle
  NamespaceId ns;
  TextDigest text;  // all zero: unknown
  uint64_t tokens = 0;
  Nanos recompute = 0;         // declared time to compute it; 0: unknown
  Nanos remote_recompute = 0;  // the same, only for the comparison with fetching from other nodes
  double flops = 0;            // FLOPs to compute it; 0: unknown
  Nanos needed_at = 0;         // on the injected clock; a past time means now
  bool defer = false;          // a hit does not cause a write to the disk (Placement::Defer)
  bool storable = true;        // false: too short to have an interior; missed without a lookup
  bool unreachable = false;    // other nodes have it, but none answered in time
};

// An existing object, published or not; for a bundle, all of its existing shards.
struct Presence {
  uint32_t shards = 1, of_shards = 1;  // published shards
  TierKind tier = TierKind::kNone;     // fastest tier with a copy; for several shards, the slowest of these
  // tiers with a complete copy of all shards, fastest first; a disk counts when acknowledged
  std::vector<TierKind> tiers;
  uint64_t bytes = 0;  // size of its plan until it is published
  uint32_t uses = 0;   // lookups that found it
  uint32_t references = 0;
  Nanos age = 0;   // since publication
  Nanos idle = 0;  // since the last use or publication
};

struct Explanation {
  MissReason reason = MissReason::kNeverSeen;  // kNone: a lookup would find it
  std::optional<Presence> present;
  std::optional<Ghost> ghost;            // the evicted or never published object
  std::optional<NamespaceId> elsewhere;  // kNamespaceDiffers only: where the same text was published last
};

// A segment missed by a lookup or a landing.
struct Miss {
  Nanos at = 0;  // on the injected clock
  SessionId session = 0;
  Query query;  // a landing's miss has no text, and no key if its lease is lost
  Explanation why;
};

}  // namespace ashlar::storage
