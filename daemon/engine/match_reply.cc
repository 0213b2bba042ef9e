// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/match_reply.h"

#include <algorithm>
#include <span>

#include "ashlar/v1/cache.pb.h"
#include "proto/outcome.h"

namespace ashlar::daemon {
namespace {

// Upper bound: tag and length of a SegmentMatch in its prompt, its numbers, and an ExtentRun in it.
constexpr size_t kHitBytes = 6 + 2 + 2 + 11 + 4;
constexpr size_t kRunBytes = 2 + 3 * 6;

void WriteMiss(MissReason reason, size_t index, v1::SegmentMatch* out) {
  out->set_miss_reason(static_cast<uint32_t>(reason));
  out->set_kind(static_cast<uint32_t>(KindOfSegment(index)));
}

void WriteHit(const storage::Found& found, v1::SegmentMatch* out) {
  out->set_miss_reason(static_cast<uint32_t>(MissReason::kNone));
  out->set_kind(static_cast<uint32_t>(found.header->kind));
  out->set_tier(static_cast<uint32_t>(found.tier));
  out->set_bytes(found.header->bytes);
  for (const storage::ExtentRun& run : found.slot->runs) {
    v1::ExtentRun* extents = out->add_extents();
    extents->set_arena(run.arena);
    extents->set_first(run.first);
    extents->set_count(run.count);
  }
}

void WritePrefixObject(const storage::Match& match, uint32_t object, v1::PrefixMatch* prefix) {
  const storage::PrefixObjects& objects = match.prefix.objects;
  v1::SegmentMatch* const out = object == objects.checkpoint ? prefix->mutable_checkpoint()
                                : object == objects.span     ? prefix->mutable_span()
                                                             : prefix->add_blocks();
  WriteHit(match.found[object], out);
  out->set_object(object);
}

void WritePrefix(const storage::FoundPrefix& prefix, v1::PromptMatch* out) {
  out->set_prefix_depth(prefix.depth);
  v1::PrefixMatch* const resume = out->mutable_prefix();
  resume->set_depth(prefix.depth);
  resume->set_provenance(static_cast<uint32_t>(prefix.provenance));
  resume->set_own(prefix.own);
  resume->set_span_tokens(prefix.span_tokens);
  const size_t listed = std::min(prefix.resumable.size(), MatchReplyWriter::kMaxDepths);
  resume->mutable_resumable()->Add(prefix.resumable.end() - static_cast<ptrdiff_t>(listed), prefix.resumable.end());
}

}  // namespace

bool MatchReplyWriter::Take(const storage::Found& hit) {
  const size_t bytes = kHitBytes + hit.slot->runs.size() * kRunBytes;
  const bool fits = bytes <= budget_left_;
  budget_left_ = fits ? budget_left_ - bytes : 0;
  return fits;
}

bool MatchReplyWriter::Write(const storage::Match& match, size_t& written, storage::Slice& slice,
                             v1::PromptMatch* out) {
  const storage::FoundPrefix& prefix = match.prefix;
  const size_t segments = std::min<size_t>(prefix.objects.begin, match.found.size());
  for (; written < segments; ++written) {
    if (!slice.Take()) return false;
    const storage::Found& found = match.found[written];
    if (found.reason != MissReason::kNone) {
      WriteMiss(found.reason, written, out->add_segments());
      continue;
    }
    WriteHit(found, out->add_segments());
    if (written == 0) out->set_prefix_depth(found.header->tokens);
  }
  bool resumed = prefix.depth > 0;
  prefix.objects.ForEach([&](uint32_t object) { resumed &= match.found[object].reason == MissReason::kNone; });
  for (; resumed && written < segments + prefix.objects.size(); ++written) {
    if (!slice.Take()) return false;
    WritePrefixObject(match, static_cast<uint32_t>(written), out->mutable_prefix());
  }
  if (resumed) WritePrefix(prefix, out);
  if (match.lease != storage::LeaseId{}) out->set_lease(match.lease.data(), match.lease.size());
  const size_t wanted = std::min(prefix.checkpoint_at.size(), kMaxDepths);
  out->mutable_checkpoint_positions()->Add(prefix.checkpoint_at.begin(),
                                           prefix.checkpoint_at.begin() + static_cast<ptrdiff_t>(wanted));
  return true;
}

}  // namespace ashlar::daemon
