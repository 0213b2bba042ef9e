// `ashlar-bench router`: time to first token of a cold prompt whose segments several nodes' engines compute at once
// (HYPIC Fig. 14's shape). Prefill is emulated: an engine sleeps as long as its GPU would compute. All else is real:
// daemons of a cluster with etcd, tuples and keys and values of qwen3-next's layout scaled down, transfers, landings.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/engine.h"
#include "examples/local_daemon/local_nodes.h"
#include "tools/bench/bench.h"

namespace ashlar::bench {
namespace {

using Watch = std::chrono::steady_clock;

constexpr uint64_t kSegments = 11, kSegmentTokens = 2400, kQuestionTokens = 64;
constexpr uint32_t kPageTokens = 16, kSeam = 8;
constexpr size_t kNodes = 8;
constexpr double kTokensPerSecond = 6000;
constexpr uint32_t kLinearHeads = 4, kHeadDim = 128, kConvKernel = 4, kConvChannels = 3 * kLinearHeads * kHeadDim;
constexpr uint64_t kPromptPages = (kSegments * kSegmentTokens + kQuestionTokens) / kPageTokens;
constexpr uint64_t kSegmentPages = kSegmentTokens / kPageTokens;

double MillisecondsSince(Watch::time_point start) {
  return std::chrono::duration<double, std::milli>(Watch::now() - start).count();
}

// One period of qwen3-next: three linear layers, then attention. An eighth of its linear heads, all of its keys and
// values.
std::vector<engine::Layer> Layers(const std::vector<double>& frequencies) {
  engine::Layer linear{.kind = engine::LayerKind::kLinear};
  linear.family = Family::kGdn;
  linear.key_heads = linear.value_heads = kLinearHeads;
  linear.d_k = linear.d_v = kHeadDim;
  linear.conv_channels = kConvChannels;
  linear.conv_kernel = kConvKernel;
  engine::Layer attention{.kind = engine::LayerKind::kGqa};
  attention.rope = {.style = RopeStyle::kHalfSplit,
                    .rotary_dim = static_cast<uint32_t>(2 * frequencies.size()),
                    .frequencies = frequencies.data()};
  attention.kv_heads = 2;
  attention.key_dim = attention.value_dim = 256;
  attention.dtype = DType::kBF16;
  return {linear, linear, linear, attention};
}

// An engine that sleeps where another one computes.
class EmulatedEngine {
 public:
  EmulatedEngine() : state_(kLinearHeads * kHeadDim * kHeadDim), transition_(state_.size()) {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal(0, 0.05f);
    for (float& value : state_) value = normal(random);
    for (float& value : transition_) value = normal(random);
    tail_.assign((kConvKernel - 1) * kConvChannels, 0.5f);
    for (uint32_t layer = 0; layer < 3; ++layer) {
      tensors_.push_back(
          {.layer = layer, .state = state_.data(), .conv_tail = tail_.data(), .transition = transition_.data()});
    }
  }

  // With room for so many tokens' pages.
  absl::Status Open(const ClientOptions& daemon, uint64_t pages) {
    std::vector<double> frequencies;
    for (int i = 0; i < 32; ++i) frequencies.push_back(std::pow(1e7, -i / 32.0));
    const std::vector<engine::Layer> layers = Layers(frequencies);
    engine::OpenOptions options;
    options.rpc_socket = daemon.rpc_socket.c_str();
    options.session_socket = daemon.session_socket.c_str();
    options.name = "bench-router";
    options.timeout_ms = 60'000;
    options.model.model_id = "emulated";
    options.model.weights_digest = "none";
    options.model.dtype = "bf16";
    options.model.page_tokens = kPageTokens;
    options.model.head = options.model.tail = kSeam;
    options.model.layers = layers.data();
    options.model.layer_count = static_cast<uint32_t>(layers.size());
    options.model.tokens_per_second = kTokensPerSecond;
    options.memory.pages = static_cast<uint32_t>(pages);
    options.epsilon = 0;
    const engine::Status opened = engine::Cache::Open(options, &cache_);
    if (!opened.ok()) return absl::InternalError(opened.message);
    for (uint64_t page = 0; page < pages; ++page) pages_.push_back(static_cast<int32_t>(page));
    std::memset(cache_.data(), 0x3c, cache_.bytes());  // no page is touched for the first time while something counts
    return absl::OkStatus();
  }

  // Computes and publishes what a request misses, from run `filled` on.
  absl::Status Fill(engine::Request& request, uint32_t& filled) {
    uint32_t missing = 0;
    const engine::Run* const runs = request.missing(&missing);
    for (; filled < missing; ++filled) {
      const std::chrono::duration<double> takes(static_cast<double>(runs[filled].token_count) / kTokensPerSecond);
      std::this_thread::sleep_for(takes);
      const engine::ComputedRun computed{tensors_.data(), static_cast<uint32_t>(tensors_.size()), pages_.data(),
                                         kSegmentPages};
      if (const engine::Status status = request.Publish(filled, computed, nullptr); !status.ok()) {
        return absl::InternalError(status.message);
      }
    }
    return absl::OkStatus();
  }

  // Serves others until told to stop.
  void Serve(const std::atomic<bool>& stop) {
    while (!stop) {
      engine::Request work;
      uint32_t filled = 0;
      if (cache_.ServePrefill(100, &work).ok()) Fill(work, filled).IgnoreError();
    }
  }

  struct Times {
    double ttft_ms = 0, combine_ms = 0;
    uint64_t elsewhere = 0, hits = 0;
  };
  // A cold prompt, whose first token comes as soon as everything cached is in its place.
  absl::StatusOr<Times> Ask(std::span<const int32_t> tokens, bool parallel) {
    const Watch::time_point begin = Watch::now();
    const std::vector<uint64_t> lengths(kSegments, kSegmentTokens);
    engine::Prompt prompt{.tokens = tokens.data(),
                          .token_count = tokens.size(),
                          .segment_lengths = lengths.data(),
                          .segment_count = lengths.size(),
                          .page_table = pages_.data(),
                          .page_count = kPromptPages,
                          .fill = true,
                          .cold_parallel = parallel};
    engine::Request request;
    if (const engine::Status status = cache_.Begin(&prompt, 1, &request); !status.ok()) {
      return absl::InternalError(status.message);
    }
    Times times{.elsewhere = request.elsewhere()};
    uint32_t filled = 0;
    do {
      if (absl::Status status = Fill(request, filled); !status.ok()) return status;
    } while (request.WaitCold(60'000).code == engine::Code::kRestart);
    const Watch::time_point combine = Watch::now();
    if (const engine::Status status = request.LookAgain(nullptr, 0); !status.ok()) {
      return absl::InternalError(status.message);
    }
    for (uint32_t layer = 0; layer < 4; ++layer) request.WaitLayer(layer);
    if (const engine::Status status = request.Finish(); !status.ok()) return absl::InternalError(status.message);
    times.combine_ms = MillisecondsSince(combine);
    times.ttft_ms = MillisecondsSince(begin);
    for (uint32_t i = 0; i < request.plan().segment_count; ++i) times.hits += request.plan().segments[i].used;
    return times;
  }

 private:
  engine::Cache cache_;
  std::vector<float> state_, transition_, tail_;
  std::vector<engine::LinearTensors> tensors_;
  std::vector<int32_t> pages_;
};

// Of equally long segments: each worker's share, the largest one.
double BoundMilliseconds(size_t workers) {
  const uint64_t rounds = (kSegments + workers - 1) / workers;
  return static_cast<double>(rounds * kSegmentTokens) / kTokensPerSecond * 1e3;
}

class Prompts {
 public:
  std::vector<int32_t> Next() {
    std::vector<int32_t> tokens(kSegments * kSegmentTokens + kQuestionTokens);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random_() % 150'000);
    return tokens;
  }

 private:
  std::mt19937_64 random_{2};
};

// Of one number of workers, the asking engine among them.
absl::Status Measure(const tools::LocalNodes& nodes, EmulatedEngine& asker, size_t workers, int repetitions,
                     Prompts& prompts, nlohmann::json& cases) {
  std::atomic<bool> stop = false;
  std::vector<std::unique_ptr<EmulatedEngine>> engines;
  for (size_t node = 1; node < workers; ++node) {
    engines.push_back(std::make_unique<EmulatedEngine>());
    const absl::Status status = engines.back()->Open(nodes.daemon(node).client_options(), kSegmentPages);
    if (!status.ok()) return status;
  }
  std::vector<std::thread> threads;
  for (const auto& engine : engines) threads.emplace_back([&engine = *engine, &stop] { engine.Serve(stop); });
  // The asker's node remembers for a second that the others had none.
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  std::vector<double> ttft, combine;
  uint64_t elsewhere = 0, hits = 0;
  absl::Status status;
  for (int i = -1; i < repetitions && status.ok(); ++i) {
    const absl::StatusOr<EmulatedEngine::Times> times = asker.Ask(prompts.Next(), workers > 1);
    status = times.status();
    if (i < 0 || !status.ok()) continue;  // the first one measures rates
    ttft.push_back(times->ttft_ms);
    combine.push_back(times->combine_ms);
    elsewhere = times->elsewhere;
    hits += times->hits;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  if (!status.ok()) return status;
  cases.push_back({{"workers", workers},
                   {"ttft_ms", Median(ttft)},
                   {"bound_ms", BoundMilliseconds(workers)},
                   {"combine_ms", Median(combine)},
                   {"elsewhere", elsewhere},
                   {"landed", static_cast<double>(hits) / repetitions}});
  return absl::OkStatus();
}

}  // namespace

absl::Status Router(const Options& options, nlohmann::json& figures) {
  figures["machine"] = Machine();
  figures["segments"] = kSegments;
  figures["segment_tokens"] = kSegmentTokens;
  figures["tokens_per_second"] = kTokensPerSecond;
  const size_t count = options.quick ? 2 : kNodes;
  auto nodes = tools::LocalNodes::Start(count, {.dram_bytes = uint64_t{512} << 20, .threads = 1});
  if (!nodes.ok()) return nodes.status();
  EmulatedEngine asker;
  if (absl::Status status = asker.Open((*nodes)->daemon(0).client_options(), kPromptPages); !status.ok()) return status;
  Prompts prompts;
  nlohmann::json cases = nlohmann::json::array();
  const int repetitions = options.quick ? 1 : std::min(options.repetitions, 5);
  for (size_t workers = 1; workers <= count; workers *= 2) {
    const absl::Status status = Measure(**nodes, asker, workers, repetitions, prompts, cases);
    if (!status.ok()) return status;
  }
  std::printf("%zu segments of %zu tokens, %.0f tokens a second\n%8s %10s %10s %8s %11s %8s %10s\n",
              static_cast<size_t>(kSegments), static_cast<size_t>(kSegmentTokens), kTokensPerSecond, "workers",
              "ttft_ms", "bound_ms", "of it", "combine_ms", "speed-up", "elsewhere");
  const double alone = cases[0]["ttft_ms"].get<double>();
  for (nlohmann::json& one : cases) {
    const double ttft = one["ttft_ms"].get<double>();
    one["ratio"] = ttft / one["bound_ms"].get<double>();
    one["speed_up"] = alone / ttft;
    std::printf("%8zu %10.0f %10.0f %8.3f %11.1f %8.2f %10zu\n", one["workers"].get<size_t>(), ttft,
                one["bound_ms"].get<double>(), one["ratio"].get<double>(), one["combine_ms"].get<double>(),
                one["speed_up"].get<double>(), one["elsewhere"].get<size_t>());
  }
  figures["cases"] = std::move(cases);
  return absl::OkStatus();
}

}  // namespace ashlar::bench
