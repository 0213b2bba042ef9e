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
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double MemcpyBandwidth(size_t bytes, int repetitions, kernels::Workers& workers) {
  std::unique_ptr<char[]> source(new char[bytes]), target(new char[bytes]);
  std::memset(source.get(), 1, bytes);
  std::memset(target.get(), 2, bytes);
  double best = 0;
  for (int threads = 1; threads <= workers.Size(); ++threads) {
    const size_t slice = bytes / threads;
    std::vector<double> seconds;
    for (int i = 0; i < repetitions; ++i) {
      seconds.push_back(Seconds([&] {
        kernels::ParallelFor(workers, threads, [&](int64_t t) {
          std::memcpy(target.get() + t * slice, source.get() + t * slice, slice);
        });
      }));
    }
    best = std::max(best, static_cast<double>(slice * threads) / Median(seconds));
  }
  return best;
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
