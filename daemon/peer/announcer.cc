// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/announcer.h"

#include <algorithm>

#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

Holding HoldingOf(const ObjectHeader& header, TierKind tier) {
  Holding holding{.tier = tier, .kind = header.kind, .shard = header.shard, .bytes = header.bytes};
  // A prompt's first segment is also stored as a checkpoint, but under its own key, which no prefix has.
  const bool chained = header.first_token > 0 || header.tokens < limits::kPrefixBlockTokens;
  if (header.kind == ObjectKind::kCheckpoint && chained) holding.depth = static_cast<uint32_t>(header.tokens);
  if (header.kind == ObjectKind::kSpan) {
    holding.depth = static_cast<uint32_t>(header.tokens);
    holding.span_begin = static_cast<uint32_t>(header.first_token);
  }
  return holding;
}

}  // namespace

TierKind Announcer::Resides(const storage::TenantPool&, const ObjectHeader& header,
                            const storage::Residence& residence) {
  const TierKind now = residence.nearest, announced = residence.announced;
  if (now == TierKind::kNone) {
    if (announced != TierKind::kNone) directory_.Withdraw(header.ns, header.key, header.shard);
    return TierKind::kNone;
  }
  const bool wanted = mode_ == AnnounceMode::kAll || residence.uses >= 2 || residence.saved;
  const bool moved = announced == TierKind::kHbm && (now != TierKind::kHbm || residence.level != residence.was_level);
  const bool same = announced != TierKind::kNone && (announced == TierKind::kSsd) == (now == TierKind::kSsd) && !moved;
  if (!wanted || (same && !directory_.WasDisplaced(header.ns, header.key, header.shard))) return announced;
  const double worth = static_cast<double>(header.tokens) * (1 + residence.uses);
  Holding holding = HoldingOf(header, now);
  if (now == TierKind::kHbm && residence.level < gpus_.size()) holding.gpu = gpus_[residence.level];
  return directory_.Announce(header.ns, header.key, holding, worth) ? now : announced;
}

void Announcer::Flush(ReportAll report_all) {
  if (!walk_) return;
  const size_t capacity = directory_.RemainingCapacity();
  if (capacity == 0) return;
  storage::Slice slice(std::min(capacity, kSaidAtOnce));
  if (report_all(*walk_, slice)) walk_.reset();
}

void Announcer::Tick() {
  const DirectoryStats stats = directory_.Stats();
  if (walk_ || stats.dropped_announcements == dropped_ || stats.queued_announcements > 0) return;
  dropped_ = stats.dropped_announcements;
  walk_.emplace();
}

}  // namespace ashlar::daemon
