// SPDX-License-Identifier: Apache-2.0
// PagePools: the page pools of all hosted regions, and the leases under which engines' requests hold pages there.
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

// A request's pages are held by its lease: as long as any session holds that. There is no deadline: a request may run
// for hours. Deterministic; one thread. Pools end with the last of their leases and their declaration.
class PagePools {
 public:
  // `leases_per_session`: who holds that many is refused more.
  explicit PagePools(size_t leases_per_session = limits::kMaxLeases) : leases_per_session_(leases_per_session) {}

  // A pool for the pages of a region (its number, never used twice). RESOURCE_EXHAUSTED as long as requests hold pages
  // of an earlier pool there, or something writes to them: two pools must not give one page to two requests. An earlier
  // one that is at rest is closed. The caller keeps the pool for as long as it is declared, and the pool the `charge`
  // for its memory.
  absl::StatusOr<std::shared_ptr<PagePool>> Open(TenantId tenant, uint64_t region, uint32_t pages,
                                                 std::shared_ptr<const void> charge = nullptr);

  struct Request {
    std::shared_ptr<PagePool> pool;
    PagePool::AdmissionId admission = 0;
  };
  // Admits a request and gives `lease`, a name that the engine chose, to the session. If the answer's admission is 0,
  // the request was refused, and the answer has its shortage. ALREADY_EXISTS: a lease of that name is held;
  // FAILED_PRECONDITION: the pool is closed; RESOURCE_EXHAUSTED: the session has as many requests as it may, or the
  // tenant's pools have limits::kMaxPageReferences entries.
  absl::StatusOr<PagePool::Answer> Admit(SessionId session, TenantId tenant, const LeaseId& lease,
                                         const std::shared_ptr<PagePool>& pool,
                                         std::span<const PagePool::Want> segments, uint64_t own_pages,
                                         uint64_t own_now = UINT64_MAX);

  // Null unless the session holds the lease. Valid until it ends.
  const Request* Find(SessionId session, const LeaseId& lease) const;
  // Makes the session a holder; again is harmless. NOT_FOUND for an unknown lease or another tenant's;
  // RESOURCE_EXHAUSTED for a session that holds as many as it may.
  absl::StatusOr<const Request*> Attach(SessionId session, TenantId tenant, const LeaseId& lease);
  // The request is over with its lease's last holder. Releasing what is not held is harmless.
  void Release(SessionId session, const LeaseId& lease);
  void ReleaseAll(SessionId session);

  // PagePool::Erase in all pools of a tenant.
  void Erase(TenantId tenant);

  // The levels of all pools of a tenant together.
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
  bool HasRoom(SessionId session) const;
  // Of all pools of the tenant.
  uint64_t References(TenantId tenant) const;

  const size_t leases_per_session_;
  std::map<uint64_t, Place> places_;  // by region
  absl::flat_hash_map<LeaseId, Lease> leases_;
  std::map<SessionId, std::set<LeaseId>> sessions_;  // the leases that each holds
};

}  // namespace ashlar::storage
