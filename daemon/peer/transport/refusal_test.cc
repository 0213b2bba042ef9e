// SPDX-License-Identifier: Apache-2.0
// The transport refuses requests without a grant or outside of it, malformed messages, and malicious peers.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "daemon/peer/transport/spans.h"
#include "daemon/peer/transport/testing/held_bytes.h"
#include "daemon/peer/transport/testing/raw_client.h"
#include "daemon/peer/transport/wire.h"

namespace ashlar::daemon {
namespace {

std::unique_ptr<Transport> StartOne(TransportOptions options = {}) {
  auto started = Transport::Start(std::move(options));
  EXPECT_TRUE(started.ok()) << started.status();
  return *std::move(started);
}

absl::Status Fetch(Transport& asker, const HostPort& peer, const Grant& grant, uint64_t offset,
                   std::span<std::byte> target) {
  Outcome outcome;
  asker.Fetch(peer, grant, offset, {target}, 0, outcome.done());
  return outcome.Wait();
}

TEST(TransportRefusalTest, RequestsWithoutAGrantOrOutsideOfIt) {
  std::vector<std::string> suspects;  // the holder's thread writes it before it answers
  auto holder = StartOne({.log = [&](const std::string& event, const std::string& peer, const std::string& why) {
    if (event == kProtocolViolation) suspects.push_back(absl::StrCat(peer.substr(0, peer.rfind(':')), " ", why));
  }});
  auto asker = StartOne();
  std::vector<std::byte> there(1000, std::byte{1}), here(1000, std::byte{2});
  const auto held = std::make_shared<HeldBytes>(Spans{there});
  const Grant read = holder->Allow(1000, held), other = holder->Allow(1000, held);
  const HostPort peer = holder->address();

  Grant wrong = read;
  wrong.secret[15] ^= 1;
  EXPECT_EQ(Fetch(*asker, peer, wrong, 0, here), absl::PermissionDeniedError("grant: unknown"));
  wrong = read;
  wrong.number += 1000;
  EXPECT_EQ(Fetch(*asker, peer, wrong, 0, here), absl::PermissionDeniedError("grant: unknown"));
  wrong = {read.number, other.secret};
  EXPECT_EQ(Fetch(*asker, peer, wrong, 0, here), absl::PermissionDeniedError("grant: unknown"));
  EXPECT_EQ(Fetch(*asker, peer, read, 1, here),
            absl::OutOfRangeError("offset 1, length 1000: the grant has 1000 bytes"));
  EXPECT_EQ(Fetch(*asker, peer, read, 1001, std::span(here).first(1)).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Fetch(*asker, peer, read, INT64_MAX - 1000, here).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Fetch(*asker, peer, read, UINT64_MAX - 500, here).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Fetch(*asker, peer, read, 0, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(held->asked(), 0u);
  EXPECT_EQ(holder->stats().refused, 6u);
  EXPECT_THAT(suspects, testing::ElementsAre("127.0.0.1 refused: grant: unknown")) << "once a connection";
  EXPECT_TRUE(Fetch(*asker, peer, read, 0, here).ok());
  EXPECT_TRUE(here == there);
}

TEST(TransportRefusalTest, AddressesThatAreNotAllowed) {
  // Connections of this machine to itself come from 127.0.0.1.
  auto holder = StartOne({.allow = {"192.0.2.1"}, .silence = 300'000'000}), asker = StartOne({.silence = 300'000'000});
  std::vector<std::byte> there(1000), here(1000);
  const Grant read = holder->Allow(1000, std::make_shared<HeldBytes>(Spans{there}));
  EXPECT_TRUE(absl::IsUnavailable(Fetch(*asker, holder->address(), read, 0, here)));
  holder = StartOne({.allow = {"192.0.2.1", "127.0.0.1"}});
  const Grant again = holder->Allow(1000, std::make_shared<HeldBytes>(Spans{there}));
  EXPECT_TRUE(Fetch(*asker, holder->address(), again, 0, here).ok());
  EXPECT_EQ(Transport::Start({.allow = {"here"}}).status().message(),
            "cluster.transport_allow: here is not an IPv4 address");
}

TEST(TransportRefusalTest, RefusesOtherProtocolsThanUcx) {
  auto holder = StartOne(), asker = StartOne();
  std::vector<std::byte> there(1000, std::byte{1}), here(1000);
  const Grant read = holder->Allow(1000, std::make_shared<HeldBytes>(Spans{there}));
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 20; ++i) {
    const int connection = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{.sin_family = AF_INET, .sin_port = htons(holder->address().port)};
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    ASSERT_EQ(connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    std::string garbage(random() % 5000, '\0');
    for (char& c : garbage) c = static_cast<char>(random());
    (void)!send(connection, garbage.data(), garbage.size(), MSG_NOSIGNAL);
    close(connection);
  }
  EXPECT_TRUE(Fetch(*asker, holder->address(), read, 0, here).ok()) << "seed " << seed;
  EXPECT_TRUE(here == there);
}

class RawClientTest : public testing::Test {
 protected:
  ~RawClientTest() override {
    EXPECT_TRUE(there_ == std::vector<std::byte>(kBytes, std::byte{1}));
    EXPECT_EQ(held_->asked(), 0u);
    std::vector<std::byte> here(kBytes);
    EXPECT_TRUE(Fetch(*asker_, holder_->address(), read_, 0, here).ok()) << "seed " << seed_;
    EXPECT_TRUE(here == there_);
  }

  static constexpr size_t kBytes = 100'000;
  const uint64_t seed_ = std::random_device{}();
  std::mt19937_64 random_{seed_};
  std::vector<std::byte> there_ = std::vector<std::byte>(kBytes, std::byte{1});  // outlives its readers
  std::unique_ptr<Transport> holder_ = StartOne(), asker_ = StartOne();
  std::shared_ptr<HeldBytes> held_ = std::make_shared<HeldBytes>(Spans{there_});
  const Grant read_ = holder_->Allow(kBytes, held_);
  const Grant other_ = holder_->Allow(kBytes, held_);
};

TEST_F(RawClientTest, ReadsNothingWithoutAGrant) {
  RawClient client(holder_->address(), UCP_FEATURE_AM);
  const std::vector<std::byte> payload(5000, std::byte{9});
  for (const uint64_t number : {read_.number, other_.number, uint64_t{3}, uint64_t{1000}}) {
    for (const MessageKind kind : {MessageKind::kFetch, MessageKind::kBorrow}) {
      const Message ask{.kind = kind,
                        .to = {number, DrawSecret()},
                        .from = {77, DrawSecret()},
                        .length = 1000,
                        .patience = 1'000'000'000};
      client.Message(EncodeMessage(ask), {});
    }
    client.Message(EncodeMessage({.kind = MessageKind::kData, .to = {number, DrawSecret()}}), payload);
    client.Message(EncodeMessage({.kind = MessageKind::kLent, .to = {number, DrawSecret()}, .from = {5, {1}}}), {});
    client.Message(EncodeMessage({.kind = MessageKind::kCancel, .from = {number, DrawSecret()}}), {});
  }
  TransportStats stats;
  for (int i = 0; i < 5000 && stats.refused + stats.late < 16; ++i) {
    client.lost();
    stats = holder_->stats();
  }
  EXPECT_EQ(stats.refused, 8u);
  EXPECT_EQ(stats.late, 8u);
}

TEST_F(RawClientTest, OnlyGrantedAccessIsPossible) {
  for (const uint64_t features : {UCP_FEATURE_RMA, UCP_FEATURE_TAG, UCP_FEATURE_STREAM}) {
    RawClient client(holder_->address(), features);
    std::vector<std::byte> mine(1000, std::byte{9});
    if (features == UCP_FEATURE_RMA) {
      client.Memory(std::span(there_).first(1000), mine, true);
      client.Memory(std::span(there_).first(1000), mine, false);
    } else if (features == UCP_FEATURE_TAG) {
      client.Tag(mine);
    } else {
      client.Stream(mine);
    }
    EXPECT_TRUE(mine == std::vector<std::byte>(1000, std::byte{9}));
  }
}

TEST_F(RawClientTest, IsDisconnectedAfterMalformedMessages) {
  RawClient client(holder_->address(), UCP_FEATURE_AM);
  // A rendezvous before there is a connection ends the client, by an assertion of UCX 1.13.
  client.Message(EncodeMessage({.kind = MessageKind::kPing}), {}, UCP_AM_SEND_FLAG_EAGER);
  for (int i = 0; i < 200 && !client.lost(); ++i) {
    std::vector<std::byte> header(random_() % 200), payload(random_() % 300'000);
    for (auto& byte : header) byte = static_cast<std::byte>(random_());
    // Eager, by rendezvous, and with an id that has no handler.
    client.Message(header, payload, i % 2 ? UCP_AM_SEND_FLAG_EAGER : 0, i % 3 == 0 ? 1 + random_() % 65535 : 0);
    usleep(1000);
  }
  EXPECT_TRUE(client.lost());
  EXPECT_GE(holder_->stats().malformed, 17u);
}

TEST(WireTest, MessagesRoundTrip) {
  const Message message{.kind = MessageKind::kBorrow,
                        .to = {5, DrawSecret()},
                        .from = {6, DrawSecret()},
                        .offset = 7,
                        .length = 8,
                        .patience = 9};
  const auto parsed = ParseMessage(EncodeMessage(message), 0);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(SameGrant(parsed->to, message.to) && SameGrant(parsed->from, message.from));
  EXPECT_EQ(parsed->kind, MessageKind::kBorrow);
  EXPECT_EQ(std::tuple(parsed->offset, parsed->length, parsed->patience), std::tuple(7u, 8u, 9u));
}

TEST(WireTest, RefusesMessagesThatNoTransportSends) {
  const Message fetch{.kind = MessageKind::kFetch, .to = {5, {1}}, .from = {6, {1}}, .length = 8, .patience = 9};
  const auto why = [](const Message& message, size_t payload = 0) {
    return std::string(ParseMessage(EncodeMessage(message), payload).status().message());
  };
  const auto with = [&](auto change) {
    Message changed = fetch;
    change(changed);
    return changed;
  };
  EXPECT_EQ(why(fetch), "");
  EXPECT_EQ(why(fetch, 1), "payload");
  EXPECT_EQ(why(with([](Message& m) { m.length = 0; })), "length");
  EXPECT_EQ(why(with([](Message& m) { m.patience = 0; })), "patience");
  EXPECT_EQ(why(with([](Message& m) { m.to = {}; })), "to");
  EXPECT_EQ(why(with([](Message& m) { m.from = {}; })), "from");
  EXPECT_EQ(why(with([](Message& m) { m.code = 3; })), "code");
  EXPECT_EQ(why(with([](Message& m) { m.offset = uint64_t{1} << 63; })), "offset + length overflows");
  EXPECT_EQ(why(with([](Message& m) { m.length = UINT64_MAX; })), "offset + length overflows");
  EXPECT_EQ(why({.kind = MessageKind::kData, .to = {5, {1}}}), "data: empty payload");
  EXPECT_EQ(why({.kind = MessageKind::kData, .to = {5, {1}}, .offset = UINT64_MAX}, 8), "offset + length overflows");
  EXPECT_EQ(why({.kind = MessageKind::kFailed, .code = 17, .to = {5, {1}}}), "code");
  EXPECT_EQ(why({.kind = MessageKind::kFailed, .code = 3, .to = {5, {1}}}, 257), "error text: too long");
  EXPECT_EQ(why({.kind = static_cast<MessageKind>(0)}), "kind 0");
  EXPECT_EQ(why({.kind = static_cast<MessageKind>(13)}), "kind 13");
  for (const int reserved : {2, 3, 5}) {
    EXPECT_EQ(why(with([&](Message& m) { m.kind = static_cast<MessageKind>(reserved); })),
              "kind " + std::to_string(reserved));
  }
  HeaderBytes bytes = EncodeMessage(fetch);
  bytes[2] = std::byte{2};
  EXPECT_EQ(ParseMessage(bytes, 0).status().message(), "header: version 2; expected 1");
  EXPECT_EQ(ParseMessage(std::span(bytes).first(79), 0).status().message(), "header: 79 bytes; expected 80");
}

// Every order of pieces, against a bit for each byte.
TEST(ReceivedTest, CountsEveryByteOnce) {
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    Received received;
    std::vector<bool> there(60);
    for (int i = 0; i < 60; ++i) {
      const size_t from = random() % 60, to = from + 1 + random() % (60 - from);
      const bool fresh = std::find(there.begin() + from, there.begin() + to, true) == there.begin() + to;
      ASSERT_EQ(received.Add(from, to), fresh) << "seed " << seed;
      if (fresh) std::fill(there.begin() + from, there.begin() + to, true);
      ASSERT_EQ(received.bytes(), static_cast<uint64_t>(std::count(there.begin(), there.end(), true)));
    }
  }
}

}  // namespace
}  // namespace ashlar::daemon
