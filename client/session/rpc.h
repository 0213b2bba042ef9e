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

  // The unary calls. Each returns when it is answered, or at its deadline. `sent`: whether the daemon may have seen the
  // request.
  absl::Status OpenModel(const v1::OpenModelRequest&, v1::OpenModelReply&, Deadline, bool* sent = nullptr);
  absl::Status CloseModel(const v1::CloseModelRequest&, v1::CloseModelReply&, Deadline, bool* sent = nullptr);
  absl::Status DeclarePages(const v1::DeclarePagesRequest&, v1::DeclarePagesReply&, Deadline, bool* sent = nullptr);
  absl::Status Match(const v1::MatchRequest&, v1::MatchReply&, Deadline, bool* sent = nullptr);
  absl::Status Reserve(const v1::ReserveRequest&, v1::ReserveReply&, Deadline, bool* sent = nullptr);
  absl::Status Publish(const v1::PublishRequest&, v1::PublishReply&, Deadline, bool* sent = nullptr);
  absl::Status Abandon(const v1::AbandonRequest&, v1::AbandonReply&, Deadline, bool* sent = nullptr);
  absl::Status Commit(const v1::CommitRequest&, v1::CommitReply&, Deadline, bool* sent = nullptr);
  absl::Status Advance(const v1::AdvanceRequest&, v1::CompositionReply&, Deadline, bool* sent = nullptr);
  absl::Status Quiesce(const v1::QuiesceRequest&, v1::QuiesceReply&, Deadline, bool* sent = nullptr);
  absl::Status Release(const v1::ReleaseRequest&, v1::ReleaseReply&, Deadline, bool* sent = nullptr);
  absl::Status AttachLease(const v1::AttachLeaseRequest&, v1::AttachLeaseReply&, Deadline, bool* sent = nullptr);
  absl::Status Admit(const v1::AdmitRequest&, v1::AdmitReply&, Deadline, bool* sent = nullptr);
  absl::Status ExtendAdmission(const v1::ExtendAdmissionRequest&, v1::AdmitReply&, Deadline, bool* sent = nullptr);
  absl::Status MarkFilled(const v1::MarkFilledRequest&, v1::MarkFilledReply&, Deadline, bool* sent = nullptr);
  absl::Status AttachAdmission(const v1::AttachAdmissionRequest&, v1::AdmitReply&, Deadline, bool* sent = nullptr);
  absl::Status PlanPrefill(const v1::PlanPrefillRequest&, v1::PlanPrefillReply&, Deadline, bool* sent = nullptr);
  absl::Status AwaitPrefill(const v1::AwaitPrefillRequest&, v1::AwaitPrefillReply&, Deadline, bool* sent = nullptr);
  absl::Status EndPrefill(const v1::EndPrefillRequest&, v1::EndPrefillReply&, Deadline, bool* sent = nullptr);
  absl::Status ServePrefill(const v1::ServePrefillRequest&, v1::ServePrefillReply&, Deadline, bool* sent = nullptr);
  absl::Status HandOff(const v1::HandOffRequest&, v1::HandOffReply&, Deadline, bool* sent = nullptr);
  absl::Status Probe(const v1::ProbeRequest&, v1::ProbeReply&, Deadline, bool* sent = nullptr);

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
