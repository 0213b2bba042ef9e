// SPDX-License-Identifier: Apache-2.0
// Slow links and holders that hang: what lookups return, and how soon hits return afterwards.
#include <chrono>
#include <thread>
#include <vector>

#include "tests/nodes/peer_daemons.h"

namespace ashlar::nodes {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

class LinksTest : public PeerDaemonsTest {
 protected:
  // Waits until the first daemon's prompts are known to the second one, which an engine uses.
  void Await(TestEngine& engine) {
    engine.Lookup(NewPrompt());
    AwaitEntries(1);
    ASSERT_TRUE(Eventually([&] { return cluster_->daemon(1).Metric("ashlar_peers_connected") == 1; }));
  }
  static MissReason ReasonOf(TestEngine& engine, const std::vector<Tokens>& prompt) {
    return engine.Lookup(prompt).segments()[0].reason;
  }
};

// An object of some MiB over 10 Mbit/s, which an engine computes in a quarter of a second.
TEST_F(LinksTest, AFetchSlowerThanComputingIsAbandoned) {
  Start(2);
  const integration::Shape shape{.kv_heads = 16, .tokens = 1024, .tokens_per_second = 4000};
  const std::vector<std::vector<Tokens>> prompts = {MakePrompt(random_(), 1, 1000), MakePrompt(random_(), 1, 1000)};
  TestEngine holder(cluster_->daemon(0).client_options(), shape);
  for (const auto& prompt : prompts) holder.PublishPrompt(prompt);
  TestEngine engine(cluster_->daemon(1).client_options(), shape);
  Await(engine);
  cluster_->network().SetBetween(0, 1, {.bytes_per_second = 10'000'000 / 8});

  const Match match = engine.Lookup(prompts[0]);
  ASSERT_EQ(Hits(match), 1u) << "nothing is known of the link";
  const auto began = steady_clock::now();
  Landing landing = engine.Land(match, prompts[0]);
  EXPECT_THAT(landing.Wait(integration::kPatience), testing::ElementsAre(MissReason::kSlowerThanRecompute));
  const double took = std::chrono::duration<double, std::milli>(steady_clock::now() - began).count();
  Figure("given up, ms", took);
  EXPECT_LT(took, 2000);
  EXPECT_EQ(ReasonOf(engine, prompts[1]), MissReason::kSlowerThanRecompute) << "the link is known";
  cluster_->network().Heal();
}

// Hits return within a second or two after the holder resumes, and meanwhile the reason is reported.
TEST_F(LinksTest, AResumedHolderIsFoundAgainAtOnce) {
  Start({.daemons = 2,
         .etcd = true,
         .complete =
             [this](const NodePlace& place, DaemonOptions* options) {
               options->cluster = ClusterYaml(place, certificates_.Make(place.name, authority_), /*lookup_ms=*/100);
             },
         .network = {.relay = true}});
  const std::vector<Tokens> prompt = MakePrompt(random_(), 1, 60);
  Publish(cluster_->daemon(0), prompt);
  TestEngine engine(cluster_->daemon(1).client_options());
  Await(engine);
  cluster_->daemon(0).Freeze();
  const auto thaws = steady_clock::now() + milliseconds(1500);  // within the lease: the directory still lists it
  std::vector<MissReason> reasons;
  while (steady_clock::now() < thaws) {
    reasons.push_back(ReasonOf(engine, prompt));
    std::this_thread::sleep_for(milliseconds(100));
  }
  cluster_->daemon(0).Thaw();
  const auto thawed = steady_clock::now();
  EXPECT_TRUE(Eventually([&] { return ReasonOf(engine, prompt) == MissReason::kNone; }));
  const double took = std::chrono::duration<double, std::milli>(steady_clock::now() - thawed).count();
  Figure("first hit after it goes on, ms", took);
  EXPECT_LT(took, 2000);
  EXPECT_EQ(reasons.front(), MissReason::kHolderUnreachable);
}

}  // namespace
}  // namespace ashlar::nodes
