// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/etcd_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <random>

#include "daemon/peer/directory/local_directory.h"
#include "daemon/peer/directory/testing/directory_fixture.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Names = std::set<std::string>;

class EtcdDirectoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = EtcdProcess::WhyNot(); !why.empty()) GTEST_SKIP() << why;
    etcd_ = std::make_unique<EtcdProcess>();
  }
  EtcdDirectoryOptions Options() const { return OptionsFor(etcd_->endpoint()); }
  std::unique_ptr<Node> Join(const std::string& name) const { return std::make_unique<Node>(name, Options()); }
  // Keys in etcd with this prefix after the cluster's prefix.
  size_t CountKeys(const std::string& kind) const {
    const std::string keys =
        Shell("ETCDCTL_API=3 etcdctl --endpoints " + etcd_->endpoint() + " get --prefix --keys-only " +
              "--write-out fields /ashlar/default/" + kind + " | grep -c '^\"Key\"' || true");
    return std::stoul(keys);
  }

  std::unique_ptr<EtcdProcess> etcd_;
};

TEST(LocalDirectory, HasOneMember) {
  LocalDirectory directory({.node = "a"});
  const Key keys[] = {DigestOf(1)};
  EXPECT_TRUE(directory.Announce(NamespaceOf(1), keys[0], {}, 1));
  directory.Follow(NamespaceOf(1));
  EXPECT_TRUE(directory.Locate(NamespaceOf(1), keys).empty());
  ASSERT_EQ(directory.Members().size(), 1u);
  EXPECT_EQ(directory.Members()[0]->node, "a");
  EXPECT_TRUE(directory.Health().connected);
}

TEST_F(EtcdDirectoryTest, TwoNodesSeeEachOthersObjects) {
  const auto a = Join("a"), b = Join("b");
  ASSERT_TRUE(Until([&] { return a->members() == 2 && b->members() == 2; }));
  EXPECT_EQ(a->directory.Members()[0]->node, "a") << "itself first";
  EXPECT_EQ(a->directory.Members()[1]->control_address, "b:1");
  EXPECT_EQ(a->directory.Members()[1]->transport_address, "b:2");
  EXPECT_NE(a->directory.Members()[0]->incarnation, a->directory.Members()[1]->incarnation);
  EXPECT_GT(a->member_changes, 0);
  a->directory.Follow(NamespaceOf(1));
  b->directory.Follow(NamespaceOf(1));
  const Holding holding = {.tier = TierKind::kSsd,
                           .kind = ObjectKind::kSpan,
                           .shard = {2, 8},
                           .bytes = 123456789012,
                           .depth = 70000,
                           .span_begin = 69900};
  a->Hold(1, 7, holding);
  ASSERT_TRUE(Until([&] { return b->Holders(1, 7) == Names{"a"}; }));
  const Key keys[] = {DigestOf(6), DigestOf(7)};
  const std::vector<Located> located = b->directory.Locate(NamespaceOf(1), keys);
  ASSERT_EQ(located.size(), 1u);
  EXPECT_EQ(located[0].index, 1u);
  EXPECT_EQ(located[0].holding, holding);
  EXPECT_EQ(located[0].member->incarnation, a->directory.Members()[0]->incarnation);
  EXPECT_THAT(a->Holders(1, 7), IsEmpty()) << "never itself";
  EXPECT_THAT(b->directory.SpanEnds(NamespaceOf(1), 69900, 70000, 9), ElementsAre(70000));
  EXPECT_THAT(b->directory.SpanEnds(NamespaceOf(1), 69900, 69999, 9), IsEmpty());

  a->directory.Withdraw(NamespaceOf(1), DigestOf(7), {1, 8});  // another shard
  a->Hold(1, 8);
  ASSERT_TRUE(Until([&] { return b->Holders(1, 8) == Names{"a"}; }));
  EXPECT_EQ(b->Holders(1, 7), Names{"a"});
  a->directory.Withdraw(NamespaceOf(1), DigestOf(7), holding.shard);
  ASSERT_TRUE(Until([&] { return b->Holders(1, 7).empty(); }));
  EXPECT_THAT(b->directory.SpanEnds(NamespaceOf(1), 69900, UINT64_MAX, 9), IsEmpty());
}

TEST_F(EtcdDirectoryTest, OnlyFollowedNamespacesAreMirrored) {
  const auto a = Join("a"), b = Join("b");
  for (uint64_t ns = 1; ns <= 3; ++ns) {
    for (uint64_t key = 0; key < 100; ++key) a->Hold(ns, key);
  }
  b->directory.Follow(NamespaceOf(1));
  b->directory.Follow(NamespaceOf(2));
  b->directory.Follow(NamespaceOf(2));
  ASSERT_TRUE(Until([&] { return b->directory.Stats().entries == 200; }));
  EXPECT_THAT(b->Holders(3, 5), IsEmpty());
  b->directory.Unfollow(NamespaceOf(1));
  b->directory.Unfollow(NamespaceOf(2));  // one more Unfollow than Follow: it stays
  ASSERT_TRUE(Until([&] { return b->directory.Stats().entries == 100; }));
  EXPECT_THAT(b->Holders(1, 5), IsEmpty());
  EXPECT_TRUE(Until([&] { return b->Holders(2, 5) == Names{"a"}; }));
  b->directory.Follow(NamespaceOf(1));
  b->directory.Follow(NamespaceOf(3));
  ASSERT_TRUE(Until([&] { return b->directory.Stats().entries == 300; }));
  EXPECT_EQ(a->directory.Stats().entries, 0u);
}

TEST_F(EtcdDirectoryTest, OtherClustersInTheSameEtcdAreNotSeen) {
  EtcdDirectoryOptions other = Options();
  other.cluster = "other";
  const auto a = Join("a");
  Node b("b", other);
  a->directory.Follow(NamespaceOf(1));
  b.Hold(1, 1);
  ASSERT_TRUE(Until([&] { return b.directory.Stats().sent_announcements == 1; }));
  const auto c = Join("c");
  c->Hold(1, 2);
  ASSERT_TRUE(Until([&] { return a->Holders(1, 2) == Names{"c"}; }));
  EXPECT_THAT(a->Holders(1, 1), IsEmpty());
  EXPECT_EQ(a->members(), 2u);
  EXPECT_EQ(b.members(), 1u);
}

TEST_F(EtcdDirectoryTest, AKilledMemberAndItsEntriesAreRemoved) {
  const auto a = Join("a"), b = Join("b");
  a->directory.Follow(NamespaceOf(1));
  b->Hold(1, 1000);
  NodeProcess killed(etcd_->endpoint(), "killed", 0, 300);
  ASSERT_TRUE(Until([&] { return a->directory.Stats().entries == 301; }));
  ASSERT_TRUE(Until([&] { return a->Holders(1, 299) == Names{"killed"}; }));
  EXPECT_EQ(CountKeys("e"), 301u);
  killed.Kill();
  ASSERT_TRUE(Until([&] { return a->members() == 2; }));
  EXPECT_THAT(a->Holders(1, 299), IsEmpty()) << "at once";
  ASSERT_TRUE(Until([&] { return a->directory.Stats().entries == 1; }));
  EXPECT_EQ(a->Holders(1, 1000), Names{"b"});
  EXPECT_EQ(CountKeys("e"), 1u);
  EXPECT_EQ(CountKeys("m"), 2u);
  EXPECT_EQ(a->directory.Stats().swept + b->directory.Stats().swept, 300u);
}

// More than one page, so that they are read and swept in slices.
TEST_F(EtcdDirectoryTest, ManyEntriesOfSeveralNamespacesAreReadAndSwept) {
  const auto a = Join("a");
  NodeProcess killed(etcd_->endpoint(), "killed", 0, 15000, 3);
  a->Hold(2, 20000);
  for (uint64_t ns = 1; ns <= 3; ++ns) a->directory.Follow(NamespaceOf(ns));
  ASSERT_TRUE(Until([&] { return a->directory.Stats().entries == 15000; }));
  const auto late = Join("late");
  for (uint64_t ns = 1; ns <= 3; ++ns) late->directory.Follow(NamespaceOf(ns));
  ASSERT_TRUE(Until([&] { return late->directory.Stats().entries == 15001; }));
  EXPECT_EQ(late->directory.Stats().resyncs, 3u);
  killed.Kill();
  ASSERT_TRUE(Until([&] { return late->directory.Stats().entries == 1 && a->directory.Stats().entries == 0; }));
  EXPECT_EQ(CountKeys("e"), 1u);
}

TEST_F(EtcdDirectoryTest, IgnoresEntriesOfEarlierIncarnation) {
  const auto a = Join("a");
  a->directory.Follow(NamespaceOf(1));
  NodeProcess first(etcd_->endpoint(), "b", 0, 50);
  ASSERT_TRUE(Until([&] { return a->Holders(1, 49) == Names{"b"}; }));
  const uint64_t incarnation = a->directory.Members()[1]->incarnation;
  first.Kill();
  NodeProcess again(etcd_->endpoint(), "b", 25, 50);  // before the first one's lease ends
  ASSERT_TRUE(Until([&] { return a->Holders(1, 74) == Names{"b"}; }));
  EXPECT_THAT(a->Holders(1, 0), IsEmpty());
  EXPECT_EQ(a->members(), 2u);
  EXPECT_NE(a->directory.Members()[1]->incarnation, incarnation);
  ASSERT_TRUE(Until([&] { return CountKeys("e") == 50; })) << "the first one's are swept";
  EXPECT_TRUE(Until([&] { return a->directory.Stats().entries == 50; })) << "and this one hears of it";
}

TEST_F(EtcdDirectoryTest, ExpiredMemberReturns) {
  const auto a = Join("a");
  a->directory.Follow(NamespaceOf(1));
  NodeProcess b(etcd_->endpoint(), "b", 0, 200);
  ASSERT_TRUE(Until([&] { return a->Holders(1, 199) == Names{"b"}; }));
  b.Freeze();
  ASSERT_TRUE(Until([&] { return a->members() == 1; }));
  ASSERT_TRUE(Until([&] { return a->directory.Stats().entries == 0; })) << "swept";
  b.Thaw();
  ASSERT_TRUE(Until([&] { return a->members() == 2 && a->directory.Stats().entries == 200; }));
  EXPECT_TRUE(Until([&] { return a->Holders(1, 0) == Names{"b"}; }));
}

TEST_F(EtcdDirectoryTest, LeavingMemberIsRemovedAtOnce) {
  EtcdDirectoryOptions options = Options();
  options.lease_seconds = 600;
  auto a = std::make_unique<Node>("a", options);
  auto b = std::make_unique<Node>("b", options);
  ASSERT_TRUE(Until([&] { return a->members() == 2; }));
  b.reset();
  EXPECT_TRUE(Until([&] { return a->members() == 1; }));
}

TEST_F(EtcdDirectoryTest, LeavingIsNotAFailure) {
  for (int i = 0; i < 5; ++i) {
    std::atomic<int> connected{0}, failed{0};
    const SteadyClock clock;
    const DirectoryEvents events = {
        .members_changed = [] {},
        .announce_again = [] {},
        .erasures_changed = [] {},
        .health_changed = [&](const DirectoryHealth& health) { ++(health.connected ? connected : failed); }};
    auto directory = std::make_unique<EtcdDirectory>(
        Options(), Member{.node = "a", .control_address = "a:1", .transport_address = "a:2", .version = "1"}, events,
        clock);
    ASSERT_TRUE(Until([&] { return connected > 0; }));
    const int before = failed;
    directory = nullptr;
    EXPECT_EQ(failed, before) << "it has revoked its lease, and logs no failure";
  }
}

TEST_F(EtcdDirectoryTest, TwoDaemonsWithTheSameNameAreDistinguished) {
  const auto a = Join("same");
  ASSERT_TRUE(Until([&] { return a->directory.Health().connected; }));
  const auto b = Join("same");
  ASSERT_TRUE(Until([&] { return !a->directory.Health().reason.empty() && b->directory.Health().connected; }));
  EXPECT_THAT(a->directory.Health().reason, ::testing::HasSubstr("same node name, same"));
  EXPECT_TRUE(a->directory.Health().connected);
  EXPECT_EQ(b->directory.Health().reason, "");
}

TEST_F(EtcdDirectoryTest, AFullQueueDropsTheLeastValuable) {
  EtcdDirectoryOptions options = Options();
  options.queued_writes = 10;
  options.endpoints = {"127.0.0.1:1"};  // no server is there
  Node a("a", options);
  for (uint64_t key = 0; key < 30; ++key) {
    const bool taken = a.directory.Announce(NamespaceOf(1), DigestOf(key), {}, static_cast<double>(key % 15));
    EXPECT_EQ(taken, key < 15 || key % 15 >= 6) << key;
  }
  EXPECT_EQ(a.directory.RemainingCapacity(), 0u);
  EXPECT_EQ(a.directory.Stats().queued_announcements, 10u);
  EXPECT_EQ(a.directory.Stats().dropped_announcements, 20u);
  for (uint64_t key = 100; key < 115; ++key) a.directory.Withdraw(NamespaceOf(1), DigestOf(key), {});
  EXPECT_EQ(a.directory.Stats().queued_withdrawals, 10u);
  EXPECT_EQ(a.directory.Stats().dropped_withdrawals, 5u);
  EXPECT_FALSE(a.directory.Announce(NamespaceOf(1), DigestOf(1), {.shard = {0, 257}}, 99));
  EXPECT_FALSE(a.directory.Announce(NamespaceOf(1), DigestOf(1), {.bytes = uint64_t{1} << 40}, 99));
  EXPECT_FALSE(a.directory.Health().connected);
  EXPECT_TRUE(Until([&] { return a.directory.Health().reason != "not connected yet"; }));
  EXPECT_THAT(a.directory.Health().reason, ::testing::HasSubstr("127.0.0.1:1: cannot read erasures: "));
}

TEST_F(EtcdDirectoryTest, ANodeStaysWithinItsShareOfTheBudget) {
  EtcdDirectoryOptions options = Options();
  options.writes_per_second = 1000;
  options.cluster_writes_per_second = 200;  // rate of two nodes
  Node a("a", options), b("b", options);
  ASSERT_TRUE(Until([&] { return a.members() == 2 && b.members() == 2; }));
  const auto begin = std::chrono::steady_clock::now();
  const uint64_t before = a.directory.Stats().sent_announcements;
  for (uint64_t key = 0; key < 400; ++key) a.Hold(1, key);
  a.directory.Withdraw(NamespaceOf(1), DigestOf(9999), {});
  ASSERT_TRUE(Until([&] { return a.directory.Stats().sent_withdrawals == 1; }));
  EXPECT_LT(a.directory.Stats().sent_announcements - before, 400u) << "it goes first";
  ASSERT_TRUE(Until([&] { return a.directory.Stats().sent_announcements - before == 400; }));
  // A bucket holds one second's worth, and may have been filled at the rate of one member: 200 at once, then 100 per
  // second.
  EXPECT_GT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1500));
}

TEST_F(EtcdDirectoryTest, ErasureReachesLaterMembers) {
  const auto a = Join("a"), b = Join("b");
  ASSERT_TRUE(Until([&] { return a->members() == 2 && b->members() == 2; }));
  ClusterErasure erasure{.tenant = "t", .ns = NamespaceOf(1), .node = "a"};
  erasure.id.fill(9);
  const auto tell = [&](Node& node) {
    std::promise<absl::Status> told;
    node.directory.Erase(erasure, [&](const absl::Status& status) { told.set_value(status); });
    return told.get_future().get();
  };
  ASSERT_TRUE(tell(*a).ok());
  ASSERT_EQ(a->directory.Erasures().size(), 1u) << "at once";
  const int64_t revision = a->directory.Erasures()[0].revision;
  EXPECT_GT(revision, 0);
  ASSERT_TRUE(Until([&] { return b->directory.Erasures() == a->directory.Erasures(); }));
  const auto later = Join("c");
  ASSERT_TRUE(Until([&] { return later->directory.Erasures() == a->directory.Erasures(); }));
  EXPECT_GT(later->erasures_changes, 0);
  const auto being_erased = [](const Node& node) { return node.directory.BeingErased("t", NamespaceOf(1)); };
  EXPECT_TRUE(being_erased(*a));
  EXPECT_FALSE(a->directory.BeingErased("t", NamespaceOf(2)));
  EXPECT_FALSE(a->directory.BeingErased("u", NamespaceOf(1)));
  a->directory.Erased(revision);
  b->directory.Erased(revision);
  const auto erased = [&](const Node& node, const std::string& who) {
    const auto members = node.directory.Members();
    const auto member = std::ranges::find(members, who, &Member::node);
    return member == members.end() ? -1 : (*member)->erased;
  };
  ASSERT_TRUE(Until([&] { return erased(*later, "a") == revision && erased(*later, "b") == revision; }));
  EXPECT_EQ(a->members(), 3u) << "it is the member that it was";
  EXPECT_TRUE(being_erased(*a)) << "c has not";
  later->directory.Erased(revision);
  for (const Node* node : {a.get(), b.get(), later.get()}) {
    EXPECT_TRUE(Until([&] { return !being_erased(*node); }));
  }
  // An etcd that has lost everything has also lost this, and completed erasures are reported again with new revisions.
  etcd_->Wipe();
  ASSERT_TRUE(Until([&] { return !a->directory.Health().connected; }));
  EXPECT_EQ(tell(*a).code(), absl::StatusCode::kUnavailable);
  const int changes = a->erasures_changes;
  etcd_->Start();
  ASSERT_TRUE(Until([&] { return a->erasures_changes > changes && a->directory.Erasures().empty(); }));
  EXPECT_TRUE(Until([&] { return erased(*a, "a") == 0; }));
}

TEST_F(EtcdDirectoryTest, TheMirrorIsBounded) {
  EtcdDirectoryOptions options = Options();
  options.mirror_entries = 50;
  const auto a = Join("a");
  Node b("b", options);
  for (uint64_t key = 0; key < 80; ++key) a->Hold(1, key);
  b.directory.Follow(NamespaceOf(1));
  ASSERT_TRUE(Until([&] { return b.directory.Stats().entries_refused >= 30; }));
  EXPECT_EQ(b.directory.Stats().entries, 50u);
}

// Nodes hold, drop, follow and stop at random. In the end every node sees exactly the model's state.
TEST_F(EtcdDirectoryTest, AnyOrderConverges) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  constexpr uint64_t kNodeCount = 3, kKeys = 60, kSpaces = 3;
  std::vector<std::unique_ptr<Node>> nodes(kNodeCount);
  std::vector<std::set<std::pair<uint64_t, uint64_t>>> held(kNodeCount);
  std::vector<std::set<uint64_t>> followed(kNodeCount);
  for (int step = 0; step < 3000; ++step) {
    const uint64_t i = random() % kNodeCount, ns = random() % kSpaces, key = random() % kKeys;
    if (nodes[i] == nullptr) nodes[i] = Join(absl::StrCat("n", i));
    const uint64_t what = random() % 1000;
    if (what < 500) {
      nodes[i]->Hold(ns, key);
      held[i].insert({ns, key});
    } else if (what < 900) {
      nodes[i]->Drop(ns, key);
      held[i].erase({ns, key});
    } else if (what < 950 && followed[i].insert(ns).second) {
      nodes[i]->directory.Follow(NamespaceOf(ns));
    } else if (what < 994 && followed[i].erase(ns) > 0) {
      nodes[i]->directory.Unfollow(NamespaceOf(ns));
    } else if (what >= 998) {
      nodes[i] = nullptr;
      held[i].clear();
      followed[i].clear();
    }
    if (random() % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
  }
  const auto agrees = [&](uint64_t i) {
    for (uint64_t ns = 0; ns < kSpaces; ++ns) {
      for (uint64_t key = 0; key < kKeys; ++key) {
        Names expected;
        for (uint64_t j = 0; j < kNodeCount; ++j) {
          if (j != i && held[j].contains({ns, key}) && followed[i].contains(ns)) expected.insert(absl::StrCat("n", j));
        }
        if (nodes[i]->Holders(ns, key) != expected) return false;
      }
    }
    return true;
  };
  for (uint64_t i = 0; i < kNodeCount; ++i) {
    if (nodes[i] == nullptr) continue;
    EXPECT_TRUE(Until([&] { return agrees(i); })) << "node " << i;
  }
}

}  // namespace
}  // namespace ashlar::daemon
