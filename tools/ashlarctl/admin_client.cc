// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/admin_client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.grpc.pb.h"
#include "proto/limits.h"
#include "tools/ashlarctl/listener.h"

namespace ashlar::ctl {

struct AdminClient::Rpc {
  using Stub = v1::Admin::Stub;
  static constexpr std::chrono::seconds kPatience{30};

  template <typename Request, typename Reply>
  absl::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
                    Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    const grpc::Status status = (stub.get()->*method)(&context, request, reply);
    return status.ok() ? absl::OkStatus() : Explained(status);
  }

  // The daemon's own refusals name a field; to all other errors this adds the socket's path and a reason.
  absl::Status Explained(const grpc::Status& status) const {
    const auto code = static_cast<absl::StatusCode>(status.error_code());
    const std::string& message = status.error_message();
    const bool reached = code != absl::StatusCode::kUnavailable && code != absl::StatusCode::kUnimplemented;
    if (reached && !message.empty() && code != absl::StatusCode::kDeadlineExceeded) return absl::Status(code, message);
    if (const absl::StatusOr<pid_t> listener = ListenerOf(socket); !listener.ok()) return listener.status();
    if (code == absl::StatusCode::kDeadlineExceeded) {
      return absl::Status(code, absl::StrCat(socket, ": the daemon has not answered within ", kPatience.count(), " s"));
    }
    if (code == absl::StatusCode::kUnimplemented) {
      return absl::Status(code, absl::StrCat(socket,
                                             ": the server does not implement this call; the socket is not a daemon's "
                                             "listen.admin_socket, or the daemon is older than this ashlarctl"));
    }
    return absl::Status(code, absl::StrCat("no daemon answers on ", socket, ": ", absl::StatusCodeToString(code),
                                           message.empty() ? "" : ": ", message));
  }

  std::string socket;
  std::unique_ptr<Stub> stub;
};

AdminClient::AdminClient(const std::string& socket) : rpc_(std::make_unique<Rpc>()) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(limits::kMaxReplyBytes));
  rpc_->socket = socket;
  rpc_->stub = v1::Admin::NewStub(
      grpc::CreateCustomChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials(), arguments));
}

AdminClient::~AdminClient() = default;

const std::string& AdminClient::socket() const {
  return rpc_->socket;
}

#define ASHLAR_CALL(name, request, reply)                                       \
  absl::Status AdminClient::name(const v1::request& asked, v1::reply* answer) { \
    return rpc_->Call(&Rpc::Stub::name, asked, answer);                         \
  }
ASHLAR_ADMIN_CALLS(ASHLAR_CALL)
#undef ASHLAR_CALL

}  // namespace ashlar::ctl
