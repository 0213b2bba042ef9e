// SPDX-License-Identifier: Apache-2.0
// Progress: how far a long run of seeds has come, in a file, so that it can be run in parts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/simulation/simulation.h"

namespace ashlar::simulation {

struct Progress {
  uint64_t first = 0;  // seed
  uint64_t trace = 0;  // of the first seed: another one is of another program, whose seeds are others
  uint64_t done = 0;   // seeds, from the first one on; none of them broke a promise
  Coverage coverage;
  Reached reached;
  Transitions transitions;
};

// `progress` begins anew if there is no such file. False: the file is no progress of this first seed and trace.
bool Load(const std::string& path, Progress& progress);
// Writes all of it or, if the process ends meanwhile, leaves the old file.
bool Save(const std::string& path, const Progress& progress);

// The same of another simulation: its numbers in order, behind a title.
bool LoadNumbers(const std::string& path, const std::string& title, std::vector<uint64_t>& numbers);
bool SaveNumbers(const std::string& path, const std::string& title, const std::vector<uint64_t>& numbers);

}  // namespace ashlar::simulation
