// SPDX-License-Identifier: Apache-2.0
// What breaks between daemons of a cluster, and what engines see of it: a miss at most. Long faults last as long as
// issue and pages say where ASHLAR_LONG_FAULTS is set, and a few seconds elsewhere.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "daemon/testing/child_process.h"
#include "proto/limits.h"
#include "tests/nodes/peer_daemons.h"

namespace ashlar::nodes {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

seconds Long(seconds whole, seconds usual) {
  return std::getenv("ASHLAR_LONG_FAULTS") != nullptr ? whole : usual;
}

// Changes a bit of every 4,096th byte of a daemon's arenas, unknown to the daemon.
size_t SpoilArenas(pid_t pid) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  const int memory = open(("/proc/" + std::to_string(pid) + "/mem").c_str(), O_RDWR | O_CLOEXEC);
  size_t spoilt = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") == std::string::npos || line.find(" rw-s ") == std::string::npos) continue;
    uint64_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    for (uint64_t at = begin + 2048; at < end; at += 4096) {
      uint8_t byte = 0;
      if (pread(memory, &byte, 1, static_cast<off_t>(at)) != 1 || byte == 0) continue;
      byte ^= 1;
      spoilt += pwrite(memory, &byte, 1, static_cast<off_t>(at)) == 1;
    }
  }
  close(memory);
  return spoilt;
}

class PeerFaultsTest : public PeerDaemonsTest {
 protected:
  void StartWith(size_t daemons, const std::function<daemon::TestSubject(const NodePlace&)>& subject,
                 const std::function<void(const NodePlace&, DaemonOptions*)>& complete = nullptr) {
    Start({.daemons = daemons,
           .etcd = true,
           .complete =
               [&](const NodePlace& place, DaemonOptions* options) {
                 options->cluster = ClusterYaml(place, certificates_.Make(place.name, authority_, subject(place)));
                 if (complete) complete(place, options);
               },
           .network = {.relay = true}});
  }
  // The engine of a node that cannot reach its peers gets misses, and no errors.
  static size_t HitsAt(DaemonProcess& daemon, const std::vector<Tokens>& prompt) {
    return Hits(TestEngine(daemon.client_options()).Lookup(prompt));
  }
};

// A daemon refuses to start with an expired certificate. This one does not know that, because its clock is late.
TEST_F(PeerFaultsTest, AnExpiredCertificateIsRefused) {
  const std::vector<std::string> late = ClockOff("-30m");
  if (late.empty()) GTEST_SKIP() << "faketime is not installed, or a sanitizer keeps it out";
  StartWith(
      3,
      [](const NodePlace& place) -> daemon::TestSubject {
        if (place.node == 1) return {.name = place.name, .from_seconds = -3600, .to_seconds = -900};
        return {.name = place.name};
      },
      [&](const NodePlace& place, DaemonOptions* options) {
        if (place.node == 1) options->environment = late;
      });
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(2), prompt, true);
  EXPECT_EQ(HitsAt(cluster_->daemon(1), prompt), 0u);
  Publish(cluster_->daemon(1), prompt);
  EXPECT_EQ(HitsAt(cluster_->daemon(1), prompt), prompt.size()) << "its own engines are served";
  EXPECT_GT(cluster_->daemon(0).Metric("ashlar_peers_rejected_total{reason=\"expired\"}"), 0);
}

TEST_F(PeerFaultsTest, AnHourOfClockSkewChangesNothing) {
  const std::vector<std::string> off = ClockOff("+1h");
  if (off.empty()) GTEST_SKIP() << "faketime is not installed, or a sanitizer keeps it out";
  StartWith(
      2,
      [](const NodePlace& place) -> daemon::TestSubject {
        return {.name = place.name, .from_seconds = -4 * 3600, .to_seconds = 4 * 3600};
      },
      [&](const NodePlace& place, DaemonOptions* options) {
        if (place.node == 1) options->environment = off;
      });
  const std::vector<Tokens> prompt = NewPrompt(), other = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), prompt, true);
  Publish(cluster_->daemon(1), other);
  ExpectToLand(cluster_->daemon(0), other, true);
}

TEST_F(PeerFaultsTest, ALinkWithADelayOf200MillisecondsCostsTime) {
  Start(2);
  cluster_->network().SetBetween(0, 1, {.delay = milliseconds(200)});
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLandInTheEnd(cluster_->daemon(1), prompt);
}

// Links to etcd as well. Two nodes fetch from each other, and the third one from both.
TEST_F(PeerFaultsTest, DuplicatedAndReorderedFramesChangeNothing) {
  Start(3);
  cluster_->network().SetAll({.duplicate = 0.05, .reorder = 0.05});
  std::vector<std::vector<Tokens>> prompts[2];
  for (size_t node = 0; node < 2; ++node) {
    TestEngine engine(cluster_->daemon(node).client_options());
    for (int i = 0; i < 10; ++i) engine.PublishPrompt(prompts[node].emplace_back(MakePrompt(random_(), 4, 200)));
  }
  const Stopwatch since;
  std::vector<std::thread> nodes;
  for (size_t node = 0; node < 3; ++node) {
    nodes.emplace_back([this, node, &prompts] {
      for (size_t holder = 0; holder < 2; ++holder) {
        if (holder == node) continue;
        for (const auto& prompt : prompts[holder]) ExpectToLand(cluster_->daemon(node), prompt, true);
      }
    });
  }
  for (std::thread& node : nodes) node.join();
  Figure("until all has landed, ms", since.ms());
  for (const char* fault : {"ashlar_remote_requests_total{outcome=\"failed\"}", "ashlar_remote_fetch_failures_total",
                            "ashlar_transport_malformed_messages_total", "ashlar_transport_requests_rejected_total"}) {
    EXPECT_EQ(cluster_->Sum(fault), 0) << fault;
  }
  LinkCounts all;
  for (size_t from = 0; from < cluster_->network().nodes(); ++from) {
    for (size_t to = 0; to < cluster_->network().nodes(); ++to) {
      const LinkCounts counts = cluster_->network().counts(from, to);
      all.delivered += counts.delivered;
      all.duplicated += counts.duplicated;
      all.reordered += counts.reordered;
    }
  }
  EXPECT_GT(all.duplicated, 0u);
  EXPECT_GT(all.reordered, 0u);
  Figure("frames", static_cast<double>(all.delivered));
  Figure("frames that came twice", static_cast<double>(all.duplicated));
  Figure("frames that were overtaken", static_cast<double>(all.reordered));
}

TEST_F(PeerFaultsTest, ATenSecondCutHeals) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  Publish(cluster_->daemon(0), first);
  ExpectToLand(cluster_->daemon(1), first, true);
  Publish(cluster_->daemon(0), second);
  cluster_->network().SetBetween(0, 1, {.cut = true});
  const auto heals = std::chrono::steady_clock::now() + Long(seconds(10), seconds(3));
  while (std::chrono::steady_clock::now() < heals) {
    EXPECT_EQ(HitsAt(cluster_->daemon(1), first), first.size());
    EXPECT_EQ(HitsAt(cluster_->daemon(0), second), second.size());
    std::this_thread::sleep_for(milliseconds(200));
  }
  cluster_->network().Heal();
  ExpectToLand(cluster_->daemon(1), second, true);
}

TEST_F(PeerFaultsTest, AMinuteWithoutEtcdOnlyHidesNewObjects) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt(), third = NewPrompt();
  for (const auto& prompt : {first, second}) Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), first, true);
  cluster_->etcd().Kill();
  std::this_thread::sleep_for(Long(seconds(60), seconds(6)));  // at least two leases
  ExpectToLand(cluster_->daemon(1), second, true);
  Publish(cluster_->daemon(0), third);
  ExpectToLand(cluster_->daemon(0), third, false);
  cluster_->etcd().Start();
  ExpectToLandInTheEnd(cluster_->daemon(1), third);
}

// A quarter of a second each way, with a lease of three seconds, and every 50th frame lost: both continue, and a daemon
// that starts with such a link joins.
TEST_F(PeerFaultsTest, ASlowEtcdOnlyDelaysNewObjects) {
  Start(2);
  const size_t etcd = cluster_->etcd_node();
  for (size_t node = 0; node < 2; ++node) {
    cluster_->network().SetBetween(node, etcd, {.loss = 0.02, .delay = milliseconds(250)});
  }
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(0), prompt, false);
  ExpectToLandInTheEnd(cluster_->daemon(1), prompt);
  cluster_->daemon(1).Kill();
  cluster_->daemon(1).Start();
  ExpectToLandInTheEnd(cluster_->daemon(1), prompt);
}

TEST_F(PeerFaultsTest, AHungEtcdOnlyHidesNewObjects) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  Publish(cluster_->daemon(0), first);
  ExpectToLand(cluster_->daemon(1), first, true);
  cluster_->etcd().Freeze();
  Publish(cluster_->daemon(0), second);
  ExpectToLand(cluster_->daemon(0), second, false);
  std::this_thread::sleep_for(seconds(4));  // longer than a lease
  ExpectToLand(cluster_->daemon(1), first, false);
  cluster_->etcd().Thaw();
  // The holder's lease may end first, and with it the transfers from it.
  ExpectToLandInTheEnd(cluster_->daemon(1), second);
}

TEST_F(PeerFaultsTest, WrongBytesOfAPeerNeverLand) {
  Start(2);
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  TestEngine engine(cluster_->daemon(1).client_options());
  std::optional<Match> match;
  ASSERT_GT(SpoilArenas(cluster_->daemon(0).pid()), 0u);
  // The holder's own check of the header already makes some of them misses; the rest are found when they land.
  const bool known = Eventually(
      [&] { return cluster_->daemon(1).Metric("ashlar_directory_entries") >= static_cast<double>(prompt.size()); });
  ASSERT_TRUE(known);
  match.emplace(engine.Lookup(prompt));
  const size_t found = Hits(*match);
  Landing landing = engine.Land(*match, prompt);
  size_t landed = 0;
  for (const MissReason reason : landing.Wait(integration::kPatience)) landed += reason == MissReason::kNone;
  EXPECT_EQ(landed, 0u) << "of " << found << " that were found";
  engine.PublishPrompt(prompt);  // computed again, it serves
  EXPECT_EQ(Hits(engine.Lookup(prompt)), prompt.size());
}

// etcd and the certificate identify it as node 2, which has what the others request.
TEST_F(PeerFaultsTest, APeerOfAnotherVersionIsRefused) {
  Start(3);
  const std::vector<Tokens> there = NewPrompt(), here = NewPrompt();
  Publish(cluster_->daemon(2), there);
  Publish(cluster_->daemon(0), here);
  TestEngine engine(cluster_->daemon(1).client_options());
  AwaitEntries(1);
  const std::string member = cluster_->KeepMember(2);
  ASSERT_NE(member, "");
  cluster_->daemon(2).Kill();
  const NodePlace place = cluster_->place(2), other = cluster_->place(0);
  const uint32_t version = limits::kPeerProtocolMax + 1;
  const std::string log = cluster_->daemon(2).directory() + "/peer_of_version.log";
  daemon::ChildProcess peer;
  peer.Start({.command = {PEER_OF_VERSION, absl::StrCat(version), place.name, place.control_address,
                          certificates_.PathOf(place.name), other.name, other.control_address},
              .log = log,
              .network_namespace = cluster_->network().stack(2)});
  const Stopwatch since;
  const std::string words =
      absl::StrCat("refused: 9 protocol: no common version; the peer speaks ", version, " to ", version);
  const auto said = [&] {
    std::ifstream file(log);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  EXPECT_TRUE(Eventually([&] { return said().find(words) != std::string::npos; })) << said();
  const std::string refused = "ashlar_peers_rejected_total{reason=\"version\"}";
  double slowest = 0;
  EXPECT_TRUE(Eventually([&] {
    const Stopwatch lookup;
    EXPECT_EQ(Hits(engine.Lookup(there)), 0u);
    slowest = std::max(slowest, lookup.ms());
    return cluster_->daemon(1).Metric(refused) > 0;  // which has greeted it
  })) << cluster_->daemon(1).log();
  Figure("until both sides have refused it, ms", since.ms());
  Figure("slowest lookup, ms", slowest);
  EXPECT_TRUE(Eventually([&] { return cluster_->daemon(0).Metric(refused) > 0; }));  // which it has greeted
  EXPECT_EQ(cluster_->daemon(1).Metric("ashlar_cluster_members"), 3) << "etcd has all three";
  ExpectToLand(cluster_->daemon(1), here, true);
  peer.Kill();
  cluster_->RemoveMember(member);
}

// No keys of a node that has left stay in etcd.
TEST_F(PeerFaultsTest, KeysOfANodeThatDiedAreSwept) {
  Start(2);
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), prompt, true);
  ASSERT_TRUE(Eventually([&] { return cluster_->daemon(1).Metric("ashlar_directory_entries") > 0; }));
  cluster_->daemon(0).Kill();
  const Stopwatch since;
  EXPECT_TRUE(Eventually([&] {
    const DaemonProcess& left = cluster_->daemon(1);
    return left.Metric("ashlar_directory_entries") == 0 && left.Metric("ashlar_cluster_members") == 1;
  }));
  EXPECT_LT(since.ms(), 2 * kLeaseMs + 3000) << "two leases, and patience for a busy machine";
  Figure("until no node lists it, ms", since.ms());
  EXPECT_TRUE(Eventually([&] { return cluster_->Held(/*all_announced=*/true).empty(); }));
  Figure("until its keys are swept from etcd, ms", since.ms());
}

}  // namespace
}  // namespace ashlar::nodes
