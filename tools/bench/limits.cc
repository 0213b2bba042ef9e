// The limits that figures are held against.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>

#include "tools/bench/bench.h"

namespace ashlar::bench {

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

double MemcpyLimit::Measure(int threads, kernels::Workers& workers) {
  char* const source = sources_[round_ % kColdSets].get();
  char* const target = targets_[round_ % kColdSets].get();
  ++round_;
  const size_t slice = bytes_ / threads;
  const double seconds = Seconds([&] {
    kernels::ParallelFor(workers, threads,
                         [&](int64_t t) { std::memcpy(target + t * slice, source + t * slice, slice); });
  });
  return static_cast<double>(slice * threads) / seconds;
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
