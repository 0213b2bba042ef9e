// SPDX-License-Identifier: Apache-2.0
// LeaseTable: leases, the engines' rights to the objects that a look-up found.
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
#include "storage/objects/object_table.h"
#include "storage/slice.h"
#include "storage/tier/tier.h"
#include "storage/transfer/verified_layers.h"

namespace ashlar::storage {

// The list of one lease: one result a query, misses among them.
using LeasedObjects = std::vector<ObjectTable::Result>;

// A lease keeps objects in place as long as any session holds it. It is named by 128 random bits, so that one process
// of an engine can hand it to another; sessions of other tenants cannot tell it from an unknown one. A deadline ends a
// lease only if it was never used. A session's leases are bounded in number and in the segments that they list, and so
// are the leases of all sessions of a tenant; a lease counts for each of its holders.
//
// A lease ends at once. Settle gives its objects back, a step for each segment, because there may be very many.
class LeaseTable {
 public:
  // The default bounds of all sessions of a tenant: a few busy engines' worth. 175 MB at most.
  static constexpr size_t kTenantLeases = size_t{1} << 17;
  static constexpr size_t kTenantSegments = size_t{1} << 22;

  struct Bounds {
    Nanos unused_lease = 0;                        // a lease that was never used ends so long after it is needed
    size_t leases = limits::kMaxLeases;            // of one session
    size_t segments = limits::kMaxLeasedSegments;  // of one session's leases together
    size_t tenant_leases = kTenantLeases;          // of all sessions of a tenant, likewise
    size_t tenant_segments = kTenantSegments;
  };

  // `random` gives 64 bits a call; null: the system's.
  LeaseTable(std::function<uint64_t()> random, Bounds bounds);

  // For a tenant, other bounds than those of all.
  void SetTenantBounds(TenantId tenant, size_t leases, size_t segments) {
    tenants_[tenant].bounds = {leases, segments};
  }

  // Checks that the session, one of this tenant, may hold one more lease of so many segments. RESOURCE_EXHAUSTED names
  // the bound.
  absl::Status Room(SessionId session, TenantId tenant, size_t segments) const;
  bool HasRoom(SessionId session, TenantId tenant, size_t segments) const {
    return Fits(session, tenant, segments) == Fit::kYes;
  }
  // Grants a lease. The session must have room. `others`: the other shards of the listed objects. `name`: no lease may
  // have it yet; all zero: one is drawn.
  LeaseId Grant(SessionId holder, TenantId tenant, LeasedObjects segments, Nanos needed_at,
                std::vector<ObjectTable::Reference> others = {}, const MatchedPrefix& prefix = {},
                const LeaseId& name = {});
  // Returns whether a lease has that name, whoever holds it.
  bool Exists(const LeaseId& name) const { return serials_.contains(name); }

  // Returns the objects of a lease that this session holds; null for any other lease. Valid until the lease ends.
  const LeasedObjects* Held(SessionId session, const LeaseId& id) const;
  // Makes the session a holder, which counts as use. NOT_FOUND for an unknown lease or another tenant's;
  // RESOURCE_EXHAUSTED for a session without room.
  absl::StatusOr<const LeasedObjects*> Attach(SessionId session, TenantId tenant, const LeaseId& id);
  // Returns the objects of a lease of this tenant, whoever holds it; null: unknown. Valid until the lease ends.
  const LeasedObjects* Peek(TenantId tenant, const LeaseId& id) const;
  // Returns the part of the lease that is a prefix; null: unknown.
  const MatchedPrefix* Prefix(const LeaseId& id) const;
  // Removes the lease's deadline. The lease must exist. `composed`: states resumed under this lease are composed.
  void Use(const LeaseId& id, bool composed = false);
  // Returns whether the lease was ever used with `composed`; false for an unknown one.
  bool Composed(const LeaseId& id) const;
  // Returns the record of verified tuples of a lease that exists. A landing that verifies them may outlive the lease.
  std::shared_ptr<VerifiedLayers> Verified(const LeaseId& id);

  // The lease ends with its last holder. Releasing what is not held is harmless.
  void Release(SessionId session, const LeaseId& id);
  // These two take a step for each lease. False: there is more, call again. Settle gives back the ended leases'
  // objects.
  bool ReleaseAll(SessionId session, Slice& slice);
  bool Expire(Nanos now, Slice& slice);

  // Takes references that nobody needs any more, for Settle.
  void GiveBack(TenantId tenant, LeasedObjects segments, std::vector<ObjectTable::Reference> others);
  // Gives back what the tenant's ended leases listed, in the order in which they ended. False: there is more.
  bool Settle(TenantId tenant, Slice& slice);
  bool SettleAll(Slice& slice);  // of all tenants

  size_t size() const { return leases_.size(); }
  size_t Count(SessionId session) const {  // that it holds
    const auto held = holdings_.find(session);
    return held == holdings_.end() ? 0 : held->second.leases.size();
  }

 private:
  using Serial = uint64_t;  // order of granting: what is done to many leases is done in this order
  struct Lease {
    LeaseId id{};
    TenantId tenant = 0;
    LeasedObjects segments;
    std::vector<ObjectTable::Reference> others;
    MatchedPrefix prefix;
    size_t Size() const { return segments.size() + others.size(); }
    absl::InlinedVector<SessionId, 1> holders;  // in the order in which they came
    Nanos deadline = kNever;
    bool composed = false;
    std::shared_ptr<VerifiedLayers> verified;  // null until it is asked for
  };
  using Leases = std::map<Serial, Lease>;
  struct Holding {
    absl::btree_set<Serial> leases;
    size_t segments = 0;  // of those leases
  };
  struct TenantBounds {
    size_t leases, segments;
  };
  struct OfTenant {
    size_t leases = 0, segments = 0;  // that its sessions hold
    std::optional<TenantBounds> bounds;
  };
  enum class Fit : uint8_t { kYes, kTooManyOfSession, kTooManyOfTenant };
  static_assert(limits::kMaxLeases * sizeof(Lease) +
                        limits::kMaxLeasedSegments * (sizeof(ObjectTable::Result) + sizeof(uint32_t)) <=
                    40 << 20,
                "what one session may hold takes 40 MiB at most, beside the nodes of maps and sets");

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
  absl::btree_set<std::pair<Nanos, Serial>> deadlines_;  // of leases that have one
  struct Ended {
    std::vector<ObjectTable::Reference> others;
    LeasedObjects segments;
    size_t settled = 0;  // of both, others first
  };
  std::map<TenantId, std::deque<Ended>> ended_;  // of tenants that have some
};

}  // namespace ashlar::storage
