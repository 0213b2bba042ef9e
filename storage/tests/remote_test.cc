// SPDX-License-Identifier: Apache-2.0
// Objects on another node: found, fetched, landed, released, and never corrupt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "storage/testing/other_node.h"
#include "storage/testing/prefix_engine.h"
#include "storage/testing/tokens.h"

namespace ashlar::storage {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
constexpr SessionId kAnn = 1;

struct Heard {
  TierKind tier;
  uint32_t uses;
  bool operator==(const Heard&) const = default;
};

class RemoteTest : public ::testing::Test {
 protected:
  void Make(TieredOptions options = {.hbm = 0, .dram = 32, .ssd = 0}) {
    options.remote = &other_;
    options.cache.objects.residence = [this](const TenantPool&, const ObjectHeader& header,
                                             const Residence& residence) {
      heard_.push_back({residence.nearest, residence.uses});
      TierKind& announced = announced_[{header.key, header.shard.rank}];
      EXPECT_EQ(residence.announced, announced);
      return announced = residence.nearest;
    };
    rig_ = std::make_unique<TieredRig>(options);
    rig_->cache->OpenSession(kAnn, 1);
  }
  ~RemoteTest() override {
    rig_->cache->CloseSession(kAnn, [] {});
    other_.Settle(*rig_);
    EXPECT_EQ(other_.leased(), 0u);
    const Cache::Stats left = rig_->cache->stats();
    EXPECT_EQ(left.leases + left.reservations + left.landings + left.copies_under_way, 0u);
  }

  static ObjectHeader Plan(uint64_t text, uint64_t tokens = 64) { return TestPlan(text, tokens); }
  static Query Ask(const ObjectHeader& plan) {
    return {.kind = plan.kind, .key = plan.key, .shard = plan.shard, .tokens = plan.tokens};
  }
  void PublishThere(const ObjectHeader& plan, uint64_t text) {
    ASSERT_TRUE(other_.rig.Publish(OtherNode::kItself, plan, text));
    other_.rig.Settle();
  }
  bool Offer(const ObjectHeader& plan, Nanos cost = 0) { return other_.Offer(*rig_->cache, Ask(plan), cost); }
  // Looks up, lands and checks every byte.
  MissReason Land(const ObjectHeader& plan, uint64_t text) {
    const Match match = rig_->Lookup(kAnn, plan);
    found_ = match.found[0];
    if (found_.reason != MissReason::kNone) return found_.reason;
    const MissReason verdict = LandUnder(match, plan, text);
    rig_->cache->Release(kAnn, match.lease);
    return verdict;
  }
  MissReason LandUnder(const Match& match, const ObjectHeader& plan, uint64_t text) {
    const TestPages pages(TestPages::Holding(plan.tokens + 100));
    const auto landing = rig_->StartLanding(kAnn, ++landings_, match.lease, TestTarget(pages, {{0, 100}}));
    other_.Settle(*rig_);
    const MissReason verdict = landing->verdict.value()[0];
    if (verdict == MissReason::kNone) {
      EXPECT_LT(LandingError(pages, plan, text, 100), 1e-4);
      const MemoryTier& top = rig_->hbm != nullptr ? *rig_->hbm : *rig_->dram;
      EXPECT_EQ(TupleError(top, *match.found[0].slot, *match.found[0].header, text), 0.0);
    }
    return verdict;
  }
  uint64_t Used(const Tier& tier) { return tier.Usage(1).used_bytes / limits::kExtentBytes; }

  OtherNode other_;
  std::unique_ptr<TieredRig> rig_;
  std::vector<Heard> heard_;
  std::map<std::pair<Key, uint32_t>, TierKind> announced_;
  Found found_;
  LandingId landings_ = 0;
};

TEST_F(RemoteTest, RemoteObjectLandsAndStays) {
  Make();
  PublishThere(Plan(1), 1);
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kNeverSeen);
  ASSERT_TRUE(Offer(Plan(1)));
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(found_.tier, TierKind::kRemote);
  EXPECT_EQ(other_.leased(), 0u) << "this node has a copy of its own";
  EXPECT_THAT(rig_->observer.copied, ElementsAre(std::pair(TierKind::kRemote, TierKind::kDram)));
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(found_.tier, TierKind::kDram);
  EXPECT_FALSE(Offer(Plan(1))) << "it is here already";
  EXPECT_THAT(rig_->observer.evicted, IsEmpty());
}

TEST_F(RemoteTest, LayersLandWhileLaterOnesArrive) {
  Make({.hbm = 0, .dram = 64, .ssd = 0});
  const ObjectHeader plan = Plan(1, 4000);
  PublishThere(plan, 1);
  ASSERT_TRUE(Offer(plan));
  const Match match = rig_->Lookup(kAnn, plan);
  const TestPages pages(260);
  const auto landing = rig_->StartLanding(kAnn, 1, match.lease, TestTarget(pages, {{0, 7}}));
  while (landing->layers == 0 && other_.pending() > 0) {
    other_.End(0);
    rig_->executor.CompleteAll();
  }
  EXPECT_EQ(landing->layers, 1u);
  EXPECT_GT(other_.pending(), 0u);
  while (other_.pending() > 0) other_.End(other_.pending() - 1);  // in reverse order
  other_.Settle(*rig_);
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kNone));
  EXPECT_LT(LandingError(pages, plan, 1, 7), 1e-4);
  rig_->cache->Release(kAnn, match.lease);
}

TEST_F(RemoteTest, AFailedReadIsAMissWithItsReason) {
  Make();
  PublishThere(Plan(1), 1);
  ASSERT_TRUE(Offer(Plan(1)));
  const Match match = rig_->Lookup(kAnn, Plan(1));
  ASSERT_EQ(match.found[0].tier, TierKind::kRemote);
  other_.End(0, absl::UnavailableError("the node has gone"));
  EXPECT_EQ(LandUnder(match, Plan(1), 1), MissReason::kPeerFailed);
  rig_->cache->Release(kAnn, match.lease);
  EXPECT_THAT(rig_->observer.tier_errors, ElementsAre(TierKind::kRemote));
  EXPECT_EQ(Used(*rig_->dram), 0u);
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kPeerFailed) << "remembered";
  ASSERT_TRUE(Offer(Plan(1)));
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kNone);
}

TEST_F(RemoteTest, WrongBytesAreNeverTaken) {
  Make();
  PublishThere(Plan(1), 1);
  other_.corrupt = true;
  ASSERT_TRUE(Offer(Plan(1)));
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kChecksumFailed);
  EXPECT_EQ(Used(*rig_->dram), 0u);
  EXPECT_THAT(other_.damaged, ElementsAre(1)) << "the first copy, which has been released";
}

TEST_F(RemoteTest, WrongLocalBytesExcludeNoNode) {
  Make();
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(1), 1));
  const Match match = rig_->Lookup(kAnn, Plan(1));
  const ObjectBytes bytes(*rig_->dram, *match.found[0].slot);
  for (std::byte* extent : bytes.extents()) {
    extent[limits::kExtentBytes / 8] ^= std::byte{1};
  }
  EXPECT_EQ(LandUnder(match, Plan(1), 1), MissReason::kChecksumFailed);
  rig_->cache->Release(kAnn, match.lease);
  EXPECT_THAT(other_.damaged, IsEmpty());
}

TEST_F(RemoteTest, AnUnclaimedOfferLeavesNothing) {
  Make();
  PublishThere(Plan(1), 1);
  ASSERT_TRUE(Offer(Plan(1)));
  rig_->cache->adoption().SettleRemote(1, Plan(1).key, {});
  EXPECT_EQ(other_.leased(), 0u);
  EXPECT_EQ(rig_->cache->stats().objects, 0u);
  EXPECT_THAT(rig_->observer.evicted, IsEmpty()) << "nothing of this node's has gone";
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kNeverSeen);
  EXPECT_THAT(heard_, IsEmpty()) << "it was never on this node";
  rig_->cache->adoption().SettleRemote(1, Plan(1).key, {});
}

TEST_F(RemoteTest, SettlingKeepsWhatIsInUse) {
  Make();
  PublishThere(Plan(1), 1);
  ASSERT_TRUE(Offer(Plan(1)));
  const Match match = rig_->Lookup(kAnn, Plan(1));
  rig_->cache->adoption().SettleRemote(1, Plan(1).key, {});
  EXPECT_EQ(LandUnder(match, Plan(1), 1), MissReason::kNone);
  rig_->cache->Release(kAnn, match.lease);
  rig_->cache->adoption().SettleRemote(1, Plan(1).key, {});
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kNone) << "it is this node's now";
}

// Its memory is written to until the last read has ended.
TEST_F(RemoteTest, ACancelledLookupKeepsItsTargetsUntilAllReadsEnd) {
  for (const TieredOptions& options : {TieredOptions{.hbm = 0, .dram = 32, .ssd = 0}, TieredOptions{.hbm = 32}}) {
    Make(options);
    PublishThere(Plan(1), 1);
    ASSERT_TRUE(Offer(Plan(1)));
    const Match match = rig_->Lookup(kAnn, Plan(1));
    ASSERT_GT(other_.pending(), 0u);
    rig_->cache->Release(kAnn, match.lease);
    const MemoryTier& tier = *rig_->dram;
    EXPECT_EQ(Used(tier), 3u);
    EXPECT_EQ(other_.leased(), 1u);
    other_.Settle(*rig_);
    EXPECT_EQ(Used(tier), 0u);
    EXPECT_EQ(other_.leased(), 0u);
    EXPECT_EQ(rig_->cache->stats().objects, 0u);
    rig_->cache->retention().Evict(1, Plan(1).key);
    other_.rig.cache->retention().Evict(1, Plan(1).key);
  }
}

TEST_F(RemoteTest, ARequestDuringTheDrainFetchesAgain) {
  Make();
  PublishThere(Plan(1), 1);
  ASSERT_TRUE(Offer(Plan(1)));
  rig_->cache->Release(kAnn, rig_->Lookup(kAnn, Plan(1)).lease);
  const Match match = rig_->Lookup(kAnn, Plan(1));
  ASSERT_EQ(match.found[0].reason, MissReason::kNone);
  EXPECT_EQ(LandUnder(match, Plan(1), 1), MissReason::kNone);
  rig_->cache->Release(kAnn, match.lease);
}

TEST_F(RemoteTest, ConcurrentRequestsFetchOnce) {
  Make();
  PublishThere(Plan(1), 1);
  ASSERT_TRUE(Offer(Plan(1)));
  const Match first = rig_->Lookup(kAnn, Plan(1)), second = rig_->Lookup(kAnn, Plan(1));
  EXPECT_EQ(other_.pending(), 1u);
  EXPECT_EQ(LandUnder(second, Plan(1), 1), MissReason::kNone);
  for (const LeaseId& lease : {first.lease, second.lease}) rig_->cache->Release(kAnn, lease);
}

TEST_F(RemoteTest, EntersEveryMemoryTierAndTheDiskLater) {
  Make({.hbm = 16, .dram = 16, .ssd = 64});
  PublishThere(Plan(1), 1);
  ASSERT_TRUE(Offer(Plan(1)));
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(Used(*rig_->hbm), 3u);
  EXPECT_EQ(Used(*rig_->dram), 3u);
  EXPECT_EQ(Used(*rig_->ssd), 3u) << "admitted like any object";
  EXPECT_THAT(rig_->observer.copied, Contains(std::pair(TierKind::kDram, TierKind::kSsd)));
  announced_.clear();
  rig_->Restart();
  rig_->cache->OpenSession(kAnn, 1);
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kNone);
  EXPECT_EQ(found_.tier, TierKind::kSsd);
}

TEST_F(RemoteTest, AFullSourceIsAskedAgain) {
  Make({.hbm = 0, .dram = 64, .ssd = 0});
  const ObjectHeader plan = Plan(1, 4000);
  PublishThere(plan, 1);
  other_.most_reads = 1;
  ASSERT_TRUE(Offer(plan));
  EXPECT_EQ(Land(plan, 1), MissReason::kNone);
}

TEST_F(RemoteTest, MissWithoutSpaceReleasesRemoteCopy) {
  Make({.hbm = 0, .dram = 4, .ssd = 0});
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(2), 2));
  const Match held = rig_->Lookup(kAnn, Plan(2));
  PublishThere(Plan(1), 1);
  ASSERT_TRUE(Offer(Plan(1)));
  EXPECT_EQ(Land(Plan(1), 1), MissReason::kBudgetRefused);
  EXPECT_EQ(other_.leased(), 0u);
  EXPECT_EQ(rig_->cache->stats().objects, 1u);
  rig_->cache->Release(kAnn, held.lease);
}

TEST_F(RemoteTest, ATooSlowHitIsAMiss) {
  Make();
  PublishThere(Plan(1), 1);
  Query query = Ask(Plan(1));
  query.recompute = 1000;
  ASSERT_TRUE(Offer(Plan(1), /*cost=*/2000));
  EXPECT_EQ(rig_->cache->Lookup(kAnn, {&query, 1}).found[0].reason, MissReason::kSlowerThanRecompute);
  EXPECT_EQ(other_.leased(), 0u);
  ASSERT_TRUE(Offer(Plan(1), /*cost=*/500));
  const Match match = rig_->cache->Lookup(kAnn, {&query, 1});
  EXPECT_EQ(match.found[0].reason, MissReason::kNone);
  rig_->cache->Release(kAnn, match.lease);
}

TEST_F(RemoteTest, ABundleIsFetchedCompletely) {
  Make();
  std::vector<ObjectHeader> parts = {Plan(1), Plan(1)};
  for (uint32_t rank = 0; rank < 2; ++rank) {
    parts[rank].shard = {.rank = rank, .size = 2};
    PublishThere(parts[rank], 1 + rank);
  }
  ASSERT_TRUE(Offer(parts[0]));
  EXPECT_EQ(Land(parts[0], 1), MissReason::kBeingPublished) << "the other shard is missing";
  rig_->cache->adoption().SettleRemote(1, Plan(1).key, parts[0].shard);
  EXPECT_EQ(other_.leased(), 0u);
  ASSERT_TRUE(Offer(parts[0]));
  ASSERT_TRUE(Offer(parts[1]));
  EXPECT_EQ(Land(parts[0], 1), MissReason::kNone);
  EXPECT_EQ(Land(parts[1], 2), MissReason::kNone);
  EXPECT_EQ(Used(*rig_->dram), 6u);
}

TEST_F(RemoteTest, APromptResumesFromAnotherNodesPrefix) {
  Make({.hbm = 0, .dram = 256, .ssd = 0});
  const PrefixEngine engine(1);
  const Tokens text = Numbers(0, 600), prompt = Join(text, Numbers(9000, 50));
  bool kept = false;
  other_.rig.cache->Commit(OtherNode::kItself, engine.Offer(text, text.size(), {}),
                           [&](const std::vector<CommitOutcome>& o) { kept = o.back() == CommitOutcome::kKept; });
  other_.rig.Settle();
  ASSERT_TRUE(kept);
  const PrefixText asked = engine.Text(prompt);
  for (const Query& query : Prefixes::Objects(asked, {.depth = text.size()})) {
    ASSERT_TRUE(other_.Offer(*rig_->cache, query));
  }
  const Match match = rig_->cache->Lookup(kAnn, {}, asked, nullptr);
  ASSERT_EQ(match.prefix.depth, text.size());
  const TestPages pages(TestPages::Holding(prompt.size()));
  const auto landing = rig_->StartLanding(kAnn, 1, match.lease, PrefixEngine::Target(pages, match.prefix));
  other_.Settle(*rig_);
  EXPECT_THAT(*landing->verdict, Each(MissReason::kNone));
  EXPECT_EQ(engine.Error(pages, *rig_->dram, match, prompt), 0.0);
  rig_->cache->Release(kAnn, match.lease);
}

TEST_F(RemoteTest, ReportsResidence) {
  Make({.hbm = 4, .dram = 8, .ssd = 0});
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(1), 1));
  rig_->Settle();
  EXPECT_THAT(heard_, ElementsAre(Heard{TierKind::kHbm, 0}));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Land(Plan(1), 1), MissReason::kNone);
  EXPECT_THAT(heard_, ElementsAre(Heard{TierKind::kHbm, 0}, Heard{TierKind::kHbm, 2}));
  heard_.clear();
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(2), 2));  // takes its place in hbm
  rig_->Settle();
  EXPECT_THAT(heard_, Contains(Heard{TierKind::kDram, 3}));
  heard_.clear();
  rig_->cache->retention().Evict(1, Plan(1).key);
  EXPECT_THAT(heard_, ElementsAre(Heard{TierKind::kNone, 3}));
}

// Memory for two objects. All save as much, and fetching is faster than computing.
class RemotePricesTest : public RemoteTest {
 protected:
  RemotePricesTest() {
    Make({.hbm = 0, .dram = 7, .ssd = 0});
    EXPECT_TRUE(rig_->Publish(kAnn, Plan(kOwn), kOwn));
    PublishThere(Plan(kFetched), kFetched);
  }
  Found Use(uint64_t text) {
    Query query = Ask(Plan(text));
    query.recompute = 1'000'000;
    query.flops = 1e9;
    const Match match = rig_->cache->Lookup(kAnn, {&query, 1});
    rig_->clock.Advance(1);
    other_.Settle(*rig_);
    rig_->cache->Release(kAnn, match.lease);
    return match.found[0];
  }

  static constexpr uint64_t kFetched = 1, kOwn = 2, kNew = 3;
};

TEST_F(RemotePricesTest, EvictsTheObjectThatAPeerHas) {
  ASSERT_EQ(Use(kOwn).tier, TierKind::kDram);
  ASSERT_TRUE(Offer(Plan(kFetched)));
  ASSERT_EQ(Use(kFetched).tier, TierKind::kRemote);
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(kNew), kNew));
  EXPECT_EQ(Use(kOwn).reason, MissReason::kNone) << "although it was used earlier";
  EXPECT_EQ(Use(kFetched).reason, MissReason::kEvicted);
}

// The peer may have evicted it since.
TEST_F(RemotePricesTest, APeersCopyCountsUntilTheObjectIsFoundAgain) {
  for (int i = 0; i < 2; ++i) ASSERT_EQ(Use(kOwn).tier, TierKind::kDram);
  ASSERT_TRUE(Offer(Plan(kFetched)));
  ASSERT_EQ(Use(kFetched).tier, TierKind::kRemote);
  ASSERT_EQ(Use(kFetched).tier, TierKind::kDram);
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(kNew), kNew));
  EXPECT_EQ(Use(kFetched).reason, MissReason::kNone);
  EXPECT_EQ(Use(kOwn).reason, MissReason::kEvicted);
}

// Offers, lookups, landings, failures and evictions in any order: landed bytes are right, and nothing leaks.
class RemoteInAnyOrder : public RemoteTest, public ::testing::WithParamInterface<uint64_t> {};

TEST_P(RemoteInAnyOrder, LeavesNothingBehind) {
  const uint64_t seed = GetParam() != 0 ? GetParam() : std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  Make({.hbm = 8, .dram = 16, .ssd = 24});
  for (uint64_t text = 1; text <= 8; ++text) PublishThere(Plan(text), text);
  struct Held {
    Match match;
    uint64_t text;
  };
  std::vector<Held> held;
  int landed = 0;
  for (int step = 0; step < 3000; ++step) {
    const uint64_t text = 1 + random() % 8;
    switch (random() % 8) {
      case 0:
        Offer(Plan(text));
        break;
      case 1:
        rig_->cache->adoption().SettleRemote(1, Plan(text).key, {});
        break;
      case 2:
      case 3:
        if (Match match = rig_->Lookup(kAnn, Plan(text)); match.found[0].reason == MissReason::kNone) {
          held.push_back({std::move(match), text});
        }
        break;
      case 4:
        if (!held.empty()) {
          const size_t which = random() % held.size();
          if (random() % 8 == 0)
            landed += LandUnder(held[which].match, Plan(held[which].text), held[which].text) == MissReason::kNone;
          rig_->cache->Release(kAnn, held[which].match.lease);
          held.erase(held.begin() + static_cast<ptrdiff_t>(which));
        }
        break;
      case 5:
        if (other_.pending() > 0) {
          const bool fails = random() % 4 == 0;
          other_.End(random() % other_.pending(), fails ? absl::UnavailableError("cut") : absl::OkStatus());
        }
        break;
      case 6:
        if (rig_->executor.pending() > 0) rig_->executor.Complete(random() % rig_->executor.pending());
        if (rig_->io.pending() > 0) rig_->io.Complete(random() % rig_->io.pending());
        break;
      default:
        if (random() % 4 == 0) rig_->cache->retention().Evict(1, Plan(text).key);
        rig_->cache->Tick();
    }
  }
  for (const Held& one : held) rig_->cache->Release(kAnn, one.match.lease);
  other_.Settle(*rig_);
  for (uint64_t text = 1; text <= 8; ++text) rig_->cache->adoption().SettleRemote(1, Plan(text).key, {});
  EXPECT_EQ(other_.leased(), 0u);
  EXPECT_GT(landed, 0);
  for (uint64_t text = 1; text <= 8; ++text) rig_->cache->retention().Evict(1, Plan(text).key);
  other_.Settle(*rig_);
  EXPECT_EQ(Used(*rig_->hbm) + Used(*rig_->dram) + Used(*rig_->ssd), 0u);
}

// A fresh seed, and two in which an unwanted copy continued to read while another one became whole.
INSTANTIATE_TEST_SUITE_P(Seeds, RemoteInAnyOrder, ::testing::Values(0, 2223857923, 150386182));

}  // namespace
}  // namespace ashlar::storage
