// SPDX-License-Identifier: Apache-2.0
// Nodes with a tier on an emulated GPU whose memory the transport reaches: objects move from that tier to other nodes,
// and from other nodes to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/peer/peers.h"
#include "daemon/peer/testing/checked_landing.h"
#include "daemon/peer/testing/emulated_gpu_ucx.h"
#include "daemon/peer/testing/peer_node.h"
#include "kernels/cuda/emulator/driver.h"
#include "kernels/gpu.h"
#include "storage/objects/object_bytes.h"
#include "storage/testing/on_gpu.h"

namespace ashlar::daemon {
namespace {

using storage::Query;
using storage::TestPages;
using storage::TestPlan;
using ::testing::ElementsAre;

constexpr uint64_t kDramExtents = 16, kHbmExtents = 24;
constexpr uint64_t kLong = 2000;  // tokens of an object that is sent in several pieces

const kernels::Gpu& GpuOfNumber(int number) {
  std::string why;
  const kernels::Gpu* const gpu = kernels::FindGpu(number, &why);
  if (gpu == nullptr) std::abort();
  return *gpu;
}

Query Ask(const ObjectHeader& plan) {
  return {.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
}

void Await(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// A node with a GPU, and an engine on it.
struct GpuNode {
  GpuNode(TestCluster& cluster, const std::string& name, int its_number, bool reaches = true,
          RemoteReads reads = RemoteReads::kNever)
      : number(its_number), gpu(GpuOfNumber(its_number)), memory(gpu) {
    control.reaches = reaches;
    node.emplace(cluster, name, kDramExtents, PeerNode::Patient(), reads,
                 GpuTier{&gpu, kHbmExtents, EmulatedGpuUcx::Surroundings(control)});
  }

  PeerNode* operator->() { return &*node; }
  void Publish(const ObjectHeader& plan, uint64_t text) {
    node->Publish(PeerNode::kOnGpu, plan, memory.Source(plan, text));
  }
  std::vector<TierKind> Where(const ObjectHeader& plan) {
    return node->OnLoop([&] { return node->cache.upkeep().inventory().Where(0, plan.key, plan.shard); });
  }
  uint64_t Used(const storage::MemoryTier& tier) {
    return node->OnLoop([&] { return tier.Usage(0).used_bytes / limits::kExtentBytes; });
  }
  // Fills dram with objects that an engine leases.
  void FillDram() {
    for (uint64_t text = 1000; Used(*node->tier) + kSmallExtents <= kDramExtents; ++text) {
      const ObjectHeader plan = TestPlan(text, 64);
      node->Publish(plan, text);
      const Query query = Ask(plan);
      held.push_back(node->Lookup({&query, 1}).lease);
    }
  }
  void LetDramGo() {
    for (const storage::LeaseId& lease : held) node->Release(lease);
    held.clear();
  }
  // Cards may read its arenas.
  void AwaitRegistered() {
    Await([&] {
      return node->transport->stats().registered_bytes ==
             node->OnLoop([&] { return node->hbm->Usage().held_bytes + node->tier->Usage().held_bytes; });
    });
  }
  // Waits until no lease of a fetch is left.
  void AwaitNothingLeased() {
    Await([&] {
      const PeersStats stats = node->OnLoop([&] { return node->peers.stats(); });
      return stats.holder.leases == 0 && stats.objects.copies == 0 && stats.objects.reading == 0;
    });
    Await([&] {
      const TransportStats stats = node->transport->stats();
      return stats.grants == 0 && stats.transfers == 0 && stats.loans == 0;
    });
    Await([&] {
      const storage::Cache::Stats left = node->OnLoop([&] { return node->cache.stats(); });
      return left.leases == held.size() && left.reservations == 0;
    });
  }

  static constexpr uint64_t kSmallExtents = 3;

  const int number;
  const kernels::Gpu& gpu;
  storage::OnGpu memory;
  EmulatedGpuUcx::Control control;
  std::vector<storage::LeaseId> held;
  std::optional<PeerNode> node;
};

class GpuPeersTest : public ::testing::Test {
 protected:
  // Looks up at a node for an engine in CPU memory, lands, and checks every byte.
  static MissReason Land(PeerNode& node, const ObjectHeader& plan, uint64_t text) {
    const Query query = Ask(plan);
    const storage::Match match = node.Lookup({&query, 1});
    if (match.found[0].reason != MissReason::kNone) return match.found[0].reason;
    EXPECT_EQ(match.found[0].tier, TierKind::kRemote);
    return LandUnder(node, match, plan, text);
  }
  static uint64_t AfterHeader(const ObjectHeader& plan) { return plan.bytes - EncodedHeaderBytes(plan.parts.size()); }

  TestCluster cluster_;
  const ObjectHeader plan_ = TestPlan(1, kLong);
};

TEST_F(GpuPeersTest, SendsGpuOnlyObjectsFromGpu) {
  GpuNode a(cluster_, "a", 0);
  PeerNode b(cluster_, "b", 256, PeerNode::Patient());
  a.FillDram();
  a.Publish(plan_, 1);
  ASSERT_THAT(a.Where(plan_), ElementsAre(TierKind::kHbm));
  EXPECT_EQ(Land(b, plan_, 1), MissReason::kNone);
  EXPECT_EQ(a.control.gpu_sent, AfterHeader(plan_));
  EXPECT_THAT(a.Where(plan_), ElementsAre(TierKind::kHbm)) << "no copy was made in dram";
  a.AwaitNothingLeased();
  a->OnLoop([&] { a->cache.retention().Evict(0, plan_.key); });
  EXPECT_EQ(a.Used(*a->hbm), 0u);
}

TEST_F(GpuPeersTest, SendsFromDramIfAvailable) {
  GpuNode a(cluster_, "a", 0);
  PeerNode b(cluster_, "b", 256, PeerNode::Patient());
  a.Publish(plan_, 1);
  Await([&] { return a.Where(plan_).size() == 2; });
  EXPECT_EQ(Land(b, plan_, 1), MissReason::kNone);
  EXPECT_EQ(a.control.gpu_sent, 0u);
}

TEST_F(GpuPeersTest, FallsBackToDramWithoutGpuAccess) {
  GpuNode a(cluster_, "a", 0, /*reaches=*/false);
  PeerNode b(cluster_, "b", 256, PeerNode::Patient());
  a.FillDram();
  a.Publish(plan_, 1);
  const Query query = Ask(plan_);
  EXPECT_NE(b.Lookup({&query, 1}).found[0].reason, MissReason::kNone) << "dram has no space";
  EXPECT_THAT(a.Where(plan_), ElementsAre(TierKind::kHbm));
  a.LetDramGo();
  EXPECT_EQ(Land(b, plan_, 1), MissReason::kNone);
  EXPECT_THAT(a.Where(plan_), ElementsAre(TierKind::kHbm, TierKind::kDram));
  EXPECT_EQ(a.control.gpu_sent, 0u);
  a.AwaitNothingLeased();
}

// The reader's network is frozen meanwhile. The copy stays in place, even if others need its space.
TEST_F(GpuPeersTest, AnEvictedObjectIsSentFromTheGpuToItsEnd) {
  GpuNode a(cluster_, "a", 0), b(cluster_, "b", 1);
  a.FillDram();
  const ObjectHeader first = TestPlan(2, 64);
  a.Publish(first, 2);
  ASSERT_EQ(Land(*b.node, first, 2), MissReason::kNone);  // they are connected
  a.Publish(plan_, 1);
  const uint64_t extents = plan_.Extents();
  b.control.stands = true;
  const Query query = Ask(plan_);
  const storage::Match match = b->Lookup({&query, 1});
  ASSERT_EQ(match.found[0].tier, TierKind::kRemote);
  a->OnLoop([&] { a->cache.retention().Evict(0, plan_.key); });
  for (uint64_t text = 10; text < 15; ++text) a.Publish(TestPlan(text, 64), text);
  EXPECT_GT(a.Used(*a->hbm), kHbmExtents - extents) << "all space was wanted";
  b.control.stands = false;
  EXPECT_EQ(LandUnder(*b.node, match, plan_, 1), MissReason::kNone);
  a.AwaitNothingLeased();
  b.AwaitNothingLeased();
  EXPECT_LE(a.Used(*a->hbm), kHbmExtents - extents) << "its space is free again";
}

// Each shard is only on a GPU; one lookup finds all of them.
TEST_F(GpuPeersTest, ABundleIsSentFromItsShardsGpus) {
  GpuNode a(cluster_, "a", 0);
  PeerNode b(cluster_, "b", 256, PeerNode::Patient());
  a.FillDram();
  std::vector<ObjectHeader> shards(2, TestPlan(1, 64));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    shards[rank].shard = {.rank = rank, .size = 2};
    a.Publish(shards[rank], 1 + rank);
  }
  EXPECT_EQ(Land(b, shards[0], 1), MissReason::kNone);
  Await([&] { return a.control.gpu_sent == 2 * AfterHeader(shards[0]); });
  a.AwaitNothingLeased();
}

// By RDMA reads, the reader's card reads from the GPU's memory.
TEST_F(GpuPeersTest, AReaderReadsItInPlace) {
  GpuNode a(cluster_, "a", 0, true, RemoteReads::kBySoftware), b(cluster_, "b", 1, true, RemoteReads::kBySoftware);
  a.FillDram();
  const ObjectHeader first = TestPlan(2, 64);
  a.Publish(first, 2);
  ASSERT_EQ(Land(*b.node, first, 2), MissReason::kNone);  // a first fetch uses messages
  const uint64_t by_messages = a.control.gpu_sent;
  a.Publish(plan_, 1);
  a.AwaitRegistered();
  EXPECT_EQ(Land(*b.node, plan_, 1), MissReason::kNone);
  EXPECT_EQ(a.control.gpu_sent, by_messages);
  EXPECT_EQ(b->transport->stats().read_bytes, AfterHeader(plan_));
  a.AwaitNothingLeased();
}

TEST_F(GpuPeersTest, AHolderThatDiesDuringTheFetchIsAMiss) {
  std::optional<GpuNode> a(std::in_place, cluster_, "a", 0);
  GpuNode b(cluster_, "b", 1);
  a->FillDram();
  a->Publish(plan_, 1);
  const Query query = Ask(plan_);
  b.control.stands = true;
  const storage::Match match = b->Lookup({&query, 1});
  ASSERT_EQ(match.found[0].tier, TierKind::kRemote);
  a.reset();
  b.control.stands = false;
  EXPECT_EQ(LandUnder(*b.node, match, plan_, 1), MissReason::kPeerFailed);
  b.AwaitNothingLeased();
}

// Objects of other nodes for an engine on a GPU with a tier.
class GpuReadersTest : public GpuPeersTest {
 protected:
  using Copies = std::vector<std::pair<TierKind, TierKind>>;

  // Looks up for the engine on the GPU, lands there and checks every byte.
  static MissReason LandThere(GpuNode& node, const ObjectHeader& plan, uint64_t text) {
    const Query query = Ask(plan);
    const storage::Match match = node->Lookup({&query, 1}, nullptr, PeerNode::kOnGpu);
    if (match.found[0].reason != MissReason::kNone) return match.found[0].reason;
    EXPECT_EQ(match.found[0].tier, TierKind::kRemote);
    return LandThereUnder(node, match, plan, text);
  }
  static MissReason LandThereUnder(GpuNode& node, const storage::Match& match, const ObjectHeader& plan,
                                   uint64_t text) {
    TestPages pages(TestPages::Holding(plan.tokens + 100));
    storage::LandTarget target = TestTarget(pages, {{0, 100}});
    node.memory.Reset();
    node.memory.Move(target.rows, pages.memory().size_bytes());
    const void* const far = target.rows.front().keys.base;
    const std::vector<MissReason> verdict = node->Land(match.lease, std::move(target), PeerNode::kOnGpu);
    if (verdict[0] == MissReason::kNone) {
      node.gpu.CopyToHost(pages.memory().data(), far, pages.memory().size_bytes());
      EXPECT_LT(LandingError(pages, plan, text, 100), 1e-4);
      const kernels::cuda::emulator::DeviceWork as_the_gpu(node.number);
      EXPECT_EQ(TupleError(*node->hbm, *match.found[0].slot, *match.found[0].header, text), 0.0);
      const std::byte* const start = storage::ObjectBytes(*node->hbm, *match.found[0].slot).start();
      const std::string header = EncodeHeader(*match.found[0].header);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(start), header.size()), header);
    }
    node->Release(match.lease, PeerNode::kOnGpu);
    return verdict[0];
  }
  static Copies Copied(GpuNode& node) {
    return node->OnLoop([&] { return node->observer.copied; });
  }
  static constexpr std::pair<TierKind, TierKind> kStraight{TierKind::kRemote, TierKind::kHbm};
};

TEST_F(GpuReadersTest, AnObjectIsReceivedDirectlyOnTheRequestingGpu) {
  PeerNode a(cluster_, "a");
  GpuNode b(cluster_, "b", 1);
  b.FillDram();
  a.Publish(plan_, 1);
  EXPECT_EQ(LandThere(b, plan_, 1), MissReason::kNone);
  EXPECT_THAT(Copied(b), ElementsAre(kStraight));
  EXPECT_THAT(b.Where(plan_), ElementsAre(TierKind::kHbm));
  b.AwaitNothingLeased();
  b->OnLoop([&] { b->cache.retention().Evict(0, plan_.key); });
  EXPECT_EQ(b.Used(*b->hbm), 0u);
}

TEST_F(GpuReadersTest, DramGetsItsCopyAfterwards) {
  PeerNode a(cluster_, "a");
  GpuNode b(cluster_, "b", 1);
  a.Publish(plan_, 1);
  EXPECT_EQ(LandThere(b, plan_, 1), MissReason::kNone);
  Await([&] { return b.Where(plan_).size() == 2; });
  EXPECT_THAT(Copied(b), ElementsAre(kStraight, std::pair(TierKind::kHbm, TierKind::kDram)));
}

TEST_F(GpuReadersTest, FallsBackToDramWithoutGpuAccess) {
  PeerNode a(cluster_, "a");
  GpuNode b(cluster_, "b", 1, /*reaches=*/false);
  a.Publish(plan_, 1);
  EXPECT_EQ(LandThere(b, plan_, 1), MissReason::kNone);
  EXPECT_THAT(Copied(b),
              ElementsAre(std::pair(TierKind::kRemote, TierKind::kDram), std::pair(TierKind::kDram, TierKind::kHbm)));
  b.AwaitNothingLeased();
}

// From GPU to GPU, with both drams full: a card reads there and writes here.
TEST_F(GpuReadersTest, ACardReadsFromGpuToGpu) {
  GpuNode a(cluster_, "a", 0, true, RemoteReads::kBySoftware), b(cluster_, "b", 1, true, RemoteReads::kBySoftware);
  a.FillDram();
  b.FillDram();
  const ObjectHeader first = TestPlan(2, 64);
  a.Publish(first, 2);
  ASSERT_EQ(LandThere(b, first, 2), MissReason::kNone);  // a first fetch uses messages
  EXPECT_EQ(b.control.gpu_got, 0u);
  a.Publish(plan_, 1);
  a.AwaitRegistered();
  b.AwaitRegistered();
  EXPECT_EQ(LandThere(b, plan_, 1), MissReason::kNone);
  EXPECT_EQ(b.control.gpu_got, AfterHeader(plan_));
  EXPECT_THAT(Copied(b), ElementsAre(kStraight, kStraight));
  a.AwaitNothingLeased();
  b.AwaitNothingLeased();
}

TEST_F(GpuReadersTest, AHolderThatDiesDuringTheFetchLeavesNothing) {
  std::optional<GpuNode> a(std::in_place, cluster_, "a", 0);
  GpuNode b(cluster_, "b", 1);
  a->FillDram();
  b.FillDram();
  a->Publish(plan_, 1);
  const Query query = Ask(plan_);
  b.control.stands = true;
  const storage::Match match = b->Lookup({&query, 1}, nullptr, PeerNode::kOnGpu);
  ASSERT_EQ(match.found[0].tier, TierKind::kRemote);
  a.reset();
  b.control.stands = false;
  EXPECT_EQ(LandThereUnder(b, match, plan_, 1), MissReason::kPeerFailed);
  b.AwaitNothingLeased();
  EXPECT_EQ(b.Used(*b->hbm), 0u);
}

// An engine that disconnects in the middle of a fetch.
TEST_F(GpuReadersTest, AnEngineThatLeavesDuringTheFetchLeavesNothing) {
  PeerNode a(cluster_, "a");
  GpuNode b(cluster_, "b", 1);
  a.Publish(plan_, 1);
  const Query query = Ask(plan_);
  b.control.stands = true;
  const storage::Match match = b->Lookup({&query, 1}, nullptr, PeerNode::kOnGpu);
  ASSERT_EQ(match.found[0].tier, TierKind::kRemote);
  b->OnLoop([&] { b->cache.CloseSession(PeerNode::kOnGpu, [] {}); });
  b->OnLoop([&] { b->cache.retention().Evict(0, plan_.key); });
  b.control.stands = false;
  b.AwaitNothingLeased();
  Await([&] { return b.Used(*b->hbm) == 0; });
}

}  // namespace
}  // namespace ashlar::daemon
