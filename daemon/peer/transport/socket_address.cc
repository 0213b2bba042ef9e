// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/socket_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {

absl::StatusOr<SocketAddress> ToSocketAddress(const HostPort& at) {
  SocketAddress address;
  auto& four = reinterpret_cast<sockaddr_in&>(address.bytes);
  auto& six = reinterpret_cast<sockaddr_in6&>(address.bytes);
  if (inet_pton(AF_INET, at.host.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(at.port);
    address.size = sizeof four;
  } else if (inet_pton(AF_INET6, at.host.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(at.port);
    address.size = sizeof six;
  } else {
    return absl::InvalidArgumentError(absl::StrCat(at.host, ": expected an IPv4 or IPv6 address"));
  }
  return address;
}

uint16_t PortOf(const sockaddr_storage& address) {
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string ToText(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  const bool six = address.ss_family == AF_INET6;
  if (six) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr, text, sizeof text);
  } else {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text, sizeof text);
  }
  return six ? absl::StrCat("[", text, "]:", PortOf(address)) : absl::StrCat(text, ":", PortOf(address));
}

}  // namespace ashlar::daemon
