// SPDX-License-Identifier: Apache-2.0
// TestNode: a daemon in this process, for tests, and helpers to observe it from outside.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ashlar/v1/session.pb.h"
#include "daemon/daemon.h"
#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {

// A daemon in a new directory, which is removed with it.
class TestNode {
 public:
  // `more` is YAML after listen: and dram: (16 MiB in arenas of 1 MiB); `listen` is added after the sockets. Metrics
  // name tenants unless `more` sets it.
  explicit TestNode(const std::string& more = "", const std::string& listen = "");
  ~TestNode();

  std::string rpc_socket() const { return folder_ + "/rpc.sock"; }
  std::string session_socket() const { return folder_ + "/session.sock"; }
  std::string admin_socket() const { return folder_ + "/admin.sock"; }
  Daemon& daemon() { return *daemon_; }
  void Stop() { daemon_->Stop(5'000'000'000); }

 private:
  std::string folder_;
  std::unique_ptr<Daemon> daemon_;
};

// Ends the process with a message if `condition` is false: tests cannot continue without their fixture.
void Require(bool condition, const std::string& what);

// Returns the number of open descriptors of this process.
size_t OpenDescriptors();
// Returns a memfd sealed with `seals`.
UniqueFd MakeMemfd(size_t bytes, int seals);
// Waits at most 20 s for `condition`.
bool Eventually(const std::function<bool()>& condition);

// Runs `body` on a thread of another user. Requires root.
void AsUser(uid_t uid, const std::function<void()>& body);

// Returns the reply to GET /metrics on a local port; empty without one.
std::string Scrape(int port);

// Returns the reply of grpc.health.v1.Health/Check for a service: a ServingStatus, or −1 without a reply.
inline constexpr int kServing = 1, kNotServing = 2;
int Health(const std::string& rpc_socket, const std::string& service);

// A raw session socket.
class RawSession {
 public:
  explicit RawSession(const std::string& path);
  explicit RawSession(const TestNode& node) : RawSession(node.session_socket()) {}

  // Sends bytes, or a request, with descriptors; returns false if the daemon has closed.
  bool Send(const std::string& bytes, std::span<const int> descriptors = {});
  // Returns the next reply and its descriptor. UNAVAILABLE if the daemon has closed the socket.
  absl::StatusOr<v1::SessionReply> Receive(UniqueFd* descriptor = nullptr);
  absl::StatusOr<v1::SessionReply> Ask(const v1::SessionRequest& request, std::span<const int> descriptors = {},
                                       UniqueFd* descriptor = nullptr);
  absl::StatusOr<v1::SessionReply> Hello(UniqueFd* descriptor = nullptr);
  bool Closed();  // returns whether the daemon has closed its end
  int fd() const { return socket_.get(); }
  void Close() { socket_.Reset(); }

 private:
  UniqueFd socket_;
};

// Converts the error of a reply to a status.
absl::Status StatusOf(const absl::StatusOr<v1::SessionReply>& reply);

}  // namespace ashlar::daemon
