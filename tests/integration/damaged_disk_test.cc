// SPDX-License-Identifier: Apache-2.0
// Disks that were damaged while no daemon ran: a daemon starts on each, and serves only verified objects.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "proto/limits.h"
#include "storage/tier/record_log.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/disk_load.h"

namespace ashlar::integration {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPrompts = 8;
constexpr uint64_t kContentSeed = 1;

// The first disk's; each disk has the next one.
uint64_t FirstSeed() {
  const char* const asked = std::getenv("ASHLAR_DAMAGE_SEED");
  return asked == nullptr ? std::random_device{}() : std::strtoull(asked, nullptr, 10);
}

// Returns the command that repeats one disk's damage.
std::string Again(uint64_t seed) {
  return "ASHLAR_DAMAGE_SEED=" + std::to_string(seed) +
         " ASHLAR_DAMAGES=1 disk_test --gtest_filter=DamagedDisk.ServesOnlyVerifiedObjects";
}

class DamagedDisk : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasDirectIo()) GTEST_SKIP() << testing::TempDir() << " has no O_DIRECT";
    folder_ = daemon_.ssd_folder();
    whole_ = daemon_.directory() + "/whole";
    // Half of it is in tables, because a start writes them; the other half is in the log.
    for (int half = 0; half < 2 && !HasFatalFailure(); ++half) {
      if (half > 0) daemon_.Start();
      TestEngine engine(daemon_.client_options(), kPromptShape);
      Witness witness(daemon_.admin_socket(), engine.model().ns());
      for (size_t i = 0; i < kPrompts / 2; ++i) {
        const Prompts fresh = {random_() >> 32};
        PublishWhatIsMissing(engine, fresh[0]);
        // Waits before the next one, so that no batch of records has two objects, however slow the machine is.
        Texts acknowledged;
        ASSERT_TRUE(
            Eventually([&] { return witness.Hear(fresh, acknowledged) && Count(acknowledged) == kPromptSegments; }));
        prompts_.push_back(fresh[0]);
      }
      daemon_.Kill();
    }
    fs::copy(folder_, whole_, fs::copy_options::recursive);
  }

  void Restore() {
    fs::remove_all(folder_);
    fs::copy(whole_, folder_, fs::copy_options::recursive);
  }
  std::vector<fs::path> Files() const {
    std::vector<fs::path> files = {folder_ + "/slab"};
    for (const auto& entry : fs::directory_iterator(folder_ + "/records")) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    return files;
  }
  fs::path TheLog() const {
    for (const fs::path& file : Files()) {
      if (file.extension() == ".log" && fs::file_size(file) > 0) return file;
    }
    return {};
  }
  static std::string Read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  uint64_t Draw(uint64_t below) { return random_() % below; }

  // Objects that may be damaged: each takes an extent of the slab. Far more than exist if the disk's own metadata is
  // damaged too.
  static constexpr size_t kAny = 1'000'000;

  // Damages one bit, a run of zeros, the end, or all of it, and returns a description. Adds the objects that may be
  // damaged.
  std::string Damage(const fs::path& path, size_t& struck) {
    const uint64_t size = fs::file_size(path), kind = size == 0 ? 3 : Draw(4);
    const std::string name = path.filename().string();
    struck += kAny;
    if (kind == 3) return fs::remove(path), name + " removed";
    // Every other time the slab's header: the rest of the slab is objects.
    const uint64_t at = Draw(name == "slab" && Draw(2) == 0 ? 48 : size);
    if (kind == 2) return fs::resize_file(path, at), name + " cut to " + std::to_string(at);
    const uint64_t zeros = kind == 1 ? std::min(size - at, 1 + Draw(8192)) : 0;
    const uint64_t last = at + std::max<uint64_t>(zeros, 1) - 1;
    if (name == "slab" && at >= limits::kExtentBytes) {
      struck += last / limits::kExtentBytes - at / limits::kExtentBytes + 1 - kAny;
    }
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    if (kind == 1) {
      file.seekp(static_cast<std::streamoff>(at)) << std::string(zeros, '\0');
      return name + ": " + std::to_string(zeros) + " zeros at " + std::to_string(at);
    }
    const auto offset = static_cast<std::streamoff>(at);
    file.seekg(offset);
    const int before = file.get();
    file.seekp(offset).put(static_cast<char>(before ^ (1 << Draw(8))));
    return name + ": a bit at " + std::to_string(at);
  }

  // One file or two, depending on the seed.
  std::string DamageSome(uint64_t seed, size_t& struck) {
    random_.seed(seed);
    std::string damage;
    struck = 0;
    for (uint64_t files = 1 + Draw(2); files > 0; --files) {
      const std::vector<fs::path> there = Files();
      const fs::path& file = Draw(4) == 0 ? there.back() : there[Draw(there.size())];  // "slab" sorts last
      if (fs::exists(file)) damage += Damage(file, struck) + "; ";
    }
    return damage;
  }

  // Starts the daemon on the damaged disk. Every hit lands with its published bytes; then the daemon accepts a new
  // prompt. Returns the number of objects that the daemon reports, and counts the ones that land.
  size_t StartAndLand() {
    size_t found = landed_ = 0;
    daemon_.Start();
    if (HasFatalFailure()) return 0;
    {
      TestEngine engine(daemon_.client_options(), kPromptShape);
      Witness witness(daemon_.admin_socket(), engine.model().ns());
      Texts there;
      EXPECT_TRUE(witness.Hear(prompts_, there));
      for (const uint64_t seed : prompts_) {
        Lands(engine, seed, {}, &landed_);
        found += there[seed].size();
      }
      const uint64_t fresh = random_() >> 32;
      PublishWhatIsMissing(engine, fresh);
      EXPECT_TRUE(Lands(engine, fresh, {0, 1, 2}));
    }
    daemon_.Kill();
    return found;
  }
  bool Quarantined() const {
    return std::ranges::any_of(fs::directory_iterator(folder_), [](const fs::directory_entry& entry) {
      return entry.path().filename().string().starts_with("records.damaged-");
    });
  }

  size_t Published() const { return prompts_.size() * kPromptSegments; }
  void ExpectLostAtMost(size_t struck) const {
    EXPECT_FALSE(Quarantined());
    EXPECT_GE(landed_ + struck, Published());
  }

  // Every run's disk has the same prompts, so that a seed determines all of its damage.
  std::mt19937_64 random_{kContentSeed};
  DaemonProcess daemon_{{.dram = "8MiB", .arena = "1MiB", .ssd = "16MiB", .admission = "all"}};
  std::string folder_, whole_;
  Prompts prompts_;
  size_t landed_ = 0;
};

// The environment's ASHLAR_DAMAGES=220 sets the number of damages, and ASHLAR_DAMAGE_SEED=N the first seed, to repeat
// an earlier run.
TEST_F(DamagedDisk, ServesOnlyVerifiedObjects) {
  const char* const asked = std::getenv("ASHLAR_DAMAGES");
  const int cases = asked == nullptr ? 6 : std::atoi(asked);
  const uint64_t first = FirstSeed();
  std::printf("seeds from %lu; %s\n", static_cast<unsigned long>(first), Again(first).c_str());
  size_t found = 0, struck = 0;
  int quarantined = 0, all = 0, objects_alone = 0;
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    Restore();
    const uint64_t seed = first + static_cast<uint64_t>(i);
    const std::string damage = DamageSome(seed, struck);
    SCOPED_TRACE(damage + "\nagain: " + Again(seed));
    const size_t here = StartAndLand();
    found += here;
    quarantined += Quarantined() ? 1 : 0;
    all += here == Published() ? 1 : 0;
    if (struck >= kAny) continue;
    ++objects_alone;
    ExpectLostAtMost(struck);
  }
  std::printf(
      "%d damaged disks, all started: %d lost nothing, %d were quarantined; %zu of %zu objects found. %d of objects "
      "alone\n",
      cases, all, quarantined, found, cases * Published(), objects_alone);
}

TEST_F(DamagedDisk, DamageLosesOnlyTheDamagedObjects) {
  for (int disk = 0; disk < 2; ++disk) {
    Restore();
    random_.seed(FirstSeed() + disk);
    size_t struck = kAny;
    std::string damage;
    while (struck >= kAny) {
      Restore();
      struck = 0;
      damage = Damage(folder_ + "/slab", struck);
    }
    SCOPED_TRACE(damage);
    EXPECT_EQ(StartAndLand(), Published());
    ExpectLostAtMost(struck);
  }
}

TEST_F(DamagedDisk, ASeedGivesTheSameDamage) {
  const uint64_t seed = FirstSeed();
  SCOPED_TRACE(seed);
  std::string damage[2];
  size_t struck = 0;
  for (std::string& each : damage) {
    Restore();
    each = DamageSome(seed, struck);
  }
  EXPECT_NE(damage[0], "");
  EXPECT_EQ(damage[0], damage[1]);
  ASSERT_EQ(::setenv("ASHLAR_DAMAGE_SEED", "77", 1), 0);
  EXPECT_EQ(FirstSeed(), 77u);
  ::unsetenv("ASHLAR_DAMAGE_SEED");
}

TEST_F(DamagedDisk, DamageInTheLogLosesNoLaterRecords) {
  Restore();
  const fs::path log = TheLog();
  ASSERT_FALSE(log.empty());
  const size_t batches = storage::ScanRecordLog(Read(log)).batches.size();
  EXPECT_GE(batches, kPrompts / 2);
  std::fstream file(log, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(fs::file_size(log) / 2)).put('!');
  file.close();
  EXPECT_EQ(storage::ScanRecordLog(Read(log)).batches.size(), batches - 1);
  EXPECT_GE(StartAndLand(), (prompts_.size() - 1) * kPromptSegments);
  EXPECT_FALSE(Quarantined());
}

TEST_F(DamagedDisk, DamagedRecordsAreRenamedAndLogged) {
  Restore();
  fs::remove(folder_ + "/records/CURRENT");
  EXPECT_EQ(StartAndLand(), 0u);
  EXPECT_TRUE(Quarantined());
  EXPECT_THAT(daemon_.log(), ::testing::HasSubstr("the disk index is damaged; it was renamed"));
  daemon_.Start();
  EXPECT_EQ(daemon_.Metric("ashlar_ssd_quarantined_databases_total"), 0) << "it is well by now";
  daemon_.Kill();
  fs::remove(folder_ + "/records/CURRENT");
  daemon_.Start();
  EXPECT_EQ(daemon_.Metric("ashlar_ssd_quarantined_databases_total"), 1);
}

}  // namespace
}  // namespace ashlar::integration
