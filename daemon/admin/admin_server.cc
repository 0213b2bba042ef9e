#include "daemon/admin/admin_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "ashlar/v1/admin.grpc.pb.h"
#include "daemon/rpc/rpc_listener.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kConnections = 16;  // of each of the two users
constexpr int kThreads = 8;
constexpr size_t kMemory = size_t{256} << 20;  // of messages under way
constexpr std::chrono::seconds kGoodbye{2};

grpc::Status ToGrpc(const absl::Status& status) {
  // The codes are the same numbers by design.
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

class Calls final : public v1::Admin::Service {
 public:
  explicit Calls(const AdminService& service) : service_(service) {}

 private:
  using Context = grpc::ServerContext;
  grpc::Status Explain(Context*, const v1::Texts* request, v1::ExplainReply* reply) override {
    return ToGrpc(service_.Explain(*request, reply));
  }
  grpc::Status LastMisses(Context*, const v1::LastMissesRequest* request, v1::LastMissesReply* reply) override {
    return ToGrpc(service_.LastMisses(*request, reply));
  }
  grpc::Status Models(Context*, const v1::ModelsRequest* request, v1::ModelsReply* reply) override {
    return ToGrpc(service_.Models(*request, reply));
  }
  grpc::Status Stats(Context*, const v1::StatsRequest*, v1::StatsReply* reply) override {
    return ToGrpc(service_.Stats(reply));
  }
  grpc::Status Sessions(Context*, const v1::SessionsRequest*, v1::SessionsReply* reply) override {
    return ToGrpc(service_.Sessions(reply));
  }
  grpc::Status GetConfig(Context*, const v1::GetConfigRequest*, v1::GetConfigReply* reply) override {
    return ToGrpc(service_.GetConfig(reply));
  }
  grpc::Status Drain(Context*, const v1::DrainRequest*, v1::DrainReply* reply) override {
    return ToGrpc(service_.Drain(reply));
  }
  grpc::Status Undrain(Context*, const v1::UndrainRequest*, v1::DrainReply* reply) override {
    return ToGrpc(service_.Undrain(reply));
  }
  grpc::Status GetDrain(Context*, const v1::GetDrainRequest*, v1::DrainReply* reply) override {
    return ToGrpc(service_.GetDrain(reply));
  }
  grpc::Status Pin(Context*, const v1::PinRequest* request, v1::ObjectsReply* reply) override {
    return ToGrpc(service_.Pin(*request, reply));
  }
  grpc::Status Unpin(Context*, const v1::Texts* texts, v1::ObjectsReply* reply) override {
    return ToGrpc(service_.Unpin(*texts, reply));
  }
  grpc::Status Evict(Context*, const v1::Texts* texts, v1::ObjectsReply* reply) override {
    return ToGrpc(service_.Evict(*texts, reply));
  }

  const AdminService& service_;
};

}  // namespace

struct AdminServer::Impl {
  explicit Impl(const AdminService& service) : calls(service) {}

  Calls calls;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<RpcListener> listener;
};

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const std::string& path, const AdminService& service) {
  auto impl = std::make_unique<Impl>(service);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(limits::kMaxRequestBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(limits::kMaxReplyBytes));
  builder.SetResourceQuota(grpc::ResourceQuota("admin").Resize(kMemory).SetMaxThreads(kThreads));
  builder.RegisterService(&impl->calls);
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr) return absl::UnavailableError("cannot start gRPC for the admin socket");
  // The socket's mode keeps others out; asking who is there keeps them out however the socket came to them.
  RpcListener::Options options{.of_a_user = kConnections, .mode = kAdminSocketMode};
  options.tenant_of_uid = {{0, 0}, {geteuid(), 0}};
  const auto admit = [impl = impl.get()](UniqueFd socket, const storage::TenantId* known) {
    if (known == nullptr) {
      shutdown(socket.get(), SHUT_RDWR);
    } else {
      grpc::AddInsecureChannelFromFd(impl->server.get(), socket.Release());
    }
  };
  auto listener = RpcListener::Start(path, std::move(options), admit);
  if (!listener.ok()) return listener.status();
  impl->listener = *std::move(listener);
  return std::unique_ptr<AdminServer>(new AdminServer(std::move(impl)));
}

AdminServer::AdminServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

AdminServer::~AdminServer() {
  impl_->listener = nullptr;
  impl_->server->Shutdown(std::chrono::system_clock::now() + kGoodbye);
}

}  // namespace ashlar::daemon
