// SPDX-License-Identifier: Apache-2.0
// RefusedConnections: connections that this daemon refused or closed, counted for metrics and logged.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// The reason is a metric's label.
enum class RefusedConnection : uint8_t {
  kTooMany,   // beyond a limit
  kStranger,  // of a user that belongs to no tenant
  kVersion,   // no version of the protocol in common
  kSilent,    // no greeting in time
  kProtocol,  // it breaks the protocol
};
absl::string_view Name(RefusedConnection reason);

// Thread-safe. Logs one line for each socket and reason in kQuiet, with the number of those that it has not logged.
class RefusedConnections {
 public:
  static constexpr storage::Nanos kQuiet = 10'000'000'000;

  // `socket`: the listener, a metric's label: "rpc", "session", "events". `peer`: what is known of the other end.
  void Add(const char* socket, RefusedConnection reason, absl::string_view peer, absl::string_view why);
  // By socket and reason, ever.
  std::map<std::pair<std::string, RefusedConnection>, uint64_t> counts() const;

 private:
  struct Count {
    uint64_t all = 0, logged = 0;
    storage::Nanos quiet_until = 0;
  };
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, RefusedConnection>, Count> counts_;  // guarded by mutex_
};

}  // namespace ashlar::daemon
