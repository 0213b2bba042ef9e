// SPDX-License-Identifier: Apache-2.0
// Partitions in one direction, or between some nodes: each lookup ends in time, as a hit on a reachable node or as a
// miss, and objects of unreachable nodes are found again after the partition.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/nodes/peer_daemons.h"

namespace ashlar::nodes {
namespace {

using std::chrono::milliseconds;

constexpr uint32_t kLookupMs = 300;
constexpr double kBusyMs = 1'000;         // what a busy machine may add
constexpr uint64_t kThrottled = 500'000;  // bytes per second: a long prompt takes two seconds
constexpr size_t kLongRun = 300;          // tokens of a segment, of about 300 KB
constexpr LinkConditions kCut{.cut = true};

// A cut between node 1 and another one, as seen by node 1.
struct Way {
  const char* name;
  bool out, in;
};
constexpr Way kWays[] = {{"out", true, false}, {"in", false, true}, {"both ways", true, true}};

class PartitionsTest : public PeerDaemonsTest {
 protected:
  // A peer that is silent for two seconds counts as gone.
  void StartNodes() {
    Start({.daemons = 3, .etcd = true, .complete = [this](const NodePlace& place, DaemonOptions* options) {
             options->cluster = ClusterYaml(place, certificates_.Make(place.name, authority_), kLookupMs) +
                                "  peer_timeout_seconds: 2\n  replicate: never\n";
           }});
  }
  void CutOff(size_t other, const Way& way) {
    if (way.out) cluster_->network().SetLink(1, other, kCut);
    if (way.in) cluster_->network().SetLink(other, 1, kCut);
  }
  // One timed lookup, and the landing of its hits. Returns whether all of it landed.
  bool Asked(TestEngine& engine, const std::vector<Tokens>& prompt) {
    engine.FillTargets(kPoison);
    const Stopwatch since;
    const Match match = engine.Lookup(prompt);
    slowest_ms_ = std::max(slowest_ms_, since.ms());
    ++lookups_;
    Landing landing = engine.Land(match, prompt);
    const std::vector<MissReason> reasons = landing.Wait(integration::kPatience);
    ExpectRight(engine, prompt, reasons);
    return std::ranges::count(reasons, MissReason::kNone) == static_cast<ptrdiff_t>(prompt.size());
  }
  void ExpectInTime() {
    EXPECT_LT(slowest_ms_, kLookupMs + kBusyMs);
    Figure("lookups", lookups_);
    Figure("slowest lookup, ms", slowest_ms_);
  }
  void FigureOf(const Way& way, const std::string& what, double ms) {
    Figure(absl::StrCat("cut ", way.name, ": ", what, ", ms"), ms);
  }
  double Metric(size_t node, const std::string& name) { return cluster_->daemon(node).Metric(name); }
  TestEngine EngineAt(size_t node) { return TestEngine(cluster_->daemon(node).client_options()); }

 private:
  double slowest_ms_ = 0, lookups_ = 0;
};

// Nodes 0 and 1 both reach etcd, which still lists the other one.
TEST_F(PartitionsTest, ANodeReachesEtcdButNotItsPeer) {
  StartNodes();
  TestEngine at0 = EngineAt(0), at1 = EngineAt(1), slow = EngineAt(1);
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    const std::vector<Tokens> far = NewPrompt(), both = NewPrompt(), own = NewPrompt();
    const std::vector<Tokens> under_way = MakePrompt(random_(), 3, kLongRun);
    for (const auto& prompt : {far, both, under_way}) Publish(cluster_->daemon(0), prompt);
    ExpectToLand(cluster_->daemon(2), both, true);
    Publish(cluster_->daemon(1), own);
    for (const size_t node : {0, 1}) AwaitEntries(node);

    slow.FillTargets(kPoison);
    cluster_->network().SetLink(0, 1, {.bytes_per_second = kThrottled});
    const Match match = Found(slow, under_way);
    Landing landing = slow.Land(match, under_way);
    std::this_thread::sleep_for(milliseconds(200));
    CutOff(0, way);
    const Stopwatch cut;
    bool other_holder = false;
    // Both detect it, so that neither holds anything for the other any longer.
    const bool noticed = Eventually([&] {
      EXPECT_FALSE(Asked(at1, far));
      EXPECT_FALSE(Asked(at0, own));
      other_holder = Asked(at1, both) || other_holder;
      return Metric(0, "ashlar_peers_connected") == 1 && Metric(1, "ashlar_peers_connected") == 1;
    });
    ASSERT_TRUE(noticed);
    FigureOf(way, "until both have given their connection up", cut.ms());
    EXPECT_TRUE(other_holder) << "node 2 is reached, and has it";
    const std::vector<MissReason> reasons = landing.Wait(integration::kPatience);
    FigureOf(way, "until the verdict of a fetch under way, at most", cut.ms());
    ExpectRight(slow, under_way, reasons);
    EXPECT_TRUE(Eventually([&] { return Metric(0, "ashlar_peer_leases") == 0; }));

    cluster_->network().Heal();
    const Stopwatch healed;
    for (const auto& prompt : {far, under_way}) EXPECT_TRUE(Eventually([&] { return Asked(at1, prompt); }));
    EXPECT_TRUE(Eventually([&] { return Asked(at0, own); }));
    FigureOf(way, "from its end until what was cut off has landed", healed.ms());
  }
  ExpectInTime();
}

// Node 1 reaches the other nodes, which no longer see it when its lease ends.
TEST_F(PartitionsTest, ANodeReachesItsPeersButNotEtcd) {
  StartNodes();
  TestEngine at0 = EngineAt(0), at1 = EngineAt(1);
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    const std::vector<Tokens> known = NewPrompt(), known_too = NewPrompt(), own = NewPrompt(), later = NewPrompt();
    for (const auto& prompt : {known, known_too}) Publish(cluster_->daemon(0), prompt);
    Publish(cluster_->daemon(1), own);
    for (const size_t node : {0, 1}) AwaitEntries(node);

    CutOff(cluster_->etcd_node(), way);
    const Stopwatch cut;
    Publish(cluster_->daemon(0), later);
    EXPECT_TRUE(Eventually([&] { return Asked(at1, known); }));
    EXPECT_TRUE(Eventually([&] { return Metric(0, "ashlar_cluster_members") == 2; }));
    FigureOf(way, "until the others do not believe it", cut.ms());
    EXPECT_FALSE(Asked(at0, own));
    EXPECT_TRUE(Eventually([&] { return Asked(at1, known_too); })) << "what is known goes on being used";
    if (way.in) {
      EXPECT_FALSE(Asked(at1, later)) << "etcd's word of it does not come";
    }
    EXPECT_TRUE(Asked(at1, own));

    cluster_->network().Heal();
    const Stopwatch healed;
    EXPECT_TRUE(Eventually([&] { return Asked(at0, own); }));
    EXPECT_TRUE(Eventually([&] { return Asked(at1, later); }));
    FigureOf(way, "from its end until what was cut off has landed", healed.ms());
    EXPECT_TRUE(Eventually([&] { return cluster_->Sum("ashlar_cluster_members") == 9; }));
  }
  ExpectInTime();
}

}  // namespace
}  // namespace ashlar::nodes
