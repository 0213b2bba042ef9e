// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/tcp_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/port_wait.h"
#include "daemon/testing/http_peer.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;

TEST(TcpSocket, AddressesAreReadOrRefused) {
  const struct {
    const char* text;
    const char* host;  // null: refused
    int port;
  } kCases[] = {
      {"127.0.0.1:9464", "127.0.0.1", 9464},
      {"localhost:0", "localhost", 0},
      {"[::1]:65535", "::1", 65535},
      {"", nullptr, 0},
      {"localhost", nullptr, 0},
      {":9464", nullptr, 0},
      {"[]:9464", nullptr, 0},
      {"::1:9464", nullptr, 0},
      {"[::1:9464", nullptr, 0},
      {"::1]:9464", nullptr, 0},
      {"localhost:", nullptr, 0},
      {"localhost:65536", nullptr, 0},
      {"localhost:-1", nullptr, 0},
      {"localhost:http", nullptr, 0},
  };
  for (const auto& c : kCases) {
    const auto read = ParseHostPort(c.text);
    ASSERT_EQ(read.ok(), c.host != nullptr) << c.text;
    if (!read.ok()) {
      EXPECT_THAT(read.status().message(), HasSubstr("expected host:port")) << c.text;
      continue;
    }
    EXPECT_EQ(read->host, c.host);
    EXPECT_EQ(read->port, c.port);
  }
}

TEST(TcpSocket, ListensOnTheGivenAddress) {
  const auto first = ListenTcp({"127.0.0.1", 0});
  ASSERT_TRUE(first.ok()) << first.status();
  const uint16_t port = PortOf(first->fd.get());
  ASSERT_GT(port, 0);
  const HttpPeer peer(port);
  EXPECT_TRUE(peer.connected());
  EXPECT_EQ(PeerAddress(peer.fd()), std::string("\x7f\0\0\1", 4));
  EXPECT_EQ(PeerAddress(first->fd.get()), "") << "a listening socket has no peer";

  const absl::Status taken = ListenTcp({"127.0.0.1", port}).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(taken.message(), HasSubstr(absl::StrCat("port ", port, " of 127.0.0.1: Address already in use")));
  EXPECT_THAT(ListenTcp({"192.0.2.1", 0}).status().message(), HasSubstr("cannot listen on port 0 of 192.0.2.1"));
  EXPECT_THAT(ListenTcp({"no such host", 0}).status().message(), HasSubstr("cannot resolve no such host"));
}

// Without it, a reply of several segments takes 40 ms more if the other end delays its acknowledgements.
TEST(TcpSocket, AcceptedSocketsSendWithoutDelay) {
  auto listener = ListenTcp({"127.0.0.1", 0});
  ASSERT_TRUE(listener.ok()) << listener.status();
  const HttpPeer peer(PortOf(listener->fd.get()));
  bool accepted = false;
  AcceptSome(*listener, [&](const UniqueFd& socket) {
    int on = 0;
    socklen_t size = sizeof on;
    EXPECT_EQ(getsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, &size), 0);
    EXPECT_NE(on, 0);
    accepted = true;
  });
  EXPECT_TRUE(accepted);
}

TEST(TcpSocket, WaitsForAPortThatIsBeingReleased) {
  auto first = ListenTcp({"127.0.0.1", 0});
  ASSERT_TRUE(first.ok()) << first.status();
  const HostPort at{"127.0.0.1", PortOf(first->fd.get())};
  std::thread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    first->fd.Reset();
  });
  EXPECT_EQ(ListenTcp(at, kPortPatience).status(), absl::OkStatus());
  release.join();
}

TEST(TcpSocket, ServesIPv6IfAvailable) {
  const auto listener = ListenTcp({"::1", 0});
  if (!listener.ok()) GTEST_SKIP() << "no IPv6 here: " << listener.status();
  EXPECT_GT(PortOf(listener->fd.get()), 0);
}

}  // namespace
}  // namespace ashlar::daemon
