// SPDX-License-Identifier: Apache-2.0
// Query, and Explanation: why a look-up missed, or what it would find, with everything that is known.
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

// One run of a prompt's tokens that is looked up.
struct Query {
  ObjectKind kind = ObjectKind::kSegment;
  Key key;
  TensorShard shard{};  // the shard that is wanted: it is found when all of its bundle is there
  NamespaceId ns;
  TextDigest text;  // all zero: not known
  uint64_t tokens = 0;
  Nanos recompute = 0;         // the time of computing it again, as the engine declared; 0: not known
  Nanos remote_recompute = 0;  // likewise, compared only with what other nodes take to send it
  double flops = 0;            // likewise
  Nanos needed_at = 0;         // when it will be, on the injected clock; what is past is now
  bool defer = false;          // finding it does not have it written to a disk (ObjectTable::Defer)
  bool storable = true;        // false: too short to have an interior, a miss without a look-up
  bool unreachable = false;    // other nodes are known to have it, and none of them answered in time
};

// An object that is there, published or not; for a bundle, all of its shards that are there.
struct Presence {
  uint32_t shards = 1, of_shards = 1;  // published
  TierKind tier = TierKind::kNone;     // the nearest copy; of several shards: the farthest of these
  std::vector<TierKind> tiers;         // of whole copies of all of it, top to bottom; on a disk: acknowledged
  uint64_t bytes = 0;                  // of its plan until it is published
  uint32_t uses = 0;                   // look-ups that found it
  uint32_t references = 0;
  Nanos age = 0;   // since its publication
  Nanos idle = 0;  // since its last use, or its publication
};

struct Explanation {
  MissReason reason = MissReason::kNeverSeen;  // kNone: a look-up would find it
  std::optional<Presence> present;
  std::optional<Ghost> ghost;            // of what is gone, or never came
  std::optional<NamespaceId> elsewhere;  // kNamespaceDiffers: where the same text was published last
};

// One segment that a look-up or a landing missed.
struct Miss {
  Nanos at = 0;  // on the injected clock
  SessionId session = 0;
  Query query;  // the query of a landing's miss has no text, and no key if its lease is lost
  Explanation why;
};

}  // namespace ashlar::storage
