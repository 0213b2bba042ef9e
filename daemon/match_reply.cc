#include "daemon/match_reply.h"

#include "ashlar/v1/cache.pb.h"
#include "proto/outcome.h"

namespace ashlar::daemon {
namespace {

// At most: tag and length of a SegmentMatch inside its prompt, and its own numbers; an ExtentRun inside it.
constexpr size_t kHitBytes = 6 + 2 + 2 + 11;
constexpr size_t kRunBytes = 2 + 3 * 6;

void WriteMiss(MissReason reason, size_t index, v1::SegmentMatch* out) {
  out->set_miss_reason(static_cast<uint32_t>(reason));
  out->set_kind(static_cast<uint32_t>(KindOfSegment(index)));
}

void WriteHit(const storage::Found& found, size_t index, v1::SegmentMatch* out) {
  out->set_miss_reason(static_cast<uint32_t>(MissReason::kNone));
  out->set_kind(static_cast<uint32_t>(KindOfSegment(index)));
  out->set_tier(static_cast<uint32_t>(found.tier));
  out->set_bytes(found.header->bytes);
  for (const storage::ExtentRun& run : found.slot->runs) {
    v1::ExtentRun* extents = out->add_extents();
    extents->set_arena(run.arena);
    extents->set_first(run.first);
    extents->set_count(run.count);
  }
}

}  // namespace

bool MatchReplyWriter::Take(const storage::Found& hit) {
  const size_t bytes = kHitBytes + hit.slot->runs.size() * kRunBytes;
  const bool fits = bytes <= budget_left_;
  budget_left_ = fits ? budget_left_ - bytes : 0;
  return fits;
}

void MatchReplyWriter::Write(const storage::Match& match, v1::PromptMatch* out) {
  if (match.lease != storage::LeaseId{}) out->set_lease(match.lease.data(), match.lease.size());
  for (size_t i = 0; i < match.found.size(); ++i) {
    const storage::Found& found = match.found[i];
    if (found.reason != MissReason::kNone) {
      WriteMiss(found.reason, i, out->add_segments());
      continue;
    }
    WriteHit(found, i, out->add_segments());
    if (i == 0) out->set_prefix_depth(found.header->tokens);
  }
}

}  // namespace ashlar::daemon
