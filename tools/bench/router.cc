// `ashlar-bench router`: time to first token of a cold prompt whose segments several nodes' engines compute at once
// (HYPIC Fig. 14's shape). Prefill is emulated: an engine sleeps as long as its GPU would compute. All else is real:
// daemons of a cluster with etcd, tuples and keys and values of qwen3-next's layout scaled down, transfers, landings.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/engine.h"
#include "examples/local_daemon/local_nodes.h"
#include "tools/bench/bench.h"
#include "tools/bench/emulated_engine.h"

namespace ashlar::bench {
namespace {

constexpr uint64_t kSegments = EmulatedEngine::kSegments, kSegmentTokens = EmulatedEngine::kSegmentTokens;
constexpr size_t kNodes = 8;
constexpr double kTokensPerSecond = EmulatedEngine::kTokensPerSecond;

// Of equally long segments: each worker's share, the largest one.
double BoundMilliseconds(size_t workers) {
  const uint64_t rounds = (kSegments + workers - 1) / workers;
  return static_cast<double>(rounds * kSegmentTokens) / kTokensPerSecond * 1e3;
}

// Of one number of workers, the asking engine among them.
absl::Status Measure(const tools::LocalNodes& nodes, EmulatedEngine& asker, size_t workers, int repetitions,
                     Prompts& prompts, nlohmann::json& cases) {
  std::atomic<bool> stop = false;
  std::vector<std::unique_ptr<EmulatedEngine>> engines;
  for (size_t node = 1; node < workers; ++node) {
    engines.push_back(std::make_unique<EmulatedEngine>());
    const absl::Status status =
        engines.back()->Open(nodes.daemon(node).client_options(), EmulatedEngine::kSegmentPages);
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
  if (absl::Status status = asker.Open((*nodes)->daemon(0).client_options(), EmulatedEngine::kPromptPages);
      !status.ok())
    return status;
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
