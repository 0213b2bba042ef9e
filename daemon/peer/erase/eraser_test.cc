// SPDX-License-Identifier: Apache-2.0
// Erasures in a cluster: every node erases once for each request, across restarts, and takes no erased object from
// nodes that have not erased yet.
#include "daemon/peer/erase/eraser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "daemon/peer/testing/peer_node.h"
#include "storage/testing/tiered_rig.h"

namespace ashlar::daemon {
namespace {

using storage::Query;
using storage::TestPlan;

class EraserTest : public ::testing::Test {
 protected:
  EraserTest() : folder_(std::filesystem::temp_directory_path() / absl::StrCat("erase-", std::random_device()())) {
    std::filesystem::create_directory(folder_);
  }
  ~EraserTest() override { std::filesystem::remove_all(folder_); }

  void Ask(uint8_t id, const std::string& tenant = "default", std::optional<NamespaceId> ns = std::nullopt) {
    ClusterErasure erasure{.tenant = tenant, .ns = ns, .node = "operator"};
    erasure.id.fill(id);
    a_.directory.Erase(erasure, [](const absl::Status& told) { ASSERT_TRUE(told.ok()); });
  }
  std::unique_ptr<Eraser> Make(PeerNode& node, const std::string& folder) {
    return node.OnLoop([&] {
      auto made = std::make_unique<Eraser>(&node.workers, node.clock, node.directory,
                                           std::vector<std::string>{"default"}, folder);
      made->Start(node.cache, [this](storage::TenantId, const std::optional<NamespaceId>&) { ++pages_erased_; });
      return made;
    });
  }
  // Runs until all known erasures are done and acknowledged.
  static void Finish(PeerNode& node, Eraser& eraser) {
    const int64_t all = node.directory.Erasures().back().revision;
    node.OnLoop([&] { eraser.Changed(); });
    while (node.directory.erased < all) {
      node.OnLoop([&] { eraser.Tick(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  static MissReason Find(PeerNode& node, const ObjectHeader& plan) {
    const Query query{.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
    const storage::Match match = node.Lookup({&query, 1});
    if (match.found[0].reason == MissReason::kNone) node.Release(match.lease);
    return match.found[0].reason;
  }
  static uint64_t Objects(PeerNode& node) {
    return node.OnLoop([&] { return node.cache.stats().objects; });
  }

  const std::filesystem::path folder_;
  TestCluster cluster_;
  PeerNode a_{cluster_, "a"};
  int pages_erased_ = 0;
};

TEST_F(EraserTest, ErasesEachOnceAlsoAfterARestart) {
  const auto first = Make(a_, folder_);
  a_.Publish(TestPlan(1, 64), 1);
  Ask(1);
  Finish(a_, *first);
  EXPECT_EQ(Objects(a_), 0u);
  EXPECT_EQ(pages_erased_, 1);
  ClusterErasure::Id id;
  id.fill(1);
  ASSERT_NE(first->Find(id), nullptr);
  EXPECT_EQ(first->Find(id)->erased.objects, 1u);

  a_.Publish(TestPlan(2, 64), 2);
  const auto second = Make(a_, folder_);
  a_.directory.erased = 0;
  Finish(a_, *second);
  EXPECT_EQ(Objects(a_), 1u) << "published after it";
  Ask(2);
  Finish(a_, *second);
  EXPECT_EQ(Objects(a_), 0u);

  // Lost: it is done once more.
  a_.Publish(TestPlan(3, 64), 3);
  std::ofstream(folder_ / "forgotten") << "not a number\n" << std::string(32, 'g') << "\n" << std::string(31, '1');
  const auto third = Make(a_, folder_);
  a_.directory.erased = 0;
  Finish(a_, *third);
  EXPECT_EQ(Objects(a_), 0u);
  std::stringstream text;
  text << std::ifstream(folder_ / "forgotten").rdbuf();
  EXPECT_EQ(text.str(), absl::StrCat("01010101010101010101010101010101\n", "02020202020202020202020202020202\n"));
}

TEST_F(EraserTest, UnknownTenantIsErasedAtOnce) {
  const auto eraser = Make(a_, "");
  a_.Publish(TestPlan(1, 64), 1);
  Ask(1, "another");
  Finish(a_, *eraser);
  EXPECT_EQ(Objects(a_), 1u);
}

TEST_F(EraserTest, ErasesOnlyTheNamespace) {
  const auto eraser = Make(a_, "");
  const ObjectHeader plan = TestPlan(1, 64);
  NamespaceId other = plan.ns;
  other.bytes[0] ^= 1;
  a_.Publish(plan, 1);
  Ask(1, "default", other);
  Finish(a_, *eraser);
  EXPECT_EQ(Objects(a_), 1u);
  Ask(2, "default", plan.ns);
  Finish(a_, *eraser);
  EXPECT_EQ(Objects(a_), 0u);
}

TEST_F(EraserTest, FetchesNothingFromNodesWithPendingErasure) {
  PeerNode b(cluster_, "b");
  const ObjectHeader plan = TestPlan(1, 64);
  b.Publish(plan, 1);
  Ask(1);
  const auto here = Make(a_, "");
  Finish(a_, *here);
  EXPECT_NE(Find(a_, plan), MissReason::kNone) << "b has it, and is to erase it";
  EXPECT_EQ(Objects(b), 1u);
  const auto there = Make(b, "");
  Finish(b, *there);
  EXPECT_EQ(Objects(b), 0u);
  b.Publish(plan, 1);
  EXPECT_EQ(Find(a_, plan), MissReason::kNone) << "all have erased: this one is new";
}

TEST_F(EraserTest, RetriesWritingARecord) {
  const std::filesystem::path later = folder_ / "later";
  const auto eraser = Make(a_, later);
  a_.Publish(TestPlan(1, 64), 1);
  Ask(1);
  a_.OnLoop([&] { eraser->Changed(); });
  while (Objects(a_) > 0) a_.OnLoop([&] { eraser->Tick(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  a_.OnLoop([&] { eraser->Tick(); });
  EXPECT_EQ(a_.directory.erased, 0);
  std::filesystem::create_directory(later);
  Finish(a_, *eraser);
  EXPECT_TRUE(std::filesystem::exists(later / "forgotten"));
}

class EraserWithADisk : public ::testing::Test {
 protected:
  void Publish(storage::TenantId tenant) {
    rig_.cache->OpenSession(tenant, tenant);
    ASSERT_TRUE(rig_.Publish(tenant, TestPlan(tenant, 64, ObjectKind::kSegment, tenant), tenant));
    rig_.Settle();
  }
  void Ask(uint8_t tenant) {
    ClusterErasure erasure{.tenant = absl::StrCat("tenant", tenant), .node = "operator"};
    erasure.id.fill(tenant);
    directory_.Erase(erasure, [](const absl::Status& told) { ASSERT_TRUE(told.ok()); });
  }
  void Erase(Eraser& eraser, int seconds) {
    eraser.Changed();
    for (int i = 0; i < seconds; ++i) {
      for (int round = 0; round < 4; ++round) {
        eraser.Tick();
        rig_.Settle();
      }
      rig_.clock.Advance(1'000'000'000);
      rig_.cache->Tick();
    }
  }
  Eraser Make() {
    Eraser made(nullptr, rig_.clock, directory_, {"nobody", rig_.names[0], "tenant2"}, "");
    made.Start(*rig_.cache, [](storage::TenantId, const std::optional<NamespaceId>&) {});
    return made;
  }
  uint64_t OnDisk() { return rig_.ssd->Usage().used_bytes; }

  storage::TieredRig rig_{{.hbm = 0}};
  TestCluster cluster_;
  TestDirectory directory_{cluster_, "a"};
};

TEST_F(EraserWithADisk, ErasesATenantThatIsNotConfigured) {
  Publish(1);
  const uint64_t of_one = OnDisk();
  rig_.names[0] = "renamed";
  rig_.Restart();
  Publish(2);
  EXPECT_EQ(OnDisk(), 2 * of_one);
  Ask(1);
  Eraser eraser = Make();
  Erase(eraser, 2);
  EXPECT_EQ(OnDisk(), of_one);
  EXPECT_EQ(directory_.erased, 1);
  rig_.names[0] = "tenant1";
  rig_.Restart();
  EXPECT_EQ(rig_.cache->stats().objects, 1u) << "the other tenant's alone";
}

TEST_F(EraserWithADisk, WaitsUntilTheDisksObjectsAreAdopted) {
  Publish(1);
  rig_.cache->adoption().Adopt({}, /*more=*/true);
  Ask(1);
  Eraser eraser = Make();
  Erase(eraser, 3);
  EXPECT_EQ(rig_.cache->stats().objects, 1u);
  EXPECT_EQ(directory_.erased, 0);
  rig_.cache->adoption().Adopt({});
  Erase(eraser, 2);
  EXPECT_EQ(OnDisk(), 0u);
  EXPECT_EQ(directory_.erased, 1);
}

TEST_F(EraserWithADisk, ABadPartOfTheDiskDelaysNoOtherErasure) {
  Publish(1);
  Publish(2);
  const uint64_t of_one = OnDisk() / 2;
  rig_.disk.set_faults({.bad_at = storage::SsdTier::SlabBytes(0)});  // in the first object
  Ask(1);
  Ask(2);
  Eraser eraser = Make();
  Erase(eraser, 60);
  EXPECT_EQ(OnDisk(), of_one) << "of the first, whose bytes are still there";
  EXPECT_EQ(rig_.cache->stats().objects, 0u);
  EXPECT_EQ(directory_.erased, 0);
  EXPECT_FALSE(rig_.ssd->health().degraded()) << "all but this place is well";
  rig_.disk.set_faults({});
  Erase(eraser, 5);
  EXPECT_EQ(OnDisk(), 0u);
  EXPECT_EQ(directory_.erased, 2);
}

}  // namespace
}  // namespace ashlar::daemon
