// SPDX-License-Identifier: Apache-2.0
// PagePools: the page pools of all hosted regions, and the leases under which requests hold their pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/limits.h"
#include "storage/ids.h"
#include "storage/sharing/page_pool.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// A lease keeps the pages of a request while any session holds it. There is no deadline, because a request may run for
// hours. Deterministic; one thread only. A pool ends with the last of its leases and its declaration.
class PagePools {
 public:
  // `leases_per_session` limits the requests of a session.
  explicit PagePools(size_t leases_per_session = limits::kMaxLeases) : leases_per_session_(leases_per_session) {}

  // Creates a pool for the pages of a region (its number, never reused). RESOURCE_EXHAUSTED while requests hold pages
  // of an earlier pool of the region, or something writes to them, because two pools must not allocate the same page.
  // An unused earlier pool is closed. The caller keeps the pool while it is declared, and the pool keeps `charge`.
  absl::StatusOr<std::shared_ptr<PagePool>> Open(TenantId tenant, uint64_t region, uint32_t pages,
                                                 std::shared_ptr<const void> charge = nullptr);

  struct Request {
    std::shared_ptr<PagePool> pool;
    PagePool::AdmissionId admission = 0;
  };
  // Admits a request, and gives `lease`, an id chosen by the engine, to the session. If the answer's admission is 0,
  // the request was refused with the answer's shortage. ALREADY_EXISTS: the lease id is in use. FAILED_PRECONDITION:
  // the pool is closed. RESOURCE_EXHAUSTED: the session is at its limit of requests, or the tenant's pools have
  // limits::kMaxPageReferences entries.
  absl::StatusOr<PagePool::Answer> Admit(SessionId session, TenantId tenant, const LeaseId& lease,
                                         const std::shared_ptr<PagePool>& pool,
                                         std::span<const PagePool::Want> segments, uint64_t own_pages,
                                         uint64_t own_now = UINT64_MAX, bool fills = true);

  // Null unless the session holds the lease. Valid until it ends.
  const Request* Find(SessionId session, const LeaseId& lease) const;
  // Makes the session a holder; repeating it has no effect. NOT_FOUND for an unknown lease or one of another tenant;
  // RESOURCE_EXHAUSTED if the session is at its limit.
  absl::StatusOr<const Request*> Attach(SessionId session, TenantId tenant, const LeaseId& lease);
  // The request ends with the last holder of its lease. Leases that are not held are ignored.
  void Release(SessionId session, const LeaseId& lease);
  void ReleaseAll(SessionId session);

  // Calls PagePool::Erase on all pools of a tenant.
  void Erase(TenantId tenant);

  // The sum over all pools of a tenant.
  PagePool::Levels levels(TenantId tenant) const;

 private:
  struct Lease {
    TenantId tenant = 0;
    Request request;
    std::set<SessionId> holders;
  };
  struct Place {
    TenantId tenant = 0;
    std::weak_ptr<PagePool> pool;
  };
  bool HasCapacity(SessionId session) const;
  absl::Status TooManyRequests() const;
  // Sum over all pools of the tenant.
  uint64_t References(TenantId tenant) const;

  const size_t leases_per_session_;
  std::map<uint64_t, Place> places_;  // keyed by region
  absl::flat_hash_map<LeaseId, Lease> leases_;
  std::map<SessionId, std::set<LeaseId>> sessions_;  // leases that each session holds
};

}  // namespace ashlar::storage
