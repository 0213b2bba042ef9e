// SPDX-License-Identifier: Apache-2.0
// WritingCall: a call during which the daemon writes into the engine's memory, and the proof that it can write no more
// (docs/decisions: a landing in doubt stays in doubt).
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

// The common part of landings and compositions. Thread-safe. It has no thread of its own: the threads that wait take in
// the events.
class WritingCall {
 public:
  virtual ~WritingCall();
  WritingCall(const WritingCall&) = delete;
  WritingCall& operator=(const WritingCall&) = delete;

  // True once nothing can write for this call any more: the verdict came, the daemon confirmed that writing has ceased,
  // or the kernel that the daemon is dead. A deadline that has passed only looks, and asks the daemon again where it
  // did not answer.
  bool WaitQuiet(Deadline deadline);

 protected:
  // Takes a number for the call, which has entered `connection` (Connection::EnterLanding) and leaves it once it is
  // quiet.
  explicit WritingCall(std::shared_ptr<Connection> connection);

  // A finished part of the call itself; tags are the derived class's own, positive.
  virtual void Take(intptr_t tag, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // Asks gRPC to give the call up. Its parts still come to Take.
  virtual void Cancel() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;

  Connection& connection() const { return *connection_; }
  uint64_t number() const { return number_; }
  grpc::CompletionQueue& queue() const { return *queue_; }
  static void* AsTag(intptr_t tag) { return reinterpret_cast<void*>(tag); }

  // Takes in events until done() or the deadline, and returns done(). Releases mutex_ while it waits.
  bool WaitUntil(Deadline deadline, const std::function<bool()>& done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetQuiet() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The call has ended. Without a verdict the daemon is asked whether it is quiet.
  void SetOver() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool over() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return over_; }
  // Nobody waits for the verdict any more: cancels, and asks.
  void GiveUp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Derived destructors call it first: cancels, waits until the call is quiet and all of it has come back.
  void End();

  Mutex mutex_;  // also guards the state of derived classes

 private:
  enum class Doubt { kNone, kAsking, kUnanswered };  // kNone also before there is any
  struct Question;

  void TakeAny(intptr_t tag, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AskQuiet() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<Connection> connection_;
  const uint64_t number_;
  const std::unique_ptr<grpc::CompletionQueue> queue_;

  CondVar changed_;
  bool taking_ ABSL_GUARDED_BY(mutex_) = false;  // a thread waits on the queue, the others for changed_
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  bool quiet_ ABSL_GUARDED_BY(mutex_) = false;
  Doubt doubt_ ABSL_GUARDED_BY(mutex_) = Doubt::kNone;
  std::unique_ptr<Question> question_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::internal
