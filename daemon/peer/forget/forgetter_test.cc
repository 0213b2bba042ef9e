// Nodes of a test forget what their cluster is to forget: each wish once, across restarts. Nothing of it comes from
// nodes that have not forgotten yet.
#include "daemon/peer/forget/forgetter.h"

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

class ForgetterTest : public ::testing::Test {
 protected:
  ForgetterTest() : folder_(std::filesystem::temp_directory_path() / absl::StrCat("forget-", std::random_device()())) {
    std::filesystem::create_directory(folder_);
  }
  ~ForgetterTest() override { std::filesystem::remove_all(folder_); }

  void Ask(uint8_t id, const std::string& tenant = "default", std::optional<NamespaceId> ns = std::nullopt) {
    ClusterForgetting forgetting{.tenant = tenant, .ns = ns, .node = "operator"};
    forgetting.id.fill(id);
    a_.directory.Forget(forgetting, [](const absl::Status& told) { ASSERT_TRUE(told.ok()); });
  }
  std::unique_ptr<Forgetter> Make(PeerNode& node, const std::string& folder) {
    return node.OnLoop([&] {
      auto made = std::make_unique<Forgetter>(&node.workers, node.clock, node.directory,
                                              std::vector<std::string>{"default"}, folder);
      made->Start(node.cache, [this](storage::TenantId, const std::optional<NamespaceId>&) { ++pages_forgotten_; });
      return made;
    });
  }
  // Until it has done all that is known, and has said so.
  static void Finish(PeerNode& node, Forgetter& forgetter) {
    const int64_t all = node.directory.Forgettings().back().revision;
    node.OnLoop([&] { forgetter.Changed(); });
    while (node.directory.forgotten < all) {
      node.OnLoop([&] { forgetter.Tick(); });
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
  int pages_forgotten_ = 0;
};

TEST_F(ForgetterTest, DoesEachOnceAlsoAfterARestart) {
  const auto first = Make(a_, folder_);
  a_.Publish(TestPlan(1, 64), 1);
  Ask(1);
  Finish(a_, *first);
  EXPECT_EQ(Objects(a_), 0u);
  EXPECT_EQ(pages_forgotten_, 1);
  ClusterForgetting::Id id;
  id.fill(1);
  ASSERT_NE(first->Find(id), nullptr);
  EXPECT_EQ(first->Find(id)->forgotten.objects, 1u);

  a_.Publish(TestPlan(2, 64), 2);
  const auto second = Make(a_, folder_);
  a_.directory.forgotten = 0;
  Finish(a_, *second);
  EXPECT_EQ(Objects(a_), 1u) << "published behind it";
  Ask(2);
  Finish(a_, *second);
  EXPECT_EQ(Objects(a_), 0u);

  // Lost: it is done once more.
  a_.Publish(TestPlan(3, 64), 3);
  std::ofstream(folder_ / "forgotten") << "not a number\n" << std::string(32, 'g') << "\n" << std::string(31, '1');
  const auto third = Make(a_, folder_);
  a_.directory.forgotten = 0;
  Finish(a_, *third);
  EXPECT_EQ(Objects(a_), 0u);
  std::stringstream text;
  text << std::ifstream(folder_ / "forgotten").rdbuf();
  EXPECT_EQ(text.str(), absl::StrCat("01010101010101010101010101010101\n", "02020202020202020202020202020202\n"));
}

TEST_F(ForgetterTest, OfATenantThatIsNotHereThereIsNothing) {
  const auto forgetter = Make(a_, "");
  a_.Publish(TestPlan(1, 64), 1);
  Ask(1, "another");
  Finish(a_, *forgetter);
  EXPECT_EQ(Objects(a_), 1u);
}

TEST_F(ForgetterTest, OnlyTheNamespaceGoes) {
  const auto forgetter = Make(a_, "");
  const ObjectHeader plan = TestPlan(1, 64);
  NamespaceId other = plan.ns;
  other.bytes[0] ^= 1;
  a_.Publish(plan, 1);
  Ask(1, "default", other);
  Finish(a_, *forgetter);
  EXPECT_EQ(Objects(a_), 1u);
  Ask(2, "default", plan.ns);
  Finish(a_, *forgetter);
  EXPECT_EQ(Objects(a_), 0u);
}

TEST_F(ForgetterTest, NothingComesFromANodeThatHasNotForgotten) {
  PeerNode b(cluster_, "b");
  const ObjectHeader plan = TestPlan(1, 64);
  b.Publish(plan, 1);
  Ask(1);
  const auto here = Make(a_, "");
  Finish(a_, *here);
  EXPECT_NE(Find(a_, plan), MissReason::kNone) << "b has it, and is to forget it";
  EXPECT_EQ(Objects(b), 1u);
  const auto there = Make(b, "");
  Finish(b, *there);
  EXPECT_EQ(Objects(b), 0u);
  b.Publish(plan, 1);
  EXPECT_EQ(Find(a_, plan), MissReason::kNone) << "all have forgotten: this one is new";
}

TEST_F(ForgetterTest, ARecordThatCannotBeWrittenIsTriedAgain) {
  const std::filesystem::path later = folder_ / "later";
  const auto forgetter = Make(a_, later);
  a_.Publish(TestPlan(1, 64), 1);
  Ask(1);
  a_.OnLoop([&] { forgetter->Changed(); });
  while (Objects(a_) > 0) a_.OnLoop([&] { forgetter->Tick(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  a_.OnLoop([&] { forgetter->Tick(); });
  EXPECT_EQ(a_.directory.forgotten, 0);
  std::filesystem::create_directory(later);
  Finish(a_, *forgetter);
  EXPECT_TRUE(std::filesystem::exists(later / "forgotten"));
}

class ForgetterWithADisk : public ::testing::Test {
 protected:
  void Publish(storage::TenantId tenant) {
    rig_.cache->OpenSession(tenant, tenant);
    ASSERT_TRUE(rig_.Publish(tenant, TestPlan(tenant, 64, ObjectKind::kSegment, tenant), tenant));
    rig_.Settle();
  }
  void Ask(uint8_t tenant) {
    ClusterForgetting forgetting{.tenant = absl::StrCat("tenant", tenant), .node = "operator"};
    forgetting.id.fill(tenant);
    directory_.Forget(forgetting, [](const absl::Status& told) { ASSERT_TRUE(told.ok()); });
  }
  void Forget(Forgetter& forgetter, int seconds) {
    forgetter.Changed();
    for (int i = 0; i < seconds; ++i) {
      for (int round = 0; round < 4; ++round) {
        forgetter.Tick();
        rig_.Settle();
      }
      rig_.clock.Advance(1'000'000'000);
      rig_.cache->Tick();
    }
  }
  Forgetter Make() {
    Forgetter made(nullptr, rig_.clock, directory_, {"nobody", rig_.names[0], "tenant2"}, "");
    made.Start(*rig_.cache, [](storage::TenantId, const std::optional<NamespaceId>&) {});
    return made;
  }
  uint64_t OnDisk() { return rig_.ssd->Usage().used_bytes; }

  storage::TieredRig rig_{{.hbm = 0}};
  TestCluster cluster_;
  TestDirectory directory_{cluster_, "a"};
};

TEST_F(ForgetterWithADisk, ForgetsATenantThatIsNotConfigured) {
  Publish(1);
  const uint64_t of_one = OnDisk();
  rig_.names[0] = "renamed";
  rig_.Restart();
  Publish(2);
  EXPECT_EQ(OnDisk(), 2 * of_one);
  Ask(1);
  Forgetter forgetter = Make();
  Forget(forgetter, 2);
  EXPECT_EQ(OnDisk(), of_one);
  EXPECT_EQ(directory_.forgotten, 1);
  rig_.names[0] = "tenant1";
  rig_.Restart();
  EXPECT_EQ(rig_.cache->stats().objects, 1u) << "the other tenant's alone";
}

TEST_F(ForgetterWithADisk, WaitsUntilTheDisksObjectsAreAdopted) {
  Publish(1);
  rig_.cache->Adopt({}, /*more=*/true);
  Ask(1);
  Forgetter forgetter = Make();
  Forget(forgetter, 3);
  EXPECT_EQ(rig_.cache->stats().objects, 1u);
  EXPECT_EQ(directory_.forgotten, 0);
  rig_.cache->Adopt({});
  Forget(forgetter, 2);
  EXPECT_EQ(OnDisk(), 0u);
  EXPECT_EQ(directory_.forgotten, 1);
}

TEST_F(ForgetterWithADisk, ABadPlaceOfTheDiskHoldsUpNoOther) {
  Publish(1);
  Publish(2);
  const uint64_t of_one = OnDisk() / 2;
  rig_.disk.set_faults({.bad_at = storage::SsdTier::SlabBytes(0)});  // in the first object
  Ask(1);
  Ask(2);
  Forgetter forgetter = Make();
  Forget(forgetter, 60);
  EXPECT_EQ(OnDisk(), of_one) << "of the first, whose bytes are still there";
  EXPECT_EQ(rig_.cache->stats().objects, 0u);
  EXPECT_EQ(directory_.forgotten, 0);
  EXPECT_FALSE(rig_.ssd->degraded()) << "all but this place is well";
  rig_.disk.set_faults({});
  Forget(forgetter, 5);
  EXPECT_EQ(OnDisk(), 0u);
  EXPECT_EQ(directory_.forgotten, 2);
}

}  // namespace
}  // namespace ashlar::daemon
