// SPDX-License-Identifier: Apache-2.0
// CallLending: calls during which the daemon reads the engine's memory. When they return, the daemon no longer reads
// it.
#pragma once

#include "absl/status/status.h"
#include "client/session/connection.h"
#include "client/session/deadline.h"
#include "client/session/rpc.h"

namespace ashlar::internal {

template <typename Request, typename Reply>
using LendingMethod = absl::Status (Rpc::*)(const Request&, Reply&, Deadline, bool* sent);

// RESOURCE_EXHAUSTED: the daemon was not asked, or has no space for the call. INVALID_ARGUMENT and UNAUTHENTICATED: the
// daemon refused. In all three cases the daemon reads nothing. gRPC itself never ends a call with the latter two, nor
// with ABORTED, by which the daemon reports a lack of space; it does with RESOURCE_EXHAUSTED if memory runs short.
// After any other failure the daemon's progress is unknown: then this returns at the deadline, which also binds the
// daemon, or once the daemon is dead.
template <typename Request, typename Reply>
absl::Status CallLending(Connection& connection, LendingMethod<Request, Reply> method, Request& request, Reply& reply,
                         Deadline deadline) {
  request.set_session(connection.session());
  request.set_deadline_ns(connection.channel().InDaemonsClock(deadline));
  bool sent = false;
  absl::Status status = (connection.rpc().*method)(request, reply, deadline, &sent);
  if (status.ok() || !sent || absl::IsInvalidArgument(status) || absl::IsUnauthenticated(status)) return status;
  if (absl::IsAborted(status)) return absl::ResourceExhaustedError(status.message());
  connection.daemon().WaitDead(deadline);
  if (absl::IsResourceExhausted(status)) return absl::UnavailableError("the call may have reached the daemon");
  return status;
}

}  // namespace ashlar::internal
