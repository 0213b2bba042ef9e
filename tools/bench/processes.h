// SPDX-License-Identifier: Apache-2.0
// Facts of processes that benchmarks start: memory, CPU time, metrics, and the cores on which they run.
#pragma once

#include <sched.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/neighbours/http_client.h"

namespace ashlar::bench {

inline uint64_t ResidentBytes(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("VmRSS:")) return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
  }
  return 0;
}

inline double CpuSeconds(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  if (text.rfind(')') == std::string::npos) return 0;
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::vector<std::string> values;
  for (std::string value; fields >> value;) values.push_back(value);
  if (values.size() < 13) return 0;
  return (std::strtod(values[11].c_str(), nullptr) + std::strtod(values[12].c_str(), nullptr)) /
         static_cast<double>(::sysconf(_SC_CLK_TCK));
}

// The value of a metric without labels, or of `name{labels}` as the daemon writes it; −1 if there is none.
inline double MetricOf(uint16_t port, const std::string& name) {
  const absl::StatusOr<std::string> text = neighbours::ReadMetrics(port, std::chrono::seconds(10));
  const size_t at = text.ok() ? text->find(absl::StrCat("\n", name, " ")) : std::string::npos;
  return at == std::string::npos ? -1 : std::strtod(text->c_str() + at + name.size() + 2, nullptr);
}

// One half of the cores, for one of two machines that a benchmark emulates on one. With a single core: that core.
inline cpu_set_t Half(bool second) {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int first = cores / 2;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int core = 0; core < cores; ++core) {
    if (cores == 1 || (core >= first) == second) CPU_SET(core, &set);
  }
  return set;
}
// Moves all current and future threads of a process; 0: the calling thread.
inline void RunOn(pid_t pid, const cpu_set_t& cores) {
  if (pid == 0) {
    sched_setaffinity(0, sizeof cores, &cores);
    return;
  }
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"), error)) {
    sched_setaffinity(std::atoi(task.path().filename().c_str()), sizeof cores, &cores);
  }
}

inline double Percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())))];
}

}  // namespace ashlar::bench
