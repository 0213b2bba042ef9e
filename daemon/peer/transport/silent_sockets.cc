// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/silent_sockets.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <charconv>
#include <cstring>
#include <map>
#include <optional>
#include <string>

#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {
namespace {

constexpr uint8_t kEstablished = 1;  // TCP_ESTABLISHED; its header conflicts with that of tcp_info

using Name = int (*)(int, sockaddr*, socklen_t*);

std::optional<sockaddr_in6> AddressBy(Name name, int socket) {
  sockaddr_in6 address{};  // large enough for both families
  socklen_t size = sizeof address;
  if (name(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return std::nullopt;
  if (address.sin6_family != AF_INET && address.sin6_family != AF_INET6) return std::nullopt;
  return address;
}

// Port 0 means none. The port has the same offset in both families.
uint16_t LocalPort(int socket) {
  const std::optional<sockaddr_in6> address = AddressBy(getsockname, socket);
  return address.has_value() ? ntohs(address->sin6_port) : 0;
}

std::string PeerHost(int socket) {
  const std::optional<sockaddr_in6> address = AddressBy(getpeername, socket);
  if (!address.has_value()) return "";
  if (address->sin6_family == AF_INET6) return {reinterpret_cast<const char*>(&address->sin6_addr), sizeof(in6_addr)};
  const auto& four = reinterpret_cast<const sockaddr_in&>(*address);
  return {reinterpret_cast<const char*>(&four.sin_addr), sizeof(in_addr)};
}

// Returns the age of an established connection that has received nothing.
std::optional<std::chrono::milliseconds> SilentFor(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  if (info.tcpi_state != kEstablished || info.tcpi_bytes_received > 0) return std::nullopt;
  return std::chrono::milliseconds(info.tcpi_last_data_recv);
}

}  // namespace

SilentSockets::SilentSockets(const std::set<int>& listening, std::chrono::milliseconds patience)
    : patience_(patience), folder_(opendir("/proc/self/fd")) {
  for (const int socket : listening) ports_.insert(LocalPort(socket));
  ports_.erase(0);
}

size_t SilentSockets::End() {
  if (folder_ == nullptr) return 0;
  size_t ended = 0;
  std::map<std::string, size_t> of_host;
  rewinddir(folder_.get());
  while (const dirent* const entry = readdir(folder_.get())) {
    int fd = -1;
    std::from_chars(entry->d_name, entry->d_name + std::strlen(entry->d_name), fd);
    if (fd < 0 || !ports_.contains(LocalPort(fd))) continue;
    // UCX may close the descriptor meanwhile, and its number may be reused; a duplicate stays valid.
    const UniqueFd socket(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!socket.valid() || !ports_.contains(LocalPort(socket.get()))) continue;
    const std::optional<std::chrono::milliseconds> silent = SilentFor(socket.get());
    if (!silent.has_value()) continue;
    if (*silent < patience_ && ++of_host[PeerHost(socket.get())] <= kOfAnAddress) continue;
    shutdown(socket.get(), SHUT_RDWR);  // UCX sees the end and closes it
    ++ended;
  }
  return ended;
}

}  // namespace ashlar::daemon
