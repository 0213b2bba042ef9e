// SPDX-License-Identifier: Apache-2.0
// The engines, operators and faults of one simulation of several nodes, and the oracle that watches them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulation/nodes/node.h"
#include "tests/simulation/nodes/nodes.h"

namespace ashlar::simulation::nodes {

class Driver {
 public:
  // `nodes`: 0: drawn.
  Driver(uint64_t seed, Bug bug, size_t nodes = 0);
  ~Driver();
  Report Run();

 private:
  struct Machine {
    MachineClock clock;
    std::unique_ptr<Node> node;  // null: no daemon runs there
    uint64_t incarnation = 0;    // incarnation of the last one
    bool for_good = false;       // it is not started again
    bool stops = false;          // true: it drains first
  };
  // The drawn sizes and habits of one seed.
  struct Habits {
    size_t nodes = 0;
    uint32_t lease_seconds = 5;
    uint64_t extents = 16;  // extents of a tenant on a node
    Nanos faults_for = 30 * kSecond, op_every = kSecond, fault_every = kSecond;
    bool prefills = false, flips = false, drains = false, reorders = false, announces_all = true;
    bool withholds = false, refuses = false;
  };
  // A prompt of segments in progress: found elsewhere, found here, landed, released.
  struct Prompt {
    size_t machine = 0;
    TenantId tenant = 0;
    std::vector<Text> texts;
    std::vector<storage::Query> queries;
    std::vector<size_t> found;  // indices of texts that hit
    std::vector<TierKind> tiers;
    storage::LeaseId lease{};
    std::unique_ptr<storage::TestPages> pages;
    std::vector<uint64_t> positions;
    Nanos ends_by = 0;  // end of its current stage
    const char* stage = "";
    bool must_hit = false;
  };
  struct Prefill {  // a plan on its way
    size_t machine = 0;
    TenantId tenant = 0;
    uint64_t plan = 0;
    std::vector<Text> texts;
    Nanos ends_by = 0;
  };

  static Habits DrawHabits(uint64_t seed, size_t nodes);
  void Fail(const std::string& what);
  // Prints it with the time to stderr if ASHLAR_NODES_ALOUD is set.
  void Say(const std::string& what) const;
  void Reach(Event event, uint64_t times = 1) { report_.reached.counts[static_cast<size_t>(event)] += times; }
  uint64_t Draw(uint64_t below) { return schedule_.Draw(below); }
  Node* At(size_t machine) { return machines_[machine].node.get(); }
  std::vector<size_t> Running() const;
  std::optional<size_t> AnyRunning();
  Text AnyText(TenantId tenant) { return {tenant, 1 + Draw(kTexts)}; }
  void RunUntil(Nanos end);

  // Engines (engines.cc).
  void NextOperation();
  void LookUp(size_t machine, TenantId tenant, std::vector<Text> texts, bool must_hit);
  void Found(uint64_t number, const daemon::RemoteLookup::Adopted& adopted);
  void LookHere(uint64_t number);
  void Land(uint64_t number);
  void Landed(uint64_t number, const std::vector<MissReason>& verdict);
  void LetGo(uint64_t number);
  void CheckReason(const Prompt& prompt, const Text& text, MissReason reason);
  void Publish(size_t machine, const Text& text, std::function<void(bool)> done);
  void PublishParts(size_t machine, std::vector<Text> parts, const std::function<void(bool)>& done);
  void Evict(size_t machine);
  void Plan(size_t machine);
  void AwaitPlan(uint64_t number);
  void Planned(uint64_t number, const daemon::Router::States& states);
  void OfferPrefill(size_t machine, storage::SessionId session, uint64_t assignment, bool published);
  void Compute(size_t machine, storage::SessionId session, const daemon::PrefillWorkers::Given& given);

  // Faults (faults.cc).
  void Start(size_t machine);
  void End(size_t machine, bool leaves);
  void NextFault();
  void HarmNode();
  void HarmNetwork();
  void HarmEtcd();
  void StopWell(size_t machine);
  void AwaitDrained(size_t machine, Nanos began, Nanos until);
  bool Disturbed() const;
  void Harvest(Node& node);
  void Heal();

  // Checks (oracle.cc).
  void Watch();
  void CheckConverged();
  void CheckMirrors();
  void SayWhoHas(const Text& text, size_t asked);
  void CheckKeys();
  void CheckEverythingLands();
  void CheckNothingIsLeft();

  const Bug bug_;
  const Habits habits_;
  Schedule schedule_;
  Network network_;
  Etcd etcd_;
  Fabric fabric_;
  CallSwitch calls_;
  Surroundings around_;
  std::vector<storage::MemoryTier*> memories_;  // indexed by machine
  std::vector<Machine> machines_;
  Report report_;
  bool faults_ = true, engines_ = true;
  Nanos disturbed_at_ = 0;  // when a fault was seen last
  uint64_t drawn_ = 0, publishes_ = 0;
  std::map<uint64_t, Prompt> prompts_;
  std::map<uint64_t, Prefill> plans_;
  std::set<Text> published_, evicted_;
};

}  // namespace ashlar::simulation::nodes
