// SPDX-License-Identifier: Apache-2.0
// LeaseTable: leases, the rights of engines to the objects that a lookup found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/limits.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/lookup/match.h"
#include "storage/objects/object_reference.h"
#include "storage/slice.h"
#include "storage/tier/tier.h"
#include "storage/transfer/verified_layers.h"

namespace ashlar::storage {

// The entries of one lease: one result per query, including misses.
using LeasedObjects = std::vector<FoundObject>;

// A lease keeps objects in place while any session holds it. Its id has 128 random bits, so that one process of an
// engine can pass it to another; other tenants cannot distinguish it from an unknown id. A deadline ends a lease only
// if it was never used. Leases and listed segments are limited per session and per tenant; a lease counts for each
// holder.
//
// A lease ends immediately. Settle then releases its objects, one step per segment, because there may be very many.
class LeaseTable {
 public:
  // Default limits of all sessions of a tenant, enough for a few busy engines. At most 175 MB.
  static constexpr size_t kTenantLeases = size_t{1} << 17;
  static constexpr size_t kTenantSegments = size_t{1} << 22;

  struct Bounds {
    Nanos unused_lease = 0;                        // a lease that is never used ends this long after the time of need
    size_t leases = limits::kMaxLeases;            // per session
    size_t segments = limits::kMaxLeasedSegments;  // segments in all leases of one session
    size_t tenant_leases = kTenantLeases;          // per tenant
    size_t tenant_segments = kTenantSegments;
  };

  // `random` returns 64 bits per call; null: the system's source.
  LeaseTable(std::function<uint64_t()> random, Bounds bounds);

  // Overrides the limits for one tenant.
  void SetTenantBounds(TenantId tenant, size_t leases, size_t segments) {
    tenants_[tenant].bounds = {leases, segments};
  }

  // Checks that a session of this tenant may hold another lease with `segments`. RESOURCE_EXHAUSTED names the limit.
  absl::Status CheckCapacity(SessionId session, TenantId tenant, size_t segments) const;
  bool HasCapacity(SessionId session, TenantId tenant, size_t segments) const {
    return Fits(session, tenant, segments) == Fit::kYes;
  }
  // Grants a lease. CheckCapacity must have allowed it. `others` are the other shards of the listed objects. `name`
  // must be unused; all zero: a random id.
  LeaseId Grant(SessionId holder, TenantId tenant, LeasedObjects segments, Nanos needed_at,
                std::vector<ObjectReference> others = {}, const MatchedPrefix& prefix = {}, const LeaseId& name = {});
  // Returns whether the id is in use by any session.
  bool Exists(const LeaseId& name) const { return serials_.contains(name); }

  // Returns the objects of a lease that this session holds; null for any other lease. Valid until the lease ends.
  const LeasedObjects* Held(SessionId session, const LeaseId& id) const;
  // Makes the session a holder, which counts as use. NOT_FOUND for an unknown lease or one of another tenant;
  // RESOURCE_EXHAUSTED if the session is at its limit.
  absl::StatusOr<const LeasedObjects*> Attach(SessionId session, TenantId tenant, const LeaseId& id);
  // Returns the objects of a lease of this tenant with any holder; null if unknown. Valid until the lease ends.
  const LeasedObjects* Peek(TenantId tenant, const LeaseId& id) const;
  // Returns the prefix part of the lease; null if unknown.
  const MatchedPrefix* Prefix(const LeaseId& id) const;
  // Removes the lease's deadline. The lease must exist. `composed`: states resumed under this lease are composed.
  void Use(const LeaseId& id, bool composed = false);
  // Returns whether the lease was ever used with `composed`; false if unknown.
  bool Composed(const LeaseId& id) const;
  // Returns the record of verified tuples of an existing lease. A landing that verifies them may outlive the lease.
  std::shared_ptr<VerifiedLayers> Verified(const LeaseId& id);

  // The lease ends with its last holder. Leases that are not held are ignored.
  void Release(SessionId session, const LeaseId& id);
  // Takes one step per lease. Returns false if more is left. Settle then releases the objects of the ended leases.
  bool ReleaseAll(SessionId session, Slice& slice);
  bool Expire(Nanos now, Slice& slice);

  // Adds references that are no longer needed, for Settle.
  void GiveBack(TenantId tenant, LeasedObjects segments, std::vector<ObjectReference> others);
  // Releases the objects of the tenant's ended leases, in the order in which they ended. Returns false if more is left.
  bool Settle(TenantId tenant, Slice& slice);
  bool SettleAll(Slice& slice);  // settles all tenants

  size_t size() const { return leases_.size(); }
  size_t Count(SessionId session) const {  // leases that the session holds
    const auto held = holdings_.find(session);
    return held == holdings_.end() ? 0 : held->second.leases.size();
  }

 private:
  using Serial = uint64_t;  // order of granting; operations on many leases use it
  struct Lease {
    LeaseId id{};
    TenantId tenant = 0;
    LeasedObjects segments;
    std::vector<ObjectReference> others;
    MatchedPrefix prefix;
    size_t Size() const { return segments.size() + others.size(); }
    absl::InlinedVector<SessionId, 1> holders;  // ordered as they attached
    Nanos deadline = kNever;
    bool composed = false;
    std::shared_ptr<VerifiedLayers> verified;  // null until requested
  };
  using Leases = std::map<Serial, Lease>;
  struct Holding {
    absl::btree_set<Serial> leases;
    size_t segments = 0;  // segments in these leases
  };
  struct TenantBounds {
    size_t leases, segments;
  };
  struct OfTenant {
    size_t leases = 0, segments = 0;  // held by its sessions
    std::optional<TenantBounds> bounds;
  };
  enum class Fit : uint8_t { kYes, kTooManyOfSession, kTooManyOfTenant };
  static_assert(limits::kMaxLeases * sizeof(Lease) +
                        limits::kMaxLeasedSegments * (sizeof(FoundObject) + sizeof(uint32_t)) <=
                    40 << 20,
                "a session's leases take at most 40 MiB, without the nodes of maps and sets");

  static constexpr Nanos kNever = INT64_MAX;

  Fit Fits(SessionId session, TenantId tenant, size_t segments) const;
  TenantBounds BoundsOf(TenantId tenant) const;
  Leases::iterator Find(const LeaseId& id);
  static bool Holds(SessionId session, const Lease& lease);
  void Hold(SessionId session, Serial serial, Lease& lease);
  void LetGo(SessionId session, Leases::iterator lease);
  void SetDeadline(Serial serial, Lease& lease, Nanos deadline);

  const std::function<uint64_t()> random_;
  const Bounds bounds_;
  Serial next_serial_ = 1;
  Leases leases_;
  absl::flat_hash_map<LeaseId, Serial> serials_;
  std::map<SessionId, Holding> holdings_;
  std::map<TenantId, OfTenant> tenants_;
  absl::btree_set<std::pair<Nanos, Serial>> deadlines_;  // contains all leases with a deadline
  struct Ended {
    std::vector<ObjectReference> others;
    LeasedObjects segments;
    size_t settled = 0;  // number settled of both, `others` first
  };
  std::map<TenantId, std::deque<Ended>> ended_;  // only tenants with ended leases
};

}  // namespace ashlar::storage
