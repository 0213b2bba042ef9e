// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/simulation.h"

#include "absl/strings/str_cat.h"
#include "tests/simulation/driver.h"

namespace ashlar::simulation {

void Coverage::Add(const Coverage& other) {
  for (size_t fault = 0; fault < kFaults; ++fault) {
    for (size_t state = 0; state < kStates; ++state) pairs[fault][state] += other.pairs[fault][state];
  }
}

std::string Coverage::Missing() const {
  static constexpr const char* kFaultNames[kFaults] = {"read error",   "write error", "sync error", "record error",
                                                       "bit flip",     "disk full",   "crash",      "queue full",
                                                       "engine death", "no space",    "disk hang"};
  static constexpr const char* kStateNames[kStates] = {"leased",   "reserved",   "publishing", "landing",   "copying",
                                                       "draining", "committing", "spanning",   "composing", "admitted",
                                                       "filling",  "expiring",   "evacuating"};
  std::string missing;
  for (size_t fault = 0; fault < kFaults; ++fault) {
    for (size_t state = 0; state < kStates; ++state) {
      if (pairs[fault][state] == 0) absl::StrAppend(&missing, kFaultNames[fault], " while ", kStateNames[state], "; ");
    }
  }
  return missing;
}

void Reached::Add(const Reached& other) {
  for (size_t event = 0; event < kEvents; ++event) counts[event] += other.counts[event];
}

namespace {

constexpr const char* kEventNames[kEvents] = {"prefixes landed",   "conversations' prefixes landed",
                                              "spans landed",      "states kept",
                                              "spans kept",        "composed",
                                              "not composed",      "shared pages filled",
                                              "shared pages read", "pages reclaimed",
                                              "expired",           "erased"};

}  // namespace

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

namespace {

// Transitions that the simulation does not reach; CopyState's unit test takes them. kAbandon: while a cancelled copy is
// refilled straight from the disk, making space in DRAM evicts the last copy of another shard that no lease holds.
bool IsReachable(const storage::CopyTransition& transition) {
  return transition.event != storage::CopyEvent::kAbandon;
}

}  // namespace

void Transitions::Add(const Transitions& other) {
  for (size_t row = 0; row < counts.size(); ++row) counts[row] += other.counts[row];
}

std::string Transitions::Missing() const {
  std::string missing;
  for (size_t row = 0; row < counts.size(); ++row) {
    const storage::CopyTransition& transition = storage::kCopyTransitions[row];
    if (counts[row] > 0 || !IsReachable(transition)) continue;
    absl::StrAppend(&missing, "no copy: ", storage::Describe(transition), "; ");
  }
  return missing;
}

Report Simulate(uint64_t seed, int operations, Bug bug) {
  return Driver(seed, bug).Run(operations);
}

}  // namespace ashlar::simulation
