// SPDX-License-Identifier: Apache-2.0
// Reserves memory for segments that other engines compute, before they start, so that no result is lost for lack of
// space.
#include <utility>

#include "daemon/router/router.h"

namespace ashlar::daemon {

// Space is reserved under a name that no text has, so an engine of this node can still publish the segment under its
// own name. It is as large as the segment, and the adoption of the segment takes the same space in the same turn of the
// metadata thread. An operator's warm-up does not know the sizes of its segments, so it reserves no space.
bool Router::ReserveSpace(Task& task) {
  if (task.cold.bytes == 0) return true;
  const storage::SessionId session = SessionOf(task.cold.work.tenant);
  if (task.space != 0 && cache_.Planned(session, task.space) != nullptr) return true;
  ObjectHeader plan{
      .ns = task.cold.work.ns, .key = task.cold.work.key, .kind = task.cold.work.kind, .bytes = task.cold.bytes};
  for (uint8_t& byte : plan.key.bytes) byte = static_cast<uint8_t>(~byte);
  const storage::Cache::Reservation reserved = cache_.Reserve(session, plan);
  task.space = reserved.id;
  return reserved.outcome == ReserveOutcome::kGranted;
}

void Router::ReleaseSpace(Task& task) {
  if (task.space != 0) cache_.Abandon(SessionOf(task.cold.work.tenant), std::exchange(task.space, 0));
}

void Router::YieldSpace(storage::TenantId tenant, const Key& key) {
  if (const auto task = tasks_.find({tenant, key}); task != tasks_.end()) ReleaseSpace(*task->second);
}

}  // namespace ashlar::daemon
