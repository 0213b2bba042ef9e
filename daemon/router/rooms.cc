// SPDX-License-Identifier: Apache-2.0
// Room in this node's memory for segments that others compute: taken before they begin, so that no result comes in
// vain.
#include <utility>

#include "daemon/router/router.h"

namespace ashlar::daemon {

// The room is a reservation under a name that no text has: the segment's own name stays free for an engine of this node
// that publishes it. It is as large as the segment, and whoever takes the segment in takes the same room in the same
// turn of the metadata thread. An operator's warm-up does not say how large its segments are, and has no room ahead.
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
