// SPDX-License-Identifier: Apache-2.0
// ZMTP parsing and encoding, and connections that violate the protocol or occupy memory.
#include "daemon/events/zmtp.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/events/zmq_publisher.h"
#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string ReadyOf(const std::string& socket) {
  const std::string body =
      std::string("\x05READY\x0bSocket-Type\0\0\0", 21) + static_cast<char>(socket.size()) + socket;
  return std::string(1, 4) + static_cast<char>(body.size()) + body;
}
// The first bytes of a SUB or DEALER socket.
std::string Hello(const std::string& socket) {
  return ZmtpGreeting(ZmtpSocket::kPub).substr(0, 64) + ReadyOf(socket);
}
std::string Frame(const std::string& body, bool more = false) {
  std::string frame;
  AppendZmtpFrame(frame, body, more);
  return frame;
}

TEST(ZmtpReader, ReadsAByteAtATime) {
  ZmtpReader reader(ZmtpSocket::kPub);
  const std::string ping = std::string("\x04\x09\x04PING\x00\x0a", 9) + "ab";
  const std::string bytes = Hello("SUB") + Frame("\x01kv") + ping + std::string(1, 4) + "\x0d\x09SUBSCRIBEtop" +
                            Frame(std::string("\0kv", 3)) + Frame("\x02other");
  std::vector<ZmtpInput> inputs;
  for (const char byte : bytes) {
    auto some = reader.Receive({&byte, 1});
    ASSERT_TRUE(some.ok()) << some.status();
    for (ZmtpInput& input : *some) inputs.push_back(std::move(input));
  }
  ASSERT_EQ(inputs.size(), 6u);
  EXPECT_EQ(inputs[0].kind, ZmtpInput::Kind::kReady);
  EXPECT_EQ(inputs[1].kind, ZmtpInput::Kind::kSubscribe);
  EXPECT_THAT(inputs[1].frames, ElementsAre("kv"));
  EXPECT_EQ(inputs[2].kind, ZmtpInput::Kind::kPing);
  EXPECT_THAT(inputs[2].frames, ElementsAre("ab"));
  EXPECT_EQ(inputs[3].kind, ZmtpInput::Kind::kSubscribe);
  EXPECT_THAT(inputs[3].frames, ElementsAre("top"));
  EXPECT_EQ(inputs[4].kind, ZmtpInput::Kind::kCancel);
  EXPECT_EQ(inputs[5].kind, ZmtpInput::Kind::kMessage);
}

TEST(ZmtpReader, RefusesOtherProtocols) {
  const std::string good = Hello("SUB");
  std::string older = good, curve = good;
  older[10] = 2;
  curve.replace(12, 4, "CURV");
  const struct {
    std::string bytes;
    absl::StatusCode code;
    const char* message;
  } kCases[] = {
      {"GET / HTTP/1.1\r\n", absl::StatusCode::kFailedPrecondition, "expected ZMTP 3"},
      {older, absl::StatusCode::kFailedPrecondition, "greeting: ZMTP 2, expected 3"},
      {curve, absl::StatusCode::kFailedPrecondition, "unsupported mechanism; expected NULL"},
      {Hello("PUSH"), absl::StatusCode::kFailedPrecondition, "READY: wrong socket type; expected SUB"},
      {good.substr(0, 64) + Frame("early"), absl::StatusCode::kInvalidArgument, "message: expected READY first"},
      {good + std::string("\x02\0\0\0\0\0\0\x04\x01", 9), absl::StatusCode::kInvalidArgument, "1025 bytes"},
      {good + std::string("\x08\0", 2), absl::StatusCode::kInvalidArgument, "frame: unknown flags 8"},
  };
  for (const auto& one : kCases) {
    const auto inputs = ZmtpReader(ZmtpSocket::kPub).Receive(one.bytes);
    EXPECT_EQ(inputs.status().code(), one.code) << inputs.status();
    EXPECT_THAT(std::string(inputs.status().message()), HasSubstr(one.message));
  }
}

TEST(ZmtpReader, AMessageOfEndlessFramesIsRefused) {
  ZmtpReader reader(ZmtpSocket::kRouter);
  ASSERT_TRUE(reader.Receive(Hello("DEALER")).ok());
  for (size_t i = 0; i < ZmtpReader::kMaxFrames; ++i) ASSERT_TRUE(reader.Receive(Frame("x", true)).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(reader.Receive(Frame("x", true)).status()));
}

// A publisher on TCP, and clients that send raw bytes.
class HostileClients : public testing::Test {
 protected:
  void SetUp() override {
    auto publisher = ZmqPublisher::Start({.address = "tcp://127.0.0.1:*",
                                          .replay_address = "tcp://*:*",
                                          .topic = "kv",
                                          .greeting = std::chrono::milliseconds(200)},
                                         hub_, texts_, refused_);
    ASSERT_TRUE(publisher.ok()) << publisher.status();
    publisher_ = *std::move(publisher);
  }
  // From an address of this machine's loopback network, 127.0.0.N.
  static UniqueFd Dial(const std::string& address, uint8_t from = 1) {
    UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in own{}, other{};
    own.sin_family = other.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + from);
    other.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    other.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    EXPECT_EQ(bind(socket.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own), 0);
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<const sockaddr*>(&other), sizeof other), 0);
    return socket;
  }
  static bool Tell(const UniqueFd& socket, const std::string& bytes) {
    return send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  // Returns whether the daemon closes the connection within two seconds.
  static bool Closed(const UniqueFd& socket) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    char bytes[4096];
    while (std::chrono::steady_clock::now() < end) {
      pollfd one{.fd = socket.get(), .events = POLLIN, .revents = 0};
      if (poll(&one, 1, 50) == 1 && recv(socket.get(), bytes, sizeof bytes, MSG_DONTWAIT) <= 0) return true;
    }
    return false;
  }
  uint64_t refusals(RefusedConnection reason) const {
    const auto counts = refused_.counts();
    const auto found = counts.find({"events", reason});
    return found == counts.end() ? 0 : found->second;
  }

  EventHub hub_;
  BlockTexts texts_;
  RefusedConnections refused_;
  std::unique_ptr<ZmqPublisher> publisher_;
};

TEST_F(HostileClients, EndlessSubscriptionsAndMessagesEndTheirConnection) {
  const UniqueFd subscriber = Dial(publisher_->address()), asker = Dial(publisher_->replay_address());
  ASSERT_TRUE(Tell(subscriber, Hello("SUB")));
  ASSERT_TRUE(Tell(asker, Hello("DEALER")));
  size_t sent = 0;
  for (const std::string frame = Frame("\x01" + std::string(1000, 'k')); sent < size_t{32} << 20;
       sent += frame.size()) {
    if (!Tell(subscriber, frame)) break;
  }
  EXPECT_LT(sent, size_t{16} << 20) << "the kernel's buffers, and little more";
  for (sent = 0; sent < 4096 && Tell(asker, Frame("x", true)); ++sent) {
  }
  EXPECT_TRUE(Closed(subscriber));
  EXPECT_TRUE(Closed(asker));
  EXPECT_EQ(refusals(RefusedConnection::kTooMany), 1u);
  EXPECT_EQ(refusals(RefusedConnection::kProtocol), 1u);
}

TEST_F(HostileClients, ConnectionWithoutGreetingIsClosed) {
  const UniqueFd silent = Dial(publisher_->address()), slow = Dial(publisher_->replay_address());
  ASSERT_TRUE(Tell(slow, Hello("DEALER").substr(0, 70)));
  const UniqueFd good = Dial(publisher_->address());
  ASSERT_TRUE(Tell(good, Hello("SUB")));
  EXPECT_TRUE(Closed(silent));
  EXPECT_TRUE(Closed(slow));
  EXPECT_EQ(refusals(RefusedConnection::kTimedOut), 2u);
  pollfd one{.fd = good.get(), .events = POLLRDHUP, .revents = 0};
  EXPECT_EQ(poll(&one, 1, 0), 0);
}

TEST_F(HostileClients, ConnectionsOfAnAddressAreBoundedAndLeaveOthersSpace) {
  const auto greet = [&](uint8_t from) {
    UniqueFd socket = Dial(publisher_->address(), from);
    EXPECT_TRUE(Tell(socket, Hello("SUB")));
    return socket;
  };
  std::vector<UniqueFd> held;
  const size_t addresses = ZmqPublisher::kConnections / ZmqPublisher::kConnectionsOfAnAddress;
  for (size_t address = 2; address < 2 + addresses; ++address) {
    for (size_t i = 0; i < ZmqPublisher::kConnectionsOfAnAddress; ++i)
      held.push_back(greet(static_cast<uint8_t>(address)));
    EXPECT_TRUE(Closed(greet(static_cast<uint8_t>(address)))) << "one more of this address";
  }
  const UniqueFd router = greet(1);
  EXPECT_TRUE(Closed(held.front())) << "the oldest of an address with the most";
  EXPECT_EQ(refusals(RefusedConnection::kTooMany), addresses + 1);
  ASSERT_TRUE(Tell(router, Frame("\x01")));
  pollfd one{.fd = router.get(), .events = POLLRDHUP, .revents = 0};
  EXPECT_EQ(poll(&one, 1, 300), 0);
}

}  // namespace
}  // namespace ashlar::daemon
