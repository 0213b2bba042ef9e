// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/segment_holds.h"

#include <utility>

namespace ashlar::daemon {
namespace {

constexpr storage::SessionId kFirstSession = (storage::SessionId{1} << 62) + (storage::SessionId{1} << 61);

storage::Query QueryOf(const ColdSegment& cold) {
  return {.kind = cold.work.kind,
          .key = cold.work.key,
          .shard = cold.shard,
          .ns = cold.work.ns,
          .tokens = cold.work.tokens};
}

}  // namespace

storage::SessionId SegmentHolds::SessionOf(storage::TenantId tenant) {
  const auto [session, first] = sessions_.try_emplace(tenant, kFirstSession + tenant);
  if (first) cache_.OpenSession(session->second, tenant);
  return session->second;
}

// Space is reserved under a name that no text has, so an engine of this node can still publish the segment under its
// own name. It is as large as the segment, and the adoption of the segment takes the same space in the same turn of the
// metadata thread. An operator's warm-up does not know the sizes of its segments, so it reserves no space.
bool SegmentHolds::ReserveSpace(const ColdSegment& segment, storage::ReservationId& space) {
  if (segment.bytes == 0) return true;
  const storage::SessionId session = SessionOf(segment.work.tenant);
  if (space != 0 && cache_.Planned(session, space) != nullptr) return true;
  ObjectHeader plan{.ns = segment.work.ns, .key = segment.work.key, .kind = segment.work.kind, .bytes = segment.bytes};
  for (uint8_t& byte : plan.key.bytes) byte = static_cast<uint8_t>(~byte);
  const storage::Cache::Reservation reserved = cache_.Reserve(session, plan);
  space = reserved.id;
  return reserved.outcome == ReserveOutcome::kGranted;
}

void SegmentHolds::ReleaseSpace(storage::TenantId tenant, storage::ReservationId& space) {
  if (space != 0) cache_.Abandon(SessionOf(tenant), std::exchange(space, 0));
}

bool SegmentHolds::Lease(const ColdSegment& segment, storage::LeaseId& lease,
                         const std::function<void(bool whole)>& loaded) {
  const storage::Query query = QueryOf(segment);
  const storage::SessionId session = SessionOf(segment.work.tenant);
  const storage::Match match = cache_.Lookup(session, {&query, 1});
  const storage::Found& found = match.found.front();
  if (found.reason != MissReason::kNone) return false;
  lease = match.lease;
  // The lookup starts the fetch from the other node; the segment is here when it is complete.
  if (!cache_.WhenLoaded(session, match.lease, 0, found.header->Extents(), loaded)) loaded(false);
  return true;
}

void SegmentHolds::EndLease(storage::TenantId tenant, storage::LeaseId& lease) {
  if (lease != storage::LeaseId{}) cache_.Release(SessionOf(tenant), std::exchange(lease, {}));
}

void SegmentHolds::Close() {
  for (const auto& [tenant, session] : std::exchange(sessions_, {})) cache_.CloseSession(session, [] {});
}

}  // namespace ashlar::daemon
