// SPDX-License-Identifier: Apache-2.0
// TestNode: a daemon in this process, for tests, and helpers that look at it from outside.
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

// A daemon in a fresh folder, which is removed with it.
class TestNode {
 public:
  // `more` is YAML behind listen: and dram: (16 MiB in arenas of 1 MiB), `listen` a field behind the sockets. Metrics
  // name tenants where `more` does not say.
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

// Ends the process, and says why: tests cannot go on without their fixture.
void Require(bool condition, const std::string& what);

// Returns the number of this process's open descriptors.
size_t OpenDescriptors();
// A memfd sealed with `seals`.
UniqueFd MakeMemfd(size_t bytes, int seals);
// Waits at most 20 s for `condition`.
bool Eventually(const std::function<bool()>& condition);

// Runs `body` on a thread whose user is another one. Only root can.
void AsUser(uid_t uid, const std::function<void()>& body);

// The answer to GET /metrics on this machine's `port`; empty when there is none.
std::string Scrape(int port);

// Returns the answer of grpc.health.v1.Health/Check for a service: a ServingStatus, or −1 for no answer.
inline constexpr int kServing = 1, kNotServing = 2;
int Health(const std::string& rpc_socket, const std::string& service);

// A raw session socket.
class RawSession {
 public:
  explicit RawSession(const std::string& path);
  explicit RawSession(const TestNode& node) : RawSession(node.session_socket()) {}

  // Sends bytes, or a request, with descriptors; false when the peer is gone.
  bool Send(const std::string& bytes, std::span<const int> descriptors = {});
  // The next reply, and the descriptor that rode along. UNAVAILABLE when the daemon has closed the socket.
  absl::StatusOr<v1::SessionReply> Receive(UniqueFd* descriptor = nullptr);
  absl::StatusOr<v1::SessionReply> Ask(const v1::SessionRequest& request, std::span<const int> descriptors = {},
                                       UniqueFd* descriptor = nullptr);
  absl::StatusOr<v1::SessionReply> Hello(UniqueFd* descriptor = nullptr);
  bool Closed();  // the daemon has closed its end
  int fd() const { return socket_.get(); }
  void Close() { socket_.Reset(); }

 private:
  UniqueFd socket_;
};

// Code of a reply as a status.
absl::Status StatusOf(const absl::StatusOr<v1::SessionReply>& reply);

}  // namespace ashlar::daemon
