// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/control/peer_server.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/peer.grpc.pb.h"
#include "daemon/peer/control/peer_listener.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/happens_before.h"
#include "daemon/runtime/log.h"
#include "kernels/mutex.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

using Context = grpc::CallbackServerContext;
using Reactor = grpc::ServerUnaryReactor;

constexpr int kHandshakeMillis = 10'000;
constexpr size_t kMaxInFlightMessageBytes = size_t{256} << 20;  // for messages in flight of all peers

grpc::Status ToGrpc(const absl::Status& status) {
  // The codes are the same numbers by design.
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

std::string Property(const grpc::AuthContext& context, const char* name) {
  const std::vector<grpc::string_ref> values = context.FindPropertyValues(name);
  return values.empty() ? "" : std::string(values.front().data(), values.front().size());
}

// The reply to a greeting, which stays open until the connection ends. It owns itself until gRPC has finished with it.
class GreetStream final : public grpc::ServerWriteReactor<v1::PeerGreeting> {
 public:
  static std::shared_ptr<GreetStream> Make(std::function<void()> ended) {
    std::shared_ptr<GreetStream> stream(new GreetStream(std::move(ended)));
    stream->self_ = stream;
    return stream;
  }

  void Welcome(const PeerHello& self) {
    MutexLock lock(mutex_);
    if (ending_) return;
    Write(self, &greeting_);
    writing_ = true;
    StartWrite(&greeting_);
  }
  // Any thread, any number of times; the first one counts.
  void End(grpc::Status status) {
    MutexLock lock(mutex_);
    if (ending_) return;
    ending_ = true;
    status_ = std::move(status);
    if (!writing_) Finish(status_);
  }

  void OnWriteDone(bool) override {
    HappensAfter(this);
    MutexLock lock(mutex_);
    writing_ = false;
    if (ending_) Finish(status_);
  }
  void OnCancel() override {
    HappensAfter(this);
    ended_();
    End(grpc::Status::CANCELLED);
  }
  void OnDone() override {
    HappensAfter(this);
    ended_();
    { MutexLock lock(mutex_); }  // a thread in Finish may still hold it
    const std::shared_ptr<GreetStream> last = std::move(self_);
  }

 private:
  explicit GreetStream(std::function<void()> ended) : ended_(std::move(ended)) {}

  const std::function<void()> ended_;
  std::shared_ptr<GreetStream> self_;
  Mutex mutex_;
  v1::PeerGreeting greeting_;  // used by gRPC while writing_
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

struct Connection {
  PeerHello hello;
  std::string certificate, chain;  // in PEM; empty without TLS
  std::shared_ptr<GreetStream> stream;
};

}  // namespace

struct PeerServer::Impl final : v1::Peer::CallbackService {
  Impl(Options given, const Tls* its_tls, const PeerPolicy& its_policy, PeerCalls& its_calls, Refusals& its_refusals)
      : options(std::move(given)), tls(its_tls), policy(its_policy), calls(its_calls), refusals(its_refusals) {}

  grpc::ServerWriteReactor<v1::PeerGreeting>* Greet(Context* context, const v1::PeerGreeting* request) override;
  Reactor* Open(Context*, const v1::PeerOpenRequest*, v1::PeerOpenReply*) override;
  Reactor* Renew(Context*, const v1::PeerRenewRequest*, v1::PeerRenewReply*) override;
  Reactor* Close(Context*, const v1::PeerCloseRequest*, v1::PeerCloseReply*) override;
  Reactor* Offer(Context*, const v1::PeerOfferRequest*, v1::PeerOfferReply*) override;
  Reactor* Workers(Context*, const v1::PeerWorkersRequest*, v1::PeerWorkersReply*) override;
  Reactor* Prefill(Context*, const v1::PeerPrefillRequest*, v1::PeerPrefillReply*) override;
  Reactor* Probe(Context*, const v1::PeerProbeRequest*, v1::PeerProbeReply*) override;

  absl::Status CheckGreeting(const v1::PeerGreeting& request, const std::string& address, Connection* connection);
  void Enter(const std::string& address, std::shared_ptr<Connection> connection);
  void Leave(const std::string& address, const GreetStream* stream);
  std::shared_ptr<const Connection> Find(const Context& context);
  std::optional<storage::TenantId> FindTenant(const Connection& connection, const std::string& name);
  bool HasGreeted(const std::string& address) const;
  void ConnectionEnded(const std::string& address);
  void DropGreetings();
  void JudgeAgain();
  bool MakeServer();

  // Reads the request and determines the peer, then calls `handle(connection, read, reactor)`, which finishes the call.
  // Errors are replied here.
  template <typename Request, typename Handle>
  Reactor* Answer(Context* context, const Request& request, Handle handle) {
    Reactor* reactor = context->DefaultReactor();
    const std::shared_ptr<const Connection> connection = Find(*context);
    if (connection == nullptr) {
      if (!HasGreeted(context->peer())) {
        refusals.Add(Refusal::kBadGreeting, context->peer(), "call before the handshake");
      }
      reactor->Finish({grpc::StatusCode::FAILED_PRECONDITION, "the handshake must come before other calls"});
    } else if (auto read = Read(request); !read.ok()) {
      reactor->Finish(ToGrpc(read.status()));
    } else {
      handle(*connection, *std::move(read), reactor);
    }
    HappensBefore(this);
    return reactor;
  }
  template <typename Result, typename Reply>
  static PeerCalls::Done<Result> Finisher(Reactor* reactor, Reply* reply) {
    return [reactor, reply](absl::StatusOr<Result> result) {
      if (result.ok()) Write(*result, reply);
      reactor->Finish(ToGrpc(result.status()));
    };
  }

  const Options options;
  const MonotonicClock clock;
  const Tls* const tls;
  const PeerPolicy& policy;
  PeerCalls& calls;
  Refusals& refusals;

  mutable Mutex mutex;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  std::map<std::string, std::shared_ptr<Connection>> connections
      ABSL_GUARDED_BY(mutex);  // connections that have greeted, by address
  std::map<std::string, std::string> address_of_node ABSL_GUARDED_BY(mutex);  // address of its current connection
  std::set<std::string> spoke ABSL_GUARDED_BY(mutex);                         // addresses that made a call
  // Addresses with an accepted greeting, and the end time of their connection (0: open). Calls sent before the end may
  // be read after it and are not refusals.
  std::map<std::string, storage::Nanos> greeted ABSL_GUARDED_BY(mutex);
  uint64_t explained ABSL_GUARDED_BY(mutex) = 0;  // refused handshakes whose connections have ended

  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<PeerListener> listener;
};

absl::Status PeerServer::Impl::CheckGreeting(const v1::PeerGreeting& request, const std::string& address,
                                             Connection* connection) {
  const auto refuse = [&](Refusal refusal, absl::Status status) {
    refusals.Add(refusal, request.node().empty() ? address : request.node(), status.message());
    return status;
  };
  absl::StatusOr<PeerHello> hello = Read(request);
  if (absl::IsFailedPrecondition(hello.status())) return refuse(Refusal::kVersion, hello.status());
  if (!hello.ok()) return refuse(Refusal::kBadGreeting, hello.status());
  connection->hello = *std::move(hello);
  const std::string& node = connection->hello.node;
  if (tls != nullptr) {
    const CertificateVerdict verdict = tls->CheckClient(connection->certificate, connection->chain);
    if (verdict.refusal.has_value()) return refuse(*verdict.refusal, absl::UnauthenticatedError(verdict.why));
    if (verdict.node != node) {
      return refuse(Refusal::kWrongNode, absl::PermissionDeniedError(absl::StrCat(
                                             "node: ", node, " differs from the certificate's node ", verdict.node)));
    }
  } else if (!policy.Member(node)) {
    return refuse(Refusal::kNotAMember, absl::PermissionDeniedError("node: not in cluster.peers of this daemon"));
  }
  return absl::OkStatus();
}

grpc::ServerWriteReactor<v1::PeerGreeting>* PeerServer::Impl::Greet(Context* context, const v1::PeerGreeting* request) {
  HappensAfter(this);
  const std::string address = context->peer();
  auto connection = std::make_shared<Connection>();
  if (tls != nullptr) {
    const std::shared_ptr<const grpc::AuthContext> auth = context->auth_context();
    connection->certificate = Property(*auth, GRPC_X509_PEM_CERT_PROPERTY_NAME);
    connection->chain = Property(*auth, GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME);
  }
  auto self = std::make_shared<const GreetStream*>(nullptr);
  connection->stream = GreetStream::Make([this, address, self] { Leave(address, *self); });
  GreetStream* const stream = connection->stream.get();
  *self = stream;
  HappensBefore(stream);
  {
    MutexLock lock(mutex);
    spoke.insert(address);
  }
  if (absl::Status status = CheckGreeting(*request, address, connection.get()); !status.ok()) {
    stream->End(ToGrpc(status));
  } else {
    Enter(address, std::move(connection));
  }
  HappensBefore(this);
  return stream;
}

void PeerServer::Impl::Enter(const std::string& address, std::shared_ptr<Connection> connection) {
  std::vector<std::shared_ptr<Connection>> replaced;
  const std::shared_ptr<GreetStream> stream = connection->stream;
  {
    MutexLock lock(mutex);
    if (stopping) {
      replaced.push_back(std::move(connection));
    } else {
      const PeerHello& hello = connection->hello;
      // Replaces the node's former connection, and the previous one with this address: their ends may not be known yet.
      const auto known = address_of_node.find(hello.node);
      for (const std::string& of : {known == address_of_node.end() ? address : known->second, address}) {
        const auto found = connections.find(of);
        if (found == connections.end()) continue;
        const std::shared_ptr<Connection> former = std::move(found->second);
        connections.erase(found);
        address_of_node.erase(former->hello.node);
        const bool same = former->hello.node == hello.node && former->hello.incarnation == hello.incarnation;
        if (!same) calls.PeerGone(former->hello.node);
        replaced.push_back(former);
      }
      greeted[address] = 0;
      address_of_node[hello.node] = address;
      connections[address] = connection;
      calls.PeerHere(hello);
      stream->Welcome(options.self);
    }
  }
  for (const auto& former : replaced) {
    former->stream->End({grpc::StatusCode::UNAVAILABLE, "the connection has been replaced"});
  }
}

// Also called for streams that have not entered or have been replaced.
void PeerServer::Impl::Leave(const std::string& address, const GreetStream* stream) {
  HappensAfter(this);
  std::shared_ptr<Connection> gone;
  MutexLock lock(mutex);
  const auto found = connections.find(address);
  if (found == connections.end() || found->second->stream.get() != stream) return;
  gone = std::move(found->second);
  connections.erase(found);
  address_of_node.erase(gone->hello.node);
  calls.PeerGone(gone->hello.node);
}

std::shared_ptr<const Connection> PeerServer::Impl::Find(const Context& context) {
  HappensAfter(this);
  const std::string address = context.peer();
  std::shared_ptr<const Connection> found;
  {
    MutexLock lock(mutex);
    spoke.insert(address);
    const auto connection = connections.find(address);
    if (stopping || connection == connections.end()) return nullptr;
    found = connection->second;
  }
  // The address of a connection that has just ended may already belong to another peer.
  if (tls == nullptr || Property(*context.auth_context(), GRPC_X509_PEM_CERT_PROPERTY_NAME) == found->certificate) {
    return found;
  }
  return nullptr;
}

std::optional<storage::TenantId> PeerServer::Impl::FindTenant(const Connection& connection, const std::string& name) {
  const std::optional<storage::TenantId> tenant = policy.Tenant(connection.hello.node, name);
  if (!tenant.has_value()) {
    refusals.Add(Refusal::kTenant, connection.hello.node,
                 absl::StrCat("tenant \"", name.substr(0, 64), "\" is unknown here, or not shared with this peer"));
  }
  return tenant;
}

Reactor* PeerServer::Impl::Open(Context* context, const v1::PeerOpenRequest* request, v1::PeerOpenReply* reply) {
  return Answer(context, *request, [&](const Connection& peer, PeerOpen open, Reactor* reactor) {
    const auto tenant = FindTenant(peer, request->tenant());
    if (!tenant.has_value()) return reactor->Finish({grpc::StatusCode::NOT_FOUND, "tenant: not shared with this peer"});
    calls.Open(peer.hello, *tenant, std::move(open), Finisher<std::vector<PeerOpened>>(reactor, reply));
  });
}

Reactor* PeerServer::Impl::Renew(Context* context, const v1::PeerRenewRequest* request, v1::PeerRenewReply* reply) {
  return Answer(context, *request, [&](const Connection& peer, PeerRenew renew, Reactor* reactor) {
    calls.Renew(peer.hello, std::move(renew), Finisher<std::vector<uint32_t>>(reactor, reply));
  });
}

Reactor* PeerServer::Impl::Offer(Context* context, const v1::PeerOfferRequest* request, v1::PeerOfferReply* reply) {
  return Answer(context, *request, [&](const Connection& peer, PeerOffer offer, Reactor* reactor) {
    const auto tenant = FindTenant(peer, request->tenant());
    if (!tenant.has_value()) return reactor->Finish({grpc::StatusCode::NOT_FOUND, "tenant: not shared with this peer"});
    calls.Offer(peer.hello, *tenant, std::move(offer), Finisher<std::vector<TakeOutcome>>(reactor, reply));
  });
}

Reactor* PeerServer::Impl::Close(Context* context, const v1::PeerCloseRequest* request, v1::PeerCloseReply*) {
  return Answer(context, *request, [&](const Connection& peer, std::vector<PeerLease> leases, Reactor* reactor) {
    calls.Close(peer.hello, std::move(leases));
    reactor->Finish(grpc::Status::OK);
  });
}

Reactor* PeerServer::Impl::Workers(Context* context, const v1::PeerWorkersRequest* request,
                                   v1::PeerWorkersReply* reply) {
  return Answer(context, *request, [&](const Connection& peer, const NamespaceId& ns, Reactor* reactor) {
    const auto tenant = FindTenant(peer, request->tenant());
    if (!tenant.has_value()) return reactor->Finish({grpc::StatusCode::NOT_FOUND, "tenant: not shared with this peer"});
    calls.Workers(peer.hello, *tenant, ns, Finisher<std::vector<PeerWorker>>(reactor, reply));
  });
}

Reactor* PeerServer::Impl::Prefill(Context* context, const v1::PeerPrefillRequest* request,
                                   v1::PeerPrefillReply* reply) {
  return Answer(context, *request, [&](const Connection& peer, PeerPrefill prefill, Reactor* reactor) {
    const auto tenant = FindTenant(peer, request->tenant());
    if (!tenant.has_value()) return reactor->Finish({grpc::StatusCode::NOT_FOUND, "tenant: not shared with this peer"});
    calls.Prefill(peer.hello, *tenant, std::move(prefill), Finisher<PeerOpened>(reactor, reply));
  });
}

Reactor* PeerServer::Impl::Probe(Context* context, const v1::PeerProbeRequest* request, v1::PeerProbeReply* reply) {
  return Answer(context, *request, [&](const Connection& peer, PeerProbe probe, Reactor* reactor) {
    const auto tenant = FindTenant(peer, request->tenant());
    if (!tenant.has_value()) return reactor->Finish({grpc::StatusCode::NOT_FOUND, "tenant: not shared with this peer"});
    calls.Probe(peer.hello, *tenant, std::move(probe), Finisher<v1::NodeProbe>(reactor, reply));
  });
}

// A connection without a call was refused because of its certificate, which is already counted, or does not belong to a
// peer.
void PeerServer::Impl::ConnectionEnded(const std::string& address) {
  const uint64_t by_certificate = tls == nullptr ? 0 : tls->clients_refused();
  {
    MutexLock lock(mutex);
    if (const auto found = greeted.find(address); found != greeted.end()) found->second = clock.Now();
    if (spoke.erase(address) > 0) return;
    if (stopping) return;
    if (by_certificate > explained) {
      ++explained;
      return;
    }
  }
  refusals.Add(Refusal::kHandshake, address, "the connection ended before the handshake");
}

bool PeerServer::Impl::HasGreeted(const std::string& address) const {
  MutexLock lock(mutex);
  return greeted.contains(address);
}

// Drops entries of connections that ended a while ago.
void PeerServer::Impl::DropGreetings() {
  const storage::Nanos before = clock.Now() - options.check_every;
  MutexLock lock(mutex);
  std::erase_if(greeted, [&](const auto& one) { return one.second > 0 && one.second < before; });
}

void PeerServer::Impl::JudgeAgain() {
  if (tls == nullptr) return;
  std::vector<std::shared_ptr<Connection>> present;
  {
    MutexLock lock(mutex);
    for (const auto& [address, connection] : connections) present.push_back(connection);
  }
  for (const std::shared_ptr<Connection>& connection : present) {
    const CertificateVerdict verdict = tls->CheckClient(connection->certificate, connection->chain);
    if (!verdict.refusal.has_value()) continue;
    refusals.Add(*verdict.refusal, connection->hello.node, absl::StrCat("no longer accepted: ", verdict.why));
    connection->stream->End({grpc::StatusCode::UNAUTHENTICATED, verdict.why});
  }
}

bool PeerServer::Impl::MakeServer() {
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(limits::kMaxPeerRequestBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(limits::kMaxPeerReplyBytes));
  const int half = static_cast<int>(options.timeout / 2'000'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, half);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, half);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMillis);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kCallsOfAPeer + 1);  // one is its greeting
  // The limit on messages applies to compressed bytes, and expansion may enlarge them a thousand times.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.SetResourceQuota(grpc::ResourceQuota("peers").Resize(kMaxInFlightMessageBytes));
  acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      tls != nullptr ? tls->OfServer() : grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  HappensBefore(this);
  server = builder.BuildAndStart();
  return server != nullptr;
}

absl::StatusOr<std::unique_ptr<PeerServer>> PeerServer::Start(Options options, const Tls* tls, const PeerPolicy& policy,
                                                              PeerCalls& calls, Refusals& refusals) {
  auto impl = std::make_unique<Impl>(std::move(options), tls, policy, calls, refusals);
  if (!impl->MakeServer()) return absl::InternalError("cluster.listen_address: gRPC cannot start a server");
  if (tls == nullptr) {
    Log(LogLevel::kWarning, "cluster.tls.insecure is set: any host that reaches the port is accepted as a peer",
        {{"host", impl->options.listen.host}, {"port", impl->options.listen.port}});
  }
  PeerListener::Events events;
  events.admit = [impl = impl.get()](UniqueFd socket, const std::string&) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.fd = socket.Release();
    impl->acceptor->HandleNewConnection(&connection);
  };
  events.refused = [&refusals](const std::string& address) {
    refusals.Add(Refusal::kTooMany, address, "too many connections from this address");
  };
  events.ended = [impl = impl.get()](const std::string& address) { impl->ConnectionEnded(address); };
  events.tick = [impl = impl.get()] {
    impl->DropGreetings();
    impl->JudgeAgain();
  };
  auto listener = PeerListener::Start(impl->options.listen, impl->options.check_every, std::move(events));
  if (!listener.ok()) return listener.status();
  impl->listener = *std::move(listener);
  return std::unique_ptr<PeerServer>(new PeerServer(std::move(impl)));
}

PeerServer::PeerServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

PeerServer::~PeerServer() {
  std::vector<std::shared_ptr<Connection>> present;
  {
    MutexLock lock(impl_->mutex);
    impl_->stopping = true;
    for (const auto& [address, connection] : impl_->connections) present.push_back(connection);
  }
  for (const auto& connection : present)
    connection->stream->End({grpc::StatusCode::UNAVAILABLE, "the daemon is stopping"});
  present.clear();
  impl_->listener = nullptr;
  impl_->server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  HappensAfter(impl_.get());  // every call has ended
}

uint16_t PeerServer::port() const {
  return impl_->listener->port();
}

size_t PeerServer::peers() const {
  MutexLock lock(impl_->mutex);
  return impl_->connections.size();
}

}  // namespace ashlar::daemon
