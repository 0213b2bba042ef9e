#include "daemon/admin/admin_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "ashlar/v1/admin.grpc.pb.h"
#include "ashlar/v1/events.grpc.pb.h"
#include "daemon/rpc/rpc_listener.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kConnections = 16;  // of each of the two users
constexpr int kSubscribers = 8;
constexpr int kThreads = 8 + kSubscribers;
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
#define ASHLAR_CALL(name, request, reply)                                                         \
  grpc::Status name(grpc::ServerContext*, const v1::request* asked, v1::reply* answer) override { \
    return ToGrpc(service_.name(*asked, answer));                                                 \
  }
  ASHLAR_ADMIN_CALLS(ASHLAR_CALL)
#undef ASHLAR_CALL

  const AdminService& service_;
};

// Each subscriber has a thread: a few are left to the calls.
class EventCalls final : public v1::EventStream::Service {
 public:
  explicit EventCalls(const AdminService& service) : service_(service) {}
  void Stop() { stopping_ = true; }

 private:
  grpc::Status Subscribe(grpc::ServerContext* context, const v1::EventsRequest* request,
                         grpc::ServerWriter<v1::EventBatch>* writer) override {
    const bool room = subscribers_.fetch_add(1) < kSubscribers;
    const absl::Status status =
        room ? service_.Follow(
                   *request, [writer](const v1::EventBatch& batch) { return writer->Write(batch); },
                   [this, context] { return stopping_ || context->IsCancelled(); })
             : absl::ResourceExhaustedError("too many follow the events");
    --subscribers_;
    return ToGrpc(status);
  }

  const AdminService& service_;
  std::atomic<int> subscribers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace

struct AdminServer::Impl {
  explicit Impl(const AdminService& service) : calls(service), events(service) {}

  Calls calls;
  EventCalls events;
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
  builder.RegisterService(&impl->events);
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
  impl_->events.Stop();
  impl_->listener = nullptr;
  impl_->server->Shutdown(std::chrono::system_clock::now() + kGoodbye);
}

}  // namespace ashlar::daemon
