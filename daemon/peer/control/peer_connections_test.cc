#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/peer/channels/peer_bounds.h"
#include "daemon/peer/control/peer_client.h"
#include "daemon/peer/control/peer_server.h"
#include "daemon/testing/fake_peer_calls.h"
#include "daemon/testing/process_figures.h"

namespace ashlar::daemon {
namespace {

// The check of a daemon's open files and mappings counts on it. Both ends of each connection are in this process.
TEST(PeerConnections, TakeThreeFilesAndHardlyAnyMapping) {
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
  dial();  // what they share is there
  const size_t files = OpenFilesOfThisProcess();
  [[maybe_unused]] const size_t mappings = MappingsOfThisProcess();
  for (size_t i = 0; i < kPeers; ++i) dial();
  const size_t of_each = PeerBounds::kFilesOfCalls + PeerBounds::kFilesOfAcceptedCalls;
  EXPECT_LE(OpenFilesOfThisProcess(), files + of_each * kPeers);
#if !defined(__SANITIZE_THREAD__)  // it maps memory of its own
  EXPECT_LE(MappingsOfThisProcess(), mappings + 2 * kPeers / PeerBounds::kConnectionsOfAMapping);
#endif
}

}  // namespace
}  // namespace ashlar::daemon
