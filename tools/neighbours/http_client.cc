// SPDX-License-Identifier: Apache-2.0
#include "tools/neighbours/http_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>

namespace ashlar::neighbours {
namespace {

using std::chrono::steady_clock;

// False: not in time.
bool WaitFor(int fd, short events, steady_clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now()).count();
  pollfd wait = {.fd = fd, .events = events, .revents = 0};
  return left > 0 && poll(&wait, 1, static_cast<int>(left)) > 0;
}

}  // namespace

internal::Descriptor ConnectLoopback(uint16_t port, int receive_bytes) {
  internal::Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return socket;
  if (receive_bytes > 0) setsockopt(socket.get(), SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof receive_bytes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  const int connected = connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  if (connected != 0 && errno != EINPROGRESS) return {};
  return socket;
}

absl::StatusOr<std::string> ReadMetrics(uint16_t port, std::chrono::milliseconds patience) {
  const auto deadline = steady_clock::now() + patience;
  const internal::Descriptor socket = ConnectLoopback(port);
  if (!socket) return absl::ErrnoToStatus(errno, "cannot connect to the metrics endpoint");
  if (!WaitFor(socket.get(), POLLOUT, deadline))
    return absl::DeadlineExceededError(
        "the metrics endpoint accepted no request in time; check that the daemon still runs");
  static constexpr char kRequest[] = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  if (send(socket.get(), kRequest, sizeof kRequest - 1, MSG_NOSIGNAL) < 0) {
    return absl::ErrnoToStatus(errno, "cannot send to the metrics endpoint");
  }
  std::string answer;
  char bytes[65536];
  for (;;) {
    if (!WaitFor(socket.get(), POLLIN, deadline))
      return absl::DeadlineExceededError(
          "the metrics endpoint sent no answer in time; check that the daemon still runs");
    const ssize_t count = recv(socket.get(), bytes, sizeof bytes, 0);
    if (count < 0 && errno != EAGAIN) return absl::ErrnoToStatus(errno, "cannot read from the metrics endpoint");
    if (count == 0) break;
    if (count > 0) answer.append(bytes, static_cast<size_t>(count));
  }
  if (!answer.starts_with("HTTP/1.1 200") || answer.find("ashlar_sessions") == std::string::npos) {
    return absl::UnavailableError("the metrics endpoint answered " + answer.substr(0, answer.find('\r')));
  }
  return answer;
}

absl::Status Scrape(uint16_t port, std::chrono::milliseconds patience) {
  return ReadMetrics(port, patience).status();
}

}  // namespace ashlar::neighbours
