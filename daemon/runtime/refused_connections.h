// SPDX-License-Identifier: Apache-2.0
// RefusedConnections: counts and logs connections that the daemon refused or closed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "kernels/mutex.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// The reason is a metric label.
enum class RefusedConnection : uint8_t {
  kTooMany,      // a limit was exceeded
  kUnknownUser,  // the user belongs to no tenant
  kVersion,      // no common protocol version
  kTimedOut,     // no greeting in time
  kProtocol,     // protocol violation
};
absl::string_view Name(RefusedConnection reason);

// Thread-safe. Logs one line per socket and reason every kQuiet, with the number of unlogged ones.
class RefusedConnections {
 public:
  static constexpr storage::Nanos kQuiet = 10'000'000'000;

  // `socket` is the listener, a metric label: "rpc", "session", "events". `peer` describes the other end.
  void Add(const char* socket, RefusedConnection reason, absl::string_view peer, absl::string_view detail);
  // By socket and reason, since the start.
  std::map<std::pair<std::string, RefusedConnection>, uint64_t> counts() const;

 private:
  struct Count {
    uint64_t all = 0, logged = 0;
    storage::Nanos quiet_until = 0;
  };
  mutable Mutex mutex_;
  std::map<std::pair<std::string, RefusedConnection>, Count> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::daemon
