// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/rpc_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_posix.h>

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.grpc.pb.h"
#include "daemon/rpc/cache_service.h"
#include "daemon/rpc/calls_under_way.h"
#include "daemon/rpc/grpc_threads.h"
#include "kernels/mutex.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

// Limits of one kind of connections. Memory is for messages in flight of all these connections: beyond it, gRPC resets
// calls and ends connections of this kind, whoever owns them.
struct Bounds {
  size_t memory;
  size_t request_bytes;
  int calls_of_a_connection;  // concurrent calls; further ones wait in the client's gRPC
};
constexpr Bounds kTenantLimits = {size_t{512} << 20, limits::kMaxRequestBytes, 1024};
constexpr Bounds kUnknownUserLimits = {size_t{16} << 20, 4096, 8};
static_assert(kTenantLimits.memory >= 8 * kTenantLimits.request_bytes,
              "a tenant's engines do not wait for one another");
// Time for the last replies. It is bounded, because the client of an unused connection does not read.
constexpr storage::Nanos kFinalReplyTimeout = 100'000'000;

std::unique_ptr<grpc::Server> MakeServer(grpc::Service& service, const Bounds& bounds,
                                         const grpc::ResourceQuota& quota) {
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(bounds.request_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(limits::kMaxReplyBytes));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, bounds.calls_of_a_connection);
  // The limit on messages applies to compressed bytes, and expansion may enlarge them a thousand times.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.SetResourceQuota(quota);
  builder.RegisterService(&service);
  return builder.BuildAndStart();
}

// State shared by the servers of one tenant's users.
struct TenantResources {
  TenantResources() { quota.Resize(kTenantLimits.memory); }
  TenantCalls calls;
  grpc::ResourceQuota quota{"rpc"};
};

// gRPC for the connections of one user, or of all unknown users. It does not listen: connections are passed to it.
struct UserServer {
  const Bounds* bounds = nullptr;
  const grpc::ResourceQuota* quota = nullptr;
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<grpc::Server> server;  // created when first needed
};

}  // namespace

struct RpcServer::Impl {
  // Services are created before any of gRPC's threads, which might not see a service that is passed to them later.
  Impl(const std::map<uid_t, storage::TenantId>& tenant_of_uid, EngineService& service, Metrics& metrics) {
    unknown_users_quota.Resize(kUnknownUserLimits.memory);
    // Unknown users get only the health service.
    unknown_users = {&kUnknownUserLimits, &unknown_users_quota, std::make_unique<v1::Cache::CallbackService>()};
    for (const auto& [user, tenant] : tenant_of_uid) {
      TenantResources& shared = tenants[tenant];
      user_servers[user] = {&kTenantLimits, &shared.quota,
                            MakeCacheService(service, metrics, calls, shared.calls, user)};
    }
  }

  void Admit(UniqueFd socket, uid_t user) {
    MutexLock lock(mutex);
    const auto found = user_servers.find(user);
    UserServer& user_server = found == user_servers.end() ? unknown_users : found->second;
    if (!Open(user_server)) return;
    grpc::AddInsecureChannelFromFd(user_server.server.get(), socket.Release());
  }

  // Returns false if gRPC cannot create a server.
  bool Open(UserServer& user_server) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (user_server.server != nullptr) return true;
    user_server.server = MakeServer(*user_server.service, *user_server.bounds, *user_server.quota);
    if (user_server.server == nullptr) return false;
    SetHealth(*user_server.server);
    if (stopping) user_server.server->GetHealthCheckService()->Shutdown();
    return true;
  }

  void SetHealth(const grpc::Server& server) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    grpc::HealthCheckServiceInterface& health = *server.GetHealthCheckService();
    health.SetServingStatus("", serving);
    health.SetServingStatus(v1::Cache::service_full_name(), serving);
    for (const auto& [service, well] : services) health.SetServingStatus(service, well && serving);
  }

  // Returns all existing servers. Only Stop ends them.
  std::vector<grpc::Server*> Servers() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::vector<grpc::Server*> servers;
    if (unknown_users.server != nullptr) servers.push_back(unknown_users.server.get());
    for (const auto& [user, user_server] : user_servers) {
      if (user_server.server != nullptr) servers.push_back(user_server.server.get());
    }
    return servers;
  }

  CallsUnderWay calls;
  std::map<storage::TenantId, TenantResources> tenants;  // a node-based map, because services refer to its elements
  grpc::ResourceQuota unknown_users_quota{"rpc"};

  Mutex mutex;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool serving ABSL_GUARDED_BY(mutex) = true;
  std::map<std::string, bool> services ABSL_GUARDED_BY(mutex);  // does not contain the daemon's own services
  UserServer unknown_users ABSL_GUARDED_BY(mutex);
  std::map<uid_t, UserServer> user_servers ABSL_GUARDED_BY(mutex);  // one per user of a tenant

  std::unique_ptr<RpcListener> listener;
};

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const std::string& path, RpcListener::Options options,
                                                            EngineService& service, Metrics& metrics,
                                                            RefusedConnections& refused) {
  grpc::EnableDefaultHealthCheckService(true);
  auto impl = std::make_unique<Impl>(options.tenant_of_uid, service, metrics);
  if (absl::Status reserved = ReserveGrpcThreads(); !reserved.ok()) return reserved;
  // The first server starts the threads that all of them share.
  {
    MutexLock lock(impl->mutex);
    if (!impl->Open(impl->unknown_users)) return absl::InternalError("listen.rpc_socket: gRPC cannot start a server");
  }
  options.refused = [&refused](uid_t uid, bool unknown_user) {
    refused.Add("rpc", unknown_user ? RefusedConnection::kUnknownUser : RefusedConnection::kTooMany,
                absl::StrCat("uid ", uid), "this user has too many connections");
  };
  auto listener = RpcListener::Start(path, std::move(options), [impl = impl.get()](UniqueFd socket, uid_t user) {
    impl->Admit(std::move(socket), user);
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
  MutexLock lock(impl_->mutex);
  impl_->serving = serving;
  for (const grpc::Server* server : impl_->Servers()) impl_->SetHealth(*server);
}

void RpcServer::SetServing(const std::string& service, bool serving) {
  MutexLock lock(impl_->mutex);
  const auto [known, fresh] = impl_->services.emplace(service, serving);
  if (!fresh && known->second == serving) return;
  known->second = serving;
  for (const grpc::Server* server : impl_->Servers()) impl_->SetHealth(*server);
}

void RpcServer::Stop(storage::Nanos grace) {
  if (impl_->listener == nullptr) return;
  {
    MutexLock lock(impl_->mutex);
    impl_->stopping = true;
    // Sets all services to not serving for good; health calls are answered while other calls finish.
    for (grpc::Server* server : impl_->Servers()) server->GetHealthCheckService()->Shutdown();
  }
  impl_->calls.Close(grace);
  impl_->listener = nullptr;
  std::vector<grpc::Server*> servers;  // no more are created
  {
    MutexLock lock(impl_->mutex);
    servers = impl_->Servers();
  }
  const auto goodbye = std::chrono::system_clock::now() + std::chrono::nanoseconds(kFinalReplyTimeout);
  for (grpc::Server* server : servers) server->Shutdown(goodbye);
  MutexLock lock(impl_->mutex);  // the loop may be updating their health
  impl_->user_servers.clear();
  impl_->unknown_users.server = nullptr;  // ended before the service that it calls
  impl_->unknown_users = {};
}

}  // namespace ashlar::daemon
