// SPDX-License-Identifier: Apache-2.0
// A daemon that is killed repeatedly under load: every object that the disk had acknowledged is found again and lands
// unchanged. Also: disks that a daemon refuses.
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "kernels/checksum.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/disk_load.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using testing::HasSubstr;

// Prompts of one round. Each object takes an extent of 256 KiB: the disk holds three rounds, and memory a tenth of one.
constexpr size_t kPromptsPerRound = 110;
// The least recently used object is evicted first, so that the disk evicts only objects of earlier rounds. By price it
// may evict an object just after acknowledging it, which could not be distinguished from a loss.
const DaemonOptions kSmallMemory{
    .dram = "8MiB", .arena = "1MiB", .ssd = "256MiB", .admission = "all", .eviction = "lru", .on_damage = "refuse"};

// A field of the last line in which the daemon logged what it recovered from its disk.
double Recovered(const DaemonProcess& daemon, const std::string& field) {
  const std::string log = daemon.log();
  const size_t line = log.rfind("disk index loaded");
  const size_t at = line == std::string::npos ? line : log.find(" " + field + "=", line);
  EXPECT_NE(at, std::string::npos) << field;
  return at == std::string::npos ? -1 : std::strtod(log.c_str() + at + field.size() + 2, nullptr);
}

std::string MedianAndWorst(std::vector<double> figures) {
  std::ranges::sort(figures);
  std::ostringstream text;
  text << figures[figures.size() / 2] << " ms, worst " << figures.back() << " ms";
  return text.str();
}

class Kills {
 public:
  explicit Kills(uint32_t seed) : random_(seed) {}

  void Round() {
    Load load(daemon_.client_options(), random_, kPromptsPerRound);
    const Texts acknowledged = KillUnder(load);
    const auto killed = Clock::now();
    daemon_.Start();
    if (testing::Test::HasFatalFailure()) return;
    TestEngine engine(daemon_.client_options(), kPromptShape);
    engine.Lookup(PromptOf(load.prompts().front()));
    answered_.push_back(std::chrono::duration<double, std::milli>(Clock::now() - killed).count());
    read_.push_back(Recovered(daemon_, "milliseconds"));
    EXPECT_EQ(Recovered(daemon_, "damaged"), 0);
    EXPECT_EQ(Recovered(daemon_, "over_budget"), 0);
    EXPECT_GE(Recovered(daemon_, "objects"), static_cast<double>(Count(acknowledged)));
    load.End();
    for (const auto& [seed, segments] : acknowledged) {
      ASSERT_TRUE(Lands(engine, seed, segments)) << "the disk had acknowledged a text that is lost";
      if (testing::Test::HasFailure()) return;
    }
    checked_ += Count(acknowledged);
  }

  size_t checked() const { return checked_; }
  std::string Report() const {
    std::ostringstream text;
    text << read_.size() << " kills, " << checked_ << " acknowledged objects found and landed; disk read in "
         << MedianAndWorst(read_) << "; from the kill to the first answered match " << MedianAndWorst(answered_);
    return text.str();
  }

 private:
  // Kills the daemon at a random moment. Returns the texts that its disk had acknowledged by then.
  Texts KillUnder(Load& load) {
    Texts acknowledged;
    const NamespaceId ns = engine_namespace_;
    std::thread witness([&] {
      Witness asks(daemon_.admin_socket(), ns);
      while (asks.Hear(load.prompts(), acknowledged)) {
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(30'000 + random_() % 500'000));
    daemon_.Kill();
    witness.join();
    return acknowledged;
  }

  std::mt19937_64 random_;
  DaemonProcess daemon_{kSmallMemory};
  const NamespaceId engine_namespace_ = TestEngine(daemon_.client_options(), kPromptShape).model().ns();
  std::vector<double> read_, answered_;  // milliseconds
  size_t checked_ = 0;
};

// Starts a daemon that must end before it serves, and returns the failure, which has its exit and last lines.
std::string WhyNotStarted(const std::string& program) {
  testing::TestPartResultArray failures;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    DaemonProcess daemon({.program = program});
  }
  EXPECT_EQ(failures.size(), 1);
  return failures.size() == 0 ? "" : failures.GetTestPartResult(0).message();
}

TEST(Start, ReportsExitAndLastLogLines) {
  const std::string program = testing::TempDir() + "ashlar-dies-" + std::to_string(::getpid());
  const auto run = [&program](const std::string& script) {
    std::ofstream(program) << "#!/bin/sh\n" << script << "\n";
    EXPECT_EQ(::chmod(program.c_str(), 0700), 0);
    return WhyNotStarted(program);
  };
  EXPECT_THAT(run("echo one; echo last words; kill -SEGV $$"),
              testing::AllOf(HasSubstr("was killed by signal 11"), HasSubstr("one\nlast words")));
  EXPECT_THAT(run("i=0; while [ $i -lt 40 ]; do i=$((i + 1)); echo line $i; done; exit 3"),
              testing::AllOf(HasSubstr("exit status 3"), HasSubstr("line 21\nline 22\n"), HasSubstr("line 40\n"),
                             testing::Not(HasSubstr("line 20\n"))));
  std::filesystem::remove(program);
  EXPECT_THAT(WhyNotStarted(program), testing::AllOf(HasSubstr("exit status 127"), HasSubstr("No such file")));
}

TEST(Restart, AcknowledgedObjectsSurviveDaemon) {
  if (!HasDirectIo()) GTEST_SKIP() << testing::TempDir() << " has no O_DIRECT";
  const char* const asked = std::getenv("ASHLAR_KILLS");
  const int rounds = asked == nullptr ? 5 : std::atoi(asked);
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Kills kills(seed);
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    kills.Round();
  }
  ASSERT_FALSE(HasFailure());
  EXPECT_GT(kills.checked(), static_cast<size_t>(rounds)) << "the load never came to the disk";
  std::printf("%s\n", kills.Report().c_str());
}

// Overwrites bytes of a file, and restores them.
class Damage {
 public:
  Damage(const std::string& path, std::streamoff offset, const std::string& bytes) : path_(path), offset_(offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    original_.resize(bytes.size());
    file.seekg(offset).read(original_.data(), static_cast<std::streamsize>(bytes.size()));
    EXPECT_NE(original_, bytes) << path;
    file.seekp(offset).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    EXPECT_TRUE(file.flush()) << path;
  }
  ~Damage() {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(offset_).write(original_.data(), static_cast<std::streamsize>(original_.size()));
  }

 private:
  const std::string path_;
  const std::streamoff offset_;
  std::string original_;
};

// Returns the slab's header with other bytes at `offset`, and a valid checksum.
std::string SlabHeader(const std::string& slab, size_t offset, const std::string& bytes) {
  std::string header(40, '\0');
  std::ifstream(slab, std::ios::binary).read(header.data(), static_cast<std::streamsize>(header.size()));
  header.replace(offset, bytes.size(), bytes);
  const uint64_t checksum = kernels::UnitChecksum(header.data(), header.size() - sizeof checksum);
  return header.replace(header.size() - sizeof checksum, sizeof checksum,
                        std::string(reinterpret_cast<const char*>(&checksum), sizeof checksum));
}

TEST(Restart, RefusesAnUnreadableDiskWithoutChangingIt) {
  if (!HasDirectIo()) GTEST_SKIP() << testing::TempDir() << " has no O_DIRECT";
  DaemonProcess daemon(kSmallMemory);
  constexpr uint64_t kSeed = 1;
  {
    TestEngine engine(daemon.client_options(), kPromptShape);
    engine.PublishPrompt(PromptOf(kSeed));
    Witness witness(daemon.admin_socket(), engine.model().ns());
    Texts acknowledged;
    ASSERT_TRUE(
        Eventually([&] { return witness.Hear({kSeed}, acknowledged) && Count(acknowledged) == kPromptSegments; }));
  }
  EXPECT_EQ(daemon.Terminate(), 0);
  const auto expect_refusal = [&](const std::string& why) {
    EXPECT_THAT(daemon.Refusal(), AllOf(HasSubstr("ssd.folder " + daemon.ssd_folder()), HasSubstr(why)));
  };
  const std::string slab = daemon.ssd_folder() + "/slab";
  {
    const Damage other_version(slab, 0, SlabHeader(slab, 8, std::string("\1\0\0\0", 4)));
    expect_refusal("version 1");
  }
  {
    const Damage other_name(slab, 0, SlabHeader(slab, 16, "another's slab"));
    expect_refusal("does not match the index");
  }
  {
    const Damage no_header(slab, 16, "damaged");
    expect_refusal("ssd.on_damage: quarantine");
  }
  {
    const Damage no_database(daemon.ssd_folder() + "/records/CURRENT", 0, "nonsense");
    expect_refusal(daemon.ssd_folder() + "/records");
    expect_refusal("ssd.on_damage: quarantine");
  }
  daemon.Start();
  TestEngine engine(daemon.client_options(), kPromptShape);
  EXPECT_TRUE(Lands(engine, kSeed, {0, 1, 2}));
}

// Names of tenants, keys and lengths would reveal to other users what is cached.
TEST(Restart, DiskFilesArePrivateEvenFromAnOlderDaemon) {
  if (!HasDirectIo()) GTEST_SKIP() << testing::TempDir() << " has no O_DIRECT";
  namespace fs = std::filesystem;
  const mode_t before = ::umask(022);
  DaemonProcess daemon(kSmallMemory);
  ::umask(before);
  const auto mode_of = [](const fs::path& path) { return static_cast<unsigned>(fs::status(path).permissions()); };
  const auto expect_private = [&] {
    EXPECT_EQ(mode_of(daemon.ssd_folder()), 0700u);
    size_t files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(daemon.ssd_folder())) {
      EXPECT_EQ(mode_of(entry.path()), entry.is_directory() ? 0700u : 0600u) << entry.path();
      ++files;
    }
    EXPECT_GT(files, 4u);
    EXPECT_EQ(mode_of(daemon.client_options().rpc_socket), 0660u);
    EXPECT_EQ(mode_of(daemon.client_options().session_socket), 0660u);
    EXPECT_EQ(mode_of(daemon.admin_socket()), 0600u);
  };
  expect_private();
  daemon.Kill();
  for (const auto& entry : fs::recursive_directory_iterator(daemon.ssd_folder())) {
    fs::permissions(entry.path(), static_cast<fs::perms>(entry.is_directory() ? 0755 : 0644));
  }
  fs::permissions(daemon.ssd_folder(), static_cast<fs::perms>(0755));
  daemon.Start();
  expect_private();
}

}  // namespace
}  // namespace ashlar::integration
