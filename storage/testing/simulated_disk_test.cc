// SPDX-License-Identifier: Apache-2.0
#include "storage/testing/simulated_disk.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <set>

namespace ashlar::storage {
namespace {

constexpr size_t kBlock = BlockFile::kBlockBytes;
constexpr size_t kBlocks = 8;
using Image = std::array<std::byte, kBlocks * kBlock>;

class SimulatedDiskTest : public ::testing::Test {
 protected:
  SimulatedDiskTest()
      : seed_(std::random_device{}()), trace_(__FILE__, __LINE__, seed_), disk_(kBlocks * kBlock, seed_) {}

  absl::Status Fill(std::byte value) {
    image_.fill(value);
    return disk_.file().Write(0, image_);
  }
  const Image& Read() {
    EXPECT_EQ(disk_.file().Read(0, image_), absl::OkStatus());
    return image_;
  }
  std::set<int> Values() {
    std::set<int> values;
    for (std::byte byte : Read()) values.insert(static_cast<int>(byte));
    return values;
  }
  void PowerCycle() {
    disk_.Crash();
    EXPECT_FALSE(disk_.file().Sync().ok());
    disk_.Restart();
  }

  const uint64_t seed_;
  const ::testing::ScopedTrace trace_;
  SimulatedDisk disk_;
  alignas(4096) Image image_{};
};

TEST_F(SimulatedDiskTest, SyncedWritesSurvive) {
  EXPECT_EQ(Values(), (std::set<int>{0}));
  ASSERT_EQ(Fill(std::byte{1}), absl::OkStatus());
  ASSERT_EQ(disk_.file().Sync(), absl::OkStatus());
  PowerCycle();
  EXPECT_EQ(Values(), (std::set<int>{1}));
}

TEST_F(SimulatedDiskTest, UnsyncedWritesAreKeptDroppedOrTorn) {
  for (int round = 0; round < 200; ++round) {
    ASSERT_EQ(Fill(std::byte{1}), absl::OkStatus());
    ASSERT_EQ(disk_.file().Sync(), absl::OkStatus());
    ASSERT_EQ(Fill(std::byte{2}), absl::OkStatus());
    EXPECT_EQ(Values(), (std::set<int>{2}));
    PowerCycle();
    Read();
    for (size_t sector = 0; sector < image_.size(); sector += 512) {
      for (size_t i = 1; i < 512; ++i) ASSERT_EQ(image_[sector + i], image_[sector]) << "a sector was torn";
    }
  }
  const SimulatedDisk::Counts counts = disk_.counts();
  EXPECT_GT(counts.kept_writes, 0u);
  EXPECT_GT(counts.dropped_writes, 0u);
  EXPECT_GT(counts.torn_writes, 0u);
}

TEST_F(SimulatedDiskTest, AFailedSyncIsNotRepairedByTheNext) {
  bool lost = false;
  for (int round = 0; round < 100 && !lost; ++round) {
    ASSERT_EQ(Fill(std::byte{1}), absl::OkStatus());
    ASSERT_EQ(disk_.file().Sync(), absl::OkStatus());
    ASSERT_EQ(Fill(std::byte{2}), absl::OkStatus());
    disk_.set_faults({.sync_error = 1});
    ASSERT_FALSE(disk_.file().Sync().ok());
    disk_.set_faults({});
    ASSERT_EQ(disk_.file().Sync(), absl::OkStatus());
    EXPECT_EQ(Values(), (std::set<int>{2}));  // as long as there is power
    PowerCycle();
    lost = Values() != (std::set<int>{2});
  }
  EXPECT_TRUE(lost);
  // A block that is written again is covered again, and its old unresolved bytes do not come back.
  for (int round = 0; round < 20; ++round) {
    ASSERT_EQ(Fill(std::byte{3}), absl::OkStatus());
    disk_.set_faults({.sync_error = 1});
    ASSERT_FALSE(disk_.file().Sync().ok());
    disk_.set_faults({});
    ASSERT_EQ(Fill(std::byte{4}), absl::OkStatus());
    ASSERT_EQ(disk_.file().Sync(), absl::OkStatus());
    PowerCycle();
    ASSERT_EQ(Values(), (std::set<int>{4}));
  }
}

TEST_F(SimulatedDiskTest, BatchesAreAtomicAndDurable) {
  const std::array<RecordStore::Change, 2> put{{{"a", "1"}, {"b", "2"}}};
  const std::array<RecordStore::Change, 2> remove{{{"a", std::nullopt}, {"c", "3"}}};
  const auto records = [this] {
    std::string all;
    EXPECT_EQ(disk_.records().Load([&](std::string_view name, std::string_view value) {
      all += std::string(name) + std::string(value) + " ";
      return absl::OkStatus();
    }),
              absl::OkStatus());
    return all;
  };
  ASSERT_EQ(disk_.records().Write(put), absl::OkStatus());
  PowerCycle();
  EXPECT_EQ(records(), "a1 b2 ");
  std::set<std::string> seen;
  for (int round = 0; round < 50; ++round) {
    disk_.set_faults({.record_error = 1});
    EXPECT_FALSE(disk_.records().Write(remove).ok());
    seen.insert(records());
    disk_.set_faults({});
    const std::array<RecordStore::Change, 2> back{{{"a", "1"}, {"c", std::nullopt}}};
    ASSERT_EQ(disk_.records().Write(back), absl::OkStatus());
  }
  EXPECT_EQ(seen, (std::set<std::string>{"a1 b2 ", "b2 c3 "}));
}

TEST_F(SimulatedDiskTest, PowerFailsAtTheGivenPoint) {
  disk_.CrashAfter(2);
  EXPECT_EQ(Fill(std::byte{1}), absl::OkStatus());
  EXPECT_FALSE(disk_.file().Sync().ok());
  EXPECT_TRUE(disk_.crashed());
  EXPECT_FALSE(Fill(std::byte{2}).ok());
  disk_.Restart();
  disk_.CrashAfter(3);  // after the sync took effect, but before it returned
  EXPECT_EQ(Fill(std::byte{3}), absl::OkStatus());
  EXPECT_FALSE(disk_.file().Sync().ok());
  disk_.Restart();
  EXPECT_EQ(Values(), (std::set<int>{3}));
}

TEST_F(SimulatedDiskTest, OtherFaultsHappenOnRequest) {
  ASSERT_EQ(Fill(std::byte{1}), absl::OkStatus());
  disk_.set_faults({.full = true});
  EXPECT_EQ(Fill(std::byte{2}).code(), absl::StatusCode::kResourceExhausted);
  disk_.set_faults({.bit_flip = 1});
  EXPECT_EQ(Values().size(), 2u);
  disk_.set_faults({});
  EXPECT_EQ(Values(), (std::set<int>{1}));
  disk_.FlipBit(kBlock + 5, 1);
  EXPECT_EQ(Values(), (std::set<int>{1, 3}));
  disk_.set_faults({.read_error = 1});
  EXPECT_EQ(disk_.file().Read(0, image_).code(), absl::StatusCode::kDataLoss);
  disk_.set_faults({.lost_flush = 1});
  bool lost = false;
  for (int round = 0; round < 100 && !lost; ++round) {
    const int value = 7 + round % 2;
    ASSERT_EQ(Fill(static_cast<std::byte>(value)), absl::OkStatus());
    ASSERT_EQ(disk_.file().Sync(), absl::OkStatus());
    PowerCycle();
    disk_.set_faults({});
    lost = Values() != (std::set<int>{value});
    disk_.set_faults({.lost_flush = 1});
  }
  EXPECT_TRUE(lost);
  EXPECT_FALSE(disk_.file().Write(1, image_).ok());
  EXPECT_FALSE(disk_.file().Read(kBlock, image_).ok());
}

TEST(SimulatedDisk, TheSameSeedFailsInTheSameWay) {
  const auto run = [](uint64_t seed) {
    SimulatedDisk disk(kBlocks * kBlock, seed);
    disk.set_faults({.write_error = 0.3, .sync_error = 0.3});
    std::string story;
    static std::array<std::byte, kBlock> block{};
    for (int i = 0; i < 64; ++i) {
      block.fill(static_cast<std::byte>(i));
      story += disk.file().Write(i % kBlocks * kBlock, block).ok() ? 'w' : 'W';
      story += disk.file().Sync().ok() ? 's' : 'S';
    }
    return story;
  };
  const uint64_t seed = std::random_device{}();
  EXPECT_EQ(run(seed), run(seed));
  EXPECT_NE(run(seed), run(seed + 1));
}

}  // namespace
}  // namespace ashlar::storage
