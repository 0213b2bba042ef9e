// SPDX-License-Identifier: Apache-2.0
// The engines and operators of all nodes: they publish, look up, land, evict, plan prefills and serve them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "tests/simulation/nodes/cluster.h"

namespace ashlar::simulation::nodes {

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

class Engines : DriverPart {
 public:
  explicit Engines(Cluster& cluster) : DriverPart(cluster) {}

  // Draws an operation at drawn times, until the cluster has no engines any longer.
  void NextOperation();
  void LookUp(size_t machine, TenantId tenant, std::vector<Text> texts, bool must_hit);
  void Started(Node& node);
  void Ended(size_t machine);
  void StandStill(size_t machine, Nanos still);

  const std::map<uint64_t, Prompt>& prompts() const { return prompts_; }
  const std::map<uint64_t, Prefill>& plans() const { return plans_; }

 private:
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

  uint64_t drawn_ = 0, publishes_ = 0;
  std::map<uint64_t, Prompt> prompts_;
  std::map<uint64_t, Prefill> plans_;
  std::set<Text> published_, evicted_;
};

}  // namespace ashlar::simulation::nodes
