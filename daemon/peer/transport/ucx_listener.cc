// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/ucx_listener.h"

#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/peer/transport/address_filter.h"
#include "daemon/peer/transport/socket_address.h"
#include "daemon/peer/transport/ucx_api.h"
#include "daemon/runtime/port_wait.h"

namespace ashlar::daemon {

absl::Status UcxListener::Open(ucp_worker_h worker, const TransportOptions& options, const std::set<int>& before) {
  if (absl::Status s = Listen(worker, options.listen); !s.ok()) return s;
  sockets_ = ListeningSockets();
  for (const int fd : before) sockets_.erase(fd);
  silent_ = std::make_unique<SilentSockets>(sockets_);
  return options.allow.empty() ? absl::OkStatus() : AdmitOnly(sockets_, options.allow);
}

absl::Status UcxListener::Listen(ucp_worker_h worker, const HostPort& at) {
  auto address = ToSocketAddress(at);
  if (!address.ok()) return address.status();
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = {reinterpret_cast<const sockaddr*>(&address->bytes), address->size};
  params.conn_handler.cb = [](ucp_conn_request_h request, void* self) {
    static_cast<UcxListener*>(self)->requests_.push_back(request);
  };
  params.conn_handler.arg = this;
  const std::string what = absl::StrCat("cannot listen on port ", at.port, " of ", at.host);
  ucs_status_t listened = UCS_OK;
  WaitForPort(absl::StrCat(at.host, ":", at.port), kPortPatience, [&] {
    listened = ucp_listener_create(worker, &params, &handle_);
    return listened == UCS_ERR_BUSY;  // EADDRINUSE
  });
  if (absl::Status s = ToStatus(listened, what); !s.ok()) return s;
  ucp_listener_attr_t attributes{.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
  if (absl::Status s = ToStatus(ucp_listener_query(handle_, &attributes), what); !s.ok()) return s;
  address_ = {at.host, PortOf(attributes.sockaddr)};
  return absl::OkStatus();
}

// UCX's own thread accepts connections; UCX 1.13 does so even after their listener was destroyed. So the kernel first
// drops packets for the listening sockets, and connections made in between are accepted and refused.
void UcxListener::RefuseAll(absl::FunctionRef<bool()> progress) {
  if (handle_ == nullptr) return;
  constexpr auto kInBetween = std::chrono::milliseconds(50);
  AdmitOnly(sockets_, {"0.0.0.0"}).IgnoreError();
  const auto end = std::chrono::steady_clock::now() + kInBetween;
  while (std::chrono::steady_clock::now() < end) {
    if (!progress()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    while (ucp_conn_request_h request = Next()) Reject(request);
  }
}

void UcxListener::Close() {
  if (handle_ != nullptr) ucp_listener_destroy(std::exchange(handle_, nullptr));
}

ucp_conn_request_h UcxListener::Next() {
  if (requests_.empty()) return nullptr;
  ucp_conn_request_h request = requests_.front();
  requests_.pop_front();
  return request;
}

void UcxListener::Reject(ucp_conn_request_h request) {
  ucp_listener_reject(handle_, request);
}

size_t UcxListener::EndSilent() {
  const auto now = std::chrono::steady_clock::now();
  if (now - silent_ended_ < std::chrono::seconds(1)) return 0;
  silent_ended_ = now;
  return silent_->End();
}

}  // namespace ashlar::daemon
