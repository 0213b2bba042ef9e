#include "daemon/runtime/tcp_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
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

TEST(TcpSocket, ListensWhereItIsTold) {
  const auto first = ListenTcp({"127.0.0.1", 0});
  ASSERT_TRUE(first.ok()) << first.status();
  const uint16_t port = PortOf(first->fd.get());
  ASSERT_GT(port, 0);
  const HttpPeer peer(port);
  EXPECT_TRUE(peer.connected());
  EXPECT_EQ(PeerAddress(peer.fd()), std::string("\x7f\0\0\1", 4));
  EXPECT_EQ(PeerAddress(first->fd.get()), "") << "it is connected to nobody";

  const absl::Status taken = ListenTcp({"127.0.0.1", port}).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(taken.message(), HasSubstr(absl::StrCat("port ", port, " of 127.0.0.1: Address already in use")));
  EXPECT_THAT(ListenTcp({"192.0.2.1", 0}).status().message(), HasSubstr("cannot listen on port 0 of 192.0.2.1"));
  EXPECT_THAT(ListenTcp({"no such host", 0}).status().message(), HasSubstr("cannot resolve no such host"));
}

TEST(TcpSocket, IPv6IsServedWhereThereIsAny) {
  const auto listener = ListenTcp({"::1", 0});
  if (!listener.ok()) GTEST_SKIP() << "no IPv6 here: " << listener.status();
  EXPECT_GT(PortOf(listener->fd.get()), 0);
}

}  // namespace
}  // namespace ashlar::daemon
