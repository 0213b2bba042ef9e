// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace ashlar::daemon {
namespace {

using prometheus::MetricType;

double UnixTime() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Fields of /proc/self/stat with their numbers in proc(5).
enum class StatField : uint8_t { kState = 3, kStartTime = 22, kVirtualBytes = 23, kResidentPages = 24 };

std::optional<double> Stat(StatField field) {
  std::string line;
  std::getline(std::ifstream("/proc/self/stat"), line);
  const size_t name_end = line.rfind(") ");  // the program's name may contain blanks and brackets
  if (name_end == std::string::npos) return std::nullopt;
  const std::vector<absl::string_view> fields = absl::StrSplit(absl::string_view(line).substr(name_end + 2), ' ');
  const size_t index = static_cast<size_t>(field) - static_cast<size_t>(StatField::kState);
  double value = 0;
  if (index >= fields.size() || !absl::SimpleAtod(fields[index], &value)) return std::nullopt;
  return value;
}

// Computed once, so that a change of the clock does not look like a restart.
double StartTime() {
  const std::optional<double> ticks = Stat(StatField::kStartTime);  // since the machine started
  timespec up{};
  if (!ticks.has_value() || clock_gettime(CLOCK_BOOTTIME, &up) != 0) return 0;
  const double age = static_cast<double>(up.tv_sec) + 1e-9 * static_cast<double>(up.tv_nsec) -
                     *ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
  return UnixTime() - age;
}

double SecondsOf(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

void Add(std::vector<prometheus::MetricFamily>& families, MetricType type, const char* name, const char* help,
         double value) {
  prometheus::ClientMetric metric;
  (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  families.push_back({name, help, type, {metric}});
}

}  // namespace

ProcessMetrics::ProcessMetrics(prometheus::Registry& registry)
    : started_(StartTime()),
      reloaded_(prometheus::BuildGauge()
                    .Name("ashlar_config_last_reload_successful")
                    .Help("1 if the last configuration reload was accepted, else 0")
                    .Register(registry)
                    .Add({})),
      reloaded_at_(prometheus::BuildGauge()
                       .Name("ashlar_config_last_reload_success_timestamp_seconds")
                       .Help("Unix time when the current configuration was read, at startup or by a reload")
                       .Register(registry)
                       .Add({})) {
  Reloaded(true);
}

void ProcessMetrics::Reloaded(bool accepted) {
  reloaded_.Set(accepted ? 1 : 0);
  if (accepted) reloaded_at_.Set(UnixTime());
}

void ProcessMetrics::AddTo(std::vector<prometheus::MetricFamily>& families) const {
  rusage used{};
  if (getrusage(RUSAGE_SELF, &used) == 0) {
    Add(families, MetricType::Counter, "process_cpu_seconds_total", "Total user and system CPU time spent in seconds.",
        SecondsOf(used.ru_utime) + SecondsOf(used.ru_stime));
  }
  if (const std::optional<double> pages = Stat(StatField::kResidentPages)) {
    Add(families, MetricType::Gauge, "process_resident_memory_bytes", "Resident memory size in bytes.",
        *pages * static_cast<double>(sysconf(_SC_PAGESIZE)));
  }
  if (const std::optional<double> bytes = Stat(StatField::kVirtualBytes)) {
    Add(families, MetricType::Gauge, "process_virtual_memory_bytes", "Virtual memory size in bytes.", *bytes);
  }
  std::error_code error;
  const std::filesystem::directory_iterator open("/proc/self/fd", error);
  if (!error) {
    Add(families, MetricType::Gauge, "process_open_fds", "Number of open file descriptors.",
        static_cast<double>(std::distance(begin(open), end(open)) -
                            1));  // without the descriptor that reads the folder
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    Add(families, MetricType::Gauge, "process_max_fds", "Maximum number of open file descriptors.",
        static_cast<double>(limit.rlim_cur));
  }
  if (started_ > 0) {
    Add(families, MetricType::Gauge, "process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.", started_);
  }
}

}  // namespace ashlar::daemon
