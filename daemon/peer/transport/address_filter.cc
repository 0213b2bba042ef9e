// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/address_filter.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMaxAddresses = 1000;

bool Listens(int fd) {
  int listens = 0, domain = 0;
  socklen_t size = sizeof listens;
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) return false;
  size = sizeof domain;
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && (domain == AF_INET || domain == AF_INET6);
}

}  // namespace

std::set<int> ListeningSockets() {
  std::set<int> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string name = entry.path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    if (fd >= 0 && Listens(fd)) found.insert(fd);
  }
  return found;
}

absl::Status AdmitOnly(const std::set<int>& sockets, const std::vector<std::string>& addresses) {
  if (addresses.size() > kMaxAddresses)
    return absl::InvalidArgumentError("cluster.transport_allow: too many; expected at most 1,000 addresses");
  constexpr uint32_t kNetwork = SKF_NET_OFF;
  constexpr uint32_t kDrop = 0, kAdmit = UINT32_MAX;
  std::vector<sock_filter> program = {
      BPF_STMT(BPF_LD | BPF_B | BPF_ABS, kNetwork), BPF_STMT(BPF_ALU | BPF_RSH | BPF_K, 4),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 4, 1, 0),  // version 4
      BPF_STMT(BPF_RET | BPF_K, kDrop), BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kNetwork + 12)};
  for (const std::string& address : addresses) {
    in_addr parsed;
    if (inet_pton(AF_INET, address.c_str(), &parsed) != 1) {
      return absl::InvalidArgumentError(absl::StrCat("cluster.transport_allow: ", address, " is not an IPv4 address"));
    }
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(parsed.s_addr), 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, kAdmit));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, kDrop));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  for (const int socket : sockets) {
    if (setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) != 0) {
      return absl::InternalError(absl::StrCat("SO_ATTACH_FILTER: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
