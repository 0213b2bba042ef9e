// SPDX-License-Identifier: Apache-2.0
#include "client/session/connection.h"

#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/session/process_bound.h"
#include "proto/limits.h"

namespace ashlar::internal {
namespace {

uint64_t NextGeneration() {
  static std::atomic<uint64_t> generations = 0;
  return ++generations;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(const ClientOptions& options, std::function<void()> wake,
                                                             Deadline deadline, const std::stop_token& stop) {
  absl::StatusOr<std::unique_ptr<SessionChannel>> channel =
      SessionChannel::Open(options.session_socket, options.name, deadline, stop);
  if (!channel.ok()) return channel.status();
  absl::StatusOr<std::unique_ptr<Rpc>> rpc = Rpc::Open(options.rpc_socket, wake, deadline, stop);
  if (!rpc.ok()) return rpc.status();
  return MakeProcessBound<Connection>(options.rpc_socket, options.gpu, *std::move(channel), *std::move(rpc),
                                      std::move(wake));
}

Connection::Connection(std::string rpc_socket, const kernels::Gpu* gpu, std::unique_ptr<SessionChannel> channel,
                       std::unique_ptr<Rpc> rpc, std::function<void()> wake)
    : generation_(NextGeneration()),
      wake_(wake),
      rpc_socket_(std::move(rpc_socket)),
      channel_(std::move(channel)),
      rpc_(std::move(rpc)),
      arenas_(*channel_, gpu),
      leases_(std::move(wake)) {}

absl::StatusOr<std::unique_ptr<Rpc>> Connection::DialAgain(Deadline deadline) const {
  return Rpc::Open(
      rpc_socket_, [] {}, deadline);
}

bool Connection::EnterLanding() {
  if (++landings_under_way_ <= kMaxLandings) return true;
  LeaveLanding();
  return false;
}

void Connection::End() {
  ended_.store(true, std::memory_order_release);
  rpc_->Shutdown();
}

void Connection::EndSession() {
  End();
  channel_->Shutdown();
}

void Connection::CloseModel(uint64_t model) {
  {
    MutexLock lock(mutex_);
    to_close_.push_back(model);
  }
  wake_();
}

bool Connection::CloseModels(Deadline deadline) {
  MutexLock turn(closing_);
  while (!ended()) {
    v1::CloseModelRequest request;
    request.set_session(session());
    {
      MutexLock lock(mutex_);
      if (to_close_.empty()) return true;
      request.set_model(to_close_.back());
      to_close_.pop_back();
    }
    v1::CloseModelReply reply;
    const absl::Status status = rpc_->CloseModel(request, reply, deadline);
    if (absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status)) {
      MutexLock lock(mutex_);
      to_close_.push_back(request.model());
      return false;
    }
  }
  return true;
}

bool Connection::DoDeferredWork(Deadline deadline) {
  const bool released = ReleaseLeases(deadline), closed = CloseModels(deadline);
  KeepUnusedLeases(deadline);
  return released && closed;
}

// A request may wait long in its engine's queue between its lookup and its landing. Attaching counts as use.
void Connection::KeepUnusedLeases(Deadline deadline) {
  constexpr std::chrono::milliseconds kUnused{500};
  constexpr size_t kAtOnce = 64;
  for (const std::string& lease : leases_.TakeUnused(Deadline::clock::now() - kUnused, kAtOnce)) {
    if (ended()) return;
    v1::AttachLeaseRequest request;
    request.set_session(session());
    request.set_lease(lease);
    v1::AttachLeaseReply reply;
    static_cast<void>(rpc_->AttachLease(request, reply, deadline));  // otherwise the lease expires
  }
}

bool Connection::ReleaseLeases(Deadline deadline) {
  while (!ended()) {
    const std::vector<std::string> leases = leases_.TakeUnheld(limits::kMaxReleasesPerCall);
    if (leases.empty()) return true;
    v1::ReleaseRequest request;
    request.set_session(session());
    for (const std::string& lease : leases) request.add_leases(lease);
    v1::ReleaseReply reply;
    const absl::Status status = rpc_->Release(request, reply, deadline);
    const bool again = absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status);
    leases_.Settle(leases, !again);
    if (again) return false;
  }
  return true;
}

absl::StatusOr<std::shared_ptr<LeaseHold>> LeaseHold::Make(std::shared_ptr<Connection> connection, std::string lease,
                                                           Deadline deadline) {
  if (!connection->leases().Hold(lease, deadline)) {
    return absl::DeadlineExceededError("the lease is still being released");
  }
  return MakeProcessBound<LeaseHold>(std::move(connection), std::move(lease));
}

LeaseHold::LeaseHold(std::shared_ptr<Connection> connection, std::string lease)
    : connection_(std::move(connection)), lease_(std::move(lease)) {}

LeaseHold::~LeaseHold() {
  connection_->leases().Drop(lease_);
}

}  // namespace ashlar::internal
