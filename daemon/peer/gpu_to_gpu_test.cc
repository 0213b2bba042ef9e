// SPDX-License-Identifier: Apache-2.0
// Transfers from a GPU of one node to a GPU of another: emulated GPUs, or the machine's GPUs with the installed UCX.
#include "kernels/gpu.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "daemon/peer/testing/peer_node.h"
#include "storage/objects/object_bytes.h"
#include "storage/testing/on_gpu.h"
#ifdef ASHLAR_EMULATED_GPUS
#include "daemon/peer/testing/emulated_gpu_ucx.h"
#endif

namespace ashlar::daemon {
namespace {

TransportSurroundings SurroundingsHere() {
#ifdef ASHLAR_EMULATED_GPUS
  static EmulatedGpuUcx::Control control;
  return EmulatedGpuUcx::Surroundings(control);
#else
  return TransportSurroundings::OfThisProcess();
#endif
}

std::vector<std::byte> Bytes(const kernels::Gpu& gpu, const storage::Tier& tier, const storage::Found& found) {
  std::vector<std::byte> bytes(found.header->Extents() * limits::kExtentBytes);
  std::byte* to = bytes.data();
  const storage::ObjectBytes object(tier, *found.slot);
  for (const std::byte* extent : object.extents()) {
    gpu.CopyToHost(to, extent, limits::kExtentBytes);
    to += limits::kExtentBytes;
  }
  bytes.resize(found.header->bytes);
  return bytes;
}

// No dram has space for the object.
TEST(GpuToGpuTest, AnObjectMovesFromTierToTier) {
  std::string why;
  const kernels::Gpu* const from = kernels::FindGpu(0, &why);
  if (from == nullptr) GTEST_SKIP() << why;
  const kernels::Gpu* const second = kernels::FindGpu(1, &why);
  const kernels::Gpu* const to = second == nullptr ? from : second;
  TestCluster cluster;
  constexpr uint64_t kNodeDramExtents = 3, kNodeHbmExtents = 16;
  PeerNode a(cluster, "a", kNodeDramExtents, PeerNode::Patient(), RemoteReads::kNever,
             {from, kNodeHbmExtents, SurroundingsHere()});
  PeerNode b(cluster, "b", kNodeDramExtents, PeerNode::Patient(), RemoteReads::kNever,
             {to, kNodeHbmExtents, SurroundingsHere()});
  if (!a.transport->Reaches(MemoryType::kCuda)) GTEST_SKIP() << "this UCX does not reach GPUs' memory";
  const ObjectHeader plan = storage::TestPlan(1, 1000);
  ASSERT_GT(plan.Extents(), kNodeDramExtents);
  storage::OnGpu there(*from), here(*to);
  a.Publish(PeerNode::kOnGpu, plan, there.Source(plan, 1));
  const storage::Query query{
      .kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
  const storage::Match match = b.Lookup({&query, 1}, nullptr, PeerNode::kOnGpu);
  ASSERT_EQ(match.found[0].tier, TierKind::kRemote);
  storage::TestPages pages(storage::TestPages::Holding(plan.tokens + 100));
  storage::LandTarget target = TestTarget(pages, {{0, 100}});
  here.Move(target.rows, pages.memory().size_bytes());
  const void* const landed = target.rows.front().keys.base;
  ASSERT_EQ(b.Land(match.lease, std::move(target), PeerNode::kOnGpu), std::vector{MissReason::kNone});
  to->CopyToHost(pages.memory().data(), landed, pages.memory().size_bytes());
  EXPECT_LT(LandingError(pages, plan, 1, 100), 1e-4);
  const storage::Match at_a = a.Lookup({&query, 1}, nullptr, PeerNode::kOnGpu);
  ASSERT_EQ(at_a.found[0].tier, TierKind::kHbm);
  EXPECT_EQ(Bytes(*to, *b.hbm, match.found[0]), Bytes(*from, *a.hbm, at_a.found[0]));
  a.Release(at_a.lease, PeerNode::kOnGpu);
  b.Release(match.lease, PeerNode::kOnGpu);
}

}  // namespace
}  // namespace ashlar::daemon
