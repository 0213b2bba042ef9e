// SPDX-License-Identifier: Apache-2.0
// SegmentHolds: what the router holds in this node's cache for segments that other engines compute: space before they
// arrive, and a lease afterwards.
#pragma once

#include <functional>
#include <map>

#include "daemon/router/cold_segment.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// Has a session per tenant. The metadata thread only.
class SegmentHolds {
 public:
  // The cache must outlive the object.
  explicit SegmentHolds(storage::Cache& cache) : cache_(cache) {}

  // Reserves space for the segment, unless `space` is a reservation that still exists. Returns false without space.
  bool ReserveSpace(const ColdSegment& segment, storage::ReservationId& space);
  // Sets `space` to 0.
  void ReleaseSpace(storage::TenantId tenant, storage::ReservationId& space);

  // Looks up the computed segment, and sets `lease`. `loaded` is called when the segment is in this node's memory, or
  // fails to arrive; possibly before Lease returns. Returns false, without calling it, if the lookup misses.
  bool Lease(const ColdSegment& segment, storage::LeaseId& lease, const std::function<void(bool whole)>& loaded);
  // Sets `lease` to zero.
  void EndLease(storage::TenantId tenant, storage::LeaseId& lease);

  // Closes the sessions. Nothing may be held.
  void Close();

 private:
  storage::SessionId SessionOf(storage::TenantId tenant);

  storage::Cache& cache_;
  std::map<storage::TenantId, storage::SessionId> sessions_;
};

}  // namespace ashlar::daemon
