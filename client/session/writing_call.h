// SPDX-License-Identifier: Apache-2.0
// WritingCall: a call during which the daemon writes into the engine's memory, and the proof that it can write no more
// (docs/decisions: a landing in doubt stays in doubt).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "client/session/connection.h"
#include "client/session/deadline.h"

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
  using Lock = std::unique_lock<std::mutex>;

  // Takes a number for the call, which has entered `connection` (Connection::EnterLanding) and leaves it once it is
  // quiet.
  explicit WritingCall(std::shared_ptr<Connection> connection);

  // A finished part of the call itself, with the lock held; tags are the derived class's own, positive.
  virtual void Take(intptr_t tag, bool ok) = 0;
  // Asks gRPC to give the call up. Its parts still come to Take.
  virtual void Cancel() = 0;

  Connection& connection() const { return *connection_; }
  uint64_t number() const { return number_; }
  grpc::CompletionQueue& queue() const { return *queue_; }
  static void* AsTag(intptr_t tag) { return reinterpret_cast<void*>(tag); }
  Lock Guard() { return Lock(mutex_); }

  // The following functions need the lock. Takes in events until done() or the deadline, and returns done().
  bool WaitUntil(Lock& lock, Deadline deadline, const std::function<bool()>& done);
  void SetQuiet();
  // The call has ended. Without a verdict the daemon is asked whether it is quiet.
  void SetOver();
  bool over() const { return over_; }
  // Nobody waits for the verdict any more: cancels, and asks.
  void GiveUp();

  // Derived destructors call it first: cancels, waits until the call is quiet and all of it has come back.
  void End();

 private:
  enum class Doubt { kNone, kAsking, kUnanswered };  // kNone also before there is any
  struct Question;

  void TakeAny(intptr_t tag, bool ok);
  void AskQuiet();

  const std::shared_ptr<Connection> connection_;
  const uint64_t number_;
  const std::unique_ptr<grpc::CompletionQueue> queue_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool taking_ = false;  // guarded by mutex_, as all below. A thread waits on the queue, the others for changed_
  bool over_ = false;
  bool quiet_ = false;
  Doubt doubt_ = Doubt::kNone;
  std::unique_ptr<Question> question_;
};

}  // namespace ashlar::internal
