// SPDX-License-Identifier: Apache-2.0
#include "client/session/rpc.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/support/channel_arguments.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <unordered_set>
#include <utility>

#include "ashlar/v1/cache.grpc.pb.h"
#include "client/session/unix_socket.h"
#include "kernels/mutex.h"
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
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // a failed call is a miss, and never retried
  return arguments;
}

}  // namespace

struct Rpc::Impl {
  template <typename Request, typename Reply>
  using Method = grpc::Status (v1::Cache::Stub::*)(grpc::ClientContext*, const Request&, Reply*);

  template <typename Request, typename Reply>
  absl::Status Call(Method<Request, Reply> method, const Request& request, Reply& reply, Deadline deadline,
                    bool* sent) {
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
    MutexLock lock(mutex);
    if (shut_down) return absl::UnavailableError("the session with the daemon has ended");
    if (calls.size() >= kMaxCalls) return absl::ResourceExhaustedError("too many concurrent calls");
    calls.insert(&context);
    return absl::OkStatus();
  }

  void Leave(grpc::ClientContext& context) {
    MutexLock lock(mutex);
    calls.erase(&context);
  }

  std::function<void()> on_lost;
  std::atomic<bool> lost = false;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Cache::Stub> stub;

  Mutex mutex;
  bool shut_down ABSL_GUARDED_BY(mutex) = false;
  std::unordered_set<grpc::ClientContext*> calls ABSL_GUARDED_BY(mutex);
};

Rpc::Rpc(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Rpc::~Rpc() = default;

absl::StatusOr<std::unique_ptr<Rpc>> Rpc::Open(const std::string& socket, std::function<void()> on_lost,
                                               Deadline deadline, const std::stop_token& stop) {
  absl::StatusOr<Descriptor> connected = ConnectUnix(socket, SOCK_STREAM, deadline, stop);
  if (!connected.ok()) return connected.status();
  // gRPC closes its descriptor, which the thread sanitizer does not see. So gRPC gets a duplicate that the sanitizer
  // has not seen either.
  absl::StatusOr<Descriptor> given = Descriptor::Duplicate(connected->get());
  if (!given.ok()) return given.status();
  auto impl = std::make_unique<Impl>();
  impl->on_lost = std::move(on_lost);
  impl->channel = grpc::CreateCustomInsecureChannelFromFd("localhost", given->release(), Arguments());
  impl->stub = v1::Cache::NewStub(impl->channel);
  return std::unique_ptr<Rpc>(new Rpc(std::move(impl)));
}

// Every unary call of proto/cache_calls.h; the compiler reports calls that rpc.h does not declare.
#define ASHLAR_UNARY(name, request, reply, callers)                                                    \
  absl::Status Rpc::name(const v1::request& asked, v1::reply& answer, Deadline deadline, bool* sent) { \
    return impl_->Call(&v1::Cache::Stub::name, asked, answer, deadline, sent);                         \
  }
#define ASHLAR_STREAM(...)
ASHLAR_CACHE_CALLS(ASHLAR_UNARY, ASHLAR_STREAM)
#undef ASHLAR_UNARY
#undef ASHLAR_STREAM

void Rpc::Shutdown() {
  MutexLock lock(impl_->mutex);
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
  constexpr auto kLast = static_cast<uint32_t>(MissReason::kHolderUnreachable);
  return wire <= kLast ? static_cast<MissReason>(wire) : MissReason::kTierError;
}

}  // namespace ashlar::internal
