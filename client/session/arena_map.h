// SPDX-License-Identifier: Apache-2.0
// ArenaMap: the daemon's arenas in this process. Each is fetched when it is first needed, mapped once and read-only,
// and shared by all matches.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "client/session/deadline.h"
#include "client/session/session_channel.h"
#include "client/session/shared_memory.h"
#include "kernels/mutex.h"

namespace ashlar::internal {

// Thread-safe. Belongs to one session: another daemon numbers its arenas differently.
class ArenaMap {
 public:
  // `gpu` maps arenas on that GPU; null: arenas on a GPU are refused.
  ArenaMap(SessionChannel& channel, const kernels::Gpu* gpu) : channel_(channel), gpu_(gpu) {}

  const kernels::Gpu* gpu() const { return gpu_; }

  // The mapping stays as long as anyone holds it, even after this map or the daemon has ended.
  absl::StatusOr<std::shared_ptr<const SharedMemory>> Get(uint32_t arena, Deadline deadline);

 private:
  absl::StatusOr<SharedMemory> Map(const SessionChannel::Arena& granted) const;

  SessionChannel& channel_;
  const kernels::Gpu* const gpu_;
  Mutex mutex_;
  std::unordered_map<uint32_t, std::shared_ptr<const SharedMemory>> arenas_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::internal
