// The reference engine, really computing: a cold prompt that three nodes computed together has the logits of one node.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/integration/serving_fixture.h"
#include "tests/nodes/daemon_cluster.h"

namespace ashlar::nodes {
namespace {

using integration::DaemonOptions;
using integration::DaemonProcess;
using integration::Eventually;
using integration::MakeTestPrompt;
using integration::ServingEngine;

// An engine that offers prefill, with all of its own.
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

using PrefillServing = integration::Serving;

TEST_F(PrefillServing, ThreeNodesTogetherHaveTheBitsOfOne) {
  if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
  const integration::RagPrompt prompt = MakeTestPrompt({1, 2, 3, 4, 5, 6, 7});
  ServingEngine alone(daemon_.client_options(), runtime());
  const rag::Served one = alone.Serve(prompt);
  EXPECT_EQ(one.misses, 8u);

  DaemonCluster cluster({.daemons = 3,
                         .etcd = true,
                         .daemon = {.dram = "512MiB", .arena = "64MiB", .threads = 1},
                         .complete =
                             [](const NodePlace& place, DaemonOptions* options) {
                               options->cluster = absl::StrCat(
                                   "cluster:\n  node: ", place.name, "\n  control_address: ", place.control_address,
                                   "\n  transport_address: ", place.transport_address, "\n  tls: {insecure: true}",
                                   "\n  etcd: {endpoints: [\"", place.etcd_endpoints[0], "\"], lease_seconds: 3}\n");
                             },
                         .network = {.relay = false}});
  const ComputingWorker first(cluster.daemon(1), model_), second(cluster.daemon(2), model_);
  for (const size_t node : {1, 2}) {
    EXPECT_TRUE(Eventually([&] { return cluster.daemon(node).Metric("ashlar_prefill_workers") == 1; }));
    EXPECT_TRUE(Eventually([&] { return cluster.daemon(node).Metric("ashlar_peers_connected") == 2; }));
  }
  EXPECT_TRUE(Eventually([&] { return cluster.daemon(0).Metric("ashlar_peers_connected") == 2; }));
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

}  // namespace
}  // namespace ashlar::nodes
