// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/residences.h"

#include <utility>

namespace ashlar::storage {

void Residences::Report(Entry& entry) const {
  if (!report_) return;
  entry.announced = report_(entry.pool, entry.header,
                            {.nearest = entry.resides,
                             .saved = entry.saved,
                             .uses = entry.uses,
                             .announced = entry.announced,
                             .was = std::exchange(entry.reported, entry.resides),
                             .level = entry.resides_at,
                             .was_level = std::exchange(entry.reported_at, entry.resides_at)});
}

bool Residences::ReportAll(ReportWalk& walk, Slice& slice) const {
  if (walk.last == 0) walk.last = index_.newest();  // later objects are reported as they are added
  return index_.Walk(walk.after, walk.last, slice, [&](Entry& entry) {
    if (entry.gone != MissReason::kNone || entry.resides == TierKind::kNone) return true;
    if (walk.lost) entry.announced = TierKind::kNone;
    Report(entry);
    return true;
  });
}

}  // namespace ashlar::storage
