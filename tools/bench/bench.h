// SPDX-License-Identifier: Apache-2.0
// ashlar-bench: figures beside the machine's limit, measured in the same run.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/device.h"
#include "nlohmann/json.hpp"

namespace ashlar::bench {

struct Options {
  std::string json;     // file for the figures; empty: none
  int repetitions = 9;  // number of samples of a median
  int threads = 0;      // 0: all cores
  int seconds = 0;      // neighbours: seconds per attack; traffic: per phase; 0: the default
  std::string filter;   // kernels: only cases whose "op family dtype shape" contains this; neighbours: attacks
  bool quick = false;   // kernels, store, ssd, entries, prefix, neighbours: small
  std::string file;     // vectors: the file
  std::string compare;  // store: "redis", or empty
  std::string dir;      // ssd, remote: a folder on the disk; empty: the program's own
  std::string engine;   // ssd: "tier" or "blobdb"; empty: tier
};

// Subcommands. Each prints a table and fills `figures` with the same numbers.
absl::Status Land(const Options& options, nlohmann::json& figures);
absl::Status Sharing(const Options& options, nlohmann::json& figures);
absl::Status Entries(const Options& options, nlohmann::json& figures);
absl::Status Prefix(const Options& options, nlohmann::json& figures);
absl::Status Decode(const Options& options, nlohmann::json& figures);
absl::Status Store(const Options& options, nlohmann::json& figures);
absl::Status Router(const Options& options, nlohmann::json& figures);
absl::Status Remote(const Options& options, nlohmann::json& figures);
absl::Status Traffic(const Options& options, nlohmann::json& figures);
absl::Status Mirror(const Options& options, nlohmann::json& figures);
absl::Status Ssd(const Options& options, nlohmann::json& figures);
absl::Status TimeKernels(const Options& options, nlohmann::json& figures);
absl::Status Transitions(const Options& options, nlohmann::json& figures);
// Holds every back end to the test vectors of a file. DATA_LOSS: not all are met; figures are still filled.
absl::Status CheckVectorsFile(const Options& options, nlohmann::json& figures);

double Seconds(const std::function<void()>& work);
double Median(std::vector<double> values);

// Rounds of a measurement rotate through this many sets of buffers, so that data has left the caches by the time it is
// moved again: cached segments are in memory, not in a core's cache.
inline constexpr int kColdSets = 8;

// The best std::memcpy into touched memory, cold, at 1 … workers.Size() threads.
class MemcpyLimit {
 public:
  explicit MemcpyLimit(size_t bytes);
  // Bytes per second of copies of `bytes`, each in slices distributed over `threads` threads. Copies are repeated until
  // `span` seconds have passed, at least once. Every copy uses the next set of buffers.
  double Measure(int threads, double span, kernels::Workers& workers);

 private:
  const size_t bytes_;
  std::vector<std::unique_ptr<char[]>> sources_, targets_;
  size_t round_ = 0;
};

// Describes the machine for the file of figures.
nlohmann::json Machine();

}  // namespace ashlar::bench
