// SPDX-License-Identifier: Apache-2.0
// OpenSessions: the sessions of a cache, with the tenant of each and the memory tier that its engine works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "storage/ids.h"
#include "storage/objects/object_table.h"

namespace ashlar::storage {

// A session is an engine's or another node's, which finds things here also during a drain. For a node, objects that lie
// on a GPU alone are brought down to the common level, unless it is sent them from there.
enum class SessionOf : uint8_t { kEngine, kNode, kNodeReachingGpus };

class OpenSessions {
 public:
  // `common`: the level of sessions until another one is set, and of those that are not known.
  explicit OpenSessions(size_t common) : common_(common) {}

  void Open(SessionId session, TenantId tenant, SessionOf whose) {
    const size_t level = whose == SessionOf::kNodeReachingGpus ? ObjectTable::kWhereItLies : common_;
    open_.emplace(session, Opened{tenant, level, whose});
  }
  void SetLevel(SessionId session, size_t level) {
    if (const auto found = open_.find(session); found != open_.end()) found->second.level = level;
  }
  // Returns the tenant of the session, which is open no more; none of one that was not.
  std::optional<TenantId> Close(SessionId session) {
    const auto closed = open_.extract(session);
    return closed.empty() ? std::nullopt : std::optional(closed.mapped().tenant);
  }

  bool Has(SessionId session) const { return open_.contains(session); }
  const TenantId* Tenant(SessionId session) const {  // null: it is not open
    const auto found = open_.find(session);
    return found == open_.end() ? nullptr : &found->second.tenant;
  }
  size_t Level(SessionId session) const {
    const auto found = open_.find(session);
    return found == open_.end() ? common_ : found->second.level;
  }
  bool IsOfNode(SessionId session) const {
    const auto found = open_.find(session);
    return found != open_.end() && found->second.whose != SessionOf::kEngine;
  }

 private:
  struct Opened {
    TenantId tenant = 0;
    size_t level = 0;
    SessionOf whose = SessionOf::kEngine;
  };
  const size_t common_;
  std::map<SessionId, Opened> open_;
};

}  // namespace ashlar::storage
