// ashlar-bench: figures with the limit of the machine beside them, measured in the same run.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/device.h"
#include "nlohmann/json.hpp"

namespace ashlar::bench {

struct Options {
  std::string json;     // file for the figures; empty: none
  int repetitions = 9;  // medians are taken over these
  int threads = 0;      // 0: all cores
};

// Subcommands. Each prints a table and fills `figures` with the same numbers.
absl::Status Land(const Options& options, nlohmann::json& figures);

double Seconds(const std::function<void()>& work);
double Median(std::vector<double> values);

// Bytes per second of the best std::memcpy of `bytes` into touched memory, at 1 … workers.Size() threads: the median
// over `repetitions` for each number of threads, and of those the largest.
double MemcpyBandwidth(size_t bytes, int repetitions, kernels::Workers& workers);

// What this ran on, for the figures' file.
nlohmann::json Machine();

}  // namespace ashlar::bench
