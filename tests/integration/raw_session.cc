// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/raw_session.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "absl/status/status.h"
#include "ashlar/v1/session.pb.h"
#include "proto/limits.h"

namespace ashlar::integration {

RawSession::RawSession(const ClientOptions& daemon) : fd_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  struct sockaddr_un address {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, daemon.session_socket.data(), daemon.session_socket.size());
  const struct timeval patience = {.tv_sec = 20, .tv_usec = 0};
  ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  if (::connect(fd_, reinterpret_cast<struct sockaddr*>(&address), sizeof address) != 0) {
    ::close(fd_);
    fd_ = -1;
  }
}

RawSession::~RawSession() {
  ::close(fd_);
}

bool RawSession::Send(const std::string& bytes, const std::vector<int>& descriptors) {
  struct iovec data = {.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  struct msghdr message {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  std::vector<char> space(CMSG_SPACE(descriptors.size() * sizeof(int)));
  if (!descriptors.empty()) {
    message.msg_control = space.data();
    message.msg_controllen = space.size();
    struct cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size() * sizeof(int));
  }
  return ::sendmsg(fd_, &message, MSG_NOSIGNAL) >= 0;
}

bool RawSession::Send(const v1::SessionRequest& request, const std::vector<int>& descriptors) {
  return Send(request.SerializeAsString(), descriptors);
}

v1::SessionReply RawSession::Receive(size_t* descriptors) {
  std::array<char, limits::kMaxSessionMessageBytes> bytes;
  alignas(struct cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * limits::kMaxDescriptorsPerMessage)> space;
  struct iovec data = {.iov_base = bytes.data(), .iov_len = bytes.size()};
  struct msghdr message {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space.data();
  message.msg_controllen = space.size();
  const ssize_t size = ::recvmsg(fd_, &message, MSG_CMSG_CLOEXEC);
  v1::SessionReply reply;
  if (size <= 0 || !reply.ParseFromArray(bytes.data(), static_cast<int>(size))) {
    reply.set_code(static_cast<uint32_t>(absl::StatusCode::kUnavailable));
    return reply;
  }
  size_t count = 0;
  for (struct cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    for (size_t i = 0; i < (part->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i, ++count) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      ::close(fd);
    }
  }
  if (descriptors != nullptr) *descriptors = count;
  return reply;
}

v1::SessionReply RawSession::Ask(const v1::SessionRequest& request, const std::vector<int>& descriptors) {
  Send(request, descriptors);
  return Receive();
}

std::string RawSession::Greet() {
  v1::SessionRequest request;
  request.mutable_hello()->set_protocol_min(limits::kProtocolMin);
  request.mutable_hello()->set_protocol_max(limits::kProtocolMax);
  request.mutable_hello()->set_client("raw");
  return Ask(request).welcome().session();
}

}  // namespace ashlar::integration
