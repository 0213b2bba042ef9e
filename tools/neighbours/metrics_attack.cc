// SPDX-License-Identifier: Apache-2.0
// The attack on the metrics endpoint, which any local user can make: connections that send nothing, send slowly, or do
// not read.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <thread>
#include <vector>

#include "tools/neighbours/attack.h"
#include "tools/neighbours/http_client.h"

namespace ashlar::neighbours {
namespace {

constexpr auto kScrapeTurn = std::chrono::milliseconds(100);
constexpr size_t kOfAKind = 64;
constexpr std::string_view kRequest = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
// Its last byte is sent repeatedly.
constexpr std::string_view kEndless = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: a";

enum class Manner { kIdle, kSpeaksSlowly, kReadsSlowly };
constexpr Manner kManners[] = {Manner::kIdle, Manner::kSpeaksSlowly, Manner::kReadsSlowly};

struct Connection {
  Manner manner;
  internal::Descriptor socket;
  size_t said = 0;  // bytes of the request
};

class Metrics final : public Attack {
 public:
  explicit Metrics(const Target& target) : port_(target.metrics_port) {}

  absl::Status Prepare() override {
    for (const Manner manner : kManners) {
      for (size_t i = 0; i < kOfAKind; ++i) connections_.push_back({.manner = manner});
    }
    return absl::OkStatus();
  }

  Achieved Run(const std::stop_token& stop) override {
    Achieved achieved;
    for (; !stop.stop_requested(); std::this_thread::sleep_for(kScrapeTurn)) {
      uint64_t open = 0;
      for (Connection& connection : connections_) {
        if (!connection.socket) {
          ++achieved.asked;
          connection.socket = ConnectLoopback(port_, /*receive_bytes=*/1);
          connection.said = 0;
        } else if (Ended(connection)) {
          ++achieved.refused;
          connection.socket = {};
          continue;
        }
        GoOn(connection);
        open += connection.socket ? 1 : 0;
      }
      achieved.granted = std::max(achieved.granted, open);
    }
    achieved.sessions = achieved.most_at_a_time = achieved.granted;
    return achieved;
  }

 private:
  // Reads a byte from slow readers.
  static bool Ended(const Connection& connection) {
    pollfd state = {.fd = connection.socket.get(), .events = POLLRDHUP, .revents = 0};
    if (poll(&state, 1, 0) > 0 && (state.revents & (POLLERR | POLLHUP)) != 0) return true;
    if ((state.revents & POLLRDHUP) == 0) return false;
    char byte;
    return recv(connection.socket.get(), &byte, 1, MSG_DONTWAIT) <= 0;
  }

  static void GoOn(Connection& connection) {
    const int fd = connection.socket.get();
    char byte;
    if (connection.manner == Manner::kReadsSlowly) (void)recv(fd, &byte, 1, MSG_DONTWAIT);
    if (connection.manner == Manner::kIdle || connection.said == kRequest.size()) return;
    const std::string_view rest = connection.manner == Manner::kReadsSlowly
                                      ? kRequest.substr(connection.said)
                                      : kEndless.substr(std::min(connection.said, kEndless.size() - 1), 1);
    const ssize_t sent = send(fd, rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) connection.said += static_cast<size_t>(sent);
  }

  const uint16_t port_;
  std::vector<Connection> connections_;
};

}  // namespace

std::unique_ptr<Attack> MakeMetrics(const Target& target, bool) {
  return std::make_unique<Metrics>(target);
}

}  // namespace ashlar::neighbours
