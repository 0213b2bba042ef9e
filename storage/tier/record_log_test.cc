// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/record_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "storage/testing/temporary_folder.h"
#include "storage/tier/record_store.h"

namespace ashlar::storage {
namespace {

std::vector<std::string> SomeBatches(std::mt19937_64& random) {
  std::vector<std::string> batches;
  for (int i = 0; i < 60; ++i) {
    // Some batches take several blocks, and some leave no space for another header in a block.
    std::string batch(i % 20 == 0 ? random() % 100'000 : 1 + random() % 3000, '\0');
    for (char& byte : batch) byte = static_cast<char>(random());
    batches.push_back(std::move(batch));
  }
  return batches;
}

TEST(RecordLog, RoundTrips) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    const std::vector<std::string> batches = SomeBatches(random);
    const RecordLogScan scan = ScanRecordLog(EncodeRecordLog(batches));
    EXPECT_EQ(scan.batches, batches);
    EXPECT_FALSE(scan.whole_after_damage);
  }
}

TEST(RecordLog, DamageLosesOnlyItsBatch) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    const std::vector<std::string> batches = SomeBatches(random);
    std::string log = EncodeRecordLog(batches);
    const size_t at = random() % (log.size() / 2);
    log[at] = static_cast<char>(log[at] ^ (1 << random() % 8));
    const RecordLogScan scan = ScanRecordLog(log);
    EXPECT_GE(scan.batches.size(), batches.size() - 1) << "a bit at " << at;
    std::vector<std::string> without = batches;
    for (size_t i = 0; i < without.size(); ++i) {
      if (i >= scan.batches.size() || without[i] != scan.batches[i]) {
        without.erase(without.begin() + static_cast<ptrdiff_t>(i));
        break;
      }
    }
    EXPECT_TRUE(scan.batches == batches || scan.batches == without) << "a bit at " << at;
  }
}

TEST(RecordLog, ABatchWithAZeroedMiddleIsNotRecovered) {
  constexpr size_t kLogBlock = 32768;
  const std::vector<std::string> batches = {"before", std::string(2 * kLogBlock, 'x'), "behind"};
  std::string log = EncodeRecordLog(batches);
  log.replace(kLogBlock, kLogBlock, kLogBlock, '\0');
  const RecordLogScan scan = ScanRecordLog(log);
  EXPECT_THAT(scan.batches, ::testing::ElementsAre("before", "behind"));
  EXPECT_TRUE(scan.whole_after_damage);
}

TEST(RecordLog, ATornEndIsNotDamage) {
  std::mt19937_64 random(1);
  const std::vector<std::string> batches = SomeBatches(random);
  const std::string log = EncodeRecordLog(batches);
  const RecordLogScan scan = ScanRecordLog(std::string_view(log).substr(0, log.size() - 5));
  EXPECT_EQ(scan.batches.size(), batches.size() - 1);
  EXPECT_FALSE(scan.whole_after_damage);
}

class RepairTest : public ::testing::Test {
 protected:
  static std::string Read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  std::filesystem::path TheLog() const {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      if (entry.path().extension() == ".log" && entry.file_size() > 0) return entry.path();
    }
    return {};
  }
  std::map<std::string, std::string> Open(int* warnings = nullptr) {
    const auto store = OpenRecordStore(path_, [warnings](bool, std::string_view) {
      if (warnings != nullptr) ++*warnings;
    });
    EXPECT_EQ(store.status(), absl::OkStatus());
    std::map<std::string, std::string> records;
    if (!store.ok()) return records;
    EXPECT_EQ((*store)->Load([&](std::string_view name, std::string_view value) {
      records.emplace(name, value);
      return absl::OkStatus();
    }),
              absl::OkStatus());
    return records;
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_ / "index";
};

TEST_F(RepairTest, RecoversBatchesAfterDamage) {
  {
    const auto store = OpenRecordStore(path_);
    ASSERT_TRUE(store.ok()) << store.status();
    for (int i = 0; i < 300; ++i) {
      const RecordStore::Change change{"record " + std::to_string(i), std::string(1 + i * 7, 'x')};
      ASSERT_EQ((*store)->Write({&change, 1}), absl::OkStatus());
    }
    const RecordStore::Change gone{"record 299", std::nullopt};
    ASSERT_EQ((*store)->Write({&gone, 1}), absl::OkStatus());
  }
  const std::filesystem::path log = TheLog();
  ASSERT_FALSE(log.empty());
  std::string bytes = Read(log);
  EXPECT_EQ(ScanRecordLog(bytes).batches.size(), 301u) << "RocksDB's logs are as they were";
  EXPECT_EQ(EncodeRecordLog(ScanRecordLog(bytes).batches), bytes);
  std::fstream(log, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(bytes.size() / 3))
      .put('!');
  int warnings = 0;
  const auto records = Open(&warnings);
  EXPECT_EQ(records.size(), 298u) << "all but the damaged one, and the one deleted after it";
  EXPECT_FALSE(records.contains("record 299"));
  EXPECT_EQ(records.at("record 298").size(), 1u + 298 * 7);
  EXPECT_GE(warnings, 1) << "said in the log";
}

}  // namespace
}  // namespace ashlar::storage
