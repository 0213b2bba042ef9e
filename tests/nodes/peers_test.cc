// Daemons of one cluster, each in a network stack of its own, with a real etcd and mutual TLS: what one has serves the
// engines of the others, and whatever fails between them costs engines a miss at most.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "daemon/testing/certificates.h"
#include "tests/integration/test_engine.h"
#include "tests/nodes/daemon_cluster.h"

namespace ashlar::nodes {
namespace {

using daemon::TestAuthority;
using daemon::TestPair;
using integration::DaemonOptions;
using integration::DaemonProcess;
using integration::Eventually;
using integration::MakePrompt;
using integration::TestEngine;
using integration::Tokens;

constexpr std::byte kPoison{0x5a};

// Certificates of a test's nodes, in a folder.
class Certificates {
 public:
  Certificates() : folder_(std::filesystem::temp_directory_path() / absl::StrCat("ashlar-", std::random_device{}())) {
    std::filesystem::create_directory(folder_);
  }
  ~Certificates() { std::filesystem::remove_all(folder_); }

  // The YAML of a node's `tls`.
  std::string Make(const std::string& node, const TestAuthority& authority) const {
    const TestPair pair = authority.Sign({.name = node});
    const std::string path = folder_ / node;
    daemon::ReplaceFile(path + ".ca", authority.pem());
    daemon::ReplaceFile(path + ".cert", pair.cert);
    daemon::ReplaceFile(path + ".key", pair.key);
    return absl::StrCat("{ca_file: ", path, ".ca, cert_file: ", path, ".cert, key_file: ", path, ".key}");
  }

 private:
  const std::filesystem::path folder_;
};

std::string ClusterYaml(const NodePlace& place, const std::string& tls) {
  return absl::StrCat("cluster:\n  node: ", place.name, "\n  control_address: ", place.control_address,
                      "\n  transport_address: ", place.transport_address,
                      "\n  announce: all\n  lookup_milliseconds: 5000\n  tls: ", tls, "\n  etcd: {endpoints: [\"",
                      place.etcd_endpoints[0], "\"], lease_seconds: 3}\n");
}

size_t Hits(const Match& match) {
  size_t hits = 0;
  for (const SegmentResult& segment : match.segments()) hits += segment.reason == MissReason::kNone;
  return hits;
}

class PeerDaemonsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
  }
  void Start(size_t daemons, bool relay = true) {
    Start({.daemons = daemons,
           .etcd = true,
           .complete =
               [this](const NodePlace& place, DaemonOptions* options) {
                 options->cluster = ClusterYaml(place, certificates_.Make(place.name, authority_));
               },
           .network = {.relay = relay}});
  }
  void Start(const ClusterOptions& options) { cluster_ = std::make_unique<DaemonCluster>(options); }

  static void Publish(DaemonProcess& daemon, const std::vector<Tokens>& prompt) {
    TestEngine(daemon.client_options()).PublishPrompt(prompt);
  }
  // Looks the prompt up, again while it is not found as a whole, lands it and compares every byte.
  static void ExpectToLand(DaemonProcess& daemon, const std::vector<Tokens>& prompt, bool remote) {
    TestEngine engine(daemon.client_options());
    engine.FillTargets(kPoison);
    std::optional<Match> match;
    const bool found = Eventually([&] {
      match.emplace(engine.Lookup(prompt));
      return Hits(*match) == prompt.size();
    });
    ASSERT_TRUE(found) << daemon.log();
    for (const SegmentResult& segment : match->segments()) EXPECT_EQ(segment.remote(), remote);
    Landing landing = engine.Land(*match, prompt);
    ASSERT_THAT(landing.Wait(integration::kPatience), testing::Each(MissReason::kNone)) << daemon.log();
    uint64_t position = 0;
    for (size_t i = 0; i < prompt.size(); ++i) {
      engine.ExpectLanded(i == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment, prompt[i], position, kPoison);
      position += prompt[i].size();
    }
  }

  std::vector<Tokens> NewPrompt() { return MakePrompt(random_(), 3, 60); }

  const uint64_t seed_ = std::random_device{}();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, seed_};
  std::mt19937_64 random_{seed_};
  const TestAuthority authority_;
  const Certificates certificates_;
  std::unique_ptr<DaemonCluster> cluster_;
};

TEST_F(PeerDaemonsTest, WhatOneNodeHasServesTheOthers) {
  Start(3);
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), prompt, /*remote=*/true);
  ExpectToLand(cluster_->daemon(1), prompt, /*remote=*/false);
  cluster_->daemon(0).Kill();
  ExpectToLand(cluster_->daemon(2), prompt, /*remote=*/true);
}

TEST_F(PeerDaemonsTest, AKilledHolderIsAMissAndItComesBack) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  Publish(cluster_->daemon(0), first);
  ExpectToLand(cluster_->daemon(1), first, true);
  Publish(cluster_->daemon(0), second);
  cluster_->daemon(0).Kill();
  TestEngine engine(cluster_->daemon(1).client_options());
  EXPECT_EQ(Hits(engine.Lookup(second)), 0u);
  cluster_->daemon(0).Start();
  Publish(cluster_->daemon(0), second);
  ExpectToLand(cluster_->daemon(1), second, true);
}

TEST_F(PeerDaemonsTest, ALossySlowLinkLosesTimeOnly) {
  Start(2);
  cluster_->network().SetBetween(0, 1, {.loss = 0.01, .delay = std::chrono::milliseconds(100)});
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), prompt, true);
}

TEST_F(PeerDaemonsTest, ACutLinkIsAMissUntilItHeals) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  Publish(cluster_->daemon(0), first);
  ExpectToLand(cluster_->daemon(1), first, true);
  Publish(cluster_->daemon(0), second);
  cluster_->network().SetBetween(0, 1, {.cut = true});
  {
    TestEngine engine(cluster_->daemon(1).client_options());
    EXPECT_EQ(Hits(engine.Lookup(second)), 0u);
    EXPECT_EQ(Hits(engine.Lookup(first)), first.size()) << "what is here is here";
  }
  cluster_->network().Heal();
  ExpectToLand(cluster_->daemon(1), second, true);
}

TEST_F(PeerDaemonsTest, WithoutEtcdWhatIsKnownGoesOnBeingUsed) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  for (const auto& prompt : {first, second}) Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), first, true);
  cluster_->etcd().Kill();
  ExpectToLand(cluster_->daemon(1), second, true);
  const std::vector<Tokens> third = NewPrompt();
  Publish(cluster_->daemon(0), third);
  ExpectToLand(cluster_->daemon(0), third, false);
  cluster_->etcd().Start();
  ExpectToLand(cluster_->daemon(1), third, true);
}

TEST_F(PeerDaemonsTest, AnEmptyEtcdIsToldEverythingAgain) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  for (const auto& prompt : {first, second}) Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), first, true);
  cluster_->etcd().Kill();
  cluster_->etcd().Wipe();
  cluster_->etcd().Start();
  cluster_->daemon(1).Kill();  // what it knew is lost as well
  cluster_->daemon(1).Start();
  ExpectToLand(cluster_->daemon(1), second, true);
}

// One node's certificate is of another authority: it gets nothing, and serves its own engines.
TEST_F(PeerDaemonsTest, AForeignPeerGetsNothing) {
  const TestAuthority foreign("foreign");
  Start({.daemons = 3, .etcd = true, .complete = [&](const NodePlace& place, DaemonOptions* options) {
           const TestAuthority& signer = place.node == 1 ? foreign : authority_;
           options->cluster = ClusterYaml(place, certificates_.Make(place.name, signer));
         }});
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(2), prompt, true);
  TestEngine engine(cluster_->daemon(1).client_options());
  EXPECT_EQ(Hits(engine.Lookup(prompt)), 0u);
  engine.PublishPrompt(prompt);
  EXPECT_EQ(Hits(engine.Lookup(prompt)), prompt.size());
}

}  // namespace
}  // namespace ashlar::nodes
