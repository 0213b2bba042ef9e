// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/tcp_socket.h"
#include "daemon/testing/http_peer.h"
#include "daemon/testing/node.h"

namespace ashlar::daemon {
namespace {

using std::chrono::milliseconds;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr milliseconds kForEver = std::chrono::hours(1);
constexpr size_t kLarge =
    HttpServer::kMaxReplyBytes / 2 + 1;  // two of these exceed the limit even with the sockets' buffers

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    Require(mkdtemp(folder_.data()) != nullptr, "mkdtemp");
    Require(chmod(folder_.c_str(), 0711) == 0, "chmod");
  }
  ~HttpServerTest() override {
    server_ = nullptr;
    std::filesystem::remove_all(folder_);
  }

  void Start(milliseconds patience = kForEver) {
    HttpServer::Options options;
    options.patience = patience;
    options.listeners.emplace_back(HttpServer::ListenerKind::kTcp, *ListenTcp({"127.0.0.1", 0}));
    options.listeners.emplace_back(HttpServer::ListenerKind::kUnix, *Listen(path(), SOCK_STREAM, 0666));
    port_ = PortOf(options.listeners.front().second.fd.get());
    HttpServer::Routes routes = {
        {"/door",
         [](HttpServer::ListenerKind kind) {
           return HttpReply{.body = kind == HttpServer::ListenerKind::kTcp ? "tcp\n" : "unix\n"};
         }},
        {"/broken",
         [](HttpServer::ListenerKind) { return HttpReply{.status = 503, .body = "no\n", .type = "text/x-why"}; }},
        {"/large", [](HttpServer::ListenerKind) { return HttpReply{.body = std::string(kLarge, 'x')}; }},
    };
    auto server = HttpServer::Start(std::move(options), std::move(routes));
    Require(server.ok(), "HttpServer::Start");
    server_ = *std::move(server);
  }

  std::string path() const { return folder_ + "/http.sock"; }
  std::string Get(const std::string& what) const { return HttpPeer(port_).Ask(what); }
  std::string Send(const std::string& bytes) const {
    HttpPeer peer(port_);
    peer.Send(bytes);
    return peer.Receive();
  }

  std::string folder_ = "/tmp/ashlard_http_XXXXXX";
  int port_ = 0;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, RoutesAnswerOnBothSockets) {
  Start();
  const std::string answer = Get("/door");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; charset=utf-8\r\n"));
  EXPECT_THAT(answer, HasSubstr("Connection: close\r\n")) << "a connection that is kept would be one that idles";
  EXPECT_THAT(answer, EndsWith("\r\n\r\ntcp\n"));
  EXPECT_THAT(HttpPeer(path()).Ask("/door"), EndsWith("\r\n\r\nunix\n"));
  EXPECT_THAT(Get("/door?name[]=up"), EndsWith("\r\n\r\ntcp\n"));
  EXPECT_THAT(Send("GET /door HTTP/1.0\r\n\r\n"), EndsWith("\r\n\r\ntcp\n"));

  const std::string broken = Get("/broken");
  EXPECT_THAT(broken, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(broken, HasSubstr("Content-Type: text/x-why\r\n"));

  const std::string head = HttpPeer(port_).Ask("/door", "HEAD");
  EXPECT_THAT(head, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(head, HasSubstr("Content-Length: 4\r\n"));
  EXPECT_THAT(head, EndsWith("\r\n\r\n"));
}

TEST_F(HttpServerTest, OtherPathsAndMethodsAreRefused) {
  Start();
  for (const char* path : {"/", "/doo", "/door/", "//door", "/../door", "/%00", "*"}) {
    EXPECT_THAT(Get(path), StartsWith("HTTP/1.1 404 ")) << path;
  }
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get", "X"}) {
    const std::string answer = HttpPeer(port_).Ask("/door", method);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 405 ")) << method;
    EXPECT_THAT(answer, HasSubstr("Allow: GET, HEAD\r\n")) << method;
  }
  // A body is announced, but the server does not wait for it.
  EXPECT_THAT(Send("POST /door HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999\r\n\r\n"),
              StartsWith("HTTP/1.1 405 "));
}

TEST_F(HttpServerTest, OversizedAndInvalidRequestsAreRefused) {
  Start();
  const std::string much(2 * HttpServer::kMaxRequestBytes, 'x');
  for (const std::string& request :
       {absl::StrCat("GET /", much, " HTTP/1.1\r\nHost: h\r\n\r\n"),
        absl::StrCat("GET /door HTTP/1.1\r\nHost: h\r\nX: ", much, "\r\n\r\n"), std::string("\r\n\r\nnothing\r\n\r\n"),
        std::string("GET /door HTTP/9.9\r\n\r\n"), std::string("\x16\x03\x01\0\xa5\x01\0\0\xa1\x03\x03\r\n\r\n", 15)}) {
    const std::string answer = Send(request);
    EXPECT_THAT(answer, Not(HasSubstr("200 OK"))) << request.substr(0, 40);
  }
  EXPECT_THAT(Get("/door"), EndsWith("tcp\n"));
}

TEST_F(HttpServerTest, SilentConnectionsDelayNoOther) {
  Start();
  const HttpPeer idle[] = {HttpPeer(port_), HttpPeer(port_), HttpPeer(path()), HttpPeer(path())};
  for (const HttpPeer& peer : idle) ASSERT_TRUE(peer.connected());
  EXPECT_THAT(Get("/door"), EndsWith("tcp\n"));
  EXPECT_THAT(HttpPeer(path()).Ask("/door"), EndsWith("unix\n"));
}

TEST_F(HttpServerTest, ANewConnectionReplacesTheOldestAtTheLimit) {
  Start();
  std::vector<HttpPeer> peers;
  for (size_t i = 0; i < HttpServer::kMaxConnections + 72; ++i) {
    peers.emplace_back(port_);
    ASSERT_TRUE(peers.back().connected());
    if (i % 3 == 0) peers.back().Send("GET /door HTTP/1.1\r\nHo");
    if (i % 10 == 0) {
      ASSERT_THAT(Get("/door"), EndsWith("tcp\n")) << "behind " << i;
    }
  }
  EXPECT_TRUE(peers.front().Closed());
  // The last one is still connected, and gets an answer when it asks.
  EXPECT_THAT(peers.back().Ask("/door"), EndsWith("tcp\n"));
}

TEST_F(HttpServerTest, ConnectionLimitIsPerUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can change its user";
  Start();
  std::optional<HttpPeer> other;
  AsUser(54321, [&] { other.emplace(path()); });
  ASSERT_TRUE(other->connected());
  std::vector<HttpPeer> flood;
  for (size_t i = 0; i < 2 * HttpServer::kMaxConnections; ++i) flood.emplace_back(path());
  EXPECT_TRUE(flood.front().Closed());
  EXPECT_THAT(other->Ask("/door"), EndsWith("unix\n"));
}

TEST_F(HttpServerTest, ClosesSlowConnections) {
  Start(milliseconds(1000));
  HttpPeer idle(port_), slow(port_), reader(port_);
  ASSERT_TRUE(reader.Send("GET /large HTTP/1.1\r\nHost: h\r\n\r\n"));
  // Each byte arrives long before the timeout.
  bool open = slow.Send("GET /door HTTP/1.1\r\nX: ");
  for (int byte = 0; byte < 500 && open; ++byte) {
    std::this_thread::sleep_for(milliseconds(10));
    open = slow.Send("x");
  }
  EXPECT_FALSE(open) << "each byte has bought it more time";
  EXPECT_TRUE(idle.Closed());
  EXPECT_LT(reader.Receive().size(), kLarge) << "it has all, though it was not taken in time";
}

TEST_F(HttpServerTest, UnreadRepliesStayBounded) {
  Start();
  HttpPeer first(port_), second(port_);
  const std::string request = "GET /large HTTP/1.1\r\nHost: h\r\n\r\n";
  ASSERT_TRUE(first.Send(request));
  ASSERT_EQ(first.Receive(1000).size(), 1000u);
  ASSERT_TRUE(second.Send(request));
  EXPECT_GT(second.Receive().size(), kLarge);
  EXPECT_LT(first.Receive().size(), kLarge - 1000) << "both replies were kept";
}

TEST_F(HttpServerTest, StopsAtOnceDespiteConnections) {
  milliseconds shortest = kForEver;
  for (int round = 0; round < 3; ++round) {
    Start();
    std::vector<HttpPeer> peers;
    for (int i = 0; i < 100; ++i) peers.emplace_back(i % 2 == 0 ? HttpPeer(port_) : HttpPeer(path()));
    ASSERT_TRUE(peers.front().Send("GET /large HTTP/1.1\r\nHost: h\r\n\r\n"));
    ASSERT_EQ(peers.front().Receive(1000).size(), 1000u);
    const auto begin = std::chrono::steady_clock::now();
    server_ = nullptr;
    shortest = std::min(shortest, std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - begin));
    EXPECT_TRUE(peers.back().Closed());
    EXPECT_FALSE(HttpPeer(port_).connected());
    EXPECT_FALSE(std::filesystem::exists(path()));
  }
  EXPECT_LT(shortest, milliseconds(1000));
}

TEST_F(HttpServerTest, ClosesAllDescriptors) {
  const size_t before = OpenDescriptors();
  Start();
  for (int i = 0; i < 50; ++i) {
    HttpPeer gone(port_), half(path()), half_said(port_);
    shutdown(half.fd(), SHUT_WR);
    half_said.Send("GET /do");
    shutdown(half_said.fd(), SHUT_WR);
    if (i % 25 == 0) HttpPeer(port_).Send("GET /large HTTP/1.1\r\nHost: h\r\n\r\n");
    ASSERT_THAT(Get("/door"), EndsWith("tcp\n"));
  }
  // With no peer left there is nothing to do: a spinning loop would use all of this time.
  const auto cpu = [] {
    timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return milliseconds(used.tv_sec * 1000 + used.tv_nsec / 1'000'000);
  };
  HttpPeer idle(port_);
  ASSERT_THAT(Get("/door"), EndsWith("tcp\n"));
  const milliseconds used = cpu();
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_LT(cpu() - used, milliseconds(200));
  server_ = nullptr;
  EXPECT_EQ(OpenDescriptors(), before + 1);  // `idle`
}

}  // namespace
}  // namespace ashlar::daemon
