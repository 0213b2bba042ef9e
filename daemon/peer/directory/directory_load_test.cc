// SPDX-License-Identifier: Apache-2.0
// Eight nodes and many entries: what a mirror takes, and how fast one is filled. ASHLAR_DIRECTORY_ENTRIES=1000000 for
// the figures of docs/benchmarks/directory.md; by default a part. ASHLAR_DIRECTORY_JSON names a file for them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "daemon/peer/directory/etcd_directory.h"
#include "daemon/peer/directory/testing/directory_fixture.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kNodes = 8;

// A line of /proc/PID/status in KiB.
uint64_t Status(pid_t pid, const std::string& field) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field)) return std::stoull(line.substr(field.size() + 1));
  }
  return 0;
}

// CPU time of a process in seconds.
double CpuSeconds(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::vector<std::string> values;
  for (std::string value; fields >> value;) values.push_back(value);
  return (std::stod(values.at(11)) + std::stod(values.at(12))) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double Since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(DirectoryLoad, EightNodesMirrorEachOthersObjects) {
  if (const std::string why = EtcdProcess::WhyNot(); !why.empty()) GTEST_SKIP() << why;
  const char* const wanted = std::getenv("ASHLAR_DIRECTORY_ENTRIES");
  const uint64_t entries = wanted == nullptr ? 20000 : std::strtoull(wanted, nullptr, 10);
  EtcdProcess etcd({.arguments = {"--quota-backend-bytes=8589934592"}});
  EtcdDirectoryOptions options = OptionsFor(etcd.endpoint());
  options.lease_seconds = 60;  // all of this runs on two CPUs
  options.queued_writes = static_cast<uint32_t>(entries);
  std::vector<std::unique_ptr<Node>> nodes;
  for (size_t i = 0; i < kNodes; ++i) nodes.push_back(std::make_unique<Node>(absl::StrCat("n", i), options));
  for (const auto& node : nodes) {
    ASSERT_TRUE(Until([&] { return node->members() == kNodes; }));
    node->directory.Follow(NamespaceOf(1));
  }

  auto begin = std::chrono::steady_clock::now();
  double etcd_seconds = CpuSeconds(etcd.pid());
  for (uint64_t key = 0; key < entries; ++key) {
    nodes[key % kNodes]->directory.Announce(NamespaceOf(1), DigestOf(key), {.bytes = 1 << 22}, 1);
  }
  const auto mirrored = [&](const Node& node) { return node.directory.Stats().entries == entries - entries / kNodes; };
  for (const auto& node : nodes) {
    ASSERT_TRUE(Until([&] { return mirrored(*node); }, std::chrono::seconds(500)));
  }
  const double announced = Since(begin);
  const double etcd_announcing = CpuSeconds(etcd.pid()) - etcd_seconds;
  const DirectoryStats stats = nodes[0]->directory.Stats();
  EXPECT_EQ(stats.entries_refused, 0u);
  EXPECT_LE(stats.bytes, 100 * stats.entries + 64 * 1024) << "bytes of a mirror";

  // One more node, without prior state.
  etcd_seconds = CpuSeconds(etcd.pid());
  begin = std::chrono::steady_clock::now();
  Node late("late", options);
  late.directory.Follow(NamespaceOf(1));
  const uint64_t resident = Status(::getpid(), "VmRSS:");
  ASSERT_TRUE(Until([&] { return late.directory.Stats().entries == entries; }, std::chrono::seconds(200)));
  const double scratch = Since(begin);
  const uint64_t grown = Status(::getpid(), "VmRSS:") - std::min(Status(::getpid(), "VmRSS:"), resident);
  const double etcd_reading = CpuSeconds(etcd.pid()) - etcd_seconds;

  // Lookups of 1,000 keys, half of which are stored.
  ASSERT_TRUE(Until([&] { return late.members() == kNodes + 1; }));
  std::vector<Key> keys;
  for (uint64_t i = 0; i < 1000; ++i) keys.push_back(DigestOf(i % 2 == 0 ? i * 37 % entries : entries + i));
  std::vector<double> times;
  for (int turn = 0; turn < 201; ++turn) {
    begin = std::chrono::steady_clock::now();
    EXPECT_EQ(late.directory.Locate(NamespaceOf(1), keys).size(), 500u);
    times.push_back(Since(begin) * 1e6);
  }
  std::ranges::nth_element(times, times.begin() + 100);
  const std::string json = absl::StrFormat(
      R"({"nodes": %d, "entries": %d, "announcements_per_second": %.0f, "announce_seconds": %.2f, "mirror_seconds": %.2f, )"
      R"("mirror_bytes_per_entry": %.1f, "resident_bytes_per_entry": %.1f, "lookup_1000_keys_us": %.0f, )"
      R"("etcd_cpu_announcing_s": %.2f, "etcd_cpu_reading_s": %.2f, "etcd_resident_bytes_per_entry": %.0f})",
      kNodes, entries, static_cast<double>(entries) / announced, announced, scratch,
      static_cast<double>(late.directory.Stats().bytes) / static_cast<double>(entries),
      static_cast<double>(grown) * 1024 / static_cast<double>(entries), times[100], etcd_announcing, etcd_reading,
      static_cast<double>(Status(etcd.pid(), "VmRSS:")) * 1024 / static_cast<double>(entries));
  std::cout << json << "\n";
  if (const char* const file = std::getenv("ASHLAR_DIRECTORY_JSON")) std::ofstream(file) << json << "\n";
}

}  // namespace
}  // namespace ashlar::daemon
