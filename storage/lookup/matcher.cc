#include "storage/lookup/matcher.h"

#include <algorithm>
#include <string>
#include <utility>

#include "storage/objects/object_bytes.h"

namespace ashlar::storage {

Found Matcher::Describe(const ObjectTable::Result& result) {
  if (!result.object) return {.reason = result.reason};
  if (result.object->gone != MissReason::kNone) return {.reason = result.object->gone};
  return {.tier = result.tier, .header = &result.object->header, .slot = &result.object->top().slot};
}

Match Matcher::Describe(const LeaseId& lease, const LeasedObjects& segments) const {
  Match match{.lease = lease};
  for (const ObjectTable::Result& segment : segments) match.found.push_back(Describe(segment));
  if (const MatchedPrefix* const prefix = leases_.Prefix(lease)) match.prefix = {*prefix};
  return match;
}

// Engines read an object's header in place, where it may have changed since it was written: they would miss the
// object, and never get it published again. One call verifies an object once, however often it asks for it.
bool Matcher::HeaderIsWhole(const Entry& object, Verified& verified) const {
  if (!object.top().whole()) return true;  // on its way up: landings will verify it
  if (!verified.insert(object.id).second) return true;
  std::string room;
  return VerifyHeader(ReadStart(top_, object.top().slot, EncodedHeaderBytes(object.header.parts.size()), room)).ok();
}

ObjectTable::Result Matcher::FindWhole(TenantId tenant, const Query& query, Others& others, Verified& verified) {
  const auto before = static_cast<ptrdiff_t>(others.size());
  ObjectTable::Result result = table_.Find(tenant, query, &others);
  if (!result.object) return result;
  const auto is_whole = [&](const ObjectTable::Reference& object) { return HeaderIsWhole(*object, verified); };
  if (is_whole(result.object) && std::all_of(others.begin() + before, others.end(), is_whole)) return result;
  table_.Drop(result.object, MissReason::kChecksumFailed);
  others.erase(others.begin() + before, others.end());
  return {.reason = MissReason::kChecksumFailed};
}

bool Matcher::IsWhole(TenantId tenant, const Query& query) {
  Others others;
  Verified verified;
  return static_cast<bool>(FindWhole(tenant, query, others, verified).object);
}

ObjectTable::Result Matcher::Find(SessionId session, TenantId tenant, const Query& query, Others& others,
                                  Verified& verified) {
  if (!query.storable) return {.reason = Missed(session, tenant, query, MissReason::kTooShort)};
  ObjectTable::Result result = FindWhole(tenant, query, others, verified);
  if (!result.object) return {.reason = Missed(session, tenant, query, result.reason)};
  return result;
}

MissReason Matcher::Missed(SessionId session, TenantId tenant, const Query& query, MissReason reason) {
  reason = explainer_.Missed(session, tenant, query, reason);
  observer_.Miss(tenant, query.kind, reason, query.tokens);
  return reason;
}

absl::StatusOr<Match> Matcher::Attach(SessionId session, TenantId tenant, const LeaseId& lease,
                                      const std::optional<TensorShard>& shard) {
  const LeasedObjects* const found = leases_.Peek(tenant, lease);
  if (found == nullptr) return absl::NotFoundError("lease: unknown");
  const auto of_another = [&](const ObjectTable::Result& segment) {
    return shard && segment.object && segment.object->header.shard != *shard;
  };
  if (std::ranges::any_of(*found, of_another)) return AttachShard(session, tenant, lease, *shard);
  const absl::StatusOr<const LeasedObjects*> segments = leases_.Attach(session, tenant, lease);
  if (!segments.ok()) return segments.status();
  return Describe(lease, **segments);
}

absl::StatusOr<Match> Matcher::AttachShard(SessionId session, TenantId tenant, const LeaseId& lease,
                                           const TensorShard& shard) {
  const LeasedObjects& found = *leases_.Peek(tenant, lease);
  if (absl::Status room = leases_.Room(session, tenant, found.size() * shard.size); !room.ok()) return room;
  const MatchedPrefix* const known = leases_.Prefix(lease);
  const MatchedPrefix prefix = known == nullptr ? MatchedPrefix{} : *known;
  Others others;
  LeasedObjects own = ForShard(found, shard, others);
  leases_.Use(lease);
  Match match;
  for (const ObjectTable::Result& segment : own) match.found.push_back(Describe(segment));
  match.prefix = {prefix};
  match.lease = leases_.Grant(session, tenant, std::move(own), clock_.Now(), std::move(others), prefix);
  return match;
}

// Returns the objects of another shard for a lease of one shard.
LeasedObjects Matcher::ForShard(const LeasedObjects& segments, const TensorShard& shard, Others& others) {
  LeasedObjects own;
  own.reserve(segments.size());
  for (const ObjectTable::Result& segment : segments) {
    if (!segment.object) {
      own.push_back({.reason = segment.reason});
      continue;
    }
    // The lease holds all shards of this size, and none of another.
    if (segment.object->header.shard.size != shard.size) {
      own.push_back({.reason = MissReason::kInvalidRequest});
      continue;
    }
    if (segment.object->gone != MissReason::kNone) {
      own.push_back({.reason = segment.object->gone});
      continue;
    }
    own.push_back({.tier = segment.tier, .object = table_.Shard(segment.object, shard)});
    for (uint32_t rank = 0; rank < shard.size; ++rank) {
      if (rank != shard.rank) others.push_back(table_.Shard(segment.object, {.rank = rank, .size = shard.size}));
    }
  }
  return own;
}

}  // namespace ashlar::storage
