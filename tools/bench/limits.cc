// SPDX-License-Identifier: Apache-2.0
// The limits of the machine that figures are compared with.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>

#include "tools/bench/bench.h"

namespace ashlar::bench {
namespace {

// Enough threads that none waits long for another one that the host has stopped.
constexpr size_t kSlicesPerThread = 16;

}  // namespace

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

MemcpyLimit::MemcpyLimit(size_t bytes) : bytes_(bytes) {
  for (int set = 0; set < kColdSets; ++set) {
    for (auto* buffers : {&sources_, &targets_}) {
      buffers->emplace_back(new char[bytes]);
      std::memset(buffers->back().get(), 1, bytes);
    }
  }
}

double MemcpyLimit::Measure(int threads, double span, kernels::Workers& workers) {
  const size_t slices = static_cast<size_t>(threads) * kSlicesPerThread;
  const size_t slice = std::max<size_t>(1, bytes_ / slices);
  double seconds = 0, bytes = 0;
  do {
    char* const source = sources_[round_ % kColdSets].get();
    char* const target = targets_[round_ % kColdSets].get();
    ++round_;
    std::atomic<size_t> next{0};
    seconds += Seconds([&] {
      kernels::ParallelFor(workers, threads, [&](int64_t) {
        for (size_t at; (at = next.fetch_add(1) * slice) + slice <= bytes_;) {
          std::memcpy(target + at, source + at, slice);
        }
      });
    });
    bytes += static_cast<double>(bytes_ / slice * slice);
  } while (seconds < span);
  return bytes / seconds;
}

nlohmann::json Machine() {
  std::string model = "unknown";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) == 0) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  }
  return {{"cpu", model}, {"cores", std::thread::hardware_concurrency()}};
}

}  // namespace ashlar::bench
