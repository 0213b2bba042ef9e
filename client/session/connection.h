// SPDX-License-Identifier: Apache-2.0
// Connection: one session with one run of the daemon: its calls, mapped arenas and leases. When the session ends, the
// connection ends for good, and the reconnector makes a new one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/session/arena_map.h"
#include "client/session/deadline.h"
#include "client/session/lease_table.h"
#include "client/session/options.h"
#include "client/session/rpc.h"
#include "client/session/session_channel.h"
#include "kernels/mutex.h"

namespace ashlar::internal {

// Thread-safe. Process-bound. Each holder keeps the session open, unless the session is lost, and with it the daemon's
// grants to it.
class Connection {
 public:
  static constexpr int kMaxLandings = 256;

  // Calls `wake` whenever DoDeferredWork has something to do, and when calls no longer reach the daemon. Fails at once
  // when told to stop.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const ClientOptions& options, std::function<void()> wake,
                                                          Deadline deadline, const std::stop_token& stop);

  SessionChannel& channel() { return *channel_; }
  Rpc& rpc() { return *rpc_; }
  ArenaMap& arenas() { return arenas_; }
  LeaseTable& leases() { return leases_; }
  const std::string& session() const { return channel_->session(); }
  uint32_t protocol() const { return channel_->protocol(); }
  const std::string& daemon_epoch() const { return channel_->daemon_epoch(); }
  const PeerProcess& daemon() const { return channel_->daemon(); }

  // Identifies a connection within the process; never 0.
  uint64_t generation() const { return generation_; }
  // Landing numbers must ascend.
  uint64_t NextLanding() { return ++landings_; }
  // Returns whether the daemon supports LookupAndLand, if the client knows.
  bool looks_up_and_lands() const { return looks_up_and_lands_; }
  void SetLooksUpAndLands(bool known) { looks_up_and_lands_ = known; }
  // Limits the calls that may be writing: returns false at kMaxLandings. Each true must be paired with one
  // LeaveLanding.
  bool EnterLanding();
  void LeaveLanding() { --landings_under_way_; }

  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // Ends the calls. The session stays open until the last holder is gone, and landings in flight continue.
  void End();
  // Ends the calls and the session, even while others hold this object. The daemon's resources (a session slot, space
  // for regions) are then free for the next connection. Landings in flight end early, and learn that their slots are
  // quiesced, because the daemon keeps a session until it has drained.
  void EndSession();

  // Opens another channel for calls of the same session, if the first is broken. It may lead to a daemon that was
  // started since.
  absl::StatusOr<std::unique_ptr<Rpc>> DialAgain(Deadline deadline) const;

  // Closes a model's handle: soon, by DoDeferredWork, or before the next model is opened.
  void CloseModel(uint64_t model);
  // Tells the daemon now. False: some remain; try again later.
  bool CloseModels(Deadline deadline);

  // Releases leases and closes models that are no longer held, and tells the daemon of leases that wait for their use.
  // False: some remain; try again later. Also call it once a second.
  bool DoDeferredWork(Deadline deadline);

 private:
  template <typename T, typename... Args>
  friend std::shared_ptr<T> MakeProcessBound(Args&&... args);
  Connection(std::string rpc_socket, const kernels::Gpu* gpu, std::unique_ptr<SessionChannel> channel,
             std::unique_ptr<Rpc> rpc, std::function<void()> wake);
  bool ReleaseLeases(Deadline deadline);
  void KeepUnusedLeases(Deadline deadline);

  const uint64_t generation_;
  const std::function<void()> wake_;
  const std::string rpc_socket_;
  const std::unique_ptr<SessionChannel> channel_;
  const std::unique_ptr<Rpc> rpc_;
  ArenaMap arenas_;
  LeaseTable leases_;
  std::atomic<uint64_t> landings_ = 0;
  std::atomic<int> landings_under_way_ = 0;
  std::atomic<bool> ended_ = false;
  std::atomic<bool> looks_up_and_lands_ = true;
  Mutex closing_;  // held by CloseModels while it calls the daemon
  Mutex mutex_ ABSL_ACQUIRED_AFTER(closing_);
  std::vector<uint64_t> to_close_ ABSL_GUARDED_BY(mutex_);  // models
};

// A hold on one lease; released when it is destroyed. Process-bound.
class LeaseHold {
 public:
  // DEADLINE_EXCEEDED: an earlier release of the same lease is still on its way.
  static absl::StatusOr<std::shared_ptr<LeaseHold>> Make(std::shared_ptr<Connection> connection, std::string lease,
                                                         Deadline deadline);
  ~LeaseHold();

  const std::string& lease() const { return lease_; }

 private:
  template <typename T, typename... Args>
  friend std::shared_ptr<T> MakeProcessBound(Args&&... args);
  LeaseHold(std::shared_ptr<Connection> connection, std::string lease);

  const std::shared_ptr<Connection> connection_;
  const std::string lease_;
};

}  // namespace ashlar::internal
