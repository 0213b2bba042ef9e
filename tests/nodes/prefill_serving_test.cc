// SPDX-License-Identifier: Apache-2.0
// The reference engine with real computation: a cold prompt that three nodes compute together has the logits of one
// node.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "examples/rag/conversation_serving.h"
#include "tests/integration/serving_fixture.h"
#include "tests/nodes/daemon_cluster.h"

namespace ashlar::nodes {
namespace {

using integration::DaemonOptions;
using integration::DaemonProcess;
using integration::Eventually;
using integration::MakeTestPrompt;
using integration::ServingEngine;

// An engine that offers prefill, with its own daemon session.
class ComputingWorker {
 public:
  ComputingWorker(const DaemonProcess& daemon, const refengine::Model& model)
      : model_(model), thread_([this, options = daemon.client_options()] { Run(options); }) {}
  ~ComputingWorker() {
    stop_ = true;
    thread_.join();
  }
  int computed() const { return computed_; }

 private:
  void Run(const ClientOptions& options) {
    kernels::ThreadPool pool(2);
    const std::unique_ptr<kernels::Queue> queue = kernels::Host().MakeQueue(&pool);
    refengine::Engine engine(model_, kernels::Host(), pool);
    const ServingEngine serving(options, {model_, engine, kernels::Host(), *queue, pool});
    while (!stop_) {
      const absl::StatusOr<bool> computed = serving.serving->ServePrefill(std::chrono::milliseconds(100));
      if (computed.ok() && *computed) ++computed_;
    }
  }

  const refengine::Model& model_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> computed_ = 0;
  std::thread thread_;
};

class PrefillServing : public integration::Serving {
 protected:
  static DaemonOptions Small() { return {.dram = "512MiB", .arena = "64MiB", .threads = 1}; }
  static ClusterOptions Nodes(size_t daemons) {
    return {.daemons = daemons,
            .etcd = true,
            .daemon = Small(),
            .complete =
                [](const NodePlace& place, DaemonOptions* options) {
                  options->cluster =
                      absl::StrCat("cluster:\n  node: ", place.name, "\n  control_address: ", place.control_address,
                                   "\n  transport_address: ", place.transport_address, "\n  tls: {insecure: true}",
                                   "\n  etcd: {endpoints: [\"", place.etcd_endpoints[0], "\"], lease_seconds: 3}\n");
                },
            .network = {.relay = false}};
  }
  static void AwaitPeers(DaemonCluster& cluster) {
    const auto others = static_cast<double>(cluster.daemons() - 1);
    for (size_t node = 0; node < cluster.daemons(); ++node) {
      EXPECT_TRUE(Eventually([&] { return cluster.daemon(node).Metric("ashlar_peers_connected") == others; }));
    }
  }
};

TEST_F(PrefillServing, ThreeNodesComputeTheBitsOfOne) {
  if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
  const integration::RagPrompt prompt = MakeTestPrompt({1, 2, 3, 4, 5, 6, 7});
  ServingEngine alone(daemon_.client_options(), runtime());
  const rag::Served one = alone.Serve(prompt);
  EXPECT_EQ(one.misses, 8u);

  DaemonCluster cluster(Nodes(3));
  const ComputingWorker first(cluster.daemon(1), model_), second(cluster.daemon(2), model_);
  for (const size_t node : {1, 2}) {
    EXPECT_TRUE(Eventually([&] { return cluster.daemon(node).Metric("ashlar_prefill_workers") == 1; }));
  }
  AwaitPeers(cluster);
  ServingEngine asker(cluster.daemon(0).client_options(), runtime(), {}, rag::ComposeBy::kEngine,
                      /*cold_parallel=*/true);
  const rag::Served together = asker.Serve(prompt);
  EXPECT_EQ(together.misses, 8u);
  EXPECT_GE(first.computed(), 1);
  EXPECT_GE(second.computed(), 1);
  EXPECT_EQ(together.logits, one.logits) << "bit for bit";
  EXPECT_EQ(together.computed_tokens, one.computed_tokens) << "all of it was found in the end";
  EXPECT_EQ(asker.Serve(prompt).misses, 0u);
}

// One engine's pages and serving of conversations, with a daemon of the cluster.
struct ConversationEngine {
  ConversationEngine(const DaemonProcess& daemon, const rag::Runtime& runtime) {
    rag::ServingOptions options = integration::OptionsFor(daemon.client_options());
    options.prefixes.capture_tokens = 64;
    serving = *rag::ConversationServing::Open(runtime, options);
  }
  std::unique_ptr<rag::ConversationServing> serving;
};

// The prompt is assembled from segments, so its states belong only to its conversation. The decode engine resumes at
// its end, computes nothing of it, and continues with the same bits as the engine that assembled it.
TEST_F(PrefillServing, AFinishedPromptIsHandedToADecodeEngine) {
  if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
  DaemonCluster cluster(Nodes(2));
  AwaitPeers(cluster);
  ConversationEngine prefill(cluster.daemon(0), runtime()), decode(cluster.daemon(1), runtime());
  rag::Conversation conversation(MakeTestPrompt({1, 2, 3, 4}));
  const rag::Turn set = prefill.serving->Serve(conversation, /*decode=*/1).value();
  EXPECT_EQ(set.provenance, Provenance::kComposed);
  ASSERT_EQ(set.outcomes.back(), CommitOutcome::kKept);
  const uint64_t left = conversation.text.tokens.size();
  const absl::Status handed = prefill.serving->Handoff(conversation, "node1", std::chrono::seconds(20));
  ASSERT_TRUE(handed.ok()) << handed << cluster.daemon(1).log();

  rag::Conversation elsewhere = conversation;
  for (rag::Conversation* one : {&conversation, &elsewhere}) one->text.tokens.push_back(17);
  const rag::Turn here = prefill.serving->Serve(conversation, 4).value();
  cluster.daemon(0).Kill();  // nothing is requested there any longer
  const rag::Turn there = decode.serving->Serve(elsewhere, 4).value();
  EXPECT_TRUE(there.own);
  EXPECT_EQ(there.set->resumed, left);
  EXPECT_EQ(static_cast<TierKind>(there.set->plan().prefix_tier), TierKind::kDram);
  EXPECT_EQ(there.served.computed_tokens, 1u);
  EXPECT_EQ(there.served.logits, here.served.logits) << "bit for bit";
  EXPECT_EQ(elsewhere.text.tokens, conversation.text.tokens);
}

// A decode engine's node that has left, and an unknown one: the prefill engine learns of it in time, and continues.
TEST_F(PrefillServing, AHandoffThatFailsIsAMiss) {
  if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
  DaemonCluster cluster(Nodes(2));
  AwaitPeers(cluster);
  ConversationEngine prefill(cluster.daemon(0), runtime());
  rag::Conversation conversation(MakeTestPrompt({1, 2}));
  ASSERT_EQ(prefill.serving->Serve(conversation, 1).value().outcomes.back(), CommitOutcome::kKept);
  EXPECT_EQ(prefill.serving->Handoff(conversation, "nobody", std::chrono::seconds(5)).message(), "no_node");
  cluster.daemon(1).Kill();
  const auto began = std::chrono::steady_clock::now();
  EXPECT_TRUE(absl::IsUnavailable(prefill.serving->Handoff(conversation, "node1", std::chrono::seconds(5))));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(15));
  const uint64_t left = conversation.text.tokens.size();
  conversation.text.tokens.push_back(17);
  EXPECT_EQ(prefill.serving->Serve(conversation, 1).value().set->resumed, left);
}

}  // namespace
}  // namespace ashlar::nodes
