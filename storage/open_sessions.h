// OpenSessions: the sessions of a cache, with the tenant of each and the memory tier that its engine works in.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

#include "storage/ids.h"

namespace ashlar::storage {

class OpenSessions {
 public:
  // `common`: the level of sessions until another one is set, and of those that are not known.
  explicit OpenSessions(size_t common) : common_(common) {}

  void Open(SessionId session, TenantId tenant, bool serves) {
    open_.emplace(session, Opened{tenant, common_, serves});
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
  bool Serves(SessionId session) const {  // another node
    const auto found = open_.find(session);
    return found != open_.end() && found->second.serves;
  }

 private:
  struct Opened {
    TenantId tenant = 0;
    size_t level = 0;
    bool serves = false;
  };
  const size_t common_;
  std::map<SessionId, Opened> open_;
};

}  // namespace ashlar::storage
