// SPDX-License-Identifier: Apache-2.0
// Progress: records in a file how many seeds of a long run are done, so that it can be run in parts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/simulation/simulation.h"

namespace ashlar::simulation {

struct Progress {
  uint64_t first = 0;  // seed
  uint64_t trace = 0;  // trace of the first seed: another one belongs to another program with other seeds
  uint64_t done = 0;   // number of seeds from the first one; none of them broke a promise
  Coverage coverage;
  Reached reached;
  Transitions transitions;
};

// `progress` starts from zero if there is no such file. False: the file is not of this first seed and trace.
bool Load(const std::string& path, Progress& progress);
// Writes all of it; if the process ends meanwhile, the old file stays.
bool Save(const std::string& path, const Progress& progress);

// The same for another simulation: its numbers in order, after a title.
bool LoadNumbers(const std::string& path, const std::string& title, std::vector<uint64_t>& numbers);
bool SaveNumbers(const std::string& path, const std::string& title, const std::vector<uint64_t>& numbers);

}  // namespace ashlar::simulation
