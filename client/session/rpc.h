// SPDX-License-Identifier: Apache-2.0
// Rpc: calls of the Cache service (proto/ashlar/v1/cache.proto) on one daemon.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/deadline.h"
#include "proto/cache_calls.h"
#include "proto/outcome.h"

namespace grpc {
class Channel;
}

namespace ashlar::internal {

// Thread-safe. Bounded: calls beyond kMaxCalls are refused with RESOURCE_EXHAUSTED. The daemon returns the same if a
// queue is full, and so does gRPC if it ends a call for lack of memory, before or after the daemon has begun it.
class Rpc {
 public:
  static constexpr int kMaxCalls = 256;

  // Connects once: a channel that reconnected to a restarted daemon by itself would mix two sessions. When the
  // connection breaks, every call fails with UNAVAILABLE. If the daemon does not know the session, because it was
  // restarted between the two connections, calls fail with UNAUTHENTICATED. In both cases `on_lost` is called.
  static absl::StatusOr<std::unique_ptr<Rpc>> Open(const std::string& socket, std::function<void()> on_lost,
                                                   Deadline deadline, const std::stop_token& stop = {});
  ~Rpc();

  // The unary calls of proto/cache_calls.h, which return when they are answered. `sent`: whether the daemon may have
  // seen the request.
#define ASHLAR_UNARY(name, request, reply, callers) \
  absl::Status name(const v1::request&, v1::reply&, Deadline deadline, bool* sent = nullptr);
#define ASHLAR_STREAM(...)
  ASHLAR_CACHE_CALLS(ASHLAR_UNARY, ASHLAR_STREAM)
#undef ASHLAR_UNARY
#undef ASHLAR_STREAM

  // Reports the status of a call that was made elsewhere (LandCall): the call may have found that the connection has
  // ended.
  void Ended(const absl::Status& status);
  // True once a call has found the connection unusable, whether or not the daemon lives.
  bool lost() const;
  // Cancels the calls above; later calls fail at once.
  void Shutdown();

  // For calls that are made elsewhere (LandCall).
  const std::shared_ptr<grpc::Channel>& channel() const;

 private:
  struct Impl;
  explicit Rpc(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Converts a failed call's status to the miss reason of a segment.
MissReason ToMissReason(const absl::Status& status);
// Converts a reason from the daemon. A number that this version does not know is still a miss.
MissReason ToMissReason(uint32_t wire);

}  // namespace ashlar::internal
