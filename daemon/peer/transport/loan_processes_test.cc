// SPDX-License-Identifier: Apache-2.0
// Remote reads between processes, one of which is killed or stopped during a read.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "daemon/peer/transport/testing/held_bytes.h"
#include "daemon/peer/transport/testing/reading.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kAreaBytes = Areas::kArea;
constexpr int64_t kLittleSilence = 300'000'000;

// Sent to a reader over a pipe.
struct HolderReport {
  HostPort peer;
  Grant grant;
  RemoteMemory memory;
};
void SendReport(int pipe, const HolderReport& report) {
  const auto put = [pipe](const void* data, size_t size) {
    ASSERT_EQ(write(pipe, data, size), static_cast<ssize_t>(size));
  };
  const uint64_t arenas = report.memory.arenas.size(), runs = report.memory.runs.size();
  put(&report.peer.port, sizeof report.peer.port);
  put(&report.grant, sizeof report.grant);
  put(&arenas, sizeof arenas);
  for (const RemoteArena& arena : report.memory.arenas) {
    const uint64_t numbers[] = {arena.base, arena.bytes, arena.key.size()};
    put(numbers, sizeof numbers);
    put(arena.key.data(), arena.key.size());
  }
  put(&runs, sizeof runs);
  put(report.memory.runs.data(), runs * sizeof(RemoteRun));
}
HolderReport ReceiveReport(int pipe) {
  const auto get = [pipe](void* data, size_t size) {
    for (size_t at = 0; at < size;) {
      const ssize_t got = read(pipe, static_cast<char*>(data) + at, size - at);
      if (got <= 0) std::abort();
      at += static_cast<size_t>(got);
    }
  };
  HolderReport report{.peer = {"127.0.0.1", 0}};
  uint64_t arenas = 0, runs = 0;
  get(&report.peer.port, sizeof report.peer.port);
  get(&report.grant, sizeof report.grant);
  get(&arenas, sizeof arenas);
  for (uint64_t i = 0; i < arenas; ++i) {
    uint64_t numbers[3];
    get(numbers, sizeof numbers);
    RemoteArena& arena =
        report.memory.arenas.emplace_back(RemoteArena{std::string(numbers[2], 0), numbers[0], numbers[1]});
    get(arena.key.data(), arena.key.size());
  }
  get(&runs, sizeof runs);
  report.memory.runs.resize(runs);
  get(report.memory.runs.data(), runs * sizeof(RemoteRun));
  return report;
}

// Fetches repeatedly, and ends at the first failure. One read is in flight at a time: if a connection has failed and
// there are more, UCX's software ends the holder's process.
void ReadOn(Transport& transport, const HolderReport& report) {
  const auto memory = std::make_shared<const RemoteMemory>(report.memory);
  std::vector<std::byte> here(1 << 20);
  for (bool well = true; well;) {
    Outcome outcome;
    transport.Fetch(report.peer, report.grant, 0, {here}, 0, outcome.done(), memory);
    well = outcome.Wait().ok();
  }
}

// The other end of the tests below, in a separate process.
TEST(LoanProcess, HoldsOrReads) {
  const char* const role = std::getenv("ASHLAR_TEST_LOANS");
  if (role == nullptr) GTEST_SKIP() << "started by LoanProcessesTest";
  int pipe = 0;
  const auto transport = StartReading();
  if (std::sscanf(role, "read %d", &pipe) == 1) {
    ReadOn(*transport, ReceiveReport(pipe));
    for (;;) pause();
  }
  ASSERT_EQ(std::sscanf(role, "hold %d", &pipe), 1);
  std::mt19937_64 random(1);
  Areas areas(2);
  areas.RegisterAt(*transport);
  const Spans spans = areas.Object(2 * kAreaBytes, true, random);
  for (const auto& span : spans) std::fill(span.begin(), span.end(), std::byte{0x11});
  const Grant grant = transport->Allow(2 * kAreaBytes, std::make_shared<HeldBytes>(spans));
  SendReport(pipe, {transport->address(), grant, transport->Describe(spans)});
  for (;;) pause();
}

// The process, with the pipe's end that it holds.
pid_t StartLoanProcess(const std::string& role, int pipe) {
  const std::string variable = "ASHLAR_TEST_LOANS=" + role + " " + std::to_string(pipe);
  const pid_t child = fork();
  if (child != 0) return child;
  const char* const arguments[] = {"test", "--gtest_filter=LoanProcess.HoldsOrReads", nullptr};
  const char* const environment[] = {variable.c_str(), nullptr};
  execve("/proc/self/exe", const_cast<char**>(arguments), const_cast<char**>(environment));
  _exit(1);
}

TEST(LoanProcessesTest, AHolderThatDiesOrStopsIsDetected) {
  const auto asker = StartReading({.silence = kLittleSilence});
  for (const int signal : {SIGKILL, SIGSTOP}) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = StartLoanProcess("hold", ends[1]);
    close(ends[1]);
    const HolderReport report = ReceiveReport(ends[0]);
    close(ends[0]);
    const auto memory = std::make_shared<const RemoteMemory>(report.memory);
    std::vector<std::byte> here(2 * kAreaBytes);
    for (int i = 0; i < 2; ++i) {  // the first one uses messages
      WaitFor([&] {                // a busy machine may be silent for longer
        Outcome whole;
        asker->Fetch(report.peer, report.grant, 0, {here}, 0, whole.done(), memory);
        return whole.Wait().ok();
      });
      EXPECT_EQ(std::count(here.begin(), here.end(), std::byte{0x11}), static_cast<ptrdiff_t>(here.size()));
    }
    std::vector<Outcome> cut(16);
    const uint64_t before = asker->stats().read_bytes;
    for (Outcome& each : cut) asker->Fetch(report.peer, report.grant, 0, {here}, 0, each.done(), memory);
    WaitFor([&] { return asker->stats().read_bytes > before || cut[0].IsThere(); });
    kill(child, signal);
    bool lost = false;
    for (Outcome& each : cut) {
      const absl::Status status = each.Wait();
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
      lost |= !status.ok();
    }
    EXPECT_TRUE(lost);
    const auto untouched = std::vector<std::byte>(2 * kAreaBytes, std::byte{0x22});
    here = untouched;
    if (signal == SIGSTOP) kill(child, SIGCONT);  // later messages have no recipient
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(here == untouched);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
}

TEST(LoanProcessesTest, AReaderThatDiesOrStopsKeepsNothing) {
  std::mt19937_64 random(1);
  Areas areas(3);
  const auto holder = StartReading({.silence = kLittleSilence});
  areas.RegisterAt(*holder);
  const Spans spans = areas.Object(3 * kAreaBytes, true, random);
  for (const int signal : {SIGKILL, SIGSTOP}) {
    const Grant grant = holder->Allow(3 * kAreaBytes, std::make_shared<HeldBytes>(spans));
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = StartLoanProcess("read", ends[0]);
    close(ends[0]);
    SendReport(ends[1], {holder->address(), grant, holder->Describe(spans)});
    close(ends[1]);
    WaitFor([&] { return holder->stats().loans > 0; });
    kill(child, signal);
    RevokeNow(*holder, grant);  // the grant is quiesced in the end
    WaitFor([&] {
      const TransportStats stats = holder->stats();
      return stats.loans == 0 && stats.transfers == 0;
    });
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
}

}  // namespace
}  // namespace ashlar::daemon
