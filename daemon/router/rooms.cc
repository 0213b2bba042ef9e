// SPDX-License-Identifier: Apache-2.0
// Reserves memory for segments that other engines compute, before they start, so that no result is lost for lack of
// space.
#include <utility>

#include "daemon/router/router.h"

namespace ashlar::daemon {

// Space is reserved under a name that no text has, so an engine of this node can still publish the segment under its
// own name. It is as large as the segment, and the adoption of the segment takes the same space in the same turn of the
// metadata thread. An operator's warm-up does not know the sizes of its segments, so it reserves no space.
bool Router::TakeRoom(Task& task) {
  if (task.cold.bytes == 0) return true;
  const storage::SessionId session = SessionOf(task.cold.work.tenant);
  if (task.room != 0 && cache_.Planned(session, task.room) != nullptr) return true;
  ObjectHeader room{
      .ns = task.cold.work.ns, .key = task.cold.work.key, .kind = task.cold.work.kind, .bytes = task.cold.bytes};
  for (uint8_t& byte : room.key.bytes) byte = static_cast<uint8_t>(~byte);
  const storage::Cache::Reservation reserved = cache_.Reserve(session, room);
  task.room = reserved.id;
  return reserved.outcome == ReserveOutcome::kGranted;
}

void Router::GiveRoom(Task& task) {
  if (task.room != 0) cache_.Abandon(SessionOf(task.cold.work.tenant), std::exchange(task.room, 0));
}

void Router::YieldRoom(storage::TenantId tenant, const Key& key) {
  if (const auto task = tasks_.find({tenant, key}); task != tasks_.end()) GiveRoom(*task->second);
}

}  // namespace ashlar::daemon
