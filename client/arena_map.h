// The daemon's arenas as this process sees them: fetched on first need, mapped read-only once, shared by all matches.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "client/deadline.h"
#include "client/descriptor.h"
#include "client/session_channel.h"

namespace ashlar::internal {

// Thread-safe. Belongs to one session: another daemon numbers its arenas afresh.
class ArenaMap {
 public:
  explicit ArenaMap(SessionChannel& channel) : channel_(channel) {}

  // The mapping stays as long as anybody holds it, whatever becomes of this map or the daemon.
  absl::StatusOr<std::shared_ptr<const Mapping>> Get(uint32_t arena, Deadline deadline);

 private:
  SessionChannel& channel_;
  std::mutex mutex_;
  std::unordered_map<uint32_t, std::shared_ptr<const Mapping>> arenas_;
};

}  // namespace ashlar::internal
