#include "storage/matcher.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "storage/object_bytes.h"
#include "storage/policy/cover.h"

namespace ashlar::storage {

Found Matcher::Describe(const Pool::Result& result) {
  if (!result.object) return {.reason = result.reason};
  if (result.object->gone != MissReason::kNone) return {.reason = result.object->gone};
  return {.tier = result.tier, .header = &result.object->header, .slot = &result.object->top().slot};
}

Match Matcher::Describe(const LeaseId& lease, const LeaseTable::Segments& segments) const {
  Match match{.lease = lease};
  for (const Pool::Result& segment : segments) match.found.push_back(Describe(segment));
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

Pool::Result Matcher::FindWhole(TenantId tenant, const Query& query, Holding& holding) {
  Others& others = holding.others;
  const auto before = static_cast<ptrdiff_t>(others.size());
  Pool::Result result = pool_.Find(tenant, query, &others);
  if (!result.object) return result;
  const auto is_whole = [&](const Pool::Reference& object) { return HeaderIsWhole(*object, holding.verified); };
  if (is_whole(result.object) && std::all_of(others.begin() + before, others.end(), is_whole)) return result;
  pool_.Drop(result.object, MissReason::kChecksumFailed);
  others.erase(others.begin() + before, others.end());
  return {.reason = MissReason::kChecksumFailed};
}

bool Matcher::IsWhole(TenantId tenant, const Query& query) {
  Holding holding;
  return static_cast<bool>(FindWhole(tenant, query, holding).object);
}

Pool::Result Matcher::Find(SessionId session, TenantId tenant, const Query& query, Holding& holding) {
  if (!query.storable) return Missed(session, tenant, query, MissReason::kTooShort);
  Pool::Result result = FindWhole(tenant, query, holding);
  if (!result.object) return Missed(session, tenant, query, result.reason);
  return result;
}

Pool::Result Matcher::Missed(SessionId session, TenantId tenant, const Query& query, MissReason reason) {
  reason = explainer_.Missed(session, tenant, query, reason);
  observer_.Miss(tenant, query.kind, reason, query.tokens);
  return {.reason = reason};
}

std::optional<size_t> Matcher::Hold(TenantId tenant, std::span<const Query> objects, LeaseTable::Segments& held,
                                    Holding& holding) {
  const auto others = static_cast<ptrdiff_t>(holding.others.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    held.push_back(FindWhole(tenant, objects[i], holding));
    if (held.back().object) continue;
    held.clear();
    holding.others.erase(holding.others.begin() + others, holding.others.end());
    return i;
  }
  return std::nullopt;
}

// The one that saves most together with the segments behind it, as far as can be seen without using them.
Matcher::HeldPrefix Matcher::FindPrefix(TenantId tenant, std::span<const Query> queries, const PrefixText& prompt,
                                        FoundPrefix& prefix, Holding& holding) {
  Prefixes::Asked asked = prefixes_.Ask(tenant, prompt);
  prefix.checkpoint_at = std::move(asked.checkpoint_at);
  for (const Prefixes::Candidate& candidate : asked.candidates) prefix.resumable.push_back(candidate.depth);
  std::vector<CoverSegment> segments;
  uint64_t begin = 0;
  for (const Query& query : queries) {
    const Entry* const entry = query.storable ? pool_.Peek(tenant, query.key, query.shard) : nullptr;
    segments.push_back({begin, begin + query.tokens, entry != nullptr && entry->ready});
    begin += query.tokens;
  }
  const PrefixModel& model = prompt.model();
  const auto flops = [&model](uint64_t depth) { return model.costs.Flops(depth); };
  HeldPrefix found;
  LeaseTable::Segments& held = found.objects;
  while (!asked.candidates.empty()) {
    std::vector<uint64_t> depths;
    for (const Prefixes::Candidate& candidate : asked.candidates) depths.push_back(candidate.depth);
    const Cover cover = BestCover(depths, segments, model.layout.head, model.layout.tail, flops);
    const auto chosen = std::ranges::find(asked.candidates, cover.prefix, &Prefixes::Candidate::depth);
    if (chosen == asked.candidates.end()) break;  // segments alone, the first one among them, save more
    found.queries = Prefixes::Objects(prompt, *chosen);
    const std::optional<size_t> missing = Hold(tenant, found.queries, held, holding);
    if (!missing) {
      prefix.depth = chosen->depth;
      prefix.own = chosen->own;
      prefix.span_tokens = static_cast<uint32_t>(chosen->depth - chosen->checkpoint());
      const bool composed = std::ranges::any_of(
          held, [](const Pool::Result& object) { return object.object->header.provenance == Provenance::kComposed; });
      prefix.provenance = composed ? Provenance::kComposed : Provenance::kExact;
      break;
    }
    // A block that one lacks all lack that are as deep, a checkpoint or a span those that need it.
    const Prefixes::Candidate refused = *chosen;
    const ObjectKind lost = found.queries[*missing].kind;
    std::erase_if(asked.candidates, [&](const Prefixes::Candidate& candidate) {
      if (candidate.own != refused.own) return false;
      if (lost == ObjectKind::kPrefixPage) return candidate.checkpoint() >= (*missing + 1) * model.block_tokens;
      if (lost == ObjectKind::kSpan) return candidate.span_begin > 0 && candidate.span == refused.span;
      return candidate.checkpoint() == refused.checkpoint();
    });
  }
  std::erase_if(prefix.checkpoint_at, [&prefix](uint64_t depth) { return depth <= prefix.depth; });
  return found;
}

// What the answer has no room for is missed, and leased all the same.
void Matcher::Answer(SessionId session, TenantId tenant, std::span<const Query> queries, const PrefixText* prompt,
                     std::span<const Query> of_prefix, const HasRoom& has_room, Match& match) {
  for (size_t i = 0; i < queries.size(); ++i) {
    Found& found = match.found[i];
    if (found.reason != MissReason::kNone) continue;
    if (has_room && !has_room(found)) {
      found = {.reason = Missed(session, tenant, queries[i], MissReason::kBusy).reason};
    } else {
      observer_.Hit(tenant, queries[i].kind, found.tier, queries[i].tokens);
    }
  }
  FoundPrefix& prefix = match.prefix;
  if (prefix.depth == 0) return;
  const auto objects = std::span(match.found).subspan(prefix.first, prefix.count);
  if (has_room && !std::ranges::all_of(objects, has_room)) {
    for (Found& found : match.found) {
      if (found.reason == MissReason::kCovered) found.reason = MissReason::kBusy;
    }
    prefix.depth = prefix.count = prefix.span_tokens = 0;
    match.found.resize(prefix.first);
    return;
  }
  for (size_t i = 0; i < of_prefix.size(); ++i) {
    observer_.Hit(tenant, of_prefix[i].kind, objects[i].tier, of_prefix[i].tokens);
  }
  observer_.Resumed(tenant, prefix.own, prefix.depth, prompt->tokens().size());
}

Match Matcher::Lookup(SessionId session, TenantId tenant, std::span<const Query> queries, const PrefixText* prompt,
                      const HasRoom& has_room, const LeaseId& name, MissReason refused) {
  if (refused == MissReason::kNone && leases_.Exists(name)) refused = MissReason::kInvalidRequest;
  size_t listed = 0;
  for (const Query& query : queries) listed += query.shard.size;
  if (refused == MissReason::kNone && !leases_.HasRoom(session, listed)) refused = MissReason::kBusy;
  Holding holding;
  FoundPrefix prefix;
  HeldPrefix held;
  LeaseTable::Segments& objects = held.objects;
  if (prompt != nullptr && refused == MissReason::kNone) {
    held = FindPrefix(tenant, queries, *prompt, prefix, holding);
    if (!leases_.HasRoom(session, listed + objects.size() + holding.others.size())) {
      prefix.depth = prefix.span_tokens = 0;
      objects.clear();
      holding.others.clear();
    }
  }
  holding.segments.reserve(queries.size() + objects.size());  // a lease costs what it lists, and no more
  Nanos needed_at = std::max(clock_.Now(), prompt == nullptr ? 0 : prompt->needed_at);
  uint64_t begin = 0;
  for (const Query& query : queries) {
    needed_at = std::max(needed_at, query.needed_at);
    const uint64_t end = begin + query.tokens;
    if (prompt != nullptr && (prefix.depth >= end || SpoiledBy(prefix.depth, begin, prompt->model().layout.head))) {
      holding.segments.push_back({.reason = MissReason::kCovered});
    } else if (refused != MissReason::kNone) {
      holding.segments.push_back(Missed(session, tenant, query, refused));
    } else {
      holding.segments.push_back(Find(session, tenant, query, holding));
    }
    begin = end;
  }
  prefix.first = holding.segments.size();
  prefix.count = objects.size();
  std::ranges::move(objects, std::back_inserter(holding.segments));
  Match match;
  for (const Pool::Result& segment : holding.segments) match.found.push_back(Describe(segment));
  match.prefix = std::move(prefix);
  Answer(session, tenant, queries, prompt, held.queries, has_room, match);
  const auto is_held = [](const Pool::Result& segment) { return static_cast<bool>(segment.object); };
  if (std::ranges::any_of(holding.segments, is_held)) {
    match.lease = leases_.Grant(session, tenant, std::move(holding.segments), needed_at, std::move(holding.others),
                                match.prefix, name);
  }
  return match;
}

absl::StatusOr<Match> Matcher::Attach(SessionId session, TenantId tenant, const LeaseId& lease,
                                      const std::optional<TensorShard>& shard) {
  const LeaseTable::Segments* const found = leases_.Peek(tenant, lease);
  if (found == nullptr) return absl::NotFoundError("lease: unknown");
  const auto of_another = [&](const Pool::Result& segment) {
    return shard && segment.object && segment.object->header.shard != *shard;
  };
  if (std::ranges::any_of(*found, of_another)) return AttachShard(session, tenant, lease, *shard);
  const absl::StatusOr<const LeaseTable::Segments*> segments = leases_.Attach(session, tenant, lease);
  if (!segments.ok()) return segments.status();
  return Describe(lease, **segments);
}

absl::StatusOr<Match> Matcher::AttachShard(SessionId session, TenantId tenant, const LeaseId& lease,
                                           const TensorShard& shard) {
  const LeaseTable::Segments& found = *leases_.Peek(tenant, lease);
  if (!leases_.HasRoom(session, found.size() * shard.size)) {
    return absl::ResourceExhaustedError("lease: a session has no room for another one");
  }
  const MatchedPrefix* const known = leases_.Prefix(lease);
  const MatchedPrefix prefix = known == nullptr ? MatchedPrefix{} : *known;
  Others others;
  LeaseTable::Segments own = ForShard(found, shard, others);
  leases_.Use(lease);
  Match match;
  for (const Pool::Result& segment : own) match.found.push_back(Describe(segment));
  match.prefix = {prefix};
  match.lease = leases_.Grant(session, tenant, std::move(own), clock_.Now(), std::move(others), prefix);
  return match;
}

// What a lease of one shard is to another one.
LeaseTable::Segments Matcher::ForShard(const LeaseTable::Segments& segments, const TensorShard& shard, Others& others) {
  LeaseTable::Segments own;
  own.reserve(segments.size());
  for (const Pool::Result& segment : segments) {
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
    own.push_back({.tier = segment.tier, .object = pool_.Shard(segment.object, shard)});
    for (uint32_t rank = 0; rank < shard.size; ++rank) {
      if (rank != shard.rank) others.push_back(pool_.Shard(segment.object, {.rank = rank, .size = shard.size}));
    }
  }
  return own;
}

}  // namespace ashlar::storage
