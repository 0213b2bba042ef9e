// SPDX-License-Identifier: Apache-2.0
#include "daemon/testing/http_peer.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

constexpr int kPatienceMillis = 20'000;

template <typename Address>
UniqueFd Connect(const Address& address, int family) {
  UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) socket.Reset();
  return socket;
}

}  // namespace

HttpPeer::HttpPeer(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socket_ = Connect(address, AF_INET);
}

HttpPeer::HttpPeer(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  socket_ = Connect(address, AF_UNIX);
}

bool HttpPeer::Send(const std::string& bytes) {
  return send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

std::string HttpPeer::Receive(size_t bytes) {
  std::string all;
  char buffer[65536];
  while (all.size() < bytes) {
    pollfd waiting{socket_.get(), POLLIN, 0};
    if (poll(&waiting, 1, kPatienceMillis) != 1) break;
    const ssize_t size = recv(socket_.get(), buffer, std::min(sizeof buffer, bytes - all.size()), 0);
    if (size <= 0) break;
    all.append(buffer, static_cast<size_t>(size));
  }
  return all;
}

bool HttpPeer::Closed() {
  Receive();
  char byte;
  return recv(socket_.get(), &byte, 1, MSG_DONTWAIT) == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

std::string HttpPeer::Ask(const std::string& path, const std::string& method) {
  if (!connected() || !Send(absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: localhost\r\n\r\n"))) return "";
  return Receive();
}

}  // namespace ashlar::daemon
