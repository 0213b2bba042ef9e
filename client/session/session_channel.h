// SPDX-License-Identifier: Apache-2.0
// SessionChannel: the session with the daemon, its socket, and the requests and descriptors that cross it
// (proto/ashlar/v1/session.proto).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/deadline.h"
#include "client/session/descriptor.h"
#include "client/session/peer_process.h"
#include "client/session/unix_socket.h"
#include "kernels/device.h"
#include "kernels/gpu.h"
#include "kernels/mutex.h"

namespace ashlar::v1 {
class SessionReply;
class SessionRequest;
}  // namespace ashlar::v1

namespace ashlar::internal {

// Thread-safe. One request is in flight at a time; others wait for their turn within their deadline.
class SessionChannel {
 public:
  // Connects and agrees on a protocol version. UNAVAILABLE: no daemon; FAILED_PRECONDITION: no common version, or the
  // daemon does not send its pidfd. Fails at once when told to stop.
  static absl::StatusOr<std::unique_ptr<SessionChannel>> Open(const std::string& path, const std::string& client,
                                                              Deadline deadline, const std::stop_token& stop = {});

  const std::string& session() const { return session_; }            // the secret that names the session in every RPC
  const std::string& daemon_epoch() const { return daemon_epoch_; }  // names this run of the daemon
  const std::string& tenant() const { return tenant_; }
  uint32_t protocol() const { return protocol_; }  // the agreed protocol version
  const PeerProcess& daemon() const { return daemon_; }
  // Converts a point of this process's clock to the daemon's clock. The result may be a little early, but never late:
  // the difference between the clocks is estimated from the daemon's replies. At least 1.
  int64_t InDaemonsClock(Deadline deadline) const;

  // False once either end has ended the session. The daemon ends it before it releases what the session held.
  bool Alive() const;
  int fd() const { return socket_.get(); }  // to poll for the session's end (POLLRDHUP); only this class reads from it

  // These also return RESOURCE_EXHAUSTED if this process can open no more descriptors; the session continues. The
  // descriptor is a memfd, or an allocation on a GPU: on `gpu`, or (all zero) on the daemon's only one.
  absl::StatusOr<uint64_t> RegisterRegion(int descriptor, uint64_t bytes, kernels::MemoryKind memory,
                                          const kernels::GpuId& gpu, Deadline deadline);
  struct HostedRegion {
    uint64_t id = 0;
    Descriptor memory;
  };
  absl::StatusOr<HostedRegion> HostRegion(uint64_t bytes, Deadline deadline);
  struct Arena {
    Descriptor memory;
    uint64_t bytes = 0;
    bool on_gpu = false;
  };
  absl::StatusOr<Arena> GetArena(uint32_t arena, Deadline deadline);
  // Does not wait for the answer: the daemon may answer only once nothing uses the region any longer.
  void DropRegion(uint64_t region);

  // Ends the session: requests in progress, and all later ones, fail with UNAVAILABLE.
  void Shutdown();

 private:
  struct Answer;
  enum class Expects { kNothing, kRegion };  // the grant in a late answer

  SessionChannel() = default;
  absl::Status Greet(const std::string& client, Deadline deadline);
  absl::StatusOr<Answer> Ask(const v1::SessionRequest& request, int descriptor, Expects expects, Deadline deadline);
  void EndTurn();

  // Requires the turn.
  absl::StatusOr<Answer> Exchange(const v1::SessionRequest& request, int descriptor, Expects expects,
                                  Deadline deadline);
  absl::Status Send(const v1::SessionRequest& request, int descriptor, Deadline deadline);
  absl::StatusOr<Answer> Receive(Deadline deadline);
  absl::Status TakeLateAnswers(Deadline deadline);
  void SendDrop(uint64_t region);

  ForkClosedSocket socket_;
  PeerProcess daemon_;
  std::string session_;
  std::string daemon_epoch_;
  std::string tenant_;
  uint32_t protocol_ = 0;
  // A lower bound of the daemon's clock minus this process's, from the fastest reply so far.
  std::atomic<int64_t> clock_ahead_{INT64_MIN};

  Mutex mutex_;
  CondVar turn_ended_;
  bool turn_ ABSL_GUARDED_BY(mutex_) = false;              // a thread has the turn
  std::vector<uint64_t> to_drop_ ABSL_GUARDED_BY(mutex_);  // regions that the next end of a turn drops
  // Answers arrive in the order of requests: one entry for every request whose caller has stopped waiting. Belongs to
  // the holder of the turn.
  std::deque<Expects> late_;
};

}  // namespace ashlar::internal
