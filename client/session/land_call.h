// SPDX-License-Identifier: Apache-2.0
// LandCall: one Land or LookupAndLand call, its match, its progress, its verdict, and the proof that it can write no
// more.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/session/connection.h"
#include "client/session/deadline.h"

namespace ashlar::v1 {
class LandRequest;
class LookupAndLandRequest;
class PromptMatch;
}  // namespace ashlar::v1

namespace ashlar::internal {

// Thread-safe. Process-bound. It has no thread of its own: the waiting threads read the events.
class LandCall {
 public:
  // Starts the call. `request` is complete except for the session and the landing's number. Null: too many calls are in
  // flight.
  static std::shared_ptr<LandCall> Start(std::shared_ptr<Connection> connection, v1::LandRequest& request);
  static std::shared_ptr<LandCall> Start(std::shared_ptr<Connection> connection, v1::LookupAndLandRequest& request);
  ~LandCall();  // cancels, and waits until the landing is quiesced

  // Returns the match of a LookupAndLand, or the error if there is none. The match lives as long as the call. At the
  // deadline the call is cancelled.
  absl::StatusOr<const v1::PromptMatch*> WaitMatch(Deadline deadline);
  // Cancels the call, because no caller waits for its landing.
  void Abandon();

  // Waits until this number of attention layers is done, or the call is over (UINT32_MAX: until the call is over).
  // True: they are done, and no segment is a miss so far.
  bool WaitLayers(uint32_t layers, Deadline deadline);
  // Returns the daemon's verdict, one MissReason per segment, or the error if there is none. At the deadline the call
  // is cancelled.
  absl::StatusOr<std::vector<uint32_t>> WaitVerdict(Deadline deadline);

  // True once nothing can write for this landing any longer (writing_call.h).
  bool WaitQuiesced(Deadline deadline);

 private:
  template <typename T, typename... Args>
  friend std::shared_ptr<T> MakeProcessBound(Args&&... args);
  template <typename Request>
  static std::shared_ptr<LandCall> StartAny(std::shared_ptr<Connection> connection, Request& request);
  class Impl;
  explicit LandCall(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::internal
