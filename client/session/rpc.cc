#include "client/session/rpc.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/support/channel_arguments.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "ashlar/v1/cache.grpc.pb.h"
#include "client/session/unix_socket.h"
#include "proto/limits.h"

namespace ashlar::internal {
namespace {

absl::Status ToStatus(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(limits::kMaxReplyBytes);
  arguments.SetMaxSendMessageSize(limits::kMaxRequestBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // a call that failed is a miss, never made twice
  return arguments;
}

}  // namespace

struct Rpc::Impl {
  template <typename Request, typename Reply>
  using Method = grpc::Status (v1::Cache::Stub::*)(grpc::ClientContext*, const Request&, Reply*);

  template <typename Request, typename Reply>
  absl::Status Call(Method<Request, Reply> method, const Request& request, Reply& reply, Deadline deadline,
                    bool* sent = nullptr) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::ceil<std::chrono::system_clock::duration>(
                                                                deadline - std::chrono::steady_clock::now()));
    const absl::Status entered = Enter(context);
    if (sent != nullptr) *sent = entered.ok();
    if (!entered.ok()) return entered;
    const absl::Status status = ToStatus(((*stub).*method)(&context, request, &reply));
    Leave(context);
    Ended(status);
    return status;
  }

  void Ended(const absl::Status& status) {
    const bool useless = absl::IsUnavailable(status) || absl::IsUnauthenticated(status);
    if (useless && !lost.exchange(true)) on_lost();
  }

  absl::Status Enter(grpc::ClientContext& context) {
    std::lock_guard lock(mutex);
    if (shut_down) return absl::UnavailableError("the session with the daemon has ended");
    if (calls.size() >= kMaxCalls) return absl::ResourceExhaustedError("too many calls at a time");
    calls.insert(&context);
    return absl::OkStatus();
  }

  void Leave(grpc::ClientContext& context) {
    std::lock_guard lock(mutex);
    calls.erase(&context);
  }

  std::function<void()> on_lost;
  std::atomic<bool> lost = false;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Cache::Stub> stub;

  std::mutex mutex;
  bool shut_down = false;
  std::unordered_set<grpc::ClientContext*> calls;
};

Rpc::Rpc(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Rpc::~Rpc() = default;

absl::StatusOr<std::unique_ptr<Rpc>> Rpc::Open(const std::string& socket, std::function<void()> on_lost,
                                               Deadline deadline, const std::stop_token& stop) {
  absl::StatusOr<Descriptor> connected = ConnectUnix(socket, SOCK_STREAM, deadline, stop);
  if (!connected.ok()) return connected.status();
  // gRPC closes what it is given, and the thread sanitizer does not see that: it gets a copy, which that never saw
  // either.
  absl::StatusOr<Descriptor> given = Descriptor::Duplicate(connected->get());
  if (!given.ok()) return given.status();
  auto impl = std::make_unique<Impl>();
  impl->on_lost = std::move(on_lost);
  impl->channel = grpc::CreateCustomInsecureChannelFromFd("localhost", given->release(), Arguments());
  impl->stub = v1::Cache::NewStub(impl->channel);
  return std::unique_ptr<Rpc>(new Rpc(std::move(impl)));
}

absl::Status Rpc::OpenModel(const v1::OpenModelRequest& request, v1::OpenModelReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::OpenModel, request, reply, deadline);
}
absl::Status Rpc::CloseModel(const v1::CloseModelRequest& request, v1::CloseModelReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::CloseModel, request, reply, deadline);
}
absl::Status Rpc::DeclarePages(const v1::DeclarePagesRequest& request, v1::DeclarePagesReply& reply,
                               Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::DeclarePages, request, reply, deadline);
}
absl::Status Rpc::Match(const v1::MatchRequest& request, v1::MatchReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::Match, request, reply, deadline);
}
absl::Status Rpc::AttachLease(const v1::AttachLeaseRequest& request, v1::AttachLeaseReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::AttachLease, request, reply, deadline);
}
absl::Status Rpc::Reserve(const v1::ReserveRequest& request, v1::ReserveReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::Reserve, request, reply, deadline);
}
absl::Status Rpc::Publish(const v1::PublishRequest& request, v1::PublishReply& reply, Deadline deadline, bool& sent) {
  return impl_->Call(&v1::Cache::Stub::Publish, request, reply, deadline, &sent);
}
absl::Status Rpc::Commit(const v1::CommitRequest& request, v1::CommitReply& reply, Deadline deadline, bool& sent) {
  return impl_->Call(&v1::Cache::Stub::Commit, request, reply, deadline, &sent);
}
absl::Status Rpc::Abandon(const v1::AbandonRequest& request, v1::AbandonReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::Abandon, request, reply, deadline);
}
absl::Status Rpc::Release(const v1::ReleaseRequest& request, v1::ReleaseReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::Release, request, reply, deadline);
}
absl::Status Rpc::Admit(const v1::AdmitRequest& request, v1::AdmitReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::Admit, request, reply, deadline);
}
absl::Status Rpc::ExtendAdmission(const v1::ExtendAdmissionRequest& request, v1::AdmitReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::ExtendAdmission, request, reply, deadline);
}
absl::Status Rpc::MarkFilled(const v1::MarkFilledRequest& request, v1::MarkFilledReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::MarkFilled, request, reply, deadline);
}
absl::Status Rpc::AttachAdmission(const v1::AttachAdmissionRequest& request, v1::AdmitReply& reply, Deadline deadline) {
  return impl_->Call(&v1::Cache::Stub::AttachAdmission, request, reply, deadline);
}

void Rpc::Shutdown() {
  std::lock_guard lock(impl_->mutex);
  impl_->shut_down = true;
  for (grpc::ClientContext* call : impl_->calls) call->TryCancel();
}

void Rpc::Ended(const absl::Status& status) {
  impl_->Ended(status);
}

bool Rpc::lost() const {
  return impl_->lost;
}

const std::shared_ptr<grpc::Channel>& Rpc::channel() const {
  return impl_->channel;
}

MissReason ToMissReason(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return MissReason::kNone;
    case absl::StatusCode::kResourceExhausted:
      return MissReason::kBusy;
    case absl::StatusCode::kDeadlineExceeded:
      return MissReason::kTimedOut;
    case absl::StatusCode::kNotFound:
      return MissReason::kLeaseLost;
    case absl::StatusCode::kInvalidArgument:
      return MissReason::kInvalidRequest;
    default:
      return MissReason::kDaemonUnavailable;
  }
}

MissReason ToMissReason(uint32_t wire) {
  constexpr auto kLast = static_cast<uint32_t>(MissReason::kCovered);
  return wire <= kLast ? static_cast<MissReason>(wire) : MissReason::kTierError;
}

}  // namespace ashlar::internal
