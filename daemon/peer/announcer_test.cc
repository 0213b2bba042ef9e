// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/announcer.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "daemon/peer/directory/write_queue.h"
#include "daemon/peer/testing/peer_node.h"
#include "storage/testing/tiered_rig.h"

namespace ashlar::daemon {
namespace {

using storage::Residence;
using storage::TestPlan;

class AnnouncerTest : public ::testing::Test {
 protected:
  AnnouncerTest() { directory_.member = std::make_shared<const Member>(Member{.node = "a", .incarnation = 1}); }

  TierKind Resides(const Residence& residence) {
    return announcer_.Resides({0, storage::PoolKind::kPublic}, TestPlan(1, 64), residence);
  }
  std::optional<uint8_t> TheGpu() {
    MutexLock lock(cluster_.mutex);
    return cluster_.announced.at(0).holding.gpu;
  }
  std::vector<TestCluster::Announced> TakeAnnounced() {
    MutexLock lock(cluster_.mutex);
    return std::exchange(cluster_.announced, {});
  }

  TestCluster cluster_;
  TestDirectory directory_{cluster_, "a"};
  Announcer announcer_{directory_, AnnounceMode::kAll, {4, std::nullopt, 6}};
};

TEST_F(AnnouncerTest, AnnouncesGpuOfCopy) {
  EXPECT_EQ(Resides({.nearest = TierKind::kHbm, .level = 2}), TierKind::kHbm);
  EXPECT_EQ(TheGpu(), 6);
  // It has moved to another GPU.
  Residence moved{
      .nearest = TierKind::kHbm, .announced = TierKind::kHbm, .was = TierKind::kHbm, .level = 0, .was_level = 2};
  EXPECT_EQ(Resides(moved), TierKind::kHbm);
  EXPECT_EQ(TheGpu(), 4);
  EXPECT_EQ(Resides({.nearest = TierKind::kDram, .announced = TierKind::kHbm, .was = TierKind::kHbm, .level = 3}),
            TierKind::kDram);
  EXPECT_EQ(TheGpu(), std::nullopt) << "no GPU has it any more";
  // A copy from dram to a GPU stays in memory, and costs no write to etcd.
  TakeAnnounced();
  EXPECT_EQ(Resides({.nearest = TierKind::kHbm, .announced = TierKind::kDram, .was = TierKind::kDram, .was_level = 3}),
            TierKind::kDram);
  EXPECT_TRUE(TakeAnnounced().empty());
  EXPECT_EQ(Resides({.nearest = TierKind::kSsd, .announced = TierKind::kHbm, .was = TierKind::kHbm, .level = 4}),
            TierKind::kSsd);
  EXPECT_EQ(TheGpu(), std::nullopt);
}

TEST_F(AnnouncerTest, AnnouncesNoGpuWithoutConfiguredGpu) {
  EXPECT_EQ(Resides({.nearest = TierKind::kHbm, .level = 1}), TierKind::kHbm);
  EXPECT_EQ(TheGpu(), std::nullopt) << "a tier that lies in host memory";
  EXPECT_EQ(Resides({.nearest = TierKind::kDram, .level = 0}), TierKind::kDram);
  EXPECT_EQ(TheGpu(), std::nullopt);
}

// A directory with space for 8 writes, and an etcd that accepts them when the test allows it.
class SlowDirectory final : public TestDirectory {
 public:
  using TestDirectory::TestDirectory;
  absl::flat_hash_map<EntryId, Holding> in_etcd;

  void Drain(size_t most) {
    for (const DirectoryWrite& write : queue_.Take(most)) {
      if (write.holding) {
        in_etcd[write.id] = *write.holding;
      } else {
        in_etcd.erase(write.id);
      }
    }
  }
  bool Announced(const ObjectHeader& header) const { return in_etcd.contains(Id(header.ns, header.key)); }
  size_t queued() const { return queue_.size(); }

  bool Announce(const NamespaceId& ns, const Key& key, const Holding& holding, double worth) override {
    return queue_.Announce({Id(ns, key), holding, worth});
  }
  void Withdraw(const NamespaceId& ns, const Key& key, const TensorShard&) override { queue_.Withdraw(Id(ns, key)); }
  size_t RemainingCapacity() const override { return queue_.RemainingCapacity(); }
  bool WasDisplaced(const NamespaceId& ns, const Key& key, const TensorShard&) const override {
    return queue_.WasDisplaced(Id(ns, key));
  }
  DirectoryStats Stats() const override {
    return {.queued_announcements = queue_.announcements(), .dropped_announcements = queue_.dropped_announcements()};
  }

 private:
  static EntryId Id(const NamespaceId& ns, const Key& key) { return {Shorten(ns), Shorten(key)}; }
  WriteQueue queue_{8};
};

class AnnouncerOfManyTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kObjects = 100;
  static constexpr storage::SessionId kEngine = 1;

  AnnouncerOfManyTest() {
    storage::TieredOptions options{.hbm = 0, .dram = 3 * kObjects, .ssd = 0};
    options.cache.objects.residence = [this](const storage::TenantPool& pool, const ObjectHeader& header,
                                             const Residence& residence) {
      return announcer_.Resides(pool, header, residence);
    };
    rig_ = std::make_unique<storage::TieredRig>(options);
    rig_->cache->OpenSession(kEngine, 1);
  }
  ~AnnouncerOfManyTest() override {
    rig_->cache->CloseSession(kEngine, [] {});
  }

  void Publish(uint64_t first, uint64_t last) {
    for (uint64_t text = first; text <= last; ++text) ASSERT_TRUE(rig_->Publish(kEngine, TestPlan(text, 64), text));
    rig_->Settle();
  }
  void Use(uint64_t text) { rig_->cache->Release(kEngine, rig_->Lookup(kEngine, TestPlan(text, 64)).lease); }
  // Runs as long as there is progress.
  void Run() {
    for (int quiet = 0; quiet < 3;) {
      for (int i = 0; i < 5; ++i) {
        announcer_.Flush([&](storage::ReportWalk& walk, storage::Slice& slice) {
          return rig_->cache->residences().ReportAll(walk, slice);
        });
      }
      announcer_.Tick();
      quiet = directory_.queued() == 0 ? quiet + 1 : 0;
      directory_.Drain(3);
    }
  }

  TestCluster cluster_;
  SlowDirectory directory_{cluster_, "a"};
  Announcer announcer_{directory_, AnnounceMode::kAll, {}};
  std::unique_ptr<storage::TieredRig> rig_;
};

TEST_F(AnnouncerOfManyTest, AFullQueueDelaysAnnouncementsWithoutLoss) {
  Publish(1, kObjects);  // 8 fit into the queue
  Run();
  EXPECT_EQ(directory_.in_etcd.size(), kObjects);
}

TEST_F(AnnouncerOfManyTest, ReannouncesEverythingToAnEmptiedEtcd) {
  Publish(1, kObjects);
  Run();
  directory_.in_etcd.clear();
  announcer_.Again();
  Run();
  EXPECT_EQ(directory_.in_etcd.size(), kObjects);

  // It loses everything again when half of the announcements have been sent.
  directory_.in_etcd.clear();
  announcer_.Again();
  for (size_t i = 0; i < kObjects / 2; ++i) {
    announcer_.Flush([&](storage::ReportWalk& walk, storage::Slice& slice) {
      return rig_->cache->residences().ReportAll(walk, slice);
    });
    directory_.Drain(1);
  }
  directory_.in_etcd.clear();
  announcer_.Again();
  Run();
  EXPECT_EQ(directory_.in_etcd.size(), kObjects);
}

TEST_F(AnnouncerOfManyTest, ReannouncesDisplacedObjects) {
  Publish(1, 8);  // the queue is full of these
  Publish(9, 20);
  for (uint64_t text = 9; text <= 16; ++text) {
    Use(text);
    Use(text);
  }
  directory_.Drain(8);
  EXPECT_EQ(directory_.in_etcd.size(), 8u);
  EXPECT_FALSE(directory_.Announced(TestPlan(1, 64))) << "others of more uses were sent in its place";
  Use(1);
  Use(1);
  directory_.Drain(8);
  EXPECT_TRUE(directory_.Announced(TestPlan(1, 64))) << "the next use says it";
  Run();
  EXPECT_EQ(directory_.in_etcd.size(), 20u);
  // An object that was announced again and has ended is withdrawn.
  rig_->cache->retention().Evict(1, TestPlan(2, 64).key);
  Run();
  EXPECT_EQ(directory_.in_etcd.size(), 19u);
}

}  // namespace
}  // namespace ashlar::daemon
