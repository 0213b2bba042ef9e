// A whole engine over a real daemon: whatever becomes of the cache, a request gets its answer.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "kernels/host/thread_pool.h"
#include "tests/integration/daemon_process.h"
#include "tools/rag/baselines.h"
#include "tools/rag/cached_serving.h"
#include "tools/rag/fidelity.h"

namespace ashlar::integration {
namespace {

using rag::RagPrompt;
using refengine::ModelConfig;

constexpr int32_t kPageTokens = 16;
constexpr int32_t kPages = 192;  // one prompt, and no second one beside it
constexpr refengine::SeamWidths kSeams{8, 8};
constexpr double kSame = 1e-4;  // two ways of computing the same thing in fp32
constexpr float kPoison = -12345.0f;

// Wide keys and values, so that a landing takes long enough to be interrupted; little else to compute.
ModelConfig WideConfig() {
  ModelConfig config = refengine::TinyConfig(/*seed=*/3, /*blocks=*/4);
  config.attention = {.query_heads = 8, .kv_heads = 8, .head_dim = 128, .rotary_dim = 32};
  return config;
}

RagPrompt MakeTestPrompt(const std::vector<int32_t>& order) {
  RagPrompt prompt;
  auto append = [&](int32_t seed, size_t count) {
    for (size_t i = 0; i < count; ++i)
      prompt.tokens.push_back(static_cast<int32_t>((i * 31 + seed * 17 + i * i) % 251));
  };
  append(0, 40);
  prompt.segment_lengths.push_back(40);
  for (int32_t section : order) {
    append(section, 330);
    prompt.segment_lengths.push_back(330);
  }
  append(99, 12);
  return prompt;
}

// One engine process' worth: a client, pages in a hosted region, an engine that serves.
struct ServingEngine {
  ServingEngine(const ClientOptions& options, const rag::Runtime& runtime, const rag::Patience& patience = {}) {
    const ModelConfig& config = runtime.model.config();
    ClientOptions patient = options;
    patient.timeout = std::chrono::seconds(2);
    auto connected = Client::Connect(patient);
    EXPECT_TRUE(connected.ok()) << connected.status();
    client = std::move(*connected);
    auto hosted = client->HostRegion(rag::RegionBytes(config, kPageTokens, kPages));
    EXPECT_TRUE(hosted.ok()) << hosted.status();
    region = *hosted;
    pages = std::make_unique<refengine::PagePool>(config, kPageTokens, kPages, std::span(region.data(), region.size()));
    auto opened = rag::CachedServing::Open(*client, runtime, *pages, region, kSeams, patience);
    EXPECT_TRUE(opened.ok()) << opened.status();
    serving = std::move(*opened);
  }

  rag::Served Serve(const RagPrompt& prompt) {
    absl::StatusOr<rag::Served> served = serving->Serve(prompt);
    EXPECT_TRUE(served.ok()) << served.status();
    return served.ok() ? *std::move(served) : rag::Served{};
  }

  std::unique_ptr<Client> client;
  Region region;
  std::unique_ptr<refengine::PagePool> pages;
  std::unique_ptr<rag::CachedServing> serving;
};

class Serving : public testing::Test {
 protected:
  rag::Runtime runtime() { return {model_, engine_, kernels_, *queue_}; }

  std::vector<float> FullRecompute(const RagPrompt& prompt) {
    std::vector<std::max_align_t> memory(
        refengine::PagePool::RequiredBytes(config_, kPageTokens, kPages) / sizeof(std::max_align_t) + 64);
    void* aligned = memory.data();
    size_t room = memory.size() * sizeof(std::max_align_t);
    const size_t bytes = refengine::PagePool::RequiredBytes(config_, kPageTokens, kPages);
    std::align(64, bytes, aligned, room);
    refengine::PagePool pages(config_, kPageTokens, kPages, {static_cast<std::byte*>(aligned), bytes});
    const auto served = rag::FullRecompute(runtime(), pages).Serve(prompt);
    EXPECT_TRUE(served.ok()) << served.status();
    return served->logits;
  }

  // A process that signals the daemon as soon as it writes into the first attention layer's pages of `engine`, all of
  // which are free.
  pid_t SignalWhenItLands(ServingEngine& engine, int signal) {
    engine.serving->last() = {};  // its pages too
    const uint64_t bytes = refengine::PagePool::RequiredBytes(config_, kPageTokens, kPages);
    float* floats = reinterpret_cast<float*>(engine.region.data());
    std::fill(floats, floats + bytes / sizeof(float), kPoison);
    const refengine::PagedLayerGeometry layer = engine.pages->Geometry(0);
    const pid_t child = fork();
    if (child != 0) return child;
    alarm(30);
    for (;;) {
      for (int32_t page = 0; page < kPages; ++page) {
        const volatile float* value =
            reinterpret_cast<float*>(engine.region.data() + layer.key_offset + page * layer.page_stride);
        if (*value != kPoison) {
          kill(daemon_.pid(), signal);
          _exit(0);
        }
      }
    }
  }

  const ModelConfig config_ = WideConfig();
  const refengine::Model model_{config_};
  kernels::ThreadPool pool_{2};
  const kernels::Kernels& kernels_ = kernels::Host();
  const std::unique_ptr<kernels::Queue> queue_ = kernels_.MakeQueue(&pool_);
  refengine::Engine engine_{model_, kernels_, pool_};
  DaemonProcess daemon_{{.dram = "512MiB", .arena = "64MiB", .tenants = "", .threads = 1}};
};

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
  EXPECT_LT(rag::RelativeL2(moved.logits, FullRecompute(turned)), 0.5);
}

TEST_F(Serving, ADaemonThatDiesInTheMiddleOfALandingCostsTimeOnly) {
  ServingEngine engine(daemon_.client_options(), runtime());
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3, 4, 5, 6});
  const std::vector<float> full = FullRecompute(prompt);
  engine.Serve(prompt);
  const std::vector<float> cached = engine.Serve(prompt).logits;
  ASSERT_GT(rag::RelativeL2(cached, full), 10 * kSame) << "the two answers must be told apart";

  // The end may come when the landing is over; then the answer is the cached one, and it is tried again.
  bool interrupted = false;
  for (int attempt = 0; attempt < 10 && !interrupted; ++attempt) {
    engine.Serve(prompt);
    const pid_t killer = SignalWhenItLands(engine, SIGKILL);
    const rag::Served served = engine.Serve(prompt);
    EXPECT_EQ(waitpid(killer, nullptr, 0), killer);
    daemon_.Kill();
    EXPECT_EQ(served.hits, 7u) << "the match came before the end";
    interrupted = served.computed_tokens == prompt.tokens.size();
    EXPECT_LT(rag::RelativeL2(served.logits, interrupted ? full : cached), kSame);

    const rag::Served alone = engine.Serve(prompt);  // nobody is there
    EXPECT_EQ(alone.hits, 0u);
    EXPECT_LT(rag::RelativeL2(alone.logits, full), kSame);

    daemon_.Start();
    ASSERT_TRUE(Eventually([&] { return engine.client->connected(); }));
  }
  EXPECT_TRUE(interrupted) << "every landing was over before the daemon was killed";

  engine.Serve(prompt);
  const rag::Served again = engine.Serve(prompt);
  EXPECT_EQ(again.misses, 0u);
  EXPECT_LT(rag::RelativeL2(again.logits, cached), kSame);
}

// The landing stays in doubt, and its pages in quarantine; the pool has none for setting the prompt anew beside them.
TEST_F(Serving, APromptWaitsForPagesInQuarantine) {
  const rag::Patience hasty{.land = std::chrono::milliseconds(500)};
  ServingEngine engine(daemon_.client_options(), runtime(), hasty);
  const RagPrompt prompt = MakeTestPrompt({1, 2, 3, 4, 5, 6});
  const std::vector<float> full = FullRecompute(prompt);
  engine.Serve(prompt);

  // The daemon may be done before it stops; then there is nothing to wait for, and it is tried again.
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

TEST_F(Serving, APromptDoesNotWaitForPagesForEver) {
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

TEST_F(Serving, ADaemonThatStandsStillForAWhileCostsTimeOnly) {
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

}  // namespace
}  // namespace ashlar::integration
