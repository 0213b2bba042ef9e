#include "daemon/peer/directory/etcd_client.h"

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "etcd/v3/rpc.grpc.pb.h"

namespace ashlar::daemon {
namespace {

// The completion queue gives it back. It is deleted after its one call.
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

}  // namespace

struct EtcdClient::State {
  State(const storage::Clock& its_clock, const RoundTrips::Bounds& its_limits) : clock(its_clock), limits(its_limits) {}

  const storage::Clock& clock;
  const RoundTrips::Bounds limits;
  RoundTrips answers;
  grpc::CompletionQueue queue;
  size_t outstanding = 0;  // tags
  uint64_t connection = 0;
  std::shared_ptr<grpc::Channel> channel;
  std::string token;
  std::set<std::shared_ptr<grpc::ClientContext>> contexts;  // of calls that have not ended, of all connections

  std::mutex mutex;  // of what follows
  bool waking = false;
  grpc::Alarm alarm;

  void* NewTag(std::function<void(bool)> run) {
    ++outstanding;
    return new Tag{std::move(run)};
  }

  std::shared_ptr<grpc::ClientContext> NewContext() {
    auto context = std::make_shared<grpc::ClientContext>();
    if (!token.empty()) context->AddMetadata("token", token);
    contexts.insert(context);
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
    const storage::Nanos began = clock.Now();
    call->context->set_deadline(MonotonicDeadline(clock, began + (timeout > 0 ? timeout : answers.Limit(limits))));
    call->stub = Service::NewStub(channel);
    call->reader = ((*call->stub).*method)(call->context.get(), request, &queue);
    call->reader->Finish(&call->response, &call->status,
                         NewTag([this, call, began, timeout, done = std::move(done), of = connection](bool) {
                           contexts.erase(call->context);
                           if (of == connection && timeout == 0) Measure(call->status, began);
                           if (of == connection) done(FromGrpc(call->status), call->response);
                         }));
  }

  void Measure(const grpc::Status& status, storage::Nanos began) {
    const storage::Nanos now = clock.Now();
    if (status.ok()) answers.Answered(now - began);
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) answers.Unanswered(began, now);
  }

  // A stream reads all the time, and writes what there is to write, one message after another. It is kept alive by its
  // tags.
  template <typename Service, typename Request, typename Response>
  struct Stream : std::enable_shared_from_this<Stream<Service, Request, Response>> {
    State* state = nullptr;
    uint64_t of = 0;  // connection
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
      context = state->NewContext();
      stub = Service::NewStub(state->channel);
      call = ((*stub).*method)(context.get(), &state->queue, state->NewTag([self = this->shared_from_this()](bool ok) {
        self->started = ok;
        if (!ok) return self->End();
        self->Read();
        self->Pump();
      }));
    }
    void Read() {
      call->Read(&response, state->NewTag([self = this->shared_from_this()](bool ok) {
        if (!ok) return self->End();
        if (self->of == self->state->connection) self->got(self->response);
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
      call->Write(to_write.front(), state->NewTag([self = this->shared_from_this()](bool ok) {
        self->writing = false;
        self->to_write.pop_front();
        if (ok) self->Pump();  // else the pending read ends, too
      }));
    }
    void End() {
      ending = true;
      call->Finish(&status, state->NewTag([self = this->shared_from_this()](bool) {
        self->state->contexts.erase(self->context);
        if (self->of == self->state->connection) self->ended(FromGrpc(self->status));
      }));
    }
  };
  using WatchStream = Stream<etcdserverpb::Watch, etcdserverpb::WatchRequest, etcdserverpb::WatchResponse>;
  using KeepAliveStream =
      Stream<etcdserverpb::Lease, etcdserverpb::LeaseKeepAliveRequest, etcdserverpb::LeaseKeepAliveResponse>;
  std::shared_ptr<WatchStream> watch;
  std::shared_ptr<KeepAliveStream> keep_alive;

  template <typename AnyStream, typename Got, typename Method>
  std::shared_ptr<AnyStream> Open(Got got, Ended ended, Method method) {
    auto stream = std::make_shared<AnyStream>();
    stream->state = this;
    stream->of = connection;
    stream->got = std::move(got);
    stream->ended = std::move(ended);
    stream->Start(method);
    return stream;
  }
};

EtcdClient::EtcdClient(const storage::Clock& clock, const RoundTrips::Bounds& limits)
    : state_(std::make_unique<State>(clock, limits)) {}

EtcdClient::~EtcdClient() {
  Disconnect();
  // An operation may begin another one (a stream's end), so the queue may be closed after the last one only.
  while (state_->outstanding > 0) Poll(INT64_MAX);
  {
    std::lock_guard lock(state_->mutex);
    state_->alarm.Cancel();
  }
  state_->queue.Shutdown();
  void* tag = nullptr;
  for (bool ok = false; state_->queue.Next(&tag, &ok);) {
  }
}

void EtcdClient::Connect(const std::string& endpoint, const EtcdTls& tls) {
  Disconnect();
  grpc::ChannelArguments arguments;
  // A connection of its own: no back-off is inherited from an earlier one.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(-1);  // one revision's events come in one message
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!tls.authority.empty()) {
    credentials = grpc::SslCredentials(
        {.pem_root_certs = tls.authority, .pem_private_key = tls.key, .pem_cert_chain = tls.certificate});
  }
  state_->channel = grpc::CreateCustomChannel(absl::StrCat("dns:///", endpoint), credentials, arguments);
}

void EtcdClient::Disconnect() {
  ++state_->connection;
  for (const auto& context : state_->contexts) context->TryCancel();
  state_->watch = nullptr;
  state_->keep_alive = nullptr;
  state_->channel = nullptr;
  state_->token.clear();
}

void EtcdClient::set_token(const std::string& token) {
  state_->token = token;
}

storage::Nanos EtcdClient::Limit() const {
  return state_->answers.Limit(state_->limits);
}

void EtcdClient::Answered(storage::Nanos began) {
  state_->answers.Answered(state_->clock.Now() - began);
}

void EtcdClient::Unanswered(storage::Nanos began) {
  state_->answers.Unanswered(began, state_->clock.Now());
}

void EtcdClient::Authenticate(const etcdserverpb::AuthenticateRequest& request,
                              Done<etcdserverpb::AuthenticateResponse> done) {
  state_->Call<etcdserverpb::Auth>(&etcdserverpb::Auth::Stub::AsyncAuthenticate, request, std::move(done));
}

void EtcdClient::Range(const etcdserverpb::RangeRequest& request, Done<etcdserverpb::RangeResponse> done) {
  state_->Call<etcdserverpb::KV>(&etcdserverpb::KV::Stub::AsyncRange, request, std::move(done));
}

void EtcdClient::Txn(const etcdserverpb::TxnRequest& request, Done<etcdserverpb::TxnResponse> done) {
  state_->Call<etcdserverpb::KV>(&etcdserverpb::KV::Stub::AsyncTxn, request, std::move(done));
}

void EtcdClient::LeaseGrant(const etcdserverpb::LeaseGrantRequest& request,
                            Done<etcdserverpb::LeaseGrantResponse> done) {
  state_->Call<etcdserverpb::Lease>(&etcdserverpb::Lease::Stub::AsyncLeaseGrant, request, std::move(done));
}

void EtcdClient::LeaseRevoke(const etcdserverpb::LeaseRevokeRequest& request, storage::Nanos timeout,
                             Done<etcdserverpb::LeaseRevokeResponse> done) {
  state_->Call<etcdserverpb::Lease>(&etcdserverpb::Lease::Stub::AsyncLeaseRevoke, request, std::move(done), timeout);
}

void EtcdClient::OpenWatch(std::function<void(const etcdserverpb::WatchResponse&)> got, Ended ended) {
  state_->watch =
      state_->Open<State::WatchStream>(std::move(got), std::move(ended), &etcdserverpb::Watch::Stub::AsyncWatch);
}

void EtcdClient::Watch(const etcdserverpb::WatchRequest& request) {
  if (state_->watch != nullptr) state_->watch->Write(request);
}

void EtcdClient::OpenKeepAlive(std::function<void(const etcdserverpb::LeaseKeepAliveResponse&)> got, Ended ended) {
  state_->keep_alive = state_->Open<State::KeepAliveStream>(std::move(got), std::move(ended),
                                                            &etcdserverpb::Lease::Stub::AsyncLeaseKeepAlive);
}

void EtcdClient::KeepAlive(const etcdserverpb::LeaseKeepAliveRequest& request) {
  if (state_->keep_alive != nullptr) state_->keep_alive->Write(request);
}

void EtcdClient::Poll(storage::Nanos deadline) {
  gpr_timespec until =
      deadline == INT64_MAX ? gpr_inf_future(GPR_CLOCK_MONOTONIC) : MonotonicDeadline(state_->clock, deadline);
  // A callback may end the connection, or open another one; what comes next on the queue is then of no interest.
  for (int turn = 0; turn < 64; ++turn) {
    void* raw = nullptr;
    bool ok = false;
    if (state_->queue.AsyncNext(&raw, &ok, until) != grpc::CompletionQueue::GOT_EVENT) return;
    if (raw == nullptr) {  // woken
      std::lock_guard lock(state_->mutex);
      state_->waking = false;
    } else {
      const std::unique_ptr<Tag> tag(static_cast<Tag*>(raw));
      --state_->outstanding;
      tag->run(ok);
    }
    until = gpr_time_0(GPR_CLOCK_MONOTONIC);
  }
}

void EtcdClient::Wake() {
  std::lock_guard lock(state_->mutex);
  if (std::exchange(state_->waking, true)) return;
  state_->alarm.Set(&state_->queue, gpr_now(GPR_CLOCK_MONOTONIC), nullptr);
}

}  // namespace ashlar::daemon
