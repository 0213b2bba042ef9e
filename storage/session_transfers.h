// SPDX-License-Identifier: Apache-2.0
// SessionTransfers: counts the transfers that access a session's memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "storage/ids.h"

namespace ashlar::storage {

// Counts transfers in flight per session. A session's memory may be unmapped when there are none.
class SessionTransfers {
 public:
  void Begin(SessionId session) { ++sessions_[session].in_flight; }

  void End(SessionId session) {
    const auto found = sessions_.find(session);
    if (--found->second.in_flight > 0) return;
    const auto drained = std::move(found->second.drained);
    sessions_.erase(found);
    for (const auto& call : drained) call();
  }

  // Calls `drained` once nothing is in flight, which may be immediately.
  void WhenIdle(SessionId session, std::function<void()> drained) {
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) return drained();
    found->second.drained.push_back(std::move(drained));
  }

 private:
  struct Session {
    uint64_t in_flight = 0;
    std::vector<std::function<void()>> drained;
  };
  std::map<SessionId, Session> sessions_;
};

}  // namespace ashlar::storage
