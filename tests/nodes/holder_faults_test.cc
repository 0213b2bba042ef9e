// SPDX-License-Identifier: Apache-2.0
// Faults of the sending node during a transfer: landed bytes are correct, and everything else is a miss.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/ashlarctl_run.h"
#include "tests/nodes/peer_daemons.h"

namespace ashlar::nodes {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kSlow = 200'000;  // bytes per second: a prompt takes four seconds, and sockets hold little of it
constexpr size_t kLong = 300;        // tokens of a segment, of about 300 KB

// ASHLAR_HOLDER_KILLS=50 sets the number of kills in mid-fetch.
class HolderFaultsTest : public PeerDaemonsTest {
 protected:
  std::vector<Tokens> LongPrompt() { return MakePrompt(random_(), 3, kLong); }
  // Evicts a prompt's objects from a daemon's tiers, as an operator does.
  void EvictByHand(size_t node, const std::vector<Tokens>& prompt) {
    const DaemonProcess& daemon = cluster_->daemon(node);
    const auto run = [&](const std::string& arguments) {
      const integration::Ended ended = integration::RunAshlarctl(ASHLARCTL, arguments, daemon.admin_socket());
      EXPECT_EQ(ended.code, 0) << ended.output;
      return ended.output;
    };
    const auto models = nlohmann::json::parse(run("models --json"));
    std::string arguments =
        "evict --tenant default --namespace " + models["tenants"][0]["models"][0]["namespace"].get<std::string>();
    for (size_t i = 0; i < prompt.size(); ++i) {
      const std::string path = absl::StrCat(daemon.directory(), "/text", i);
      std::ofstream(path) << nlohmann::json(prompt[i]);
      arguments += " " + path;
    }
    EXPECT_THAT(run(arguments), testing::HasSubstr("evicted"));
  }
  // The node that sends most of a prompt's objects. The objects of a slow one are eventually opened at the other one as
  // well.
  size_t Holder(size_t objects) {
    const auto held = [this](size_t node) { return cluster_->daemon(node).Metric("ashlar_peer_leases"); };
    EXPECT_TRUE(Eventually([&] { return held(0) + held(2) >= static_cast<double>(objects); }));
    std::this_thread::sleep_for(milliseconds(300));  // until both have updated their counts
    return held(0) >= held(2) ? 0 : 2;
  }
  // Pieces and fetches that another node took over.
  double TakenOver() {
    const DaemonProcess& daemon = cluster_->daemon(1);
    return daemon.Metric("ashlar_remote_failovers_total") +
           daemon.Metric("ashlar_remote_hedges_total{outcome=\"won\"}");
  }
  static size_t Landed(const std::vector<MissReason>& reasons) {
    return static_cast<size_t>(std::ranges::count(reasons, MissReason::kNone));
  }
};

// Killed while its bytes are in transfer: the other holder continues, and without another one it is a miss. In both
// cases the next request is served.
TEST_F(HolderFaultsTest, KilledHolderIsReplacedOrMiss) {
  Start(3);
  double landed_alone = 0, landed_replaced = 0, worst = 0, replaced = 0;
  const int kills = Times("ASHLAR_HOLDER_KILLS", 2);
  for (int kill = 0; kill < kills; ++kill) {
    const bool alone = kill % 2 == 0;
    const std::vector<Tokens> prompt = LongPrompt();
    size_t killed = 0;
    Publish(cluster_->daemon(0), prompt);
    if (!alone) ExpectToLand(cluster_->daemon(2), prompt, true);
    TestEngine engine(cluster_->daemon(1).client_options());
    engine.FillTargets(kPoison);
    AwaitEntries(1);
    for (const size_t holder : {0, 2}) cluster_->network().SetBetween(1, holder, {.bytes_per_second = kSlow});
    {
      const Match match = Found(engine, prompt);
      Landing landing = engine.Land(match, prompt);
      killed = Holder(prompt.size());
      std::this_thread::sleep_for(milliseconds(random_() % 500));
      const bool in_time = !landing.quiesced();
      cluster_->daemon(killed).Kill();
      const Stopwatch since;
      cluster_->network().Heal();
      const std::vector<MissReason> reasons = landing.Wait(integration::kPatience);
      worst = std::max(worst, since.ms());
      ExpectRight(engine, prompt, reasons);
      (alone ? landed_alone : landed_replaced) += static_cast<double>(Landed(reasons));
      if (!alone) {
        EXPECT_THAT(reasons, testing::Each(MissReason::kNone));
        replaced += in_time ? 1 : 0;
      }
    }
    for (size_t i = 0; i < prompt.size(); ++i) {  // computed again if it has not arrived
      const ObjectKind kind = i == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment;
      const Reservation reservation = engine.Reserve(kind, prompt[i]);
      if (reservation.granted()) engine.model().Publish(reservation, engine.Compute(kind, prompt[i]));
    }
    ExpectToLandInTheEnd(cluster_->daemon(1), prompt);
    cluster_->daemon(killed).Start();
    EXPECT_TRUE(Eventually([&] { return cluster_->daemon(killed).Metric("ashlar_peers_connected") == 2; }));
  }
  if (replaced >= 5) {
    EXPECT_GT(TakenOver(), 0);
  }
  Figure("killed", kills);
  Figure("from the kill to the verdict, at most, ms", worst);
  Figure("segments landed without another holder", landed_alone);
  Figure("segments landed with another holder", landed_replaced);
  Figure("killed before the verdict, with another holder", replaced);
  Figure("pieces and fetches that it took over", TakenOver());
}

// Its memory is filled twice over with other objects, and an operator evicts what is being sent.
TEST_F(HolderFaultsTest, EvictionDuringSlowFetchSendsToTheEnd) {
  Start({.daemons = 2,
         .etcd = true,
         .daemon = {.dram = "8MiB", .arena = "1MiB"},
         .complete = [this](const NodePlace& place, DaemonOptions* options) {
           options->cluster = ClusterYaml(place, certificates_.Make(place.name, authority_));
         }});
  const std::vector<Tokens> prompt = LongPrompt();
  TestEngine at_holder(cluster_->daemon(0).client_options()), engine(cluster_->daemon(1).client_options());
  at_holder.PublishPrompt(prompt);
  engine.FillTargets(kPoison);
  // The reader waits for a link that is known to be slow.
  const std::vector<Tokens> first = NewPrompt();
  at_holder.PublishPrompt(first);
  AwaitEntries(1);
  cluster_->network().SetBetween(0, 1, {.bytes_per_second = 2 * kSlow});
  ExpectToLandInTheEnd(cluster_->daemon(1), first);
  cluster_->network().SetBetween(0, 1, {.bytes_per_second = kSlow});
  const Match match = Found(engine, prompt);
  Landing landing = engine.Land(match, prompt);
  constexpr int kOthers = 18;
  for (int i = 0; i < kOthers; ++i) at_holder.PublishPrompt(LongPrompt());
  EvictByHand(0, prompt);
  EXPECT_EQ(Hits(at_holder.Lookup(prompt)), 0u);
  EXPECT_FALSE(landing.quiesced()) << "it was over before";
  const Stopwatch since;
  const std::vector<MissReason> reasons = landing.Wait(integration::kPatience);
  EXPECT_THAT(reasons, testing::Each(MissReason::kNone));
  Figure("from the eviction until all has landed, ms", since.ms());
  ExpectRight(engine, prompt, reasons);
  const double published = static_cast<double>(prompt.size()) * (2 + kOthers);
  const double evicted = published - cluster_->daemon(0).Metric("ashlar_objects");
  EXPECT_GT(evicted, published / 2);
  Figure("objects that the holder evicted meanwhile", evicted);
}

// The same texts under another tenant's name: nothing of it is found or revealed.
TEST_F(HolderFaultsTest, HolderRefusesOtherTenant) {
  Start({.daemons = 2, .etcd = true, .complete = [this](const NodePlace& place, DaemonOptions* options) {
           options->cluster = ClusterYaml(place, certificates_.Make(place.name, authority_));
           options->tenants = absl::StrCat("tenants:\n  - {name: tenant", place.node, ", uids: [", ::getuid(),
                                           "], dram_bytes: 64MiB}\n");
         }});
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  EXPECT_TRUE(Eventually([&] { return cluster_->KeysInEtcd('e') == static_cast<int64_t>(prompt.size()); }));
  TestEngine engine(cluster_->daemon(1).client_options());
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(Hits(engine.Lookup(prompt)), 0u);
    std::this_thread::sleep_for(milliseconds(100));
  }
  EXPECT_EQ(cluster_->daemon(1).Metric("ashlar_directory_entries"), 0) << "its namespace is not this tenant's";
  engine.PublishPrompt(prompt);
  EXPECT_EQ(Hits(engine.Lookup(prompt)), prompt.size());
}

}  // namespace
}  // namespace ashlar::nodes
