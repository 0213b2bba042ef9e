// Calls of the Cache service (proto/ashlar/v1/cache.proto) on one daemon.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/deadline.h"
#include "proto/outcome.h"

namespace grpc {
class Channel;
}

namespace ashlar::v1 {
class AbandonReply;
class AbandonRequest;
class AdmitReply;
class AdmitRequest;
class AttachAdmissionRequest;
class AttachLeaseReply;
class AttachLeaseRequest;
class CloseModelReply;
class CloseModelRequest;
class CommitReply;
class CommitRequest;
class DeclarePagesReply;
class DeclarePagesRequest;
class ExtendAdmissionRequest;
class MarkFilledReply;
class MarkFilledRequest;
class MatchReply;
class MatchRequest;
class OpenModelReply;
class OpenModelRequest;
class PublishReply;
class PublishRequest;
class ReleaseReply;
class ReleaseRequest;
class ReserveReply;
class ReserveRequest;
}  // namespace ashlar::v1

namespace ashlar::internal {

// Thread-safe. Bounded: more than kMaxCalls at a time are refused with RESOURCE_EXHAUSTED. The daemon answers so, too,
// when a queue is full, and so does gRPC when it ends a call for want of memory, after the daemon has begun it or
// before.
class Rpc {
 public:
  static constexpr int kMaxCalls = 256;

  // Connects once: a channel that found its way to a restarted daemon by itself would mix two lives. When the
  // connection breaks, every call fails with UNAVAILABLE. When a daemon answers that does not know the session (the
  // daemon was restarted between the two sockets), calls fail with UNAUTHENTICATED. Either way `on_lost` is called.
  static absl::StatusOr<std::unique_ptr<Rpc>> Open(const std::string& socket, std::function<void()> on_lost,
                                                   Deadline deadline, const std::stop_token& stop = {});
  ~Rpc();

  absl::Status OpenModel(const v1::OpenModelRequest& request, v1::OpenModelReply& reply, Deadline deadline);
  absl::Status CloseModel(const v1::CloseModelRequest& request, v1::CloseModelReply& reply, Deadline deadline);
  absl::Status DeclarePages(const v1::DeclarePagesRequest& request, v1::DeclarePagesReply& reply, Deadline deadline);
  absl::Status Match(const v1::MatchRequest& request, v1::MatchReply& reply, Deadline deadline);
  absl::Status AttachLease(const v1::AttachLeaseRequest& request, v1::AttachLeaseReply& reply, Deadline deadline);
  absl::Status Reserve(const v1::ReserveRequest& request, v1::ReserveReply& reply, Deadline deadline);
  // `sent`: whether the daemon may have seen the request.
  absl::Status Publish(const v1::PublishRequest& request, v1::PublishReply& reply, Deadline deadline, bool& sent);
  absl::Status Commit(const v1::CommitRequest& request, v1::CommitReply& reply, Deadline deadline, bool& sent);
  absl::Status Abandon(const v1::AbandonRequest& request, v1::AbandonReply& reply, Deadline deadline);
  absl::Status Release(const v1::ReleaseRequest& request, v1::ReleaseReply& reply, Deadline deadline);

  absl::Status Admit(const v1::AdmitRequest& request, v1::AdmitReply& reply, Deadline deadline);
  absl::Status ExtendAdmission(const v1::ExtendAdmissionRequest& request, v1::AdmitReply& reply, Deadline deadline);
  absl::Status MarkFilled(const v1::MarkFilledRequest& request, v1::MarkFilledReply& reply, Deadline deadline);
  absl::Status AttachAdmission(const v1::AttachAdmissionRequest& request, v1::AdmitReply& reply, Deadline deadline);

  // What a call that was not made here (LandCall) ended with: it may have found the connection of no use.
  void Ended(const absl::Status& status);
  // True once a call has found the connection of no use, whether or not the daemon lives.
  bool lost() const;
  // Cancels the calls above; later ones fail at once.
  void Shutdown();

  // For calls that are not made here (LandCall).
  const std::shared_ptr<grpc::Channel>& channel() const;

 private:
  struct Impl;
  explicit Rpc(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// What a failed call means for a segment.
MissReason ToMissReason(const absl::Status& status);
// A reason as the daemon sent it; one that this version does not know is a miss all the same.
MissReason ToMissReason(uint32_t wire);

}  // namespace ashlar::internal
