// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/refused_connections.h"

#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/log.h"

namespace ashlar::daemon {

absl::string_view Name(RefusedConnection reason) {
  switch (reason) {
    case RefusedConnection::kTooMany:
      return "too_many";
    case RefusedConnection::kUnknownUser:
      return "unknown_user";
    case RefusedConnection::kVersion:
      return "version";
    case RefusedConnection::kTimedOut:
      return "timed_out";
    case RefusedConnection::kProtocol:
      return "protocol";
  }
  return "unknown";
}

void RefusedConnections::Add(const char* socket, RefusedConnection reason, absl::string_view peer,
                             absl::string_view detail) {
  uint64_t not_logged = 0;
  {
    MutexLock lock(mutex_);
    Count& count = counts_[{socket, reason}];
    ++count.all;
    const storage::Nanos now = MonotonicClock().Now();
    if (now < count.quiet_until) return;
    count.quiet_until = now + kQuiet;
    not_logged = count.all - count.logged - 1;
    count.logged = count.all;
  }
  Log(LogLevel::kWarning, "connection refused",
      {{"socket", socket},
       {"reason", Name(reason)},
       {"peer", peer},
       {"detail", detail},
       {"not_logged_before", not_logged}});
}

std::map<std::pair<std::string, RefusedConnection>, uint64_t> RefusedConnections::counts() const {
  std::map<std::pair<std::string, RefusedConnection>, uint64_t> counts;
  MutexLock lock(mutex_);
  for (const auto& [of, count] : counts_) counts[of] = count.all;
  return counts;
}

}  // namespace ashlar::daemon
