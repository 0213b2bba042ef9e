// Leases: engines' rights to what a lookup found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "proto/limits.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/match.h"
#include "storage/pool.h"
#include "storage/tier/tier.h"
#include "storage/verified_layers.h"

namespace ashlar::storage {

// A lease keeps objects where they are as long as any session holds it. It is named by 128 random bits, so that one
// process of an engine can hand it to another; sessions of other tenants cannot tell it from an unknown one. A deadline
// ends only a lease that was never used. What a session holds is bounded in leases and in the segments that they list;
// a lease counts for each of its holders.
class LeaseTable {
 public:
  using Segments = std::vector<Pool::Result>;  // one a query, misses among them

  struct Bounds {
    Nanos unused_lease = 0;                        // a lease that was never used ends so long after it is needed
    size_t leases = limits::kMaxLeases;            // of one session
    size_t segments = limits::kMaxLeasedSegments;  // of one session's leases together
  };

  // `random` gives 64 bits a call; null: the system's.
  LeaseTable(std::function<uint64_t()> random, Bounds bounds);

  // Whether the session may hold one more lease, of so many segments.
  bool HasRoom(SessionId session, size_t segments) const;
  // The session must have room.
  // `others`: the other shards of what the segments list. `name`: what no lease has yet; all zero: one is drawn.
  LeaseId Grant(SessionId holder, TenantId tenant, Segments segments, Nanos needed_at,
                std::vector<Pool::Reference> others = {}, const MatchedPrefix& prefix = {}, const LeaseId& name = {});
  // Whether there is a lease of that name, whosever it is.
  bool Exists(const LeaseId& name) const { return serials_.contains(name); }

  // What a lease that this session holds covers; null for any other. Valid until the lease ends.
  const Segments* Held(SessionId session, const LeaseId& id) const;
  // Makes the session a holder, which counts as use. NOT_FOUND for an unknown lease or another tenant's;
  // RESOURCE_EXHAUSTED for a session without room.
  absl::StatusOr<const Segments*> Attach(SessionId session, TenantId tenant, const LeaseId& id);
  // What a lease of this tenant covers, whoever holds it; null: unknown. Valid until the lease ends.
  const Segments* Peek(TenantId tenant, const LeaseId& id) const;
  // Which of it is a prefix's; null: unknown.
  const MatchedPrefix* Prefix(const LeaseId& id) const;
  // From now on the lease has no deadline. The lease must exist. `composed`: what is taken from it makes states
  // composed.
  void Use(const LeaseId& id, bool composed = false);
  // Whether it was ever used so; false for an unknown one.
  bool Composed(const LeaseId& id) const;
  // What is known of the tuples of a lease that exists. Whoever verifies them may outlive it.
  std::shared_ptr<VerifiedLayers> Verified(const LeaseId& id);

  // The lease ends with its last holder. Releasing what is not held is harmless.
  void Release(SessionId session, const LeaseId& id);
  void ReleaseAll(SessionId session);
  void Expire(Nanos now);

  size_t size() const { return leases_.size(); }

 private:
  using Serial = uint64_t;  // order of granting: what is done to many leases is done in this order
  struct Lease {
    LeaseId id{};
    TenantId tenant = 0;
    Segments segments;
    std::vector<Pool::Reference> others;
    MatchedPrefix prefix;
    size_t Size() const { return segments.size() + others.size(); }
    std::set<SessionId> holders;
    std::optional<Nanos> deadline;  // none once used
    bool composed = false;
    std::shared_ptr<VerifiedLayers> verified;  // null until it is asked for
  };
  using Leases = std::map<Serial, Lease>;
  struct Holding {
    std::set<Serial> leases;
    size_t segments = 0;  // of those leases
  };
  static_assert(limits::kMaxLeases * sizeof(Lease) +
                        limits::kMaxLeasedSegments * (sizeof(Pool::Result) + sizeof(uint32_t)) <=
                    40 << 20,
                "what one session may hold takes 40 MiB at most, beside the nodes of maps and sets");

  Leases::iterator Find(const LeaseId& id);
  void Hold(SessionId session, Serial serial, Lease& lease);
  void LetGo(SessionId session, Leases::iterator lease);

  const std::function<uint64_t()> random_;
  const Bounds bounds_;
  Serial next_serial_ = 1;
  Leases leases_;
  absl::flat_hash_map<LeaseId, Serial> serials_;
  std::map<SessionId, Holding> holdings_;
};

}  // namespace ashlar::storage
