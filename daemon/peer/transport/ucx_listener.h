// SPDX-License-Identifier: Apache-2.0
// UcxListener: UCX's listening sockets: which hosts may connect, and the queue of their connection requests.
#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <set>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "daemon/peer/transport/silent_sockets.h"
#include "daemon/peer/transport/transport.h"

namespace ashlar::daemon {

// Used by one thread. The worker must outlive it.
class UcxListener {
 public:
  UcxListener() = default;
  ~UcxListener() { Close(); }
  UcxListener(const UcxListener&) = delete;
  UcxListener& operator=(const UcxListener&) = delete;

  // `before`: the process's listening sockets before the worker was created, which are not UCX's.
  absl::Status Open(ucp_worker_h worker, const TransportOptions& options, const std::set<int>& before);
  // Refuses further connections for good, so that Close is safe. `progress` progresses the worker; it returns false if
  // there was no work.
  void RefuseAll(absl::FunctionRef<bool()> progress);
  void Close();

  const HostPort& address() const { return address_; }
  bool pending() const { return !requests_.empty(); }
  // Removes the oldest connection request from the queue; null if there is none. The caller accepts or rejects it.
  ucp_conn_request_h Next();
  void Reject(ucp_conn_request_h request);
  // Closes silent connections (SilentSockets) about once per second, if it is called that often. Returns their number.
  size_t EndSilent();

 private:
  absl::Status Listen(ucp_worker_h worker, const HostPort& at);

  ucp_listener_h handle_ = nullptr;
  HostPort address_;
  std::set<int> sockets_;  // UCX's
  std::deque<ucp_conn_request_h> requests_;
  std::unique_ptr<SilentSockets> silent_;
  std::chrono::steady_clock::time_point silent_ended_;  // last call of SilentSockets::End
};

}  // namespace ashlar::daemon
