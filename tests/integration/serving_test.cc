// SPDX-License-Identifier: Apache-2.0
// The reference engine over a real daemon: every request is answered, whatever happens to the cache.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/integration/engine_internals.h"
#include "tests/integration/serving_fixture.h"

namespace ashlar::integration {
namespace {

TEST_F(Serving, EnginesShareWhatOneOfThemPublished) {
  ServingEngine first(daemon_.client_options(), runtime()), second(daemon_.client_options(), runtime());
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3}), turned = MakeTestPrompt({3, 1, 2});
  EXPECT_EQ(first.Serve(prompt).misses, 4u);
  const rag::Served hit = second.Serve(prompt), moved = second.Serve(turned);
  EXPECT_EQ(hit.hits, 4u);
  EXPECT_EQ(moved.hits, 4u);
  // Both ends of every section, and the question.
  EXPECT_EQ(moved.computed_tokens, 3u * 16 + 12);
  EXPECT_EQ(hit.logits, first.Serve(prompt).logits) << "the same bits, whoever computed them";
  // 0.314: nothing is random, so only rounding may differ between machines. Other orders have 0.27 to 0.49.
  EXPECT_LT(rag::RelativeL2(moved.logits, FullRecompute(turned)), 0.4);
}

TEST_F(Serving, ADaemonThatDiesDuringALandingOnlyCostsTime) {
  ServingEngine engine(daemon_.client_options(), runtime());
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3, 4, 5, 6});
  const std::vector<float> full = FullRecompute(prompt);
  engine.Serve(prompt);
  const std::vector<float> cached = engine.Serve(prompt).logits;
  ASSERT_GT(rag::RelativeL2(cached, full), 10 * kSame) << "the two answers must be told apart";

  // The test tries again if the daemon ended after the landing, with the cached answer, or before the engine had read
  // the match.
  bool interrupted = false;
  for (int attempt = 0; attempt < 10 && !interrupted; ++attempt) {
    engine.Serve(prompt);
    const pid_t killer = SignalWhenItLands(engine, SIGKILL);
    const rag::Served served = engine.Serve(prompt);
    EXPECT_EQ(waitpid(killer, nullptr, 0), killer);
    daemon_.Kill();
    const bool computed = served.computed_tokens == prompt.tokens.size();
    EXPECT_TRUE(served.hits == 7 || (served.hits == 0 && computed)) << served.hits;
    interrupted = served.hits == 7 && computed;
    EXPECT_LT(rag::RelativeL2(served.logits, computed ? full : cached), kSame);

    const rag::Served alone = engine.Serve(prompt);  // there is no daemon
    EXPECT_EQ(alone.hits, 0u);
    EXPECT_LT(rag::RelativeL2(alone.logits, full), kSame);

    daemon_.Start();
    ASSERT_TRUE(Eventually([&] { return engine.serving->cache().connected(); }));
  }
  EXPECT_TRUE(interrupted) << "every landing was over before the daemon was killed";

  engine.Serve(prompt);
  const rag::Served again = engine.Serve(prompt);
  EXPECT_EQ(again.misses, 0u);
  EXPECT_LT(rag::RelativeL2(again.logits, cached), kSame);
}

// The landing stays unresolved, and its pages in quarantine; the pool has no space to assemble the prompt again in
// other pages.
TEST_F(Serving, APromptWaitsForPagesInQuarantine) {
  const rag::Patience hasty{.land = std::chrono::milliseconds(500)};
  ServingEngine engine(daemon_.client_options(), runtime(), hasty);
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3, 4, 5, 6});
  const std::vector<float> full = FullRecompute(prompt);
  engine.Serve(prompt);

  // The daemon may finish before it stops; then there is nothing to wait for, and the test tries again.
  bool waited = false;
  for (int attempt = 0; attempt < 10 && !waited; ++attempt) {
    const pid_t stopper = SignalWhenItLands(engine, SIGSTOP);
    std::atomic<bool> thawed = false;
    std::thread thaw([&] {
      EXPECT_EQ(waitpid(stopper, nullptr, 0), stopper);
      std::this_thread::sleep_for(3 * hasty.land);
      thawed = true;
      daemon_.Thaw();
    });
    const rag::Served served = engine.Serve(prompt);
    if (served.computed_tokens == prompt.tokens.size()) {
      waited = true;
      EXPECT_TRUE(thawed) << "there are no pages for this answer while the daemon may write";
      EXPECT_LT(rag::RelativeL2(served.logits, full), kSame);
    }
    thaw.join();
  }
  EXPECT_TRUE(waited) << "every landing was over before the daemon was stopped";
  ASSERT_TRUE(Eventually([&] { return engine.Serve(prompt).misses == 0; }));
}

TEST_F(Serving, APromptsWaitForPagesEnds) {
  const rag::Patience hasty{.land = std::chrono::milliseconds(500), .quiet = std::chrono::milliseconds(100)};
  ServingEngine engine(daemon_.client_options(), runtime(), hasty);
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3, 4, 5, 6});
  engine.Serve(prompt);
  bool refused = false;
  for (int attempt = 0; attempt < 10 && !refused; ++attempt) {
    const pid_t stopper = SignalWhenItLands(engine, SIGSTOP);
    const absl::Status status = engine.serving->Serve(prompt).status();
    EXPECT_EQ(waitpid(stopper, nullptr, 0), stopper);
    refused = absl::IsResourceExhausted(status);
    EXPECT_TRUE(status.ok() || refused) << status;
    daemon_.Thaw();
  }
  EXPECT_TRUE(refused) << "every landing was over before the daemon was stopped";
  ASSERT_TRUE(Eventually([&] { return engine.serving->Serve(prompt).ok(); }));
}

TEST_F(Serving, AFrozenDaemonOnlyCostsTime) {
  ServingEngine engine(daemon_.client_options(), runtime());
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3});
  const std::vector<float> full = FullRecompute(prompt);
  engine.Serve(prompt);
  daemon_.Freeze();
  const rag::Served alone = engine.Serve(prompt);  // asks, waits for its deadline, and computes
  EXPECT_EQ(alone.hits, 0u);
  EXPECT_LT(rag::RelativeL2(alone.logits, full), kSame);
  daemon_.Thaw();
  ASSERT_TRUE(Eventually([&] { return engine.Serve(prompt).misses == 0; }));
}

// The kernels' families include scalar transitions, and layers with rotated keys: a segment's states at another
// position differ by a rotation.
class ServingLightning : public Serving {
 protected:
  ServingLightning() : Serving(refengine::TinyLightningConfig(/*seed=*/5, /*blocks=*/2)) {}
};

TEST_F(ServingLightning, SetsPromptsFromSegmentsInAnyOrder) {
  ServingEngine own(daemon_.client_options(), runtime());
  ServingEngine asked(daemon_.client_options(), runtime(), {}, rag::ComposeBy::kDaemon);
  own.Serve(MakeTestPrompt({1, 2, 3}));
  EXPECT_EQ(own.serving->stored().heads.at(TransitionForm::kScalar),
            3u * config_.linear_layers() * config_.linear.value_heads);
  const RagPrompt turned = MakeTestPrompt({3, 1, 2});
  const rag::Served served = own.Serve(turned);
  EXPECT_EQ(served.hits, 4u);
  EXPECT_EQ(served.computed_tokens, 3u * 16 + 12);
  EXPECT_EQ(asked.Serve(turned).logits, served.logits) << "the same bits, whoever composes";
  EXPECT_GT(DaemonAdvances(asked.serving->cache()), 0u);

  rag::Layer0Fidelity layer0(runtime(), pool_, static_cast<int64_t>(turned.tokens.size()));
  own.serving->last().request.Release();
  own.Serve(turned);
  std::vector<std::byte> memory(refengine::KvPages::RequiredBytes(config_, kPageTokens, kPages) + 64);
  void* aligned = memory.data();
  size_t space = memory.size();
  std::align(64, space - 64, aligned, space);
  refengine::KvPages pages(config_, kPageTokens, kPages, {static_cast<std::byte*>(aligned), memory.size() - 64});
  const auto error = layer0.Measure(turned, own.serving->last(), pages);
  ASSERT_TRUE(error.ok() && error->has_value()) << error.status();
  EXPECT_LE((*error)->ashlar, 1e-5);
  EXPECT_GE((*error)->zero_transition, 1e-2);
}

// Transitions that have vanished are not stored, and are composed as zero.
TEST_F(Serving, StoresTransitionsInTheirHeadsForms) {
  ServingEngine engine(daemon_.client_options(), runtime());
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3});
  engine.Serve(prompt);
  const rag::StoredSegments& stored = engine.serving->stored();
  EXPECT_EQ(stored.segments, 3u);
  EXPECT_LE(stored.bytes, stored.own_bytes);
  EXPECT_GT(stored.heads.at(TransitionForm::kZero), 0u);
  EXPECT_GT(stored.heads.at(TransitionForm::kDense), 0u);
  engine.Serve(prompt);
  uint64_t zero = 0;
  const rag::SetPrompt& set = engine.serving->last();
  for (uint32_t step = 0; step < set.plan().step_count; ++step) {
    if (set.plan().steps[step].kind != engine::StepKind::kInterior) continue;
    for (const std::vector<kernels::HeadTuple>& heads : set.tuples[step].heads) {
      zero += static_cast<uint64_t>(std::ranges::count(heads, TransitionForm::kZero, &kernels::HeadTuple::form));
    }
  }
  EXPECT_EQ(zero, stored.heads.at(TransitionForm::kZero));
}

}  // namespace
}  // namespace ashlar::integration
