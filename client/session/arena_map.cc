// SPDX-License-Identifier: Apache-2.0
#include "client/session/arena_map.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::internal {

absl::StatusOr<std::shared_ptr<const SharedMemory>> ArenaMap::Get(uint32_t arena, Deadline deadline) {
  {
    MutexLock lock(mutex_);
    if (auto known = arenas_.find(arena); known != arenas_.end()) return known->second;
  }
  absl::StatusOr<SessionChannel::Arena> granted = channel_.GetArena(arena, deadline);
  if (!granted.ok()) return granted.status();
  absl::StatusOr<SharedMemory> memory = Map(*granted);
  if (!memory.ok()) return memory.status();
  MutexLock lock(mutex_);
  // Another thread may have mapped it meanwhile; its mapping is used.
  return arenas_.try_emplace(arena, std::make_shared<const SharedMemory>(*std::move(memory))).first->second;
}

absl::StatusOr<SharedMemory> ArenaMap::Map(const SessionChannel::Arena& granted) const {
  if (!granted.on_gpu) {
    absl::StatusOr<Mapping> mapping = Mapping::Map(granted.memory.get(), granted.bytes, Mapping::Access::kRead);
    if (!mapping.ok()) return mapping.status();
    return SharedMemory(*std::move(mapping));
  }
  if (gpu_ == nullptr) return absl::FailedPreconditionError("the arena is on a GPU; set ClientOptions::gpu");
  kernels::ArenaError error;
  std::unique_ptr<kernels::ArenaMemory> arena = gpu_->ImportArena(granted.memory.get(), granted.bytes, &error);
  if (arena == nullptr) return absl::InternalError(absl::StrCat("an arena cannot be mapped: ", error.message));
  return SharedMemory(*gpu_, std::move(arena));
}

}  // namespace ashlar::internal
