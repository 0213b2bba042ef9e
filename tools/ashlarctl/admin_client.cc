#include "tools/ashlarctl/admin_client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.grpc.pb.h"
#include "proto/limits.h"

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
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
      return absl::UnavailableError(absl::StrCat("no daemon answers on ", socket, ": ", status.error_message()));
    }
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
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

absl::Status AdminClient::Explain(const v1::Texts& request, v1::ExplainReply* reply) {
  return rpc_->Call(&Rpc::Stub::Explain, request, reply);
}
absl::Status AdminClient::LastMisses(const v1::LastMissesRequest& request, v1::LastMissesReply* reply) {
  return rpc_->Call(&Rpc::Stub::LastMisses, request, reply);
}
absl::Status AdminClient::Models(const v1::ModelsRequest& request, v1::ModelsReply* reply) {
  return rpc_->Call(&Rpc::Stub::Models, request, reply);
}
absl::Status AdminClient::Stats(const v1::StatsRequest& request, v1::StatsReply* reply) {
  return rpc_->Call(&Rpc::Stub::Stats, request, reply);
}
absl::Status AdminClient::Sessions(const v1::SessionsRequest& request, v1::SessionsReply* reply) {
  return rpc_->Call(&Rpc::Stub::Sessions, request, reply);
}
absl::Status AdminClient::GetConfig(const v1::GetConfigRequest& request, v1::GetConfigReply* reply) {
  return rpc_->Call(&Rpc::Stub::GetConfig, request, reply);
}
absl::Status AdminClient::Drain(const v1::DrainRequest& request, v1::DrainReply* reply) {
  return rpc_->Call(&Rpc::Stub::Drain, request, reply);
}
absl::Status AdminClient::Undrain(const v1::UndrainRequest& request, v1::DrainReply* reply) {
  return rpc_->Call(&Rpc::Stub::Undrain, request, reply);
}
absl::Status AdminClient::GetDrain(const v1::GetDrainRequest& request, v1::DrainReply* reply) {
  return rpc_->Call(&Rpc::Stub::GetDrain, request, reply);
}
absl::Status AdminClient::Pin(const v1::PinRequest& request, v1::ObjectsReply* reply) {
  return rpc_->Call(&Rpc::Stub::Pin, request, reply);
}
absl::Status AdminClient::Unpin(const v1::Texts& request, v1::ObjectsReply* reply) {
  return rpc_->Call(&Rpc::Stub::Unpin, request, reply);
}
absl::Status AdminClient::Evict(const v1::Texts& request, v1::ObjectsReply* reply) {
  return rpc_->Call(&Rpc::Stub::Evict, request, reply);
}

}  // namespace ashlar::ctl
