// SPDX-License-Identifier: Apache-2.0
#include "daemon/admin/admin_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.grpc.pb.h"
#include "ashlar/v1/events.grpc.pb.h"
#include "daemon/rpc/rpc_listener.h"
#include "kernels/mutex.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kConnections = 16;  // connections of each of the two users
constexpr int kSubscribers = 8;
constexpr int kThreads = 8 + kSubscribers;
constexpr size_t kMemory = size_t{256} << 20;  // for messages in flight
constexpr std::chrono::seconds kFinalReplyTimeout{2};

grpc::Status ToGrpc(const absl::Status& status) {
  // The codes are the same numbers by design.
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

// The peers of connections. gRPC names a connection by the descriptor that it was given.
class Operators {
 public:
  void Add(int descriptor, const Operator& who) {
    MutexLock lock(mutex_);
    of_descriptor_[absl::StrCat("fd:", descriptor)] = who;  // replaces an ended connection with the same number
  }
  Operator Find(const std::string& peer) const {
    MutexLock lock(mutex_);
    const auto found = of_descriptor_.find(peer);
    // Only these two users are admitted.
    return found == of_descriptor_.end() ? Operator{.uid = geteuid()} : found->second;
  }

 private:
  mutable Mutex mutex_;
  std::map<std::string, Operator> of_descriptor_ ABSL_GUARDED_BY(mutex_);  // at most one per descriptor
};

// Returns whether the call changes something or starts a change.
bool ChangesSomething(absl::string_view call) {
  static constexpr absl::string_view kCalls[] = {"Pin",     "Unpin", "Evict",  "Warm",  "Drain",
                                                 "Undrain", "Erase", "Verify", "Reload"};
  return std::ranges::count(kCalls, call) > 0;
}

std::string WhatCame(const google::protobuf::Message& answer) {
  return Describe(answer);
}

// Names the changed fields without values, which may be confidential.
std::string WhatCame(const v1::ReloadReply& answer) {
  std::vector<ConfigChange> changes;
  for (const v1::ConfigChange& change : answer.changes()) changes.push_back({change.field(), "", ""});
  return changes.empty() ? "" : absl::StrCat(Describe(answer), " fields=", FieldsOf(changes));
}

class Calls final : public v1::Admin::Service {
 public:
  Calls(const AdminService& service, const Operators& operators, AuditLog& audit)
      : service_(service), operators_(operators), audit_(audit) {}

 private:
  template <typename Request, typename Reply>
  grpc::Status Run(const char* name, absl::Status (AdminService::*call)(const Request&, Reply*) const,
                   const grpc::ServerContext& context, const Request& asked, Reply* answer) {
    if (!ChangesSomething(name)) return ToGrpc((service_.*call)(asked, answer));
    const Operator by = operators_.Find(context.peer());
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status = (service_.*call)(asked, answer);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    const std::string came = WhatCame(*answer);
    const std::string done = came.empty() ? "ok" : absl::StrCat("ok ", came);
    audit_.Write({.by = by,
                  .action = name,
                  .request = Describe(asked),
                  .outcome = status.ok() ? done : status.ToString(),
                  .seconds = took.count()});
    return ToGrpc(status);
  }

  grpc::Status Explain(grpc::ServerContext* context, const v1::Texts* asked, v1::ExplainReply* answer) override {
    return Run("Explain", &AdminService::Explain, *context, *asked, answer);
  }
  grpc::Status LastMisses(grpc::ServerContext* context, const v1::LastMissesRequest* asked,
                          v1::LastMissesReply* answer) override {
    return Run("LastMisses", &AdminService::LastMisses, *context, *asked, answer);
  }
  grpc::Status Models(grpc::ServerContext* context, const v1::ModelsRequest* asked, v1::ModelsReply* answer) override {
    return Run("Models", &AdminService::Models, *context, *asked, answer);
  }
  grpc::Status Stats(grpc::ServerContext* context, const v1::StatsRequest* asked, v1::StatsReply* answer) override {
    return Run("Stats", &AdminService::Stats, *context, *asked, answer);
  }
  grpc::Status Sessions(grpc::ServerContext* context, const v1::SessionsRequest* asked,
                        v1::SessionsReply* answer) override {
    return Run("Sessions", &AdminService::Sessions, *context, *asked, answer);
  }
  grpc::Status Peers(grpc::ServerContext* context, const v1::PeersRequest* asked, v1::PeersReply* answer) override {
    return Run("Peers", &AdminService::Peers, *context, *asked, answer);
  }
  grpc::Status GetConfig(grpc::ServerContext* context, const v1::GetConfigRequest* asked,
                         v1::GetConfigReply* answer) override {
    return Run("GetConfig", &AdminService::GetConfig, *context, *asked, answer);
  }
  grpc::Status Pin(grpc::ServerContext* context, const v1::PinRequest* asked, v1::ObjectsReply* answer) override {
    return Run("Pin", &AdminService::Pin, *context, *asked, answer);
  }
  grpc::Status Unpin(grpc::ServerContext* context, const v1::Texts* asked, v1::ObjectsReply* answer) override {
    return Run("Unpin", &AdminService::Unpin, *context, *asked, answer);
  }
  grpc::Status Evict(grpc::ServerContext* context, const v1::Texts* asked, v1::ObjectsReply* answer) override {
    return Run("Evict", &AdminService::Evict, *context, *asked, answer);
  }
  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* asked, v1::DrainReply* answer) override {
    return Run("Drain", &AdminService::Drain, *context, *asked, answer);
  }
  grpc::Status Undrain(grpc::ServerContext* context, const v1::UndrainRequest* asked, v1::DrainReply* answer) override {
    return Run("Undrain", &AdminService::Undrain, *context, *asked, answer);
  }
  grpc::Status GetDrain(grpc::ServerContext* context, const v1::GetDrainRequest* asked,
                        v1::DrainReply* answer) override {
    return Run("GetDrain", &AdminService::GetDrain, *context, *asked, answer);
  }
  grpc::Status Warm(grpc::ServerContext* context, const v1::Texts* asked, v1::WarmReply* answer) override {
    return Run("Warm", &AdminService::Warm, *context, *asked, answer);
  }
  grpc::Status List(grpc::ServerContext* context, const v1::ListRequest* asked, v1::ListReply* answer) override {
    return Run("List", &AdminService::List, *context, *asked, answer);
  }
  grpc::Status Erase(grpc::ServerContext* context, const v1::EraseRequest* asked, v1::EraseReply* answer) override {
    return Run("Erase", &AdminService::Erase, *context, *asked, answer);
  }
  grpc::Status Verify(grpc::ServerContext* context, const v1::VerifyRequest* asked, v1::VerifyReply* answer) override {
    return Run("Verify", &AdminService::Verify, *context, *asked, answer);
  }
  grpc::Status GetVerify(grpc::ServerContext* context, const v1::GetVerifyRequest* asked,
                         v1::VerifyReply* answer) override {
    return Run("GetVerify", &AdminService::GetVerify, *context, *asked, answer);
  }
  grpc::Status Reload(grpc::ServerContext* context, const v1::ReloadRequest* asked, v1::ReloadReply* answer) override {
    return Run("Reload", &AdminService::Reload, *context, *asked, answer);
  }
  grpc::Status Probe(grpc::ServerContext* context, const v1::AdminProbeRequest* asked,
                     v1::ProbeReply* answer) override {
    return Run("Probe", &AdminService::Probe, *context, *asked, answer);
  }

  const AdminService& service_;
  const Operators& operators_;
  AuditLog& audit_;
};

// Each subscriber occupies a thread; some threads are reserved for calls.
class EventCalls final : public v1::EventStream::Service {
 public:
  explicit EventCalls(const AdminService& service) : service_(service) {}
  void Stop() { stopping_ = true; }

 private:
  grpc::Status Subscribe(grpc::ServerContext* context, const v1::EventsRequest* request,
                         grpc::ServerWriter<v1::EventBatch>* writer) override {
    const bool admitted = subscribers_.fetch_add(1) < kSubscribers;
    const absl::Status status =
        admitted ? service_.Follow(
                       *request, [writer](const v1::EventBatch& batch) { return writer->Write(batch); },
                       [this, context] { return stopping_ || context->IsCancelled(); })
                 : absl::ResourceExhaustedError("events: too many subscribers; try again later");
    --subscribers_;
    return ToGrpc(status);
  }

  const AdminService& service_;
  std::atomic<int> subscribers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace

struct AdminServer::Impl {
  Impl(const AdminService& service, AuditLog& audit) : calls(service, operators, audit), events(service) {}

  Operators operators;
  Calls calls;
  EventCalls events;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<RpcListener> listener;
};

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const std::string& path, const AdminService& service,
                                                                AuditLog& audit, RefusedConnections& refused) {
  auto impl = std::make_unique<Impl>(service, audit);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(limits::kMaxRequestBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(limits::kMaxReplyBytes));
  builder.SetResourceQuota(grpc::ResourceQuota("admin").Resize(kMemory).SetMaxThreads(kThreads));
  builder.RegisterService(&impl->calls);
  builder.RegisterService(&impl->events);
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr) return absl::UnavailableError("listen.admin_socket: gRPC cannot start a server");
  // The socket's mode keeps other users out; the check of the peer also excludes them if they got a connection another
  // way.
  RpcListener::Options options{.of_a_user = kConnections, .mode = kAdminSocketMode};
  options.tenant_of_uid = {{0, 0}, {geteuid(), 0}};
  options.refused = [&refused](uid_t uid, bool) {
    refused.Add("admin", RefusedConnection::kTooMany, absl::StrCat("uid ", uid), "this user has too many connections");
  };
  const auto admit = [impl = impl.get(), &refused](UniqueFd socket, uid_t user) {
    const std::optional<ucred> peer = PeerOf(socket.get());
    if (user != 0 && user != geteuid()) {
      refused.Add("admin", RefusedConnection::kUnknownUser, absl::StrCat("uid ", user),
                  "expected root or the daemon's user");
      shutdown(socket.get(), SHUT_RDWR);
    } else {
      if (peer) impl->operators.Add(socket.get(), OperatorOf(peer->uid, peer->pid));
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
  impl_->server->Shutdown(std::chrono::system_clock::now() + kFinalReplyTimeout);
}

}  // namespace ashlar::daemon
