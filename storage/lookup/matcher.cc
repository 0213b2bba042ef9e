// SPDX-License-Identifier: Apache-2.0
#include "storage/lookup/matcher.h"

#include <algorithm>
#include <string>
#include <utility>

#include "storage/objects/object_bytes.h"

namespace ashlar::storage {

Found Matcher::Describe(const FoundObject& result) {
  if (!result.object) return {.reason = result.reason};
  if (result.object->gone != MissReason::kNone) return {.reason = result.object->gone};
  return {.tier = result.tier, .header = &result.object->header, .slot = &result.object.copy().slot};
}

Match Matcher::Describe(const LeaseId& lease, const LeasedObjects& segments) const {
  Match match{.lease = lease};
  for (const FoundObject& segment : segments) match.found.push_back(Describe(segment));
  if (const MatchedPrefix* const prefix = leases_.Prefix(lease)) match.prefix = {*prefix};
  return match;
}

// Engines read the header in place. If it has changed since it was written, they would miss the object and could not
// publish it again. A call verifies an object only once.
bool Matcher::HeaderIsWhole(const ObjectReference& object, Verified& verified) {
  if (!object.copy().whole()) return true;  // in promotion; landings will verify it
  if (!verified.insert(object->id).second) return true;
  std::string buffer;
  const uint64_t bytes = EncodedHeaderBytes(object->header.parts.size());
  return VerifyHeader(ReadStart(object.tier(), object.copy().slot, bytes, buffer)).ok();
}

FoundObject Matcher::FindWhole(SessionId session, TenantId tenant, const Query& query, Others& others,
                               Verified& verified) {
  const auto before = static_cast<ptrdiff_t>(others.size());
  FoundObject result = finder_.Find(tenant, query, &others, level_of_(session));
  if (!result.object) return result;
  const auto is_whole = [&](const ObjectReference& object) { return HeaderIsWhole(object, verified); };
  if (is_whole(result.object) && std::all_of(others.begin() + before, others.end(), is_whole)) return result;
  table_.Drop(result.object, MissReason::kChecksumFailed);
  others.erase(others.begin() + before, others.end());
  return {.reason = MissReason::kChecksumFailed};
}

bool Matcher::IsWhole(SessionId session, TenantId tenant, const Query& query) {
  Others others;
  Verified verified;
  return static_cast<bool>(FindWhole(session, tenant, query, others, verified).object);
}

FoundObject Matcher::Find(SessionId session, TenantId tenant, const Query& query, Others& others, Verified& verified) {
  if (!query.storable) return {.reason = Missed(session, tenant, query, MissReason::kTooShort)};
  FoundObject result = FindWhole(session, tenant, query, others, verified);
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
  if (found == nullptr) return absl::NotFoundError("lease: unknown or expired");
  const auto of_another = [&](const FoundObject& segment) {
    return shard && segment.object && segment.object->header.shard != *shard;
  };
  // A GPU's memory is useless to a process on another GPU or without one.
  const size_t level = level_of_(session);
  const auto elsewhere = [&](const FoundObject& segment) {
    return segment.object && segment.object.level() != level && segment.object.tier().gpu() != nullptr;
  };
  if (std::ranges::any_of(*found, of_another)) return AttachShard(session, tenant, lease, shard);
  if (std::ranges::any_of(*found, elsewhere)) return AttachShard(session, tenant, lease, std::nullopt);
  const absl::StatusOr<const LeasedObjects*> segments = leases_.Attach(session, tenant, lease);
  if (!segments.ok()) return segments.status();
  return Describe(lease, **segments);
}

absl::StatusOr<Match> Matcher::AttachShard(SessionId session, TenantId tenant, const LeaseId& lease,
                                           const std::optional<TensorShard>& shard) {
  const LeasedObjects& found = *leases_.Peek(tenant, lease);
  uint64_t listed = 0;
  for (const FoundObject& segment : found) {
    listed += shard ? shard->size : segment.object ? segment.object->header.shard.size : 1;
  }
  if (absl::Status allowed = leases_.CheckCapacity(session, tenant, listed); !allowed.ok()) return allowed;
  const MatchedPrefix* const known = leases_.Prefix(lease);
  const MatchedPrefix prefix = known == nullptr ? MatchedPrefix{} : *known;
  Others others;
  LeasedObjects own = ForShard(found, shard, level_of_(session), others);
  leases_.Use(lease);
  Match match;
  for (const FoundObject& segment : own) match.found.push_back(Describe(segment));
  match.prefix = {prefix};
  match.lease = leases_.Grant(session, tenant, std::move(own), clock_.Now(), std::move(others), prefix);
  return match;
}

// Returns the objects of another shard for a lease of one shard, at a session's level. Without a shard: the same
// objects.
LeasedObjects Matcher::ForShard(const LeasedObjects& segments, const std::optional<TensorShard>& wanted, size_t level,
                                Others& others) {
  LeasedObjects own;
  own.reserve(segments.size());
  for (const FoundObject& segment : segments) {
    if (!segment.object) {
      own.push_back({.reason = segment.reason});
      continue;
    }
    const TensorShard shard = wanted.value_or(segment.object->header.shard);
    // The lease holds all shards of this size and none of other sizes.
    if (segment.object->header.shard.size != shard.size) {
      own.push_back({.reason = MissReason::kInvalidRequest});
      continue;
    }
    if (segment.object->gone != MissReason::kNone) {
      own.push_back({.reason = segment.object->gone});
      continue;
    }
    FoundObject mine = finder_.ShardAt(segment.object, shard, level);
    if (mine.object) mine.tier = std::max(segment.tier, mine.tier);
    own.push_back(std::move(mine));
    for (uint32_t rank = 0; rank < shard.size; ++rank) {
      if (rank != shard.rank) others.push_back(finder_.Shard(segment.object, {.rank = rank, .size = shard.size}));
    }
  }
  return own;
}

}  // namespace ashlar::storage
