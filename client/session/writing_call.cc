// SPDX-License-Identifier: Apache-2.0
#include "client/session/writing_call.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_unary_call.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "ashlar/v1/cache.grpc.pb.h"

namespace ashlar::internal {
namespace {

// Interval between two questions whether the call is quiesced, if the daemon lives but did not answer the first.
constexpr std::chrono::milliseconds kAskAgain{20};

constexpr intptr_t kQuiesced = 0;

}  // namespace

// The Quiesce call that is in flight or was made last.
struct WritingCall::Question {
  std::unique_ptr<v1::Cache::Stub> stub;
  std::unique_ptr<grpc::ClientContext> context;
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::QuiesceReply>> call;
  v1::QuiesceReply reply;
  grpc::Status status;
  Deadline ask_again{};  // earliest time of the next call if this one is not answered
};

WritingCall::WritingCall(std::shared_ptr<Connection> connection)
    : connection_(std::move(connection)),
      number_(connection_->NextLanding()),
      queue_(std::make_unique<grpc::CompletionQueue>()),
      question_(std::make_unique<Question>()) {}

WritingCall::~WritingCall() = default;

// One thread at a time waits on the queue.
bool WritingCall::WaitUntil(Deadline deadline, const std::function<bool()>& done) {
  while (!done()) {
    if (taking_) {
      if (!changed_.WaitUntil(mutex_, deadline) && !done()) return false;
      continue;
    }
    taking_ = true;
    mutex_.Unlock();
    void* tag = nullptr;
    bool ok = false;
    const auto wall = deadline == Deadline::max()
                          ? std::chrono::system_clock::time_point::max()
                          : std::chrono::system_clock::now() + std::chrono::ceil<std::chrono::system_clock::duration>(
                                                                   deadline - std::chrono::steady_clock::now());
    const auto next = queue_->AsyncNext(&tag, &ok, wall);
    mutex_.Lock();
    taking_ = false;
    if (next == grpc::CompletionQueue::GOT_EVENT) TakeAny(reinterpret_cast<intptr_t>(tag), ok);
    changed_.NotifyAll();
    if (next != grpc::CompletionQueue::GOT_EVENT && Passed(deadline)) return done();
  }
  return true;
}

void WritingCall::TakeAny(intptr_t tag, bool ok) {
  if (tag != kQuiesced) return Take(tag, ok);
  if (question_->status.ok()) SetQuiesced();
  query_ = quiesced_ ? Query::kNone : Query::kUnanswered;
}

void WritingCall::SetQuiesced() {
  if (!std::exchange(quiesced_, true)) connection_->LeaveLanding();
}

void WritingCall::SetOver() {
  over_ = true;
  if (!quiesced_ && query_ == Query::kNone) AskQuiesced();
}

void WritingCall::Abandon() {
  Cancel();
  if (query_ == Query::kNone) AskQuiesced();
}

// Without a deadline, because even a late answer frees the memory.
void WritingCall::AskQuiesced() {
  query_ = Query::kAsking;
  question_->ask_again = After(kAskAgain);
  v1::QuiesceRequest request;
  request.set_session(connection_->session());
  request.set_landing(number_);
  request.set_daemon_epoch(connection_->daemon_epoch());
  if (question_->stub == nullptr) question_->stub = v1::Cache::NewStub(connection_->rpc().channel());
  question_->context = std::make_unique<grpc::ClientContext>();
  question_->call = question_->stub->PrepareAsyncQuiesce(question_->context.get(), request, queue_.get());
  question_->call->StartCall();
  question_->call->Finish(&question_->reply, &question_->status, AsTag(kQuiesced));
}

bool WritingCall::WaitQuiesced(Deadline deadline) {
  MutexLock lock(mutex_);
  for (;;) {
    WaitUntil(deadline,
              [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return quiesced_ || query_ == Query::kUnanswered; });
    if (connection_->daemon().Dead()) SetQuiesced();
    // A caller that only polls also asks again.
    if (quiesced_ || (Passed(deadline) && (query_ != Query::kUnanswered || !Passed(question_->ask_again))))
      return quiesced_;
    lock.Unlock();
    connection_->daemon().WaitDead(std::min(deadline, After(kAskAgain)));
    // Perhaps only the connection is broken. Dialing a socket of this machine does not wait for its listener.
    const absl::StatusOr<std::unique_ptr<Rpc>> dialed = connection_->DialAgain(std::min(deadline, After(kAskAgain)));
    lock.Lock();
    if (query_ != Query::kUnanswered) continue;
    if (dialed.ok()) question_->stub = v1::Cache::NewStub((*dialed)->channel());
    AskQuiesced();
  }
}

void WritingCall::End() {
  {
    MutexLock lock(mutex_);
    if (!quiesced_) Cancel();
  }
  WaitQuiesced(Deadline::max());
  // Calls in progress are cancelled, and return at once.
  MutexLock lock(mutex_);
  Cancel();
  if (query_ == Query::kAsking) question_->context->TryCancel();
  WaitUntil(Deadline::max(),
            [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return over_ && query_ != Query::kAsking; });
  queue_->Shutdown();
  void* tag;
  bool ok;
  while (queue_->Next(&tag, &ok)) {
  }
}

}  // namespace ashlar::internal
