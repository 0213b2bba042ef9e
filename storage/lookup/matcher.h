// SPDX-License-Identifier: Apache-2.0
// Matcher: finds and leases objects for lookups (storage/lookup/search.h), fills the result, and counts it.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "storage/executor.h"
#include "storage/history/explanation.h"
#include "storage/ids.h"
#include "storage/lookup/explainer.h"
#include "storage/lookup/lease.h"
#include "storage/lookup/match.h"
#include "storage/objects/object_finder.h"
#include "storage/objects/object_reference.h"
#include "storage/objects/object_table.h"
#include "storage/observer.h"
#include "storage/prefix/prefixes.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

class Matcher {
 public:
  // `level_of` returns the level that a session's engine lands from and maps.
  using IsOpen = std::function<bool(SessionId)>;
  using LevelOf = std::function<size_t(SessionId)>;
  Matcher(ObjectTable& table, ObjectFinder& finder, Prefixes& prefixes, LeaseTable& leases, Explainer& explainer,
          const Clock& clock, Observer& observer, IsOpen is_open, LevelOf level_of)
      : table_(table),
        finder_(finder),
        prefixes_(prefixes),
        leases_(leases),
        explainer_(explainer),
        clock_(clock),
        observer_(observer),
        is_open_(std::move(is_open)),
        level_of_(std::move(level_of)) {}

  // Implements Cache::Attach; NOT_FOUND for an unknown lease.
  absl::StatusOr<Match> Attach(SessionId session, TenantId tenant, const LeaseId& lease,
                               const std::optional<TensorShard>& shard);
  // Describes the objects of an existing lease.
  Match Describe(const LeaseId& lease, const LeasedObjects& segments) const;

  // Returns whether an object exists with an unchanged header; drops it if it has changed.
  bool IsWhole(SessionId session, TenantId tenant, const Query& query);

 private:
  friend class Search;
  using Verified = absl::flat_hash_set<ObjectId>;
  using Others = std::vector<ObjectReference>;  // other shards of the found objects

  static Found Describe(const FoundObject& result);
  static bool HeaderIsWhole(const ObjectReference& object, Verified& verified);
  FoundObject FindWhole(SessionId session, TenantId tenant, const Query& query, Others& others, Verified& verified);
  FoundObject Find(SessionId session, TenantId tenant, const Query& query, Others& others, Verified& verified);
  MissReason Missed(SessionId session, TenantId tenant, const Query& query, MissReason reason);  // returns the reason
  LeasedObjects ForShard(const LeasedObjects& segments, const std::optional<TensorShard>& shard, size_t level,
                         Others& others);
  absl::StatusOr<Match> AttachShard(SessionId session, TenantId tenant, const LeaseId& lease,
                                    const std::optional<TensorShard>& shard);

  ObjectTable& table_;
  ObjectFinder& finder_;
  Prefixes& prefixes_;
  LeaseTable& leases_;
  Explainer& explainer_;
  const Clock& clock_;
  Observer& observer_;
  const IsOpen is_open_;
  const LevelOf level_of_;
};

}  // namespace ashlar::storage
