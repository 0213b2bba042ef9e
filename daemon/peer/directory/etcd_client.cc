// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/etcd_client.h"

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "etcd/v3/rpc.grpc.pb.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {
namespace {

// Returned by the completion queue, and deleted after its only call.
struct Tag {
  std::function<void(bool ok)> run;
};

gpr_timespec MonotonicDeadline(const storage::Clock& clock, storage::Nanos at) {
  const storage::Nanos wait = std::max<storage::Nanos>(0, at - clock.Now());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(wait, GPR_TIMESPAN));
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

class GrpcEtcdClient final : public EtcdClient {
 public:
  GrpcEtcdClient(const storage::Clock& clock, const RoundTrips::Bounds& limits) : clock_(clock), limits_(limits) {}
  ~GrpcEtcdClient() override;

  void Connect(const std::string& endpoint, const EtcdTls& tls) override;
  void Disconnect() override;
  void set_token(const std::string& token) override { token_ = token; }
  storage::Nanos Limit() const override;
  void Answered(storage::Nanos began) override;
  void Unanswered(storage::Nanos began) override;
  void Authenticate(const etcdserverpb::AuthenticateRequest& request,
                    Done<etcdserverpb::AuthenticateResponse> done) override;
  void Range(const etcdserverpb::RangeRequest& request, Done<etcdserverpb::RangeResponse> done) override;
  void Txn(const etcdserverpb::TxnRequest& request, Done<etcdserverpb::TxnResponse> done) override;
  void LeaseGrant(const etcdserverpb::LeaseGrantRequest& request, Done<etcdserverpb::LeaseGrantResponse> done) override;
  void LeaseRevoke(const etcdserverpb::LeaseRevokeRequest& request, storage::Nanos timeout,
                   Done<etcdserverpb::LeaseRevokeResponse> done) override;
  void OpenWatch(std::function<void(const etcdserverpb::WatchResponse&)> got, Ended ended) override;
  void Watch(const etcdserverpb::WatchRequest& request) override;
  void OpenKeepAlive(std::function<void(const etcdserverpb::LeaseKeepAliveResponse&)> got, Ended ended) override;
  void KeepAlive(const etcdserverpb::LeaseKeepAliveRequest& request) override;
  void Poll(storage::Nanos deadline) override;
  void Wake() override;

 private:
  const storage::Clock& clock_;
  const RoundTrips::Bounds limits_;
  RoundTrips answers_;
  grpc::CompletionQueue queue_;
  size_t outstanding_ = 0;  // number of tags
  uint64_t connection_ = 0;
  std::shared_ptr<grpc::Channel> channel_;
  std::string token_;
  std::set<std::shared_ptr<grpc::ClientContext>> contexts_;  // calls in flight, of all connections

  Mutex mutex_;
  bool waking_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(mutex_);

  void* NewTag(std::function<void(bool)> run) {
    ++outstanding_;
    return new Tag{std::move(run)};
  }

  std::shared_ptr<grpc::ClientContext> NewContext() {
    auto context = std::make_shared<grpc::ClientContext>();
    if (!token_.empty()) context->AddMetadata("token", token_);
    contexts_.insert(context);
    return context;
  }

  template <typename Service, typename Request, typename Response>
  void Call(std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (Service::Stub::*method)(grpc::ClientContext*,
                                                                                                const Request&,
                                                                                                grpc::CompletionQueue*),
            const Request& request, Done<Response> done, storage::Nanos timeout = 0) {
    struct Pending {
      std::shared_ptr<grpc::ClientContext> context;
      Response response;
      grpc::Status status;
      std::unique_ptr<typename Service::Stub> stub;
      std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> reader;
    };
    auto call = std::make_shared<Pending>();
    call->context = NewContext();
    const storage::Nanos began = clock_.Now();
    call->context->set_deadline(MonotonicDeadline(clock_, began + (timeout > 0 ? timeout : answers_.Limit(limits_))));
    call->stub = Service::NewStub(channel_);
    call->reader = ((*call->stub).*method)(call->context.get(), request, &queue_);
    call->reader->Finish(&call->response, &call->status,
                         NewTag([this, call, began, timeout, done = std::move(done), of = connection_](bool) {
                           contexts_.erase(call->context);
                           if (of == connection_ && timeout == 0) Measure(call->status, began);
                           if (of == connection_) done(FromGrpc(call->status), call->response);
                         }));
  }

  void Measure(const grpc::Status& status, storage::Nanos began) {
    const storage::Nanos now = clock_.Now();
    if (status.ok()) answers_.Answered(now - began);
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) answers_.Unanswered(began, now);
  }

  // A stream always reads, and writes queued messages one after the other. Its tags keep it alive.
  template <typename Service, typename Request, typename Response>
  struct Stream : std::enable_shared_from_this<Stream<Service, Request, Response>> {
    GrpcEtcdClient* client = nullptr;
    uint64_t of = 0;  // its connection
    std::shared_ptr<grpc::ClientContext> context;
    std::unique_ptr<typename Service::Stub> stub;
    std::unique_ptr<grpc::ClientAsyncReaderWriter<Request, Response>> call;
    std::function<void(const Response&)> got;
    Ended ended;
    bool started = false, writing = false, ending = false;
    std::deque<Request> to_write;
    Response response;
    grpc::Status status;

    template <typename Method>
    void Start(Method method) {
      context = client->NewContext();
      stub = Service::NewStub(client->channel_);
      call =
          ((*stub).*method)(context.get(), &client->queue_, client->NewTag([self = this->shared_from_this()](bool ok) {
            self->started = ok;
            if (!ok) return self->End();
            self->Read();
            self->Pump();
          }));
    }
    void Read() {
      call->Read(&response, client->NewTag([self = this->shared_from_this()](bool ok) {
        if (!ok) return self->End();
        if (self->of == self->client->connection_) self->got(self->response);
        self->Read();
      }));
    }
    void Write(const Request& request) {
      to_write.push_back(request);
      Pump();
    }
    void Pump() {
      if (!started || writing || ending || to_write.empty()) return;
      writing = true;
      call->Write(to_write.front(), client->NewTag([self = this->shared_from_this()](bool ok) {
        self->writing = false;
        self->to_write.pop_front();
        if (ok) self->Pump();  // otherwise the pending read also ends
      }));
    }
    void End() {
      ending = true;
      call->Finish(&status, client->NewTag([self = this->shared_from_this()](bool) {
        self->client->contexts_.erase(self->context);
        if (self->of == self->client->connection_) self->ended(FromGrpc(self->status));
      }));
    }
  };
  using WatchStream = Stream<etcdserverpb::Watch, etcdserverpb::WatchRequest, etcdserverpb::WatchResponse>;
  using KeepAliveStream =
      Stream<etcdserverpb::Lease, etcdserverpb::LeaseKeepAliveRequest, etcdserverpb::LeaseKeepAliveResponse>;
  std::shared_ptr<WatchStream> watch_;
  std::shared_ptr<KeepAliveStream> keep_alive_;

  template <typename AnyStream, typename Got, typename Method>
  std::shared_ptr<AnyStream> Open(Got got, Ended ended, Method method) {
    auto stream = std::make_shared<AnyStream>();
    stream->client = this;
    stream->of = connection_;
    stream->got = std::move(got);
    stream->ended = std::move(ended);
    stream->Start(method);
    return stream;
  }
};

GrpcEtcdClient::~GrpcEtcdClient() {
  Disconnect();
  // An operation may start another one (a stream's end), so the queue is closed after the last one.
  while (outstanding_ > 0) Poll(INT64_MAX);
  {
    MutexLock lock(mutex_);
    alarm_.Cancel();
  }
  queue_.Shutdown();
  void* tag = nullptr;
  for (bool ok = false; queue_.Next(&tag, &ok);) {
  }
}

void GrpcEtcdClient::Connect(const std::string& endpoint, const EtcdTls& tls) {
  Disconnect();
  grpc::ChannelArguments arguments;
  // A separate connection, so that it inherits no back-off from an earlier one.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(-1);  // the events of a revision come in one message
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!tls.authority.empty()) {
    credentials = grpc::SslCredentials(
        {.pem_root_certs = tls.authority, .pem_private_key = tls.key, .pem_cert_chain = tls.certificate});
  }
  channel_ = grpc::CreateCustomChannel(absl::StrCat("dns:///", endpoint), credentials, arguments);
}

void GrpcEtcdClient::Disconnect() {
  ++connection_;
  for (const auto& context : contexts_) context->TryCancel();
  watch_ = nullptr;
  keep_alive_ = nullptr;
  channel_ = nullptr;
  token_.clear();
}

storage::Nanos GrpcEtcdClient::Limit() const {
  return answers_.Limit(limits_);
}

void GrpcEtcdClient::Answered(storage::Nanos began) {
  answers_.Answered(clock_.Now() - began);
}

void GrpcEtcdClient::Unanswered(storage::Nanos began) {
  answers_.Unanswered(began, clock_.Now());
}

void GrpcEtcdClient::Authenticate(const etcdserverpb::AuthenticateRequest& request,
                                  Done<etcdserverpb::AuthenticateResponse> done) {
  Call<etcdserverpb::Auth>(&etcdserverpb::Auth::Stub::AsyncAuthenticate, request, std::move(done));
}

void GrpcEtcdClient::Range(const etcdserverpb::RangeRequest& request, Done<etcdserverpb::RangeResponse> done) {
  Call<etcdserverpb::KV>(&etcdserverpb::KV::Stub::AsyncRange, request, std::move(done));
}

void GrpcEtcdClient::Txn(const etcdserverpb::TxnRequest& request, Done<etcdserverpb::TxnResponse> done) {
  Call<etcdserverpb::KV>(&etcdserverpb::KV::Stub::AsyncTxn, request, std::move(done));
}

void GrpcEtcdClient::LeaseGrant(const etcdserverpb::LeaseGrantRequest& request,
                                Done<etcdserverpb::LeaseGrantResponse> done) {
  Call<etcdserverpb::Lease>(&etcdserverpb::Lease::Stub::AsyncLeaseGrant, request, std::move(done));
}

void GrpcEtcdClient::LeaseRevoke(const etcdserverpb::LeaseRevokeRequest& request, storage::Nanos timeout,
                                 Done<etcdserverpb::LeaseRevokeResponse> done) {
  Call<etcdserverpb::Lease>(&etcdserverpb::Lease::Stub::AsyncLeaseRevoke, request, std::move(done), timeout);
}

void GrpcEtcdClient::OpenWatch(std::function<void(const etcdserverpb::WatchResponse&)> got, Ended ended) {
  watch_ = Open<WatchStream>(std::move(got), std::move(ended), &etcdserverpb::Watch::Stub::AsyncWatch);
}

void GrpcEtcdClient::Watch(const etcdserverpb::WatchRequest& request) {
  if (watch_ != nullptr) watch_->Write(request);
}

void GrpcEtcdClient::OpenKeepAlive(std::function<void(const etcdserverpb::LeaseKeepAliveResponse&)> got, Ended ended) {
  keep_alive_ =
      Open<KeepAliveStream>(std::move(got), std::move(ended), &etcdserverpb::Lease::Stub::AsyncLeaseKeepAlive);
}

void GrpcEtcdClient::KeepAlive(const etcdserverpb::LeaseKeepAliveRequest& request) {
  if (keep_alive_ != nullptr) keep_alive_->Write(request);
}

void GrpcEtcdClient::Poll(storage::Nanos deadline) {
  gpr_timespec until =
      deadline == INT64_MAX ? gpr_inf_future(GPR_CLOCK_MONOTONIC) : MonotonicDeadline(clock_, deadline);
  // A callback may end or replace the connection; further events of the queue then do not matter.
  for (int turn = 0; turn < 64; ++turn) {
    void* raw = nullptr;
    bool ok = false;
    if (queue_.AsyncNext(&raw, &ok, until) != grpc::CompletionQueue::GOT_EVENT) return;
    if (raw == nullptr) {  // woken
      MutexLock lock(mutex_);
      waking_ = false;
    } else {
      const std::unique_ptr<Tag> tag(static_cast<Tag*>(raw));
      --outstanding_;
      tag->run(ok);
    }
    until = gpr_time_0(GPR_CLOCK_MONOTONIC);
  }
}

void GrpcEtcdClient::Wake() {
  MutexLock lock(mutex_);
  if (std::exchange(waking_, true)) return;
  alarm_.Set(&queue_, gpr_now(GPR_CLOCK_MONOTONIC), nullptr);
}

}  // namespace

std::unique_ptr<EtcdClient> EtcdClient::Make(const storage::Clock& clock, const RoundTrips::Bounds& limits) {
  return std::make_unique<GrpcEtcdClient>(clock, limits);
}

}  // namespace ashlar::daemon
