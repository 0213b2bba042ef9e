#include "daemon/rpc_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.grpc.pb.h"
#include "daemon/unix_socket.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

// Calls of one connection that are answered at the same time; more wait in its client's gRPC.
// For messages under way, of all connections together: what is larger than this waits in the sockets.
constexpr size_t kMemoryForCalls = size_t{1} << 30;
constexpr int kMaxConcurrentCalls = 1024;
// For last answers to leave. A connection that nobody uses, and whose client therefore does not read, cannot be waited
// for.
constexpr storage::Nanos kGoodbye = 100'000'000;

grpc::Status ToGrpc(const absl::Status& status) {
  // The codes are the same numbers by design.
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

// How many calls are under way, and the end of taking new ones.
class CallsUnderWay {
 public:
  // False: no new calls any more.
  bool Enter() {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    ++count_;
    return true;
  }
  void Leave() {
    std::lock_guard lock(mutex_);
    if (--count_ == 0) none_.notify_all();
  }
  // Lets nobody enter, and waits until all have left, for at most `grace`.
  void Close(storage::Nanos grace) {
    std::unique_lock lock(mutex_);
    closed_ = true;
    none_.wait_for(lock, std::chrono::nanoseconds(grace), [this] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  bool closed_ = false;  // guarded by mutex_, as below
  int64_t count_ = 0;
};

const grpc::Status& Stopping() {
  static const grpc::Status status(grpc::StatusCode::UNAVAILABLE, "the daemon stops");
  return status;
}

// Measures one call that has entered, from its arrival.
class CallTimer {
 public:
  CallTimer(CallsUnderWay& calls, Metrics& metrics, RpcMethod method)
      : calls_(calls), metrics_(metrics), method_(method) {}
  void Finished(absl::StatusCode code) const {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin_;
    metrics_.RpcFinished(method_, code, elapsed.count());
    calls_.Leave();
  }

 private:
  CallsUnderWay& calls_;
  Metrics& metrics_;
  const RpcMethod method_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// The stream of one landing. It deletes itself when gRPC is done with it, which is after Finish, which is after the
// service's last callback.
class LandStream final : public grpc::ServerWriteReactor<v1::LandEvent> {
 public:
  LandStream(EngineService& service, const v1::LandRequest& request, CallTimer timer)
      : service_(service), request_(request), timer_(timer) {
    service_.Land(request_, {[this](uint32_t layers) { Progress(layers); },
                             [this](absl::StatusOr<std::vector<MissReason>> verdict) { End(std::move(verdict)); }});
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    broken_ |= !ok;
    Advance();
  }
  void OnCancel() override {
    {
      std::lock_guard lock(mutex_);
      broken_ = true;
      if (end_.has_value()) return;
    }
    service_.CancelLanding(request_);
  }
  void OnDone() override {
    { std::lock_guard lock(mutex_); }  // who called Finish may still be on its way out
    delete this;
  }

 private:
  void Progress(uint32_t layers) {
    std::lock_guard lock(mutex_);
    layers_ = layers;
    Advance();
  }
  void End(absl::StatusOr<std::vector<MissReason>> verdict) {
    std::lock_guard lock(mutex_);
    end_ = std::move(verdict);
    Advance();
  }

  // Writes what is newest: a slow reader sees fewer events, never a queue of them. mutex_ is held.
  void Advance() {
    if (writing_ || finished_) return;
    const bool verdict_to_write = end_.has_value() && end_->ok() && !verdict_written_;
    if (!broken_ && (verdict_to_write || layers_ > layers_written_)) {
      event_.Clear();
      event_.set_layers_done(layers_);
      layers_written_ = layers_;
      if (verdict_to_write) {
        event_.mutable_verdict();
        for (MissReason reason : **end_) event_.mutable_verdict()->add_miss_reasons(static_cast<uint32_t>(reason));
        verdict_written_ = true;
      }
      writing_ = true;
      StartWrite(&event_);
    } else if (end_.has_value()) {
      finished_ = true;
      timer_.Finished(end_->status().code());
      Finish(ToGrpc(end_->status()));
    }
  }

  EngineService& service_;
  const v1::LandRequest& request_;
  const CallTimer timer_;

  std::mutex mutex_;
  uint32_t layers_ = 0;  // guarded by mutex_, as all below; event_ also belongs to gRPC while writing_
  uint32_t layers_written_ = 0;
  std::optional<absl::StatusOr<std::vector<MissReason>>> end_;
  v1::LandEvent event_;
  bool verdict_written_ = false;
  bool writing_ = false;
  bool broken_ = false;  // nobody reads any more
  bool finished_ = false;
};

// A landing that comes too late.
class RefusedStream final : public grpc::ServerWriteReactor<v1::LandEvent> {
 public:
  RefusedStream() { Finish(Stopping()); }
  void OnDone() override { delete this; }
};

class CacheService final : public v1::Cache::CallbackService {
 public:
  CacheService(EngineService& service, Metrics& metrics) : service_(service), metrics_(metrics) {}

  CallsUnderWay& calls() { return calls_; }

  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  Reactor* OpenModel(Context* context, const v1::OpenModelRequest* request, v1::OpenModelReply* reply) override {
    return Unary(context, RpcMethod::kOpenModel, &EngineService::OpenModel, request, reply);
  }
  Reactor* CloseModel(Context* context, const v1::CloseModelRequest* request, v1::CloseModelReply* reply) override {
    return Unary(context, RpcMethod::kCloseModel, &EngineService::CloseModel, request, reply);
  }
  Reactor* DeclarePages(Context* context, const v1::DeclarePagesRequest* request,
                        v1::DeclarePagesReply* reply) override {
    return Unary(context, RpcMethod::kDeclarePages, &EngineService::DeclarePages, request, reply);
  }
  Reactor* Match(Context* context, const v1::MatchRequest* request, v1::MatchReply* reply) override {
    return Unary(context, RpcMethod::kMatch, &EngineService::Match, request, reply);
  }
  Reactor* Reserve(Context* context, const v1::ReserveRequest* request, v1::ReserveReply* reply) override {
    return Unary(context, RpcMethod::kReserve, &EngineService::Reserve, request, reply);
  }
  Reactor* Publish(Context* context, const v1::PublishRequest* request, v1::PublishReply* reply) override {
    return Unary(context, RpcMethod::kPublish, &EngineService::Publish, request, reply);
  }
  Reactor* Abandon(Context* context, const v1::AbandonRequest* request, v1::AbandonReply* reply) override {
    return Unary(context, RpcMethod::kAbandon, &EngineService::Abandon, request, reply);
  }
  grpc::ServerWriteReactor<v1::LandEvent>* Land(Context*, const v1::LandRequest* request) override {
    if (!calls_.Enter()) return new RefusedStream;
    return new LandStream(service_, *request, CallTimer(calls_, metrics_, RpcMethod::kLand));
  }
  Reactor* Quiesce(Context* context, const v1::QuiesceRequest* request, v1::QuiesceReply* reply) override {
    return Unary(context, RpcMethod::kQuiesce, &EngineService::Quiesce, request, reply);
  }
  Reactor* Advance(Context* context, const v1::AdvanceRequest* request, v1::CompositionReply* reply) override {
    return Unary(context, RpcMethod::kAdvance, &EngineService::Advance, request, reply);
  }
  Reactor* Compose(Context* context, const v1::ComposeRequest* request, v1::CompositionReply* reply) override {
    return Unary<v1::ComposeRequest, v1::CompositionReply>(context, RpcMethod::kCompose, &EngineService::Compose,
                                                           request, reply);
  }
  Reactor* Release(Context* context, const v1::ReleaseRequest* request, v1::ReleaseReply* reply) override {
    return Unary(context, RpcMethod::kRelease, &EngineService::Release, request, reply);
  }
  Reactor* AttachLease(Context* context, const v1::AttachLeaseRequest* request, v1::AttachLeaseReply* reply) override {
    return Unary(context, RpcMethod::kAttachLease, &EngineService::AttachLease, request, reply);
  }

 private:
  template <typename Request, typename Reply>
  Reactor* Unary(Context* context, RpcMethod method,
                 void (EngineService::*call)(const Request&, Reply*, EngineService::Done), const Request* request,
                 Reply* reply) {
    Reactor* reactor = context->DefaultReactor();
    if (!calls_.Enter()) {
      reactor->Finish(Stopping());
      return reactor;
    }
    (service_.*call)(*request, reply, [reactor, timer = CallTimer(calls_, metrics_, method)](absl::Status status) {
      reactor->Finish(ToGrpc(status));
      timer.Finished(status.code());
    });
    return reactor;
  }

  EngineService& service_;
  Metrics& metrics_;
  CallsUnderWay calls_;
};

}  // namespace

struct RpcServer::Impl {
  Impl(EngineService& service, Metrics& metrics) : service(service, metrics) {}

  CacheService service;
  BoundPath path;
  std::unique_ptr<grpc::Server> server;
};

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const std::string& path, EngineService& service,
                                                            Metrics& metrics) {
  grpc::EnableDefaultHealthCheckService(true);
  auto impl = std::make_unique<Impl>(service, metrics);
  absl::StatusOr<PathClaim> claim = PathClaim::Take(path, SOCK_STREAM);
  if (!claim.ok()) return claim.status();
  grpc::ServerBuilder builder;
  int bound = 0;
  builder.AddListeningPort(absl::StrCat("unix:", path), grpc::InsecureServerCredentials(), &bound);
  builder.SetMaxReceiveMessageSize(static_cast<int>(limits::kMaxMessageBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(limits::kMaxMessageBytes));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentCalls);
  builder.SetResourceQuota(grpc::ResourceQuota("rpc").Resize(kMemoryForCalls));
  builder.RegisterService(&impl->service);
  {
    SocketUmask umask;
    impl->server = builder.BuildAndStart();
  }
  if (impl->server == nullptr || bound == 0) return absl::UnavailableError(absl::StrCat("cannot listen on ", path));
  absl::StatusOr<BoundPath> adopted = BoundPath::Adopt(path);
  if (!adopted.ok()) return adopted.status();
  impl->path = *std::move(adopted);
  impl->server->GetHealthCheckService()->SetServingStatus(v1::Cache::service_full_name(), true);
  return std::unique_ptr<RpcServer>(new RpcServer(std::move(impl)));
}

RpcServer::RpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

RpcServer::~RpcServer() {
  Stop(0);
}

void RpcServer::Stop(storage::Nanos grace) {
  if (impl_->server == nullptr) return;
  impl_->server->GetHealthCheckService()->Shutdown();  // every service, for good; still answered while calls finish
  impl_->service.calls().Close(grace);
  impl_->server->Shutdown(std::chrono::system_clock::now() + std::chrono::nanoseconds(kGoodbye));
  impl_->server = nullptr;
  impl_->path = {};
}

}  // namespace ashlar::daemon
