// SPDX-License-Identifier: Apache-2.0
// SessionCalls: the part that all calls of ashlar.v1.Cache share: the session, the tenant's limit of calls per second,
// and the move to the metadata thread.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/session/session.h"
#include "daemon/session/session_table.h"
#include "proto/cache_calls.h"
#include "storage/transfer/rates.h"

namespace ashlar::daemon {

enum class CallClass { kRequest, kRelease };

// Thread-safe.
class SessionCalls {
 public:
  using Done = std::function<void(absl::Status)>;

  // Both must outlive this object.
  SessionCalls(EventLoop& loop, SessionTable& table) : loop_(loop), table_(table), rates_(loop.clock()) {}

  // See EngineService.
  absl::Status Authenticate(const std::string& secret, uid_t user, Callers callers) const;
  // UNAUTHENTICATED for an unknown or ended session.
  absl::StatusOr<std::shared_ptr<Session>> Resolve(const std::string& secret) const;

  // Runs `work` on the metadata thread if the session is still open there. Calls `done` with an error if it is not, if
  // the queue is full, or if the session ends between two slices of the work.
  void OnLoop(std::shared_ptr<Session> session, CallClass call_class, Done done, EventLoop::Work work);

  // The limit of calls per second and tenant. OnLoop refuses calls of class kRequest beyond it.
  storage::Rates& rates() { return rates_; }
  const storage::Rates& rates() const { return rates_; }

 private:
  EventLoop& loop_;
  SessionTable& table_;
  storage::Rates rates_;
};

}  // namespace ashlar::daemon
