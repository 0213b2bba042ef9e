// SPDX-License-Identifier: Apache-2.0
#include "absl/strings/str_cat.h"
#include "tests/simulation/nodes/driver.h"

namespace ashlar::simulation::nodes {
namespace {

constexpr const char* kEventNames[kEvents] = {"nodes killed",
                                              "nodes stopped well",
                                              "nodes started again",
                                              "nodes stood still",
                                              "links cut",
                                              "links cut one way",
                                              "links slowed",
                                              "links lossy",
                                              "bits flipped",
                                              "etcd down",
                                              "etcd emptied",
                                              "etcd compacted",
                                              "etcd slow",
                                              "members' leases expired",
                                              "namespaces read again",
                                              "keys swept",
                                              "landed from here",
                                              "landed from other nodes",
                                              "bundles landed",
                                              "missed (peer_failed)",
                                              "missed (checksum_failed)",
                                              "lookups that went on without answers",
                                              "lookups joined",
                                              "copies moved to another holder",
                                              "pieces hedged",
                                              "hedges won",
                                              "evicted while others fetch",
                                              "objects transferred by drains",
                                              "objects replicated",
                                              "peers' leases expired",
                                              "segments prefilled here",
                                              "segments prefilled elsewhere",
                                              "segments given back to their asker",
                                              "calls for a tenant that is not shared",
                                              "calls that found no space"};

}  // namespace

void Reached::Add(const Reached& other) {
  for (size_t event = 0; event < kEvents; ++event) counts[event] += other.counts[event];
}

std::string Reached::Missing() const {
  std::string missing;
  for (size_t event = 0; event < kEvents; ++event) {
    if (counts[event] == 0) absl::StrAppend(&missing, "no ", kEventNames[event], "; ");
  }
  return missing;
}

std::string Reached::Describe() const {
  std::string all;
  for (size_t event = 0; event < kEvents; ++event) {
    absl::StrAppend(&all, event == 0 ? "" : ", ", kEventNames[event], " ", counts[event]);
  }
  return all;
}

Report Simulate(uint64_t seed, Bug bug) {
  return Driver(seed, bug).Run();
}

}  // namespace ashlar::simulation::nodes
