// SPDX-License-Identifier: Apache-2.0
// PeerDaemonsTest: daemons of one cluster, each in a network stack of its own, with a real etcd and mutual TLS.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/testing/certificates.h"
#include "tests/integration/test_engine.h"
#include "tests/nodes/daemon_cluster.h"
#include "tests/nodes/figures.h"

namespace ashlar::nodes {

using daemon::TestAuthority;
using daemon::TestPair;
using integration::DaemonOptions;
using integration::DaemonProcess;
using integration::Eventually;
using integration::MakePrompt;
using integration::TestEngine;
using integration::Tokens;

inline constexpr std::byte kPoison{0x5a};

// Certificates of a test's nodes, in a folder.
class Certificates {
 public:
  Certificates() : folder_(std::filesystem::temp_directory_path() / absl::StrCat("ashlar-", std::random_device{}())) {
    std::filesystem::create_directory(folder_);
  }
  ~Certificates() { std::filesystem::remove_all(folder_); }

  // The YAML of a node's `tls`.
  std::string Make(const std::string& node, const TestAuthority& authority) const {
    return Make(node, authority, {.name = node});
  }
  std::string Make(const std::string& node, const TestAuthority& authority, const daemon::TestSubject& subject) const {
    const TestPair pair = authority.Sign(subject);
    const std::string path = folder_ / node;
    daemon::ReplaceFile(path + ".ca", authority.pem());
    daemon::ReplaceFile(path + ".cert", pair.cert);
    daemon::ReplaceFile(path + ".key", pair.key);
    return absl::StrCat("{ca_file: ", path, ".ca, cert_file: ", path, ".cert, key_file: ", path, ".key}");
  }
  // Path prefix of the node's files, which are these and end in .ca, .cert or .key.
  std::string PathOf(const std::string& node) const { return folder_ / node; }

 private:
  const std::filesystem::path folder_;
};

inline constexpr double kLeaseMs = 3'000;

// `lookup_ms`: how long a lookup waits for other nodes.
inline std::string ClusterYaml(const NodePlace& place, const std::string& tls, uint32_t lookup_ms = 5000) {
  return absl::StrCat("cluster:\n  node: ", place.name, "\n  control_address: ", place.control_address,
                      "\n  transport_address: ", place.transport_address,
                      "\n  announce: all\n  lookup_milliseconds: ", lookup_ms, "\n  tls: ", tls,
                      "\n  etcd: {endpoints: [\"", place.etcd_endpoints[0], "\"], lease_seconds: ", kLeaseMs / 1000,
                      "}\n");
}

inline size_t Hits(const Match& match) {
  size_t hits = 0;
  for (const SegmentResult& segment : match.segments()) hits += segment.reason == MissReason::kNone;
  return hits;
}

class PeerDaemonsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
  }
  // After any failure, no engine and no peer leaves anything held, and etcd has the entries of the existing objects.
  void TearDown() override {
    if (cluster_ == nullptr || !cluster_->etcd().Running()) return;
    const Stopwatch since;
    const std::chrono::seconds patience(cluster_->network().disturbed() ? 90 : 20);
    EXPECT_TRUE(Eventually([&] { return cluster_->Held(/*all_announced=*/true).empty(); }, patience))
        << cluster_->Held(/*all_announced=*/true);
    Figure("until nothing is held, ms", since.ms());
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
  // Looks the prompt up, repeatedly until it is found as a whole, lands it and compares every byte.
  static void ExpectToLand(DaemonProcess& daemon, const std::vector<Tokens>& prompt, bool remote) {
    TestEngine engine(daemon.client_options());
    engine.FillTargets(kPoison);
    const Stopwatch since;
    std::optional<Match> match;
    // Announcements may arrive one by one. A lookup between two of them fetches a part, which the next one finds here.
    std::vector<bool> elsewhere(prompt.size());
    const bool found = Eventually([&] {
      match.emplace(engine.Lookup(prompt));
      for (size_t i = 0; i < prompt.size(); ++i) {
        if (match->segments()[i].remote()) elsewhere[i] = true;
      }
      return Hits(*match) == prompt.size();
    });
    ASSERT_TRUE(found) << daemon.log();
    for (size_t i = 0; i < prompt.size(); ++i) EXPECT_EQ(elsewhere[i], remote) << "segment " << i;
    Landing landing = engine.Land(*match, prompt);
    ASSERT_THAT(landing.Wait(integration::kPatience), testing::Each(MissReason::kNone)) << daemon.log();
    Figure(remote ? "found elsewhere and landed, ms" : "found here and landed, ms", since.ms());
    ExpectRight(engine, prompt, std::vector<MissReason>(prompt.size(), MissReason::kNone));
  }

  // A lookup may miss, or fetch a part, before the whole prompt lands. What lands is always right.
  static void ExpectToLandInTheEnd(DaemonProcess& daemon, const std::vector<Tokens>& prompt) {
    TestEngine engine(daemon.client_options());
    engine.FillTargets(kPoison);
    const Stopwatch since;
    const bool landed = Eventually([&] {
      const Match match = engine.Lookup(prompt);
      if (Hits(match) < prompt.size()) return false;
      Landing landing = engine.Land(match, prompt);
      for (const MissReason reason : landing.Wait(integration::kPatience)) {
        if (reason != MissReason::kNone) return false;
      }
      return true;
    });
    ASSERT_TRUE(landed) << daemon.log();
    Figure("landed in the end, ms", since.ms());
    ExpectRight(engine, prompt, std::vector<MissReason>(prompt.size(), MissReason::kNone));
  }

  // Looks the prompt up until all of it is found.
  static Match Found(TestEngine& engine, const std::vector<Tokens>& prompt) {
    std::optional<Match> match;
    EXPECT_TRUE(Eventually([&] {
      match.emplace(engine.Lookup(prompt));
      return Hits(*match) == prompt.size();
    }));
    return *std::move(match);
  }
  // Returns whether a daemon that an engine of this model uses knows everything that the others hold.
  bool KnowsAll(size_t node) const {
    const auto all = static_cast<double>(cluster_->KeysInEtcd('e'));
    const DaemonProcess& daemon = cluster_->daemon(node);
    return all == cluster_->Sum("ashlar_objects") &&
           daemon.Metric("ashlar_directory_entries") == all - daemon.Metric("ashlar_objects");
  }
  void AwaitEntries(size_t node) const {
    EXPECT_TRUE(Eventually([&] { return KnowsAll(node); })) << "node " << node;
  }
  // Compares every byte that has landed.
  static void ExpectRight(TestEngine& engine, const std::vector<Tokens>& prompt,
                          const std::vector<MissReason>& landed) {
    uint64_t position = 0;
    for (size_t i = 0; i < prompt.size(); ++i) {
      const ObjectKind kind = i == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment;
      if (landed[i] == MissReason::kNone) engine.ExpectLanded(kind, prompt[i], position, kPoison);
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

}  // namespace ashlar::nodes
