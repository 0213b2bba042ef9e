// SPDX-License-Identifier: Apache-2.0
// ComposeCall: one Advance call, its verdict, and the proof that it can write no more.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "client/session/connection.h"
#include "client/session/deadline.h"

namespace ashlar::v1 {
class AdvanceRequest;
class CompositionReply;
}  // namespace ashlar::v1

namespace ashlar::internal {

// Thread-safe. Process-bound.
class ComposeCall {
 public:
  // Starts the call. `request` is complete except for the session and the call's number. Null: too many calls are in
  // flight.
  static std::shared_ptr<ComposeCall> Start(std::shared_ptr<Connection> connection, v1::AdvanceRequest& request);
  ~ComposeCall();  // cancels, and waits until the call is quiesced

  // Returns the daemon's answer, or the error if there is none. At the deadline the call is cancelled.
  absl::StatusOr<v1::CompositionReply> WaitReply(Deadline deadline);

  // True once nothing can write for this call any longer (writing_call.h).
  bool WaitQuiesced(Deadline deadline);

 private:
  template <typename T, typename... Args>
  friend std::shared_ptr<T> MakeProcessBound(Args&&... args);
  class Impl;
  explicit ComposeCall(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::internal
