// SPDX-License-Identifier: Apache-2.0
#include "client/session/land_call.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "ashlar/v1/cache.grpc.pb.h"
#include "client/session/process_bound.h"
#include "client/session/writing_call.h"

namespace ashlar::internal {

class LandCall::Impl final : public WritingCall {
 public:
  explicit Impl(std::shared_ptr<Connection> to)
      : WritingCall(std::move(to)), stub_(v1::Cache::NewStub(connection().rpc().channel())) {}
  ~Impl() override { End(); }

  template <typename Request>
  void Start(Request& request);
  absl::StatusOr<const v1::PromptMatch*> WaitMatch(Deadline deadline);
  void StopWaiting();
  bool WaitLayers(uint32_t layers, Deadline deadline);
  absl::StatusOr<std::vector<uint32_t>> WaitVerdict(Deadline deadline);

 private:
  enum Tag : intptr_t { kStarted = 1, kRead, kFinished };

  void Take(intptr_t tag, bool ok) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Cancel() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { context_.TryCancel(); }
  auto Prepare(const v1::LandRequest& request) { return stub_->PrepareAsyncLand(&context_, request, &queue()); }
  auto Prepare(const v1::LookupAndLandRequest& request) {
    return stub_->PrepareAsyncLookupAndLand(&context_, request, &queue());
  }
  void TakeEvent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool decided() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return verdict_.has_value() || over(); }
  absl::Status status() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return absl::Status(static_cast<absl::StatusCode>(status_.error_code()), status_.error_message());
  }

  const std::unique_ptr<v1::Cache::Stub> stub_;
  std::optional<v1::PromptMatch> match_ ABSL_GUARDED_BY(mutex_);  // constant once set
  uint32_t layers_done_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<std::vector<uint32_t>> verdict_ ABSL_GUARDED_BY(mutex_);
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientAsyncReader<v1::LandEvent>> reader_ ABSL_GUARDED_BY(mutex_);
  v1::LandEvent event_ ABSL_GUARDED_BY(mutex_);
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

template <typename Request>
void LandCall::Impl::Start(Request& request) {
  request.set_session(connection().session());
  request.set_landing(number());
  MutexLock lock(mutex_);
  reader_ = Prepare(request);
  reader_->StartCall(AsTag(kStarted));
}

void LandCall::Impl::Take(intptr_t tag, bool ok) {
  if (tag == kFinished) return SetOver();
  if (ok && tag == kRead) TakeEvent();
  if (ok) {
    reader_->Read(&event_, AsTag(kRead));
  } else {
    reader_->Finish(&status_, AsTag(kFinished));
  }
}

void LandCall::Impl::TakeEvent() {
  if (event_.has_match() && !match_.has_value()) match_ = std::move(*event_.mutable_match());
  layers_done_ = std::max(layers_done_, event_.layers_done());
  if (!event_.has_verdict()) return;
  verdict_.emplace(event_.verdict().miss_reasons().begin(), event_.verdict().miss_reasons().end());
  SetQuiesced();
}

absl::StatusOr<const v1::PromptMatch*> LandCall::Impl::WaitMatch(Deadline deadline) {
  MutexLock lock(mutex_);
  if (!WaitUntil(deadline, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return match_.has_value() || over(); })) {
    Abandon();
    return absl::DeadlineExceededError("the daemon sent no match before the deadline");
  }
  if (match_.has_value()) return &*match_;
  return status_.ok() ? absl::InternalError("the daemon ended the landing without a match") : status();
}

void LandCall::Impl::StopWaiting() {
  MutexLock lock(mutex_);
  if (!decided()) Abandon();
}

bool LandCall::Impl::WaitLayers(uint32_t layers, Deadline deadline) {
  MutexLock lock(mutex_);
  WaitUntil(deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return decided() || layers_done_ >= layers; });
  if (verdict_.has_value()) return std::ranges::all_of(*verdict_, [](uint32_t reason) { return reason == 0; });
  return !over() && layers_done_ >= layers;
}

absl::StatusOr<std::vector<uint32_t>> LandCall::Impl::WaitVerdict(Deadline deadline) {
  MutexLock lock(mutex_);
  if (!WaitUntil(deadline, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return decided(); })) {
    Abandon();
    return absl::DeadlineExceededError("the daemon sent no verdict before the deadline");
  }
  if (verdict_.has_value()) return *verdict_;
  return status();
}

LandCall::LandCall(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LandCall::~LandCall() = default;

template <typename Request>
std::shared_ptr<LandCall> LandCall::StartAny(std::shared_ptr<Connection> connection, Request& request) {
  if (!connection->EnterLanding()) return nullptr;
  auto impl = std::make_unique<Impl>(std::move(connection));
  impl->Start(request);
  return MakeProcessBound<LandCall>(std::move(impl));
}

std::shared_ptr<LandCall> LandCall::Start(std::shared_ptr<Connection> connection, v1::LandRequest& request) {
  return StartAny(std::move(connection), request);
}
std::shared_ptr<LandCall> LandCall::Start(std::shared_ptr<Connection> connection, v1::LookupAndLandRequest& request) {
  return StartAny(std::move(connection), request);
}

absl::StatusOr<const v1::PromptMatch*> LandCall::WaitMatch(Deadline deadline) {
  return impl_->WaitMatch(deadline);
}

void LandCall::Abandon() {
  impl_->StopWaiting();
}

bool LandCall::WaitLayers(uint32_t layers, Deadline deadline) {
  return impl_->WaitLayers(layers, deadline);
}

absl::StatusOr<std::vector<uint32_t>> LandCall::WaitVerdict(Deadline deadline) {
  return impl_->WaitVerdict(deadline);
}

bool LandCall::WaitQuiesced(Deadline deadline) {
  return impl_->WaitQuiesced(deadline);
}

}  // namespace ashlar::internal
