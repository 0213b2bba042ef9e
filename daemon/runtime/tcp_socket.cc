// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/tcp_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/port_wait.h"

namespace ashlar::daemon {
namespace {

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = sizeof bytes;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
  const in6_addr& ip6() const { return reinterpret_cast<const sockaddr_in6&>(bytes).sin6_addr; }
  const sockaddr_in& ip4() const { return reinterpret_cast<const sockaddr_in&>(bytes); }
};

UniqueFd ListenAt(const addrinfo& at) {
  UniqueFd socket(::socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // SO_REUSEADDR: a restarted daemon need not wait until old connections have expired. TCP_NODELAY: accepted sockets
  // inherit it. Without it, the last part of a reply of several segments waits for the acknowledgement of the others,
  // which the peer delays by 40 ms.
  const int yes = 1;
  if (!socket.valid() || setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) != 0 ||
      bind(socket.get(), at.ai_addr, at.ai_addrlen) != 0 || listen(socket.get(), SOMAXCONN) != 0) {
    return UniqueFd();
  }
  return socket;
}

}  // namespace

absl::StatusOr<Listener> ListenTcp(const HostPort& at, storage::Nanos patience) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure = getaddrinfo(at.host.c_str(), std::to_string(at.port).c_str(), &hints, &found);
  if (failure != 0)
    return absl::UnavailableError(absl::StrCat("cannot resolve ", at.host, ": ", gai_strerror(failure)));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  Listener listener;
  int error = 0;
  WaitForPort(absl::StrCat(at.host, ":", at.port), patience, [&] {
    bool in_use = false;
    for (const int family : {AF_INET, AF_INET6}) {
      for (const addrinfo* one = found; one != nullptr && !listener.fd.valid(); one = one->ai_next) {
        if (one->ai_family != family) continue;
        listener.fd = ListenAt(*one);
        error = errno;
        in_use |= error == EADDRINUSE;
      }
    }
    return in_use && !listener.fd.valid();
  });
  if (!listener.fd.valid()) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on port ", at.port, " of ", at.host, ": ", std::strerror(error)));
  }
  return listener;
}

uint16_t PortOf(int socket) {
  Address own;
  if (getsockname(socket, own.get(), &own.size) != 0) return 0;
  if (own.bytes.ss_family == AF_INET) return ntohs(own.ip4().sin_port);
  return own.bytes.ss_family == AF_INET6 ? ntohs(reinterpret_cast<const sockaddr_in6&>(own.bytes).sin6_port) : 0;
}

std::string PeerAddress(int socket) {
  Address peer;
  if (getpeername(socket, peer.get(), &peer.size) != 0) return "";
  const auto bytes = [](const auto& address) {
    return std::string(reinterpret_cast<const char*>(&address), sizeof address);
  };
  if (peer.bytes.ss_family == AF_INET) return bytes(peer.ip4().sin_addr);
  return peer.bytes.ss_family == AF_INET6 ? bytes(peer.ip6()) : "";
}

}  // namespace ashlar::daemon
