// SPDX-License-Identifier: Apache-2.0
// CallLending: calls during which the daemon reads the engine's memory, which is the engine's own again when they
// return.
#pragma once

#include "absl/status/status.h"
#include "client/session/connection.h"
#include "client/session/deadline.h"
#include "client/session/rpc.h"

namespace ashlar::internal {

template <typename Request, typename Reply>
using LendingMethod = absl::Status (Rpc::*)(const Request&, Reply&, Deadline, bool* sent);

// RESOURCE_EXHAUSTED: the daemon was not asked, or has no room for the call. INVALID_ARGUMENT and UNAUTHENTICATED: it
// refused. In all three it reads nothing. gRPC never ends a call with these two by itself, nor with ABORTED, by which
// the daemon says that it has no room; with RESOURCE_EXHAUSTED it does, when memory runs short. Any other failure
// leaves open how far it came: then this returns at the deadline, which the daemon heeds too, or once it is dead.
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
