// SPDX-License-Identifier: Apache-2.0
#include "daemon/security/tls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <thread>

#include "ashlar/v1/config.pb.h"
#include "daemon/security/peer_policy.h"
#include "daemon/testing/certificates.h"

namespace ashlar::daemon {
namespace {

using ::testing::StartsWith;

class TlsTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(folder_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<std::unique_ptr<Tls>> Open() {
    return Tls::Open(
        {.node = "a",
         .ca_file = folder_ + "/ca",
         .cert_file = folder_ + "/cert",
         .key_file = folder_ + "/key",
         .check_every = 10'000'000},
        [](const std::string& node) { return node != "stranger"; }, refusals_);
  }
  std::string OpenError() { return std::string(Open().status().message()); }
  void Put(const TestPair& pair) {
    ReplaceFile(folder_ + "/cert", pair.cert);
    ReplaceFile(folder_ + "/key", pair.key);
  }
  static bool Await(const std::function<bool()>& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return condition();
  }

  std::string folder_ = "/tmp/ashlar_tls_XXXXXX";
  const TestAuthority authority_;
  Refusals refusals_;
};

TEST_F(TlsTest, ADaemonDoesNotStartWithFilesThatAreWrong) {
  EXPECT_THAT(OpenError(), StartsWith("ca_file: cannot read "));
  ReplaceFile(folder_ + "/ca", authority_.pem());
  EXPECT_THAT(OpenError(), StartsWith("cert_file: cannot read "));
  const TestPair good = authority_.Sign({.name = "a"});
  Put({.cert = good.cert, .key = "nonsense"});
  EXPECT_THAT(OpenError(), StartsWith("key_file: the file has no private key"));
  Put({.cert = good.cert, .key = authority_.Sign({.name = "a"}).key});
  EXPECT_EQ(OpenError(), "key_file: does not match cert_file; expected the certificate's private key");
  Put(authority_.Sign({.name = "b"}));
  EXPECT_EQ(OpenError(), "cert_file: names node b; expected node a");
  Put(authority_.Sign({.name = "a", .from_seconds = -9, .to_seconds = -5}));
  EXPECT_EQ(OpenError(), "cert_file: certificate has expired");
  Put(TestAuthority("another").Sign({.name = "a"}));
  EXPECT_THAT(OpenError(), StartsWith("cert_file: unable to get"));
  Put(good);
  EXPECT_TRUE(Open().ok());
}

TEST_F(TlsTest, AHalfReplacedPairIsLoadedOnceComplete) {
  ReplaceFile(folder_ + "/ca", authority_.pem());
  Put(authority_.Sign({.name = "a"}));
  const auto tls = Open();
  ASSERT_TRUE(tls.ok()) << tls.status();
  const TestPair next = authority_.Sign({.name = "a"});
  ReplaceFile(folder_ + "/cert", next.cert);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // several checks
  EXPECT_EQ((*tls)->reloads(), 0u);
  ReplaceFile(folder_ + "/key", next.key);
  EXPECT_TRUE(Await([&] { return (*tls)->reloads() == 1; }));
}

TEST_F(TlsTest, TermIsThatOfCertificateInUse) {
  ReplaceFile(folder_ + "/ca", authority_.pem());
  Put(authority_.Sign({.name = "a", .to_seconds = 1000}));
  const auto tls = Open();
  ASSERT_TRUE(tls.ok()) << tls.status();
  const int64_t first = (*tls)->term().ends;
  EXPECT_NEAR(static_cast<double>(first - time(nullptr)), 1000, 60);
  Put(authority_.Sign({.name = "a", .to_seconds = 100'000}));
  EXPECT_TRUE(Await([&] { return (*tls)->term().ends > first + 90'000; }));
  EXPECT_TRUE(Await([&] { return (*tls)->term().seconds == 100'000 + 3600; }));
}

TEST_F(TlsTest, ReplacedAuthoritiesApplyAtOnce) {
  ReplaceFile(folder_ + "/ca", authority_.pem());
  Put(authority_.Sign({.name = "a"}));
  const auto tls = Open();
  ASSERT_TRUE(tls.ok()) << tls.status();
  const TestPair peer = authority_.Sign({.name = "b"}), stranger = authority_.Sign({.name = "stranger"});
  EXPECT_EQ((*tls)->CheckClient(peer.cert, "").refusal, std::nullopt);
  EXPECT_EQ((*tls)->CheckClient(stranger.cert, "").refusal, Refusal::kNotAMember);
  ReplaceFile(folder_ + "/ca", TestAuthority("next").pem());
  EXPECT_TRUE(Await([&] { return (*tls)->CheckClient(peer.cert, "").refusal == Refusal::kUntrusted; }));
}

TEST(PeerPolicy, ListsNodesAndTheirTenants) {
  v1::Config config;
  config.add_tenants()->set_name("x");
  config.add_tenants()->set_name("y");
  config.mutable_cluster()->set_node("self");
  EXPECT_TRUE(PeerPolicy(config).Member("anybody"));
  EXPECT_FALSE(PeerPolicy(config).Member("self"));
  EXPECT_EQ(PeerPolicy(config).Tenant("anybody", "y"), storage::TenantId{1});
  EXPECT_EQ(PeerPolicy(config).Tenant("anybody", "z"), std::nullopt);

  v1::ClusterPeer* peer = config.mutable_cluster()->add_peers();
  peer->set_node("b");
  peer->add_tenants("y");
  EXPECT_FALSE(PeerPolicy(config).Member("anybody"));
  EXPECT_EQ(PeerPolicy(config).Tenant("b", "y"), storage::TenantId{1});
  EXPECT_EQ(PeerPolicy(config).Tenant("b", "x"), std::nullopt);
  config.mutable_cluster()->add_peers()->set_node("*");
  EXPECT_EQ(PeerPolicy(config).Tenant("c", "x"), storage::TenantId{0});
  EXPECT_EQ(PeerPolicy(config).Tenant("b", "x"), std::nullopt) << "listed itself";
}

}  // namespace
}  // namespace ashlar::daemon
