// SPDX-License-Identifier: Apache-2.0
#include "client/session/compose_call.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_unary_call.h>

#include <utility>

#include "ashlar/v1/cache.grpc.pb.h"
#include "client/session/process_bound.h"
#include "client/session/rpc.h"
#include "client/session/writing_call.h"

namespace ashlar::internal {

class ComposeCall::Impl final : public WritingCall {
 public:
  explicit Impl(std::shared_ptr<Connection> to)
      : WritingCall(std::move(to)), stub_(v1::Cache::NewStub(connection().rpc().channel())) {}
  ~Impl() override { End(); }

  void Start(v1::AdvanceRequest& request) {
    request.set_session(connection().session());
    request.set_number(number());
    MutexLock lock(mutex_);
    call_ = stub_->PrepareAsyncAdvance(&context_, request, &queue());
    call_->StartCall();
    call_->Finish(&reply_, &status_, AsTag(kFinished));
  }
  absl::StatusOr<v1::CompositionReply> WaitReply(Deadline deadline);

 private:
  using Call = grpc::ClientAsyncResponseReader<v1::CompositionReply>;
  static constexpr intptr_t kFinished = 1;

  void Take(intptr_t, bool) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (status_.ok() || Refused()) SetQuiesced();
    SetOver();
  }
  void Cancel() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { context_.TryCancel(); }
  // The daemon itself refused, and has accessed nothing. After any other failure the progress is unknown.
  bool Refused() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const grpc::StatusCode code = status_.error_code();
    return code == grpc::StatusCode::INVALID_ARGUMENT || code == grpc::StatusCode::UNAUTHENTICATED;
  }

  const std::unique_ptr<v1::Cache::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<Call> call_ ABSL_GUARDED_BY(mutex_);
  v1::CompositionReply reply_ ABSL_GUARDED_BY(mutex_);
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<v1::CompositionReply> ComposeCall::Impl::WaitReply(Deadline deadline) {
  MutexLock lock(mutex_);
  if (!WaitUntil(deadline, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return over(); })) {
    Abandon();
    return absl::DeadlineExceededError("the daemon did not reply before the deadline");
  }
  if (status_.ok()) return reply_;
  return absl::Status(static_cast<absl::StatusCode>(status_.error_code()), status_.error_message());
}

ComposeCall::ComposeCall(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ComposeCall::~ComposeCall() = default;

std::shared_ptr<ComposeCall> ComposeCall::Start(std::shared_ptr<Connection> connection, v1::AdvanceRequest& request) {
  if (!connection->EnterLanding()) return nullptr;
  auto impl = std::make_unique<Impl>(std::move(connection));
  impl->Start(request);
  return MakeProcessBound<ComposeCall>(std::move(impl));
}

absl::StatusOr<v1::CompositionReply> ComposeCall::WaitReply(Deadline deadline) {
  return impl_->WaitReply(deadline);
}

bool ComposeCall::WaitQuiesced(Deadline deadline) {
  return impl_->WaitQuiesced(deadline);
}

}  // namespace ashlar::internal
