// SPDX-License-Identifier: Apache-2.0
// Connections between daemons: their limits, and how they end.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "ashlar/v1/peer.grpc.pb.h"
#include "daemon/peer/channels/peer_bounds.h"
#include "daemon/peer/control/peer_client.h"
#include "daemon/peer/control/peer_messages.h"
#include "daemon/peer/control/peer_server.h"
#include "daemon/testing/fake_peer_calls.h"
#include "daemon/testing/process_figures.h"

namespace ashlar::daemon {
namespace {

// The check of a daemon's open files and mappings depends on this. Both ends of each connection are in this process.
TEST(PeerConnections, TakeThreeFilesAndFewMappings) {
  constexpr size_t kPeers = 48;
  v1::Config config;
  config.mutable_cluster()->set_node("holder");
  const PeerPolicy policy(config);
  Refusals refusals;
  FakePeerCalls calls;
  auto server = PeerServer::Start({.listen = {.host = "127.0.0.1", .port = 0}, .self = {.node = "holder"}}, nullptr,
                                  policy, calls, refusals);
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<std::unique_ptr<PeerClient>> clients;
  const auto dial = [&] {
    PeerHello self{.node = absl::StrCat("asker", clients.size())};
    self.incarnation.fill(static_cast<uint8_t>(1 + clients.size()));
    PeerClient::Options options{.node = "holder",
                                .address = absl::StrCat("127.0.0.1:", (*server)->port()),
                                .self = self,
                                .here = [](const PeerHello&) {},
                                .gone = [] {}};
    clients.push_back(std::make_unique<PeerClient>(std::move(options), nullptr, refusals));
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!clients.back()->connected() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    ASSERT_TRUE(clients.back()->connected());
  };
  dial();  // the shared resources exist by now
  const size_t files = OpenFilesOfThisProcess();
  [[maybe_unused]] const size_t mappings = MappingsOfThisProcess();
  for (size_t i = 0; i < kPeers; ++i) dial();
  const size_t of_each = PeerBounds::kFilesOfCalls + PeerBounds::kFilesOfAcceptedCalls;
  EXPECT_LE(OpenFilesOfThisProcess(), files + of_each * kPeers);
#if !defined(__SANITIZE_THREAD__)  // it maps additional memory
  EXPECT_LE(MappingsOfThisProcess(), mappings + 2 * kPeers / PeerBounds::kConnectionsOfAMapping);
#endif
}

// A holder without TLS, which accepts every greeting.
class PlainHolder : public testing::Test {
 protected:
  void Start(const char* host) {
    config_.mutable_cluster()->set_node("holder");
    policy_.emplace(config_);
    auto server =
        PeerServer::Start({.listen = {.host = host, .port = 0}, .self = {.node = "holder"}, .check_every = 20'000'000},
                          nullptr, *policy_, calls_, refusals_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  std::unique_ptr<v1::Peer::Stub> Dial() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a separate connection
    return v1::Peer::NewStub(grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                                       grpc::InsecureChannelCredentials(), arguments));
  }
  struct Greeted {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::PeerGreeting>> stream;
  };
  static std::unique_ptr<Greeted> Greet(v1::Peer::Stub& stub, const std::string& node) {
    PeerHello hello{.node = node};
    hello.incarnation.fill(1);
    v1::PeerGreeting greeting, answer;
    Write(hello, &greeting);
    auto greeted = std::make_unique<Greeted>();
    greeted->stream = stub.Greet(&greeted->context, greeting);
    EXPECT_TRUE(greeted->stream->Read(&answer)) << node;
    return greeted;
  }
  static void Await(const std::function<bool()>& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_TRUE(condition());
  }

  v1::Config config_;
  std::optional<PeerPolicy> policy_;
  Refusals refusals_;
  FakePeerCalls calls_;
  std::unique_ptr<PeerServer> server_;
};

// An address is reused before the end of its previous connection is detected, or one connection greets twice.
TEST_F(PlainHolder, AReusedAddressEndsTheFormerNodesLeases) {
  ASSERT_NO_FATAL_FAILURE(Start("127.0.0.1"));
  {
    const auto stub = Dial();
    const auto a = Greet(*stub, "a"), b = Greet(*stub, "b");
    EXPECT_EQ(calls_.Count("gone a"), 1u);
    EXPECT_EQ(server_->peers(), 1u);
    v1::PeerGreeting more;
    EXPECT_FALSE(a->stream->Read(&more)) << "its stream has ended";
    b->context.TryCancel();
  }
  Await([&] { return calls_.Count("gone b") == 1; });
  const auto stub = Dial();
  const auto again = Greet(*stub, "a");
  EXPECT_EQ(calls_.Count("here a"), 2u);
  EXPECT_EQ(calls_.Count("gone a"), 1u);
  again->context.TryCancel();
}

// Calls that a stopping peer sent before its greeting's end may be read after it.
TEST_F(PlainHolder, ACallAfterItsGreetingEndedIsNotARefusal) {
  ASSERT_NO_FATAL_FAILURE(Start("127.0.0.1"));
  const auto renew = [](v1::Peer::Stub& stub) {
    grpc::ClientContext context;
    v1::PeerRenewRequest request;
    v1::PeerRenewReply reply;
    return stub.Renew(&context, request, &reply).error_code();
  };
  const auto stub = Dial();
  Greet(*stub, "a")->context.TryCancel();
  Await([&] { return calls_.Count("gone a") == 1; });
  EXPECT_EQ(renew(*stub), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(refusals_.count(Refusal::kBadGreeting), 0u);
  EXPECT_EQ(renew(*Dial()), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(refusals_.count(Refusal::kBadGreeting), 1u) << "it has never greeted";
}

// A server that listens on IPv6 gets IPv4 peers whose addresses gRPC and the kernel write differently.
TEST_F(PlainHolder, APeerOfTheOtherFamilyLeavesWithoutARefusal) {
  if (!std::filesystem::exists("/proc/net/if_inet6")) GTEST_SKIP() << "this kernel has no IPv6";
  ASSERT_NO_FATAL_FAILURE(Start("::"));
  for (size_t i = 1; i <= 3; ++i) {
    const auto stub = Dial();
    Greet(*stub, "a")->context.TryCancel();
    Await([&] { return calls_.Count("gone a") == i; });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the listener checks every 20 ms
  EXPECT_EQ(refusals_.count(Refusal::kHandshake), 0u);
}

}  // namespace
}  // namespace ashlar::daemon
