#include "client/arena_map.h"

#include <utility>

namespace ashlar::internal {

absl::StatusOr<std::shared_ptr<const Mapping>> ArenaMap::Get(uint32_t arena, Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (auto known = arenas_.find(arena); known != arenas_.end()) return known->second;
  }
  absl::StatusOr<SessionChannel::Arena> granted = channel_.GetArena(arena, deadline);
  if (!granted.ok()) return granted.status();
  absl::StatusOr<Mapping> mapping = Mapping::Map(granted->memory.get(), granted->bytes, Mapping::Access::kRead);
  if (!mapping.ok()) return mapping.status();
  std::lock_guard lock(mutex_);
  // Another thread may have been faster: its mapping is the one that is shared.
  return arenas_.try_emplace(arena, std::make_shared<const Mapping>(*std::move(mapping))).first->second;
}

}  // namespace ashlar::internal
