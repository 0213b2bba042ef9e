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
  static constexpr const char* kFaultNames[kFaults] = {"read error",   "write error", "sync error",
                                                       "record error", "bit flip",    "disk full",
                                                       "crash",        "queue full",  "engine death"};
  static constexpr const char* kStateNames[kStates] = {"leased",  "reserved", "publishing",
                                                       "landing", "copying",  "draining"};
  std::string missing;
  for (size_t fault = 0; fault < kFaults; ++fault) {
    for (size_t state = 0; state < kStates; ++state) {
      if (pairs[fault][state] == 0) absl::StrAppend(&missing, kFaultNames[fault], " while ", kStateNames[state], "; ");
    }
  }
  return missing;
}

Report Simulate(uint64_t seed, int operations, Bug bug) {
  return Driver(seed, bug).Run(operations);
}

}  // namespace ashlar::simulation
