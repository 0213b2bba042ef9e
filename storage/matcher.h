// Matching: what look-ups find, hold under leases, answer and count.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "storage/executor.h"
#include "storage/explainer.h"
#include "storage/explanation.h"
#include "storage/ids.h"
#include "storage/lease.h"
#include "storage/match.h"
#include "storage/observer.h"
#include "storage/pool.h"
#include "storage/prefixes.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

class Matcher {
 public:
  // `top`: the tier that engines map.
  Matcher(Pool& pool, Prefixes& prefixes, LeaseTable& leases, Explainer& explainer, const Tier& top, const Clock& clock,
          Observer& observer)
      : pool_(pool),
        prefixes_(prefixes),
        leases_(leases),
        explainer_(explainer),
        top_(top),
        clock_(clock),
        observer_(observer) {}

  // As Cache::Lookup. `prompt` may be null; `refused`: everything is missed for that reason.
  Match Lookup(SessionId session, TenantId tenant, std::span<const Query> queries, const PrefixText* prompt,
               const HasRoom& has_room, const LeaseId& name, MissReason refused);
  // As Cache::Attach; NOT_FOUND for an unknown lease.
  absl::StatusOr<Match> Attach(SessionId session, TenantId tenant, const LeaseId& lease,
                               const std::optional<TensorShard>& shard);
  // What a lease covers that exists.
  Match Describe(const LeaseId& lease, const LeaseTable::Segments& segments) const;

  // Whether an object is there, its stored header unchanged; one that has changed is dropped.
  bool IsWhole(TenantId tenant, const Query& query);

 private:
  using Verified = absl::flat_hash_set<ObjectId>;
  using Others = std::vector<Pool::Reference>;  // shards of what was found

  // What a look-up holds until a lease does.
  struct Holding {
    LeaseTable::Segments segments;  // one a query, then the prefix's objects
    Others others;
    Verified verified;
  };

  static Found Describe(const Pool::Result& result);
  bool HeaderIsWhole(const Entry& object, Verified& verified) const;
  Pool::Result FindWhole(TenantId tenant, const Query& query, Holding& holding);
  Pool::Result Find(SessionId session, TenantId tenant, const Query& query, Holding& holding);
  Pool::Result Missed(SessionId session, TenantId tenant, const Query& query, MissReason reason);
  // All of these objects, or none: then how many come before the first one that is missing.
  std::optional<size_t> Hold(TenantId tenant, std::span<const Query> objects, LeaseTable::Segments& held,
                             Holding& holding);
  struct HeldPrefix {
    std::vector<Query> queries;
    LeaseTable::Segments objects;  // one a query; none: there is no prefix
  };
  HeldPrefix FindPrefix(TenantId tenant, std::span<const Query> queries, const PrefixText& prompt, FoundPrefix& prefix,
                        Holding& holding);
  void Answer(SessionId session, TenantId tenant, std::span<const Query> queries, const PrefixText* prompt,
              std::span<const Query> of_prefix, const HasRoom& has_room, Match& match);
  LeaseTable::Segments ForShard(const LeaseTable::Segments& segments, const TensorShard& shard, Others& others);
  absl::StatusOr<Match> AttachShard(SessionId session, TenantId tenant, const LeaseId& lease, const TensorShard& shard);

  Pool& pool_;
  Prefixes& prefixes_;
  LeaseTable& leases_;
  Explainer& explainer_;
  const Tier& top_;
  const Clock& clock_;
  Observer& observer_;
};

}  // namespace ashlar::storage
