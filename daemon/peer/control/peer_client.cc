// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/control/peer_client.h"

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/peer.grpc.pb.h"
#include "daemon/runtime/happens_before.h"
#include "daemon/runtime/log.h"
#include "daemon/runtime/round_trips.h"
#include "kernels/mutex.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

absl::Status FromGrpc(const grpc::Status& status) {
  // The codes are the same numbers by design.
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::chrono::system_clock::time_point In(storage::Nanos nanos) {
  return std::chrono::system_clock::now() + std::chrono::nanoseconds(nanos);
}

constexpr storage::Nanos kTripsOfAGreeting = 3;

storage::Nanos SteadyNow() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::shared_ptr<grpc::Channel> MakeChannel(const PeerClient::Options& options, const Tls* tls) {
  grpc::ChannelArguments arguments;
  const int half = static_cast<int>(options.timeout / 2'000'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, half);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, half);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A channel makes one connection; the client decides when to retry and with which certificate.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // The handshake uses this name; without it gRPC's server logs an error that no certificate has the name.
  if (tls != nullptr) arguments.SetSslTargetNameOverride(options.node);
  arguments.SetMaxReceiveMessageSize(static_cast<int>(limits::kMaxPeerReplyBytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(limits::kMaxPeerRequestBytes));
  return grpc::CreateCustomChannel(
      options.address, tls != nullptr ? tls->OfChannel(options.node) : grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

struct PeerClient::Impl {
  // One connection, from its greeting to its end. Ended deletes it when gRPC has finished with it.
  class Greeting final : public grpc::ClientReadReactor<v1::PeerGreeting> {
   public:
    explicit Greeting(Impl& client) : client_(client), channel_(MakeChannel(client.options, client.tls)) {
      stub_ = v1::Peer::NewStub(channel_);
      Write(client.options.self, &request_);
    }
    void Start() {
      // A silent peer times out.
      HappensBefore(&client_);
      silence_.Set(In(client_.options.timeout), [&client = client_, this](bool fired) {
        HappensAfter(&client);
        MutexLock lock(client.mutex);
        if (fired && client.greeting == this && !welcomed) context_.TryCancel();
        client.Release();
      });
      stub_->async()->Greet(&context_, &request_, this);
      StartRead(&answer_);
      StartCall();
    }
    void OnReadDone(bool ok) override {
      HappensAfter(&client_);
      if (!ok) return;  // OnDone follows
      if (client_.Welcomed(*this, answer_)) {
        StartRead(&answer_);
      } else {
        context_.TryCancel();
      }
    }
    void OnDone(const grpc::Status& status) override {
      HappensAfter(&client_);
      client_.Ended(*this, FromGrpc(status));  // deletes this
    }
    void Cancel() { context_.TryCancel(); }
    const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
    v1::Peer::Stub& stub() { return *stub_; }

    bool welcomed = false;  // guarded by the client's mutex
    const storage::Nanos began = SteadyNow();

   private:
    Impl& client_;
    const std::shared_ptr<grpc::Channel> channel_;
    std::unique_ptr<v1::Peer::Stub> stub_;
    grpc::ClientContext context_;
    v1::PeerGreeting request_, answer_;
    grpc::Alarm silence_;
  };

  Impl(Options given, const Tls* its_tls, Refusals& its_refusals)
      : options(std::move(given)), tls(its_tls), refusals(its_refusals), retry_in(options.first_retry) {}

  void Connect() {
    auto next = std::make_unique<Greeting>(*this);
    MutexLock lock(mutex);
    if (stopping) return;
    busy += 2;  // its end, and the end of its alarm
    greeting = next.release();
    greeting->Start();
  }

  // Returns false if the reply is refused.
  bool Welcomed(Greeting& from, const v1::PeerGreeting& answer) {
    if (from.welcomed) return true;  // a later version may send more messages
    absl::StatusOr<PeerHello> hello = Read(answer);
    if (hello.ok() && hello->node != options.node) {
      refusals.Add(Refusal::kWrongNode, options.node, absl::StrCat("node: the peer calls itself ", hello->node));
      return false;
    }
    if (!hello.ok()) {
      refusals.Add(absl::IsFailedPrecondition(hello.status()) ? Refusal::kVersion : Refusal::kBadGreeting, options.node,
                   hello.status().message());
      return false;
    }
    {
      MutexLock lock(mutex);
      if (stopping) return false;
      from.welcomed = true;
      retry_in = options.first_retry;
      // Handshakes of TCP and TLS, and the greeting, give a first estimate of the reply time.
      if (answers.mean() == 0) answers.Answered((SteadyNow() - from.began) / kTripsOfAGreeting);
    }
    Log(LogLevel::kInfo, "peer connected", {{"peer", options.node}, {"address", options.address}});
    // Calls are accepted before `here` is called, so that it may call.
    if (options.here) options.here(*hello);
    return true;
  }

  void Ended(Greeting& from, const absl::Status& status) {
    std::shared_ptr<grpc::Channel> former = from.channel();
    bool was_here;
    {
      MutexLock lock(mutex);
      was_here = from.welcomed;
      greeting = nullptr;
      // A refused greeting will be refused again, so it is logged only once.
      const std::string text(status.message());
      if (!stopping && (was_here || text != last_error)) {
        Log(was_here ? LogLevel::kInfo : LogLevel::kWarning, was_here ? "peer disconnected" : "peer handshake failed",
            {{"peer", options.node}, {"address", options.address}, {"error", text}});
      }
      last_error = was_here ? "" : text;
    }
    if (was_here && options.gone) options.gone();
    MutexLock lock(mutex);
    if (!stopping) {
      const double jitter = std::uniform_real_distribution<double>(0.5, 1.0)(random);
      ++busy;
      retry = std::make_unique<grpc::Alarm>();  // the former one's callback may still be running
      HappensBefore(this);
      retry->Set(In(static_cast<storage::Nanos>(static_cast<double>(retry_in) * jitter)), [this](bool fired) {
        HappensAfter(this);
        if (fired) Connect();
        MutexLock held(mutex);
        Release();
      });
      retry_in = std::min(2 * retry_in, options.longest_retry);
    }
    last_channel.swap(former);
    former = nullptr;  // the later one replaces it
    delete &from;
    Release();
  }

  // The destructor may wait for the mutex.
  void Release() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (--busy == 0) idle.NotifyAll();
  }

  template <typename Request, typename Reply>
  struct Call {
    grpc::ClientContext context;
    Request request;
    Reply reply;
  };
  using Method = class v1::Peer::Stub::async;

  // `read` converts the reply into the result.
  template <typename Request, typename Reply, typename Result>
  void Start(std::shared_ptr<Call<Request, Reply>> call,
             void (Method::*method)(grpc::ClientContext*, const Request*, Reply*, std::function<void(grpc::Status)>),
             std::function<absl::StatusOr<Result>(const Reply&)> read, Done<Result> done, storage::Nanos patience = 0) {
    absl::Status refused;
    {
      MutexLock lock(mutex);
      if (greeting == nullptr || !greeting->welcomed || stopping) {
        refused = absl::UnavailableError(absl::StrCat("peer ", options.node, " is not connected"));
      } else if (under_way.size() == kCalls) {
        refused = absl::ResourceExhaustedError(absl::StrCat("peer ", options.node, ": too many calls in flight"));
      } else {
        under_way.insert(&call->context);
        ++busy;
        const storage::Nanos most = std::max(options.longest_call, options.call_timeout);
        call->context.set_deadline(In(answers.Limit({options.call_timeout, most}) + patience));
        const storage::Nanos began = SteadyNow();
        (greeting->stub().async()->*method)(
            &call->context, &call->request, &call->reply,
            [this, call, began, patience, read = std::move(read), done](grpc::Status status) mutable {
              {
                MutexLock held(mutex);
                under_way.erase(&call->context);
                if (patience == 0) Measure(status, began);
              }
              done(status.ok() ? Checked<Result>(read(call->reply)) : FromGrpc(status));
              call = nullptr;  // it holds the channel (last_channel)
              MutexLock held(mutex);
              Release();
            });
      }
    }
    if (!refused.ok()) done(refused);
  }
  // A call that waits for work at the peer does not measure the link.
  void Measure(const grpc::Status& status, storage::Nanos began) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const storage::Nanos now = SteadyNow();
    if (status.ok()) answers.Answered(now - began);
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) answers.Unanswered(began, now);
  }
  // A wrong reply is the peer's fault, not the caller's.
  template <typename Result>
  static absl::StatusOr<Result> Checked(absl::StatusOr<Result> read) {
    if (read.ok()) return read;
    return absl::InternalError(absl::StrCat("invalid reply from the peer: ", read.status().message()));
  }

  const Options options;
  const Tls* const tls;
  Refusals& refusals;

  mutable Mutex mutex;
  CondVar idle;
  Greeting* greeting ABSL_GUARDED_BY(mutex) = nullptr;  // owns itself
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  size_t busy ABSL_GUARDED_BY(mutex) = 0;  // callbacks still to come
  std::set<grpc::ClientContext*> under_way ABSL_GUARDED_BY(mutex);
  RoundTrips answers ABSL_GUARDED_BY(mutex);
  storage::Nanos retry_in ABSL_GUARDED_BY(mutex);
  std::string last_error ABSL_GUARDED_BY(mutex);
  std::mt19937 random ABSL_GUARDED_BY(mutex){std::random_device{}()};
  std::unique_ptr<grpc::Alarm> retry ABSL_GUARDED_BY(mutex);
  // In gRPC 1.51 the last channel of a process must not end on a gRPC thread, because it destroys the queue of that
  // thread. So the latest channel is kept, and ends with the client.
  std::shared_ptr<grpc::Channel> last_channel ABSL_GUARDED_BY(mutex);
};

PeerClient::PeerClient(Options options, const Tls* tls, Refusals& refusals)
    : impl_(std::make_unique<Impl>(std::move(options), tls, refusals)) {
  impl_->Connect();
}

PeerClient::~PeerClient() {
  MutexLock lock(impl_->mutex);
  impl_->stopping = true;
  if (impl_->greeting != nullptr) impl_->greeting->Cancel();
  for (grpc::ClientContext* context : impl_->under_way) context->TryCancel();
  if (impl_->retry != nullptr) impl_->retry->Cancel();
  while (impl_->busy > 0) impl_->idle.Wait(impl_->mutex);
}

bool PeerClient::connected() const {
  MutexLock lock(impl_->mutex);
  return impl_->greeting != nullptr && impl_->greeting->welcomed;
}

void PeerClient::Open(const std::string& tenant, PeerOpen open, Done<std::vector<PeerOpened>> done) {
  auto call = std::make_shared<Impl::Call<v1::PeerOpenRequest, v1::PeerOpenReply>>();
  Write(open, tenant, &call->request);
  impl_->Start<v1::PeerOpenRequest, v1::PeerOpenReply, std::vector<PeerOpened>>(
      std::move(call), &Impl::Method::Open,
      [open = std::move(open)](const v1::PeerOpenReply& reply) { return Read(reply, open); }, std::move(done));
}

void PeerClient::Renew(PeerRenew renew, Done<std::vector<uint32_t>> done) {
  auto call = std::make_shared<Impl::Call<v1::PeerRenewRequest, v1::PeerRenewReply>>();
  Write(renew, &call->request);
  impl_->Start<v1::PeerRenewRequest, v1::PeerRenewReply, std::vector<uint32_t>>(
      std::move(call), &Impl::Method::Renew,
      [renew = std::move(renew)](const v1::PeerRenewReply& reply) { return Read(reply, renew); }, std::move(done));
}

void PeerClient::Offer(const std::string& tenant, PeerOffer offer, Done<std::vector<TakeOutcome>> done) {
  auto call = std::make_shared<Impl::Call<v1::PeerOfferRequest, v1::PeerOfferReply>>();
  Write(offer, tenant, &call->request);
  const storage::Nanos patience = storage::Nanos{1'000'000} * offer.patience_ms;
  impl_->Start<v1::PeerOfferRequest, v1::PeerOfferReply, std::vector<TakeOutcome>>(
      std::move(call), &Impl::Method::Offer,
      [offer = std::move(offer)](const v1::PeerOfferReply& reply) { return Read(reply, offer); }, std::move(done),
      patience);
}

void PeerClient::Close(const std::vector<PeerLease>& leases, std::function<void(absl::Status)> done) {
  auto call = std::make_shared<Impl::Call<v1::PeerCloseRequest, v1::PeerCloseReply>>();
  Write(leases, &call->request);
  impl_->Start<v1::PeerCloseRequest, v1::PeerCloseReply, bool>(
      std::move(call), &Impl::Method::Close, [](const v1::PeerCloseReply&) { return true; },
      [done = std::move(done)](const absl::StatusOr<bool>& closed) { done(closed.status()); });
}

void PeerClient::Workers(const std::string& tenant, const NamespaceId& ns, Done<std::vector<PeerWorker>> done) {
  auto call = std::make_shared<Impl::Call<v1::PeerWorkersRequest, v1::PeerWorkersReply>>();
  Write(ns, tenant, &call->request);
  impl_->Start<v1::PeerWorkersRequest, v1::PeerWorkersReply, std::vector<PeerWorker>>(
      std::move(call), &Impl::Method::Workers, [](const v1::PeerWorkersReply& reply) { return Read(reply); },
      std::move(done));
}

void PeerClient::Prefill(const std::string& tenant, PeerPrefill prefill, Done<PeerOpened> done) {
  auto call = std::make_shared<Impl::Call<v1::PeerPrefillRequest, v1::PeerPrefillReply>>();
  Write(prefill, tenant, &call->request);
  const storage::Nanos patience = storage::Nanos{1'000'000} * prefill.patience_ms;
  impl_->Start<v1::PeerPrefillRequest, v1::PeerPrefillReply, PeerOpened>(
      std::move(call), &Impl::Method::Prefill,
      [prefill = std::move(prefill)](const v1::PeerPrefillReply& reply) { return Read(reply, prefill); },
      std::move(done), patience);
}

void PeerClient::Probe(const std::string& tenant, const PeerProbe& probe, Done<v1::NodeProbe> done) {
  auto call = std::make_shared<Impl::Call<v1::PeerProbeRequest, v1::PeerProbeReply>>();
  Write(probe, tenant, &call->request);
  impl_->Start<v1::PeerProbeRequest, v1::PeerProbeReply, v1::NodeProbe>(
      std::move(call), &Impl::Method::Probe, [](const v1::PeerProbeReply& reply) { return Read(reply); },
      std::move(done));
}

}  // namespace ashlar::daemon
