// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/silent_sockets.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <thread>
#include <vector>

#include "daemon/peer/transport/transport.h"
#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {
namespace {

using std::chrono::milliseconds;

UniqueFd Dial(uint16_t port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(port);
  EXPECT_EQ(connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  return socket;
}
bool Ended(const UniqueFd& socket) {
  pollfd one{.fd = socket.get(), .events = POLLRDHUP, .revents = 0};
  return poll(&one, 1, 0) == 1;
}

TEST(SilentSockets, ClosesOnlySilentConnections) {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&at), size), 0);
  ASSERT_EQ(listen(listener.get(), 16), 0);
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size), 0);
  const UniqueFd silent = Dial(ntohs(at.sin_port)), speaks = Dial(ntohs(at.sin_port));
  const UniqueFd first(accept(listener.get(), nullptr, nullptr)), second(accept(listener.get(), nullptr, nullptr));
  ASSERT_EQ(send(speaks.get(), "x", 1, 0), 1);
  SilentSockets sockets({listener.get()}, milliseconds(50));
  EXPECT_EQ(sockets.End(), 0u);
  std::this_thread::sleep_for(milliseconds(120));
  EXPECT_EQ(sockets.End(), 1u);
  EXPECT_TRUE(Ended(silent));
  EXPECT_FALSE(Ended(speaks));
}

TEST(SilentSockets, AFloodDoesNotStopTheTransport) {
  auto holder = Transport::Start({});
  ASSERT_TRUE(holder.ok()) << holder.status();
  std::vector<UniqueFd> flood;
  for (size_t i = 0; i < 4 * SilentSockets::kOfAnAddress; ++i) flood.push_back(Dial((*holder)->address().port));
  size_t left = flood.size();
  for (int i = 0; i < 60 && left > SilentSockets::kOfAnAddress; ++i) {
    std::this_thread::sleep_for(milliseconds(50));
    left = 0;
    for (const UniqueFd& one : flood) left += Ended(one) ? 0 : 1;
  }
  EXPECT_LE(left, SilentSockets::kOfAnAddress);
}

}  // namespace
}  // namespace ashlar::daemon
