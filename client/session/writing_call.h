// SPDX-License-Identifier: Apache-2.0
// WritingCall: a call during which the daemon writes into the engine's memory, and the proof that it can write no more
// (ADR 0031).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "client/session/connection.h"
#include "client/session/deadline.h"
#include "kernels/mutex.h"

namespace grpc {
class CompletionQueue;
}

namespace ashlar::internal {

// The common part of landings and compositions. Thread-safe. It has no thread of its own: the waiting threads read the
// events.
class WritingCall {
 public:
  virtual ~WritingCall();
  WritingCall(const WritingCall&) = delete;
  WritingCall& operator=(const WritingCall&) = delete;

  // True once nothing can write for this call any longer: the verdict arrived, the daemon confirmed that it has stopped
  // writing, or the kernel confirmed that the daemon is dead. With a deadline in the past, this only checks, and asks
  // the daemon again if it did not answer.
  bool WaitQuiesced(Deadline deadline);

 protected:
  // Assigns a number to the call, which has entered `connection` (Connection::EnterLanding) and leaves it once it is
  // quiesced.
  explicit WritingCall(std::shared_ptr<Connection> connection);

  // Handles a finished part of the call itself. The derived class chooses the tags, which are positive.
  virtual void Take(intptr_t tag, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // Cancels the gRPC call. Its parts are still passed to Take.
  virtual void Cancel() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;

  Connection& connection() const { return *connection_; }
  uint64_t number() const { return number_; }
  grpc::CompletionQueue& queue() const { return *queue_; }
  static void* AsTag(intptr_t tag) { return reinterpret_cast<void*>(tag); }

  // Reads events until done() or the deadline, and returns done(). Releases mutex_ while it waits.
  bool WaitUntil(Deadline deadline, const std::function<bool()>& done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetQuiesced() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Marks the call as ended. Without a verdict, asks the daemon whether it is quiesced.
  void SetOver() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool over() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return over_; }
  // No caller waits for the verdict any longer: cancels, and asks.
  void Abandon() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Derived destructors call it first: cancels, and waits until the call is quiesced and all of its parts have been
  // handled.
  void End();

  Mutex mutex_;  // also guards the state of derived classes

 private:
  enum class Query { kNone, kAsking, kUnanswered };  // whether the call is quiesced; kNone: no open query
  struct Question;

  void TakeAny(intptr_t tag, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AskQuiesced() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<Connection> connection_;
  const uint64_t number_;
  const std::unique_ptr<grpc::CompletionQueue> queue_;

  CondVar changed_;
  bool taking_ ABSL_GUARDED_BY(mutex_) = false;  // a thread waits on the queue, the others for changed_
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  bool quiesced_ ABSL_GUARDED_BY(mutex_) = false;
  Query query_ ABSL_GUARDED_BY(mutex_) = Query::kNone;
  std::unique_ptr<Question> question_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::internal
