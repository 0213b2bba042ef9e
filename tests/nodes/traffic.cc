// SPDX-License-Identifier: Apache-2.0
#include "tests/nodes/traffic.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace ashlar::nodes {
namespace {

using Clock = std::chrono::steady_clock;
using integration::InNetworkNamespace;
using std::chrono::milliseconds;

constexpr size_t kChunk = 256 << 10, kChunkWords = kChunk / sizeof(uint64_t);

struct sockaddr_in SocketAddress(const std::string& address, uint16_t port) {
  struct sockaddr_in made {};
  made.sin_family = AF_INET;
  made.sin_port = htons(port);
  EXPECT_EQ(::inet_pton(AF_INET, address.c_str(), &made.sin_addr), 1) << address;
  return made;
}

bool WaitFor(int fd, int16_t events, Clock::time_point deadline) {
  struct pollfd polled {
    .fd = fd, .events = events, .revents = 0
  };
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
  return ::poll(&polled, 1, static_cast<int>(std::max<int64_t>(left, 0))) == 1;
}

int Open(int type, const std::string& address, uint16_t port) {
  const int fd = ::socket(AF_INET, type | SOCK_CLOEXEC, 0);
  const struct sockaddr_in here = SocketAddress(address, port);
  EXPECT_EQ(::bind(fd, reinterpret_cast<const struct sockaddr*>(&here), sizeof here), 0) << std::strerror(errno);
  return fd;
}

// Random bytes, in chunks that each take a different part of them: generating all of them would take longer than
// sending them.
class Stream {
 public:
  explicit Stream(uint64_t seed) : words_(2 * kChunkWords) {
    std::mt19937_64 random(seed);
    for (uint64_t& word : words_) word = random();
  }
  const char* Chunk(uint64_t number) const {
    return reinterpret_cast<const char*>(words_.data() + number * 7'919 % kChunkWords);
  }

 private:
  std::vector<uint64_t> words_;
};

void SendStream(int fd, const Stream& stream, uint64_t bytes, Clock::time_point deadline) {
  for (uint64_t sent = 0; sent < bytes;) {
    const size_t at = sent % kChunk;
    const size_t part = std::min<uint64_t>(kChunk - at, bytes - sent);
    const ssize_t put = ::send(fd, stream.Chunk(sent / kChunk) + at, part, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put > 0) sent += put;
    if (put < 0 && (errno != EAGAIN || !WaitFor(fd, POLLOUT, deadline))) return;
  }
}

}  // namespace

int OpenDatagrams(const std::string& address, uint16_t port) {
  return Open(SOCK_DGRAM, address, port);
}

void ConnectTo(int socket, const std::string& address, uint16_t port) {
  const struct sockaddr_in there = SocketAddress(address, port);
  EXPECT_EQ(::connect(socket, reinterpret_cast<const struct sockaddr*>(&there), sizeof there), 0);
}

int Listen(const std::string& address, uint16_t port) {
  const int fd = Open(SOCK_STREAM, address, port);
  EXPECT_EQ(::listen(fd, 8), 0);
  return fd;
}

uint16_t PortOf(int socket) {
  struct sockaddr_in address {};
  socklen_t size = sizeof address;
  EXPECT_EQ(::getsockname(socket, reinterpret_cast<struct sockaddr*>(&address), &size), 0);
  return ntohs(address.sin_port);
}

int Dial(const std::string& address, uint16_t port, milliseconds patience) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const struct sockaddr_in there = SocketAddress(address, port);
  const int done = ::connect(fd, reinterpret_cast<const struct sockaddr*>(&there), sizeof there);
  int error = done == 0 ? 0 : errno;
  if (error == EINPROGRESS && WaitFor(fd, POLLOUT, Clock::now() + patience)) {
    socklen_t size = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) {
    ::close(fd);
    return -1;
  }
  ::fcntl(fd, F_SETFL, 0);
  return fd;
}

std::string Post(const std::string& address, uint16_t port, const std::string& path, const std::string& body,
                 milliseconds patience) {
  const int fd = Dial(address, port, patience);
  if (fd < 0) return "";
  const std::string request =
      "POST " + path + " HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
      "\r\n\r\n" + body;
  EXPECT_EQ(::send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string answer;
  char bytes[4096];
  while (WaitFor(fd, POLLIN, Clock::now() + patience)) {
    const ssize_t got = ::recv(fd, bytes, sizeof bytes, 0);
    if (got <= 0) break;
    answer.append(bytes, static_cast<size_t>(got));
  }
  ::close(fd);
  return answer;
}

Connection::Connection(const Network& network, size_t from, size_t to) {
  int listener;
  {
    const InNetworkNamespace there(network.stack(to));
    listener = Listen(Network::address(to));
  }
  {
    const InNetworkNamespace here(network.stack(from));
    near_ = Dial(Network::address(to), PortOf(listener));
  }
  EXPECT_GE(near_, 0) << "node " << from << " does not reach node " << to;
  if (near_ >= 0) far_ = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  ::close(listener);
  const int on = 1;
  for (const int fd : {near_, far_}) ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

Connection::~Connection() {
  for (const int fd : {near_, far_}) {
    if (fd >= 0) ::close(fd);
  }
}

uint64_t Connection::Carry(uint64_t bytes, uint64_t seed, milliseconds patience) {
  const Clock::time_point deadline = Clock::now() + patience;
  const Stream stream(seed);
  std::thread sender([&] { SendStream(near_, stream, bytes, deadline); });
  std::vector<char> came(kChunk);
  uint64_t got = 0;
  while (got < bytes) {
    const size_t at = got % kChunk;
    const ssize_t took = ::recv(far_, came.data(), std::min<uint64_t>(kChunk - at, bytes - got), MSG_DONTWAIT);
    if (took > 0) {
      equal_ = equal_ && std::memcmp(came.data(), stream.Chunk(got / kChunk) + at, took) == 0;
      got += took;
    } else if (took == 0 || errno != EAGAIN || !WaitFor(far_, POLLIN, deadline)) {
      break;
    }
  }
  sender.join();
  return got;
}

std::chrono::nanoseconds Connection::RoundTrip(milliseconds patience) {
  const Clock::time_point begin = Clock::now(), deadline = begin + patience;
  char byte = 'a';
  EXPECT_EQ(::send(near_, &byte, 1, MSG_NOSIGNAL), 1) << std::strerror(errno);
  if (!WaitFor(far_, POLLIN, deadline) || ::recv(far_, &byte, 1, 0) != 1) return Clock::now() - begin;
  EXPECT_EQ(::send(far_, &byte, 1, MSG_NOSIGNAL), 1);
  if (WaitFor(near_, POLLIN, deadline)) {
    EXPECT_EQ(::recv(near_, &byte, 1, 0), 1);
  }
  return Clock::now() - begin;
}

}  // namespace ashlar::nodes
