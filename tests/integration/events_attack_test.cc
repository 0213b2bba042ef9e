// SPDX-License-Identifier: Apache-2.0
// Malicious clients of the event ports: endless subscriptions, endless sends, silence, and many connections.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/events/zmtp.h"
#include "daemon/runtime/unique_fd.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/raw_session.h"
#include "tests/integration/victim.h"

namespace ashlar::integration {
namespace {

using daemon::UniqueFd;
using std::chrono::steady_clock;

constexpr uint32_t kStopGraceSeconds = 1;
constexpr size_t kMostBytes = size_t{64} << 20;
constexpr int kConnections = 400;

UniqueFd Dial(uint16_t port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return UniqueFd();
  return socket;
}

uint16_t FreePort() {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  EXPECT_EQ(bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
  EXPECT_EQ(getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  return ntohs(address.sin_port);
}

bool Send(const UniqueFd& socket, const std::string& bytes) {
  return send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
}

std::string Hello(const std::string& type) {
  const std::string ready = std::string("\x05READY\x0bSocket-Type\0\0\0", 21) + static_cast<char>(type.size()) + type;
  const std::string greeting = daemon::ZmtpGreeting(daemon::ZmtpSocket::kPub).substr(0, 64);
  return greeting + "\x04" + static_cast<char>(ready.size()) + ready;
}

std::string Frame(const std::string& body, bool more) {
  std::string frame;
  daemon::AppendZmtpFrame(frame, body, more);
  return frame;
}

TEST(EventsAttack, CostsOthersNothing) {
  const uint16_t publish = FreePort(), replay = FreePort();
  DaemonProcess daemon({.drain_seconds = kStopGraceSeconds,
                        .more = "events: {zmq_address: \"tcp://127.0.0.1:" + std::to_string(publish) +
                                "\", zmq_replay_address: \"tcp://127.0.0.1:" + std::to_string(replay) + "\"}\n"});
  auto victim = std::make_unique<Victim>(daemon.client_options());
  const size_t before = daemon.peak_bytes();

  std::atomic<bool> stop{false};
  std::atomic<size_t> sent{0};
  std::vector<std::jthread> attackers;
  const auto flood = [&](uint16_t port, const std::string& type, const std::string& unit) {
    attackers.emplace_back([&, port, type, unit] {
      while (!stop) {
        const UniqueFd socket = Dial(port);
        if (!socket.valid() || !Send(socket, Hello(type))) continue;
        for (int i = 0; i < 10'000 && !stop && send(socket.get(), unit.data(), unit.size(), MSG_NOSIGNAL) > 0; ++i) {
          sent += unit.size();
        }
      }
    });
  };
  for (int i = 0; i < 2; ++i) {
    flood(publish, "SUB", Frame("\x01" + std::string(1000, 'k'), false));
    flood(replay, "DEALER", Frame(std::string(1000, 'x'), true));
  }
  std::vector<UniqueFd> silent;
  for (int i = 0; i < kConnections; ++i) silent.push_back(Dial(i % 2 == 0 ? publish : replay));

  victim->ExpectServed();
  for (int i = 0; i < 50; ++i) {
    EXPECT_FALSE(RawSession(daemon.client_options()).Greet().empty()) << "a new session";
    TestEngine another(daemon.client_options());  // with a region
  }
  EXPECT_NE(daemon.Metrics(), "");
  EXPECT_TRUE(Eventually([&] { return sent > size_t{64} << 20; }));
  const size_t peak = daemon.peak_bytes();
  EXPECT_LE(peak, before + kMostBytes);
  victim.reset();
  const auto begun = steady_clock::now();
  EXPECT_EQ(daemon.Terminate(), 0) << "with the attackers still there";
  const std::chrono::duration<double> took = steady_clock::now() - begun;
  EXPECT_LE(took.count(), kStopGraceSeconds + 2);
  stop = true;
  attackers.clear();
  std::printf("%zu MiB sent; %.1f MiB more memory; stopped in %.2f s\n", sent.load() >> 20,
              static_cast<double>(peak - before) / (1 << 20), took.count());
}

}  // namespace
}  // namespace ashlar::integration
