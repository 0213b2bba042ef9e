// SPDX-License-Identifier: Apache-2.0
// OpenSessions: the open sessions of a cache, each with its tenant and the memory tier that its engine uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "storage/ids.h"
#include "storage/objects/object_finder.h"

namespace ashlar::storage {

// A session belongs to an engine or to another node. Lookups of nodes also work during a drain. For a node that cannot
// be sent GPU memory, objects that are only on a GPU are copied to the common level.
enum class SessionOf : uint8_t { kEngine, kNode, kNodeReachingGpus };

class OpenSessions {
 public:
  // `common` is the level of sessions without their own level, and of unknown ones.
  explicit OpenSessions(size_t common) : common_(common) {}

  void Open(SessionId session, TenantId tenant, SessionOf whose) {
    const size_t level = whose == SessionOf::kNodeReachingGpus ? ObjectFinder::kWhereItLies : common_;
    open_.emplace(session, Opened{tenant, level, whose});
  }
  void SetLevel(SessionId session, size_t level) {
    if (const auto found = open_.find(session); found != open_.end()) found->second.level = level;
  }
  // Closes the session and returns its tenant; nothing if it was not open.
  std::optional<TenantId> Close(SessionId session) {
    const auto closed = open_.extract(session);
    return closed.empty() ? std::nullopt : std::optional(closed.mapped().tenant);
  }

  bool Has(SessionId session) const { return open_.contains(session); }
  const TenantId* Tenant(SessionId session) const {  // null if it is not open
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
