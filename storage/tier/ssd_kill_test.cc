// SPDX-License-Identifier: Apache-2.0
// A process that stores objects in a real slab and a real RocksDB, killed repeatedly at random moments.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "storage/testing/ssd_folder.h"
#include "storage/testing/temporary_folder.h"

namespace ashlar::storage {
namespace {

// Runs the writer, kills it after `life`, and returns its output.
std::string WriteAndDie(const std::string& folder, uint64_t seed, std::chrono::microseconds life) {
  int pipe_ends[2];
  EXPECT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
  const std::string seed_text = std::to_string(seed);
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], STDOUT_FILENO);
    execl(SSD_WRITER, SSD_WRITER, folder.c_str(), seed_text.c_str(), nullptr);
    _exit(127);
  }
  close(pipe_ends[1]);
  std::string said;
  std::thread reader([&] {
    char bytes[4096];
    for (ssize_t got; (got = read(pipe_ends[0], bytes, sizeof bytes)) > 0;)
      said.append(bytes, static_cast<size_t>(got));
  });
  std::this_thread::sleep_for(life);
  kill(child, SIGKILL);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << "the writer ended by itself: " << WEXITSTATUS(status);
  reader.join();
  close(pipe_ends[0]);
  return said;
}

// Generations by number: the ones that must exist, and the ones that may no longer exist.
struct Expected {
  std::map<uint64_t, uint64_t> acknowledged;

  void Hear(const std::string& said) {
    std::istringstream lines(said);
    char what;
    SsdFolder::Version version;
    while (lines >> what >> version.number >> version.generation) {
      if (what == 'A') {
        acknowledged[version.number] = version.generation;
      } else {
        acknowledged.erase(version.number);
      }
    }
  }
};

bool IsWhole(SsdFolder& tier, const SsdTier::Recovered& object) {
  const SsdFolder::Version version = SsdFolder::VersionOf(object.header);
  if (object.header != SsdFolder::HeaderOf(version, object.slot.Extents())) return false;
  ExtentMemory read(object.slot.Extents());
  std::vector<std::byte*> targets;
  for (uint64_t i = 0; i < object.slot.Extents(); ++i) targets.push_back(read[i]);
  std::optional<absl::Status> status;
  if (!tier.tier().Read(object.slot, 0, targets, [&](absl::Status s) { status = s; })) return false;
  tier.io().PollUntil([&] { return status.has_value(); });
  for (uint64_t i = 0; i < object.slot.Extents(); ++i) {
    if (!SameExtent(read[i], tier.ExtentOf(version, i))) return false;
  }
  return status->ok();
}

TEST(SsdKill, AcknowledgedObjectsSurviveKill) {
  TemporaryFolder folder;
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  Expected expected;
  size_t acknowledged = 0;
  int64_t slow = 1;
  for (int round = 0; round < 25 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const auto life = std::chrono::microseconds(slow * (20'000 + static_cast<int64_t>(random() % 150'000)));
    const std::string said = WriteAndDie(folder.path(), random(), life);
    const auto heard = static_cast<size_t>(std::count(said.begin(), said.end(), 'A'));
    acknowledged += heard;
    if (heard == 0 && slow < 32) slow *= 2;  // a sanitizer or a busy machine: it died before it began
    expected.Hear(said);
    SsdFolder tier;
    const auto recovered = tier.Open(folder.path());
    if (absl::IsFailedPrecondition(recovered.status()) && round == 0) GTEST_SKIP() << recovered.status();
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    std::map<uint64_t, uint64_t> found;
    uint64_t extents = 0;
    for (const auto& object : *recovered) {
      const SsdFolder::Version version = SsdFolder::VersionOf(object.header);
      EXPECT_TRUE(found.emplace(version.number, version.generation).second) << "number " << version.number << " twice";
      EXPECT_TRUE(IsWhole(tier, object)) << "number " << version.number;
      extents += object.slot.Extents();
    }
    for (const auto& [number, generation] : expected.acknowledged) {
      ASSERT_TRUE(found.contains(number)) << "number " << number << " is gone";
      EXPECT_EQ(found[number], generation);
    }
    EXPECT_EQ(tier.tier().Usage().used_bytes, extents * limits::kExtentBytes);
    EXPECT_EQ(tier.tier().recovery().damaged, 0u);
    expected.acknowledged = found;  // unacknowledged objects that came back count as acknowledged from now on
  }
  EXPECT_GT(acknowledged, 50u);
}

}  // namespace
}  // namespace ashlar::storage
