// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/cache_service.h"

#include <google/protobuf/arena.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "ashlar/v1/cache.grpc.pb.h"
#include "daemon/rpc/request_gate.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/happens_before.h"
#include "kernels/mutex.h"
#include "proto/cache_calls.h"

namespace ashlar::daemon {
namespace {

grpc::Status ToGrpc(const absl::Status& status) {
  // The codes are the same numbers by design.
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

const grpc::Status& Stopping() {
  static const grpc::Status status(grpc::StatusCode::UNAVAILABLE, "the daemon is stopping");
  return status;
}

constexpr char kUnread[] = "replies: the tenant's engines do not read their replies; too many bytes wait";
constexpr char kHeld[] = "requests: the tenant has too many bytes of requests in flight; try again";

// Not served for lack of memory, so none of the engine's memory is read. An engine that lends memory must be able to
// distinguish this from gRPC's RESOURCE_EXHAUSTED, which may come at any stage of the call.
absl::Status OutOfMemory(CacheCall call, absl::string_view why) {
  const bool lends = call == CacheCall::kPublish || call == CacheCall::kCommit || call == CacheCall::kAdvance;
  return lends ? absl::AbortedError(why) : absl::ResourceExhaustedError(why);
}

// Calls that free resources and have a short reply.
constexpr bool GivesBack(CacheCall call) {
  return call == CacheCall::kRelease || call == CacheCall::kAbandon || call == CacheCall::kQuiesce ||
         call == CacheCall::kEndPrefill || call == CacheCall::kCloseModel;
}

// Parses a request after two checks of its bytes: the caller has a session (if the call needs one), and the parsed
// request stays within the limits.
template <typename Request>
absl::Status Parse(const grpc::ByteBuffer& bytes, CacheCall call, const EngineService& service, uid_t user,
                   Request* request) {
  grpc::ByteBuffer shared(bytes);  // refers to the same memory
  {
    grpc::ProtoBufferReader reader(&shared);
    const absl::Status status = service.Authenticate(FindSession(reader), user, RowOf(call).callers);
    if (!status.ok()) return status;
  }
  {
    grpc::ProtoBufferReader reader(&shared);
    if (absl::Status status = CheckCounts(*Request::descriptor(), reader); !status.ok()) return status;
  }
  grpc::ProtoBufferReader reader(&shared);
  if (!request->ParseFromZeroCopyStream(&reader)) {
    return absl::InvalidArgumentError("request: cannot be parsed as the call's message type");
  }
  // The parser uses the last of several values, but the check above has seen the first.
  return service.Authenticate(request->session(), user, RowOf(call).callers);
}

template <typename Message>
void WriteBytes(const Message& message, grpc::ByteBuffer* bytes) {
  bool own = false;
  grpc::SerializationTraits<Message>::Serialize(message, bytes, &own);
}

// Measures one call from its arrival.
class CallTimer {
 public:
  CallTimer(CallsUnderWay& calls, CallMetrics& metrics, CacheCall call)
      : calls_(calls), metrics_(metrics), call_(call) {}
  // The lookup's reply is ready; the landing after it may take much of a second more.
  void LookedUp() const { metrics_.LookedUp(Elapsed()); }
  void Finished(absl::StatusCode code) const {
    if (call_ == CacheCall::kMatch && code == absl::StatusCode::kOk) LookedUp();
    metrics_.Finished(call_, code, Elapsed());
    calls_.Leave();
  }

 private:
  double Elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

  CallsUnderWay& calls_;
  CallMetrics& metrics_;
  const CacheCall call_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// The stream of one landing, with or without a lookup. It deletes itself after gRPC's OnDone, which follows Finish,
// which follows the service's last callback.
class LandStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public LandingReplies {
 public:
  LandStream(EngineService& service, CallMemory& memory, CallTimer timer, bool awaits_match)
      : service_(service), memory_(memory), timer_(timer), awaits_match_(awaits_match) {}

  // Call before Begin: charges this number of bytes until the lookup has ended.
  absl::Status Hold(size_t bytes) {
    if (!memory_.HoldRequest(bytes)) return absl::ResourceExhaustedError(kHeld);
    MutexLock lock(mutex_);
    request_bytes_ = bytes;
    return absl::OkStatus();
  }

  // Call either Begin or Refuse, once; the stream may be deleted on return. A cancellation at that moment may come
  // before the service knows the landing: the landing continues, and its state is unknown until Quiesce, as after any
  // lost stream.
  template <typename Request>
  void Begin(void (EngineService::*call)(const Request&, LandingReplies&), const Request& request) {
    bool cancelled;
    {
      MutexLock lock(mutex_);
      session_ = request.session();
      landing_ = request.landing();
      begun_ = true;
      cancelled = broken_;
    }
    if (cancelled) return Refuse(absl::CancelledError("landing: the stream ended before the landing"));
    (service_.*call)(request, *this);
  }
  void Refuse(absl::Status why) { Ended(std::move(why)); }

  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    broken_ |= !ok;
    if (!match_.has_value()) memory_.EndAnswer(std::exchange(match_bytes_, 0));
    Advance();
  }
  void OnCancel() override {
    {
      MutexLock lock(mutex_);
      broken_ = true;
      if (end_.has_value() || !begun_) return;
    }
    service_.CancelLanding(session_, landing_);
  }
  void OnDone() override {
    {
      MutexLock lock(mutex_);  // a thread in Finish may still hold it
      memory_.EndRequest(request_bytes_);
      memory_.EndAnswer(match_bytes_ + verdict_bytes_);
      done_ = true;
      if (advances_later_) return;
    }
    delete this;
  }

  void Matched(v1::PromptMatch match) override {
    timer_.LookedUp();
    {
      MutexLock lock(mutex_);
      memory_.EndRequest(std::exchange(request_bytes_, 0));
      if (Count(match.ByteSizeLong(), match_bytes_)) match_ = std::move(match);
      awaits_match_ = false;
      if (std::exchange(advances_later_, true)) return;
    }
    AdvanceLater();
  }
  void Landed(uint32_t layers) override {
    {
      MutexLock lock(mutex_);
      layers_ = layers;
      if (std::exchange(advances_later_, true)) return;
    }
    AdvanceLater();
  }
  void Ended(absl::StatusOr<std::vector<MissReason>> verdict) override {
    {
      MutexLock lock(mutex_);
      memory_.EndRequest(std::exchange(request_bytes_, 0));
      if (verdict.ok()) Count(verdict->size() * sizeof(MissReason), verdict_bytes_);
      end_ = std::move(verdict);
      if (std::exchange(advances_later_, true)) return;
    }
    AdvanceLater();
  }

 private:
  void AdvanceLater() {
    EventLoop::AfterTurn([this] {
      bool done;
      {
        MutexLock lock(mutex_);
        advances_later_ = false;
        if (!done_) Advance();
        done = done_;
      }
      if (done) delete this;
    });
  }

  // Returns false if too much is unread: then this is dropped, and nothing more is written.
  bool Count(size_t bytes, size_t& counted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (memory_.HoldAnswer(bytes)) {
      counted = bytes;
      return true;
    }
    unread_full_ = broken_ = true;
    return false;
  }

  // Writes only the newest event: a slow reader gets fewer events and no queue builds up.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // Landed bytes stay landed, as when a connection breaks.
    if (unread_full_ && end_.has_value()) end_ = absl::UnavailableError(kUnread);
    const bool refused = end_.has_value() && !end_->ok();
    if (writing_ || finished_ || (awaits_match_ && !refused)) return;
    const bool verdict_to_write = end_.has_value() && end_->ok() && !broken_;
    if (verdict_to_write || ((match_.has_value() || layers_ > layers_written_) && !broken_)) {
      v1::LandEvent event;
      event.set_layers_done(layers_);
      layers_written_ = layers_;
      if (match_.has_value()) *event.mutable_match() = *std::exchange(match_, std::nullopt);
      if (verdict_to_write) {
        event.mutable_verdict();
        for (MissReason reason : **end_) event.mutable_verdict()->add_miss_reasons(static_cast<uint32_t>(reason));
      }
      writing_ = true;
      event_.Clear();
      WriteBytes(event, &event_);
      if (!end_.has_value()) return StartWrite(&event_);
    }
    if (!end_.has_value()) return;
    finished_ = true;
    timer_.Finished(end_->status().code());
    const grpc::Status status = ToGrpc(end_->status());
    // The status is sent with the verdict, so the client needs no further message.
    verdict_to_write ? StartWriteAndFinish(&event_, {}, status) : Finish(status);
  }

  EngineService& service_;
  CallMemory& memory_;
  const CallTimer timer_;

  Mutex mutex_;
  std::string session_;  // set under mutex_ before begun_; constant afterwards, like landing_
  storage::LandingId landing_ = 0;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  bool awaits_match_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::PromptMatch> match_ ABSL_GUARDED_BY(mutex_);                                // not written yet
  size_t request_bytes_ ABSL_GUARDED_BY(mutex_) = 0;                                            // counted as held
  size_t match_bytes_ ABSL_GUARDED_BY(mutex_) = 0, verdict_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // counted as unread
  uint32_t layers_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t layers_written_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<absl::StatusOr<std::vector<MissReason>>> end_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer event_ ABSL_GUARDED_BY(mutex_);  // read by gRPC while writing_
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;       // the reader has disconnected
  bool unread_full_ ABSL_GUARDED_BY(mutex_) = false;  // the tenant's engines leave too much unread
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool advances_later_ ABSL_GUARDED_BY(mutex_) = false;  // AdvanceLater uses the stream, so it is not deleted yet
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

// One reply, counted until gRPC has sent it. Deletes itself then.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  explicit UnaryCall(CallMemory& memory) : memory_(memory) {}
  // Call before Answer: charges this number of bytes.
  absl::Status Hold(CacheCall call, size_t bytes) {
    if (!memory_.HoldRequest(bytes)) return OutOfMemory(call, kHeld);
    request_bytes_ = bytes;
    return absl::OkStatus();
  }
  // `answer` is the reply object of the call; it is written only if the reply is sent.
  template <typename Reply>
  absl::Status Answer(absl::Status status, const Reply& reply, grpc::ByteBuffer* answer) {
    if (status.ok()) {
      const size_t bytes = reply.ByteSizeLong();
      if (memory_.HoldAnswer(bytes)) {
        bytes_ = bytes;
        WriteBytes(reply, answer);
      } else {
        // The work stays done, as when a connection breaks.
        status = absl::UnavailableError(kUnread);
      }
    }
    memory_.EndRequest(request_bytes_);
    HappensBefore(this);
    Finish(ToGrpc(status));  // may delete this
    return status;
  }
  void OnDone() override {
    HappensAfter(this);
    memory_.EndAnswer(bytes_);
    delete this;
  }

 private:
  CallMemory& memory_;
  size_t request_bytes_ = 0;  // counted as held
  size_t bytes_ = 0;          // counted as unread
};

class RefusedStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  explicit RefusedStream(const grpc::Status& why) { Finish(why); }
  void OnDone() override { delete this; }
};

// Requests stay bytes. Each call adds its own base class.
template <typename Service>
using Plain = Service;
template <template <typename> typename... Methods>
struct RawMethods {
  using Service = v1::Cache::Service;
};
template <template <typename> typename First, template <typename> typename... Rest>
struct RawMethods<First, Rest...> {
  using Service = First<typename RawMethods<Rest...>::Service>;
};
#define ASHLAR_RAW(name, ...) , v1::Cache::WithRawCallbackMethod_##name
using RawCache = RawMethods<Plain ASHLAR_CACHE_CALLS(ASHLAR_RAW, ASHLAR_RAW)>::Service;
#undef ASHLAR_RAW

class CacheService final : public RawCache {
 public:
  CacheService(EngineService& service, CallMetrics& metrics, CallsUnderWay& calls, TenantCalls& tenant, uid_t user)
      : service_(service),
        metrics_(metrics),
        calls_(calls),
        memory_(tenant.memory),
        reader_(tenant.reader),
        user_(user) {}

 private:
  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;
  using Bytes = grpc::ByteBuffer;

  Reactor* OpenModel(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::OpenModelRequest, v1::OpenModelReply>(context, CacheCall::kOpenModel, &EngineService::OpenModel,
                                                           *bytes, answer);
  }
  Reactor* CloseModel(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::CloseModelRequest, v1::CloseModelReply>(context, CacheCall::kCloseModel,
                                                             &EngineService::CloseModel, *bytes, answer);
  }
  Reactor* DeclarePages(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::DeclarePagesRequest, v1::DeclarePagesReply>(context, CacheCall::kDeclarePages,
                                                                 &EngineService::DeclarePages, *bytes, answer);
  }
  Reactor* Match(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::MatchRequest, v1::MatchReply>(context, CacheCall::kMatch, &EngineService::Match, *bytes, answer);
  }
  Reactor* Reserve(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::ReserveRequest, v1::ReserveReply>(context, CacheCall::kReserve, &EngineService::Reserve, *bytes,
                                                       answer);
  }
  Reactor* Publish(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::PublishRequest, v1::PublishReply>(context, CacheCall::kPublish, &EngineService::Publish, *bytes,
                                                       answer);
  }
  Reactor* Abandon(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::AbandonRequest, v1::AbandonReply>(context, CacheCall::kAbandon, &EngineService::Abandon, *bytes,
                                                       answer);
  }
  Reactor* Commit(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::CommitRequest, v1::CommitReply>(context, CacheCall::kCommit, &EngineService::Commit, *bytes,
                                                     answer);
  }
  grpc::ServerWriteReactor<Bytes>* Land(Context*, const Bytes* bytes) override {
    return Stream<v1::LandRequest>(CacheCall::kLand, &EngineService::Land, *bytes);
  }
  grpc::ServerWriteReactor<Bytes>* LookupAndLand(Context*, const Bytes* bytes) override {
    return Stream<v1::LookupAndLandRequest>(CacheCall::kLookupAndLand, &EngineService::LookupAndLand, *bytes);
  }
  Reactor* Advance(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::AdvanceRequest, v1::CompositionReply>(context, CacheCall::kAdvance, &EngineService::Advance,
                                                           *bytes, answer);
  }
  Reactor* Quiesce(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::QuiesceRequest, v1::QuiesceReply>(context, CacheCall::kQuiesce, &EngineService::Quiesce, *bytes,
                                                       answer);
  }
  Reactor* Release(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::ReleaseRequest, v1::ReleaseReply>(context, CacheCall::kRelease, &EngineService::Release, *bytes,
                                                       answer);
  }
  Reactor* AttachLease(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::AttachLeaseRequest, v1::AttachLeaseReply>(context, CacheCall::kAttachLease,
                                                               &EngineService::AttachLease, *bytes, answer);
  }
  Reactor* Admit(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::AdmitRequest, v1::AdmitReply>(context, CacheCall::kAdmit, service_.admissions(),
                                                   &AdmissionCalls::Admit, *bytes, answer);
  }
  Reactor* ExtendAdmission(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::ExtendAdmissionRequest, v1::AdmitReply>(
        context, CacheCall::kExtendAdmission, service_.admissions(), &AdmissionCalls::ExtendAdmission, *bytes, answer);
  }
  Reactor* MarkFilled(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::MarkFilledRequest, v1::MarkFilledReply>(context, CacheCall::kMarkFilled, service_.admissions(),
                                                             &AdmissionCalls::MarkFilled, *bytes, answer);
  }
  Reactor* AttachAdmission(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::AttachAdmissionRequest, v1::AdmitReply>(
        context, CacheCall::kAttachAdmission, service_.admissions(), &AdmissionCalls::AttachAdmission, *bytes, answer);
  }
  Reactor* PlanPrefill(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::PlanPrefillRequest, v1::PlanPrefillReply>(context, CacheCall::kPlanPrefill, service_.prefills(),
                                                               &PrefillCalls::PlanPrefill, *bytes, answer);
  }
  Reactor* AwaitPrefill(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::AwaitPrefillRequest, v1::AwaitPrefillReply>(context, CacheCall::kAwaitPrefill, service_.prefills(),
                                                                 &PrefillCalls::AwaitPrefill, *bytes, answer);
  }
  Reactor* EndPrefill(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::EndPrefillRequest, v1::EndPrefillReply>(context, CacheCall::kEndPrefill, service_.prefills(),
                                                             &PrefillCalls::EndPrefill, *bytes, answer);
  }
  Reactor* ServePrefill(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::ServePrefillRequest, v1::ServePrefillReply>(context, CacheCall::kServePrefill, service_.prefills(),
                                                                 &PrefillCalls::ServePrefill, *bytes, answer);
  }
  Reactor* HandOff(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::HandOffRequest, v1::HandOffReply>(context, CacheCall::kHandOff, &EngineService::HandOff, *bytes,
                                                       answer);
  }

  Reactor* Probe(Context* context, const Bytes* bytes, Bytes* answer) override {
    return Unary<v1::ProbeRequest, v1::ProbeReply>(context, CacheCall::kProbe, &EngineService::Probe, *bytes, answer);
  }

  // Reads here, or on the tenant's own thread if it may take long.
  void Read(const Bytes& bytes, std::function<void()> read) {
    if (bytes.Length() <= RequestReader::kAtOnceBytes) return read();
    reader_.Post(std::move(read));
  }

  template <typename Request>
  grpc::ServerWriteReactor<Bytes>* Stream(CacheCall call,
                                          void (EngineService::*handler)(const Request&, LandingReplies&),
                                          const Bytes& bytes) {
    HappensAfter(this);  // gRPC's thread may have started before the service
    if (!memory_.MayBegin()) return new RefusedStream(ToGrpc(absl::ResourceExhaustedError(kUnread)));
    if (!calls_.Enter()) return new RefusedStream(Stopping());
    constexpr bool kAwaitsMatch = std::is_same_v<Request, v1::LookupAndLandRequest>;
    auto* const stream = new LandStream(service_, memory_, CallTimer(calls_, metrics_, call), kAwaitsMatch);
    Read(bytes, [this, stream, call, handler, bytes] {
      google::protobuf::Arena arena;
      Request& request = *google::protobuf::Arena::CreateMessage<Request>(&arena);
      absl::Status read = Parse(bytes, call, service_, user_, &request);
      if (read.ok()) read = stream->Hold(arena.SpaceUsed());
      read.ok() ? stream->Begin(handler, request) : stream->Refuse(read);
    });
    return stream;
  }

  template <typename Request, typename Reply>
  Reactor* Unary(Context* context, CacheCall call,
                 void (EngineService::*handler)(const Request&, Reply*, EngineService::Done), const Bytes& bytes,
                 Bytes* answer) {
    return Unary<Request, Reply, EngineService>(context, call, service_, handler, bytes, answer);
  }

  // `calls` has the handler, and is a part of the service.
  template <typename Request, typename Reply, typename Calls>
  Reactor* Unary(Context* context, CacheCall call, Calls& calls,
                 void (Calls::*handler)(const Request&, Reply*, EngineService::Done), const Bytes& bytes,
                 Bytes* answer) {
    HappensAfter(this);
    const bool may_begin = memory_.MayBegin() || GivesBack(call);
    if (!may_begin || !calls_.Enter()) {
      Reactor* const refused = context->DefaultReactor();
      refused->Finish(may_begin ? Stopping() : ToGrpc(OutOfMemory(call, kUnread)));
      return refused;
    }
    auto* const reactor = new UnaryCall(memory_);
    struct Messages {  // one allocation, which the metadata thread frees
      google::protobuf::Arena arena;
      Request& request = *google::protobuf::Arena::CreateMessage<Request>(&arena);
      Reply& reply = *google::protobuf::Arena::CreateMessage<Reply>(&arena);
    };
    const auto messages = std::make_shared<Messages>();
    const auto done = [reactor, messages, answer, timer = CallTimer(calls_, metrics_, call)](absl::Status status) {
      EventLoop::AfterTurn([reactor, messages, answer, timer, status = std::move(status)] {
        timer.Finished(reactor->Answer(status, messages->reply, answer).code());
      });
    };
    Read(bytes, [this, call, &calls, handler, bytes, reactor, messages, done] {
      absl::Status read = Parse(bytes, call, service_, user_, &messages->request);
      if (read.ok() && !GivesBack(call)) read = reactor->Hold(call, messages->arena.SpaceUsed());
      if (!read.ok()) return done(read);
      // Not `calls.*handler`: with sanitizers, GCC 12 reads `this` before it is set.
      std::invoke(handler, calls, messages->request, &messages->reply, done);
    });
    return reactor;
  }

  EngineService& service_;
  CallMetrics& metrics_;
  CallsUnderWay& calls_;
  CallMemory& memory_;
  RequestReader& reader_;
  const uid_t user_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeCacheService(EngineService& service, Metrics& metrics, CallsUnderWay& calls,
                                                TenantCalls& tenant, uid_t user) {
  auto made = std::make_unique<CacheService>(service, metrics.calls(), calls, tenant, user);
  HappensBefore(made.get());
  return made;
}

}  // namespace ashlar::daemon
