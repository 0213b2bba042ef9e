// SPDX-License-Identifier: Apache-2.0
// PrefillCalls: the calls of ashlar.v1.Cache for parallel prefill.
#pragma once

#include <memory>

#include "daemon/engine/session_calls.h"
#include "daemon/router/router.h"
#include "daemon/session/session.h"
#include "proto/cache_calls.h"

namespace ashlar::daemon {

// Its calls are like EngineService's.
class PrefillCalls {
 public:
  using Done = SessionCalls::Done;

  // Both must outlive this object.
  PrefillCalls(SessionCalls& sessions, Router& router) : sessions_(sessions), router_(router) {}

  void PlanPrefill(const v1::PlanPrefillRequest& request, v1::PlanPrefillReply* reply, Done done);
  void AwaitPrefill(const v1::AwaitPrefillRequest& request, v1::AwaitPrefillReply* reply, Done done);
  void EndPrefill(const v1::EndPrefillRequest& request, v1::EndPrefillReply* reply, Done done);
  void ServePrefill(const v1::ServePrefillRequest& request, v1::ServePrefillReply* reply, Done done);

  // Ends the session's prefill plans and the prefill that it offers when the session ends. The metadata thread only.
  void EndRoutesWith(const std::shared_ptr<Session>& session);

 private:
  SessionCalls& sessions_;
  Router& router_;
};

}  // namespace ashlar::daemon
