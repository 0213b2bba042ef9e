// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/process_metrics.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "daemon/observe/metrics.h"
#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {
namespace {

double UnixTimeNow() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// The single value of a family, which must have the given type.
double ValueOf(const std::vector<prometheus::MetricFamily>& families, const std::string& name,
               prometheus::MetricType type = prometheus::MetricType::Gauge) {
  const auto found =
      std::find_if(families.begin(), families.end(), [&](const auto& each) { return each.name == name; });
  if (found == families.end() || found->type != type || found->metric.size() != 1) {
    ADD_FAILURE() << name << " is not there once, or has another type";
    return -1;
  }
  return type == prometheus::MetricType::Counter ? found->metric[0].counter.value : found->metric[0].gauge.value;
}

std::vector<prometheus::MetricFamily> Now(const ProcessMetrics& process) {
  std::vector<prometheus::MetricFamily> families;
  process.AddTo(families);
  return families;
}

TEST(ProcessMetricsTest, FollowTheProcessesUsage) {
  prometheus::Registry registry;
  const ProcessMetrics process(registry);
  const auto before = Now(process);
  constexpr size_t kBytes = size_t{64} << 20;
  const std::unique_ptr<char[]> memory(new char[kBytes]);
  std::fill_n(memory.get(), kBytes, 1);
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto cpu = [&] { return ValueOf(Now(process), "process_cpu_seconds_total", prometheus::MetricType::Counter); };
  const double begun = ValueOf(before, "process_cpu_seconds_total", prometheus::MetricType::Counter);
  while (cpu() < begun + 0.05) {
  }
  const auto after = Now(process);
  const auto grew = [&](const char* name) { return ValueOf(after, name) - ValueOf(before, name); };
  EXPECT_GT(grew("process_resident_memory_bytes"), 0.9 * kBytes);
  EXPECT_GT(ValueOf(after, "process_virtual_memory_bytes"), ValueOf(after, "process_resident_memory_bytes"));
  EXPECT_EQ(grew("process_open_fds"), 1);
  EXPECT_EQ(grew("process_start_time_seconds"), 0) << "as after a restart";
}

TEST(ProcessMetricsTest, ReportLimit) {
  prometheus::Registry registry;
  const auto now = Now(ProcessMetrics(registry));
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(ValueOf(now, "process_max_fds"), static_cast<double>(limit.rlim_cur));
}

TEST(ProcessMetricsTest, AChildHasItsOwnStart) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd in(ends[0]), out(ends[1]);
  const double before = UnixTimeNow();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    prometheus::Registry registry;
    const double start = ValueOf(Now(ProcessMetrics(registry)), "process_start_time_seconds");
    _exit(write(out.get(), &start, sizeof(start)) == sizeof(start) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  double start = 0;
  ASSERT_EQ(read(in.get(), &start, sizeof(start)), static_cast<ssize_t>(sizeof(start)));
  EXPECT_GE(start, before - 0.05) << "the kernel counts in ticks of a hundredth of a second";
  EXPECT_LE(start, UnixTimeNow() + 0.05);
}

TEST(ProcessMetricsTest, ShowARefusedReloadUntilOneSucceeds) {
  Metrics metrics({"blue"});
  const auto at = [&] {
    const std::string text = metrics.Text(TenantLabel::kSummed),
                      name = "\nashlar_config_last_reload_success_timestamp_seconds ";
    return std::stod(text.substr(text.find(name) + name.size()));
  };
  const auto successful = [&](const char* value) {
    return ::testing::Value(
        metrics.Text(TenantLabel::kSummed),
        ::testing::HasSubstr(std::string("\nashlar_config_last_reload_successful ") + value + "\n"));
  };
  EXPECT_TRUE(successful("1")) << "the start's configuration is in effect";
  const double started = at();
  EXPECT_NEAR(started, UnixTimeNow(), 60);
  metrics.Reloaded(false);
  EXPECT_TRUE(successful("0"));
  EXPECT_EQ(at(), started) << "what it was, is still in effect";
  metrics.Reloaded(true);
  EXPECT_TRUE(successful("1"));
  EXPECT_GT(at(), started);
}

}  // namespace
}  // namespace ashlar::daemon
