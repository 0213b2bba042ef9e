#include "daemon/rpc/rpc_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_posix.h>

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "ashlar/v1/cache.grpc.pb.h"
#include "daemon/rpc/cache_service.h"
#include "daemon/rpc/calls_under_way.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

// The bounds of the connections of one kind. Memory is for messages under way, of all these connections together:
// beyond it, gRPC resets calls and ends connections of this kind, whosever they are.
struct Bounds {
  size_t memory;
  size_t request_bytes;
  int calls_of_a_connection;  // answered at the same time; more wait in the client's gRPC
};
constexpr Bounds kOfATenant = {size_t{512} << 20, limits::kMaxRequestBytes, 1024};
constexpr Bounds kOfStrangers = {size_t{16} << 20, 4096, 8};
static_assert(kOfATenant.memory >= 8 * kOfATenant.request_bytes, "a tenant's engines do not wait for one another");
// For last answers to leave. A connection that nobody uses, and whose client therefore does not read, cannot be waited
// for.
constexpr storage::Nanos kGoodbye = 100'000'000;

std::unique_ptr<grpc::Server> MakeServer(grpc::Service& service, const Bounds& bounds) {
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(bounds.request_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(limits::kMaxReplyBytes));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, bounds.calls_of_a_connection);
  // A compressed message is bounded as it comes, and a thousand times as large when it has been expanded.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.SetResourceQuota(grpc::ResourceQuota("rpc").Resize(bounds.memory));
  builder.RegisterService(&service);
  return builder.BuildAndStart();
}

// gRPC for connections of one kind. It listens nowhere: connections are given to it.
struct Front {
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<grpc::Server> server;  // made when first needed
};

}  // namespace

struct RpcServer::Impl {
  // Services are made before any of gRPC's threads, which may not see how a later one was handed to them.
  Impl(const std::set<storage::TenantId>& tenants, EngineService& service, Metrics& metrics) {
    fronts[std::nullopt].service = std::make_unique<v1::Cache::CallbackService>();  // health is all that strangers get
    for (const storage::TenantId tenant : tenants) {
      fronts[tenant].service = MakeCacheService(service, metrics, calls);
    }
  }

  void Admit(UniqueFd socket, const storage::TenantId* tenant) {
    std::lock_guard lock(mutex);
    Front& front = fronts.at(tenant == nullptr ? std::nullopt : std::optional(*tenant));
    if (front.server == nullptr) {
      front.server = MakeServer(*front.service, tenant == nullptr ? kOfStrangers : kOfATenant);
      if (front.server == nullptr) return;
      SetHealth(front);
      if (stopping) front.server->GetHealthCheckService()->Shutdown();
    }
    grpc::AddInsecureChannelFromFd(front.server.get(), socket.Release());
  }

  // Under the mutex.
  void SetHealth(const Front& front) const {
    if (front.server == nullptr) return;
    grpc::HealthCheckServiceInterface& health = *front.server->GetHealthCheckService();
    health.SetServingStatus("", serving);
    health.SetServingStatus(v1::Cache::service_full_name(), serving);
    for (const auto& [service, well] : services) health.SetServingStatus(service, well && serving);
  }

  CallsUnderWay calls;

  std::mutex mutex;
  bool stopping = false;  // guarded by mutex, as below
  bool serving = true;
  std::map<std::string, bool> services;                      // besides the daemon's own
  std::map<std::optional<storage::TenantId>, Front> fronts;  // of every tenant; of none: the strangers'

  std::unique_ptr<RpcListener> listener;
};

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const std::string& path, RpcListener::Options options,
                                                            EngineService& service, Metrics& metrics) {
  grpc::EnableDefaultHealthCheckService(true);
  std::set<storage::TenantId> tenants;
  for (const auto& [uid, tenant] : options.tenant_of_uid) tenants.insert(tenant);
  auto impl = std::make_unique<Impl>(tenants, service, metrics);
  options.refused = [&metrics] { metrics.calls().ConnectionRefused(); };
  auto listener = RpcListener::Start(path, std::move(options),
                                     [impl = impl.get()](UniqueFd socket, const storage::TenantId* tenant) {
                                       impl->Admit(std::move(socket), tenant);
                                     });
  if (!listener.ok()) return listener.status();
  impl->listener = *std::move(listener);
  return std::unique_ptr<RpcServer>(new RpcServer(std::move(impl)));
}

RpcServer::RpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

RpcServer::~RpcServer() {
  Stop(0);
}

void RpcServer::SetServing(bool serving) {
  std::lock_guard lock(impl_->mutex);
  impl_->serving = serving;
  for (const auto& [kind, front] : impl_->fronts) impl_->SetHealth(front);
}

void RpcServer::SetServing(const std::string& service, bool serving) {
  std::lock_guard lock(impl_->mutex);
  const auto [known, fresh] = impl_->services.emplace(service, serving);
  if (!fresh && known->second == serving) return;
  known->second = serving;
  for (const auto& [kind, front] : impl_->fronts) impl_->SetHealth(front);
}

void RpcServer::Stop(storage::Nanos grace) {
  if (impl_->listener == nullptr) return;
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    // Of every service, for good; still answered while calls finish.
    for (const auto& [kind, front] : impl_->fronts) {
      if (front.server != nullptr) front.server->GetHealthCheckService()->Shutdown();
    }
  }
  impl_->calls.Close(grace);
  impl_->listener = nullptr;
  const auto goodbye = std::chrono::system_clock::now() + std::chrono::nanoseconds(kGoodbye);
  for (const auto& [kind, front] : impl_->fronts) {
    if (front.server != nullptr) front.server->Shutdown(goodbye);
  }
  std::lock_guard lock(impl_->mutex);  // the loop may be telling their health
  impl_->fronts.clear();
}

}  // namespace ashlar::daemon
