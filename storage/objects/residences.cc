// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/residences.h"

#include <utility>

namespace ashlar::storage {

void Residences::Tell(Entry& entry) const {
  if (!tell_) return;
  entry.told = tell_(entry.pool, entry.header,
                     {.nearest = entry.resides,
                      .saved = entry.saved,
                      .uses = entry.uses,
                      .told = entry.told,
                      .was = std::exchange(entry.resided, entry.resides),
                      .level = entry.resides_at,
                      .was_level = std::exchange(entry.resided_at, entry.resides_at)});
}

bool Residences::TellAll(Telling& telling, Slice& slice) const {
  if (telling.last == 0) telling.last = index_.newest();  // later objects are reported as they are added
  return index_.Walk(telling.after, telling.last, slice, [&](Entry& entry) {
    if (entry.gone != MissReason::kNone || entry.resides == TierKind::kNone) return true;
    if (telling.lost) entry.told = TierKind::kNone;
    Tell(entry);
    return true;
  });
}

}  // namespace ashlar::storage
