// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/prompt_probe.h"

#include <gtest/gtest.h>

#include "ashlar/v1/cache.pb.h"

namespace ashlar::daemon {
namespace {

constexpr int64_t kProbeSecond = 1'000'000'000;

// A prompt of 1,000 tokens on a node that computes 1,000 tokens per second.
v1::NodeProbe Node(uint64_t saved, int64_t wait = 0, int64_t fetch = 0, double rate = 1000) {
  v1::NodeProbe node;
  node.set_prompt_tokens(1000);
  node.set_prefix_tokens(saved / 2);
  node.set_segment_tokens(saved - saved / 2);
  node.set_wait_ns(wait);
  node.set_fetch_ns(fetch);
  node.set_tokens_per_second(rate);
  node.set_sessions(1);
  return node;
}

uint32_t Cheapest(std::vector<v1::NodeProbe> nodes) {
  v1::ProbeReply reply;
  for (v1::NodeProbe& node : nodes) *reply.add_nodes() = std::move(node);
  return CheapestOf(reply);
}

TEST(PromptProbe, ChoosesTheNodeThatSavesMost) {
  EXPECT_EQ(Cheapest({Node(0), Node(800), Node(500)}), 1u);
  EXPECT_EQ(Cheapest({Node(0), Node(0)}), 0u);
}

TEST(PromptProbe, ABusyNodeOrASlowTierLosesToComputingElsewhere) {
  EXPECT_EQ(Cheapest({Node(0), Node(800, 2 * kProbeSecond)}), 0u);
  EXPECT_EQ(Cheapest({Node(0), Node(800, kProbeSecond / 2)}), 1u);
  EXPECT_EQ(Cheapest({Node(0), Node(800, 0, kProbeSecond)}), 0u);
  EXPECT_EQ(Cheapest({Node(0, 0, 0, 100'000), Node(900, 0, 0, 1000)}), 0u);
}

TEST(PromptProbe, NodesThatDrainOrHaveNoEngineAreLeftOut) {
  v1::NodeProbe draining = Node(900), without = Node(900);
  draining.set_draining(true);
  without.set_sessions(0);
  EXPECT_EQ(Cheapest({draining, without, Node(0)}), 2u);
  EXPECT_EQ(Cheapest({draining, without}), 0u);
}

TEST(PromptProbe, UnknownRatesCountAsTheFastestKnown) {
  v1::NodeProbe unknown = Node(0, 0, 0, 0);
  unknown.set_queued_tokens(500);
  EXPECT_EQ(Cheapest({unknown, Node(0, kProbeSecond)}), 0u);  // 0.5 s and 1 s of waiting
  EXPECT_EQ(Cheapest({unknown, Node(0, kProbeSecond / 4)}), 1u);
  EXPECT_EQ(Cheapest({Node(0, 0, 0, 0), Node(10, 0, 0, 0)}), 1u);
}

}  // namespace
}  // namespace ashlar::daemon
