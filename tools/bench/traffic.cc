// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench traffic`: how long landings from a node's own memory take while other nodes fetch from it as fast as
// they can, and it fetches from them. The node and its engines have one half of the cores, all others the other half.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/testing/local_nodes.h"
#include "kernels/mutex.h"
#include "proto/outcome.h"
#include "tools/bench/bench.h"
#include "tools/bench/emulated_engine.h"
#include "tools/bench/processes.h"

namespace ashlar::bench {
namespace {

using Watch = std::chrono::steady_clock;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr size_t kEngines = 16, kLocal = 8;            // prompts of a segment each: about 50 MiB
constexpr size_t kFarPrompts = 12, kFarSegments = 11;  // 66 MiB each, more than the reader has memory for
constexpr double kLandingsPerSecond = 48;              // sum of all engines
constexpr uint64_t kOneSegment = EmulatedEngine::kSegmentTokens + EmulatedEngine::kQuestionTokens;

std::vector<std::vector<int32_t>> Draw(Prompts& prompts, size_t count, uint64_t tokens) {
  std::vector<std::vector<int32_t>> drawn;
  for (size_t i = 0; i < count; ++i) drawn.push_back(prompts.Next(tokens));
  return drawn;
}

absl::Status PublishAll(const tools::LocalDaemon& daemon, const std::vector<std::vector<int32_t>>& prompts) {
  EmulatedEngine engine;
  absl::Status status = engine.Open(daemon.sockets(), EmulatedEngine::kPromptPages, 0);
  if (!status.ok()) return status;
  for (const auto& prompt : prompts) {
    if (const auto asked = engine.Ask(prompt, false); !asked.ok()) return asked.status();
  }
  return absl::OkStatus();
}

struct Counts {
  std::atomic<uint64_t> remote_bytes{0}, errors{0};
};

// An engine that lands prompts of its node's own memory, at random times. It "computes" and publishes what it misses in
// no time.
class LocalEngine {
 public:
  LocalEngine(const tools::LocalDaemon& daemon, const std::vector<std::vector<int32_t>>& prompts, uint64_t seed)
      : prompts_(prompts), random_(seed), thread_([this, &daemon] { Run(daemon); }) {}
  ~LocalEngine() {
    stop_ = true;
    thread_.join();
  }
  // Landings since the previous call of Take.
  struct Landings {
    std::vector<double> milliseconds;
    uint64_t misses = 0;
  };
  Landings Take() {
    MutexLock lock(mutex_);
    return std::exchange(landings_, {});
  }
  bool ready() const { return ready_; }

 private:
  void Run(const tools::LocalDaemon& daemon) {
    RunOn(0, Half(false));
    EmulatedEngine engine;
    if (!engine.Open(daemon.sockets(), EmulatedEngine::kSegmentPages + 8, 0).ok()) return;
    ready_ = true;
    std::exponential_distribution<double> pause(kLandingsPerSecond / kEngines);
    Watch::time_point next = Watch::now();
    while (!stop_) {
      next += std::chrono::duration_cast<Watch::duration>(std::chrono::duration<double>(pause(random_)));
      while (!stop_ && Watch::now() < next) {
        std::this_thread::sleep_until(std::min(next, Watch::now() + std::chrono::milliseconds(500)));
      }
      const std::vector<int32_t>& prompt = prompts_[random_() % prompts_.size()];
      const auto landed = engine.Land(prompt);
      const bool hit = landed.ok() && landed->tiers[static_cast<size_t>(TierKind::kDram)] > 0;
      if (!hit) engine.Ask(prompt, false).IgnoreError();
      MutexLock lock(mutex_);
      if (hit) landings_.milliseconds.push_back(landed->landed_ms);
      landings_.misses += hit ? 0 : 1;
    }
  }

  const std::vector<std::vector<int32_t>>& prompts_;
  std::mt19937_64 random_;
  std::atomic<bool> stop_{false}, ready_{false};
  Mutex mutex_;
  Landings landings_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// An engine that reads another node's objects, round and round, without a pause.
class FarReader {
 public:
  FarReader(const tools::LocalDaemon& daemon, bool second_half, const std::vector<std::vector<int32_t>>& prompts,
            Counts& counts)
      : prompts_(prompts), counts_(counts), thread_([this, &daemon, second_half] { Run(daemon, second_half); }) {}
  ~FarReader() {
    stop_ = true;
    thread_.join();
  }

 private:
  void Run(const tools::LocalDaemon& daemon, bool second_half) {
    RunOn(0, Half(second_half));
    EmulatedEngine engine;
    if (!engine.Open(daemon.sockets(), EmulatedEngine::kPromptPages, 0).ok()) return;
    for (size_t i = 0; !stop_; i = (i + 1) % prompts_.size()) {
      const auto landed = engine.Land(prompts_[i]);
      if (!landed.ok()) ++counts_.errors;
      if (!landed.ok() || landed->hits == 0) continue;
      counts_.remote_bytes += landed->bytes * landed->tiers[static_cast<size_t>(TierKind::kRemote)] / landed->hits;
    }
  }

  const std::vector<std::vector<int32_t>>& prompts_;
  Counts& counts_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

struct Phase {
  std::vector<double> milliseconds;
  uint64_t misses = 0;
  double in_gbps = 0, out_gbps = 0, seconds = 0;
};

Phase Measure(std::vector<std::unique_ptr<LocalEngine>>& engines, double seconds, const Counts& in, const Counts& out) {
  for (auto& engine : engines) engine->Take();
  const uint64_t in_before = in.remote_bytes, out_before = out.remote_bytes;
  const Watch::time_point begin = Watch::now();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  Phase phase{.seconds = std::chrono::duration<double>(Watch::now() - begin).count()};
  phase.in_gbps = static_cast<double>(in.remote_bytes - in_before) / phase.seconds / 1e9;
  phase.out_gbps = static_cast<double>(out.remote_bytes - out_before) / phase.seconds / 1e9;
  for (auto& engine : engines) {
    const LocalEngine::Landings taken = engine->Take();
    phase.milliseconds.insert(phase.milliseconds.end(), taken.milliseconds.begin(), taken.milliseconds.end());
    phase.misses += taken.misses;
  }
  return phase;
}

void Report(const char* name, const Phase& phase, nlohmann::json& figures) {
  const double p50 = Percentile(phase.milliseconds, 0.5), p99 = Percentile(phase.milliseconds, 0.99);
  std::printf("%10s %10zu %10zu %10.2f %10.2f %10.2f %10.2f\n", name, phase.milliseconds.size(),
              static_cast<size_t>(phase.misses), p50, p99, phase.in_gbps, phase.out_gbps);
  figures["cases"].push_back({{"traffic", name},
                              {"landings", phase.milliseconds.size()},
                              {"misses", phase.misses},
                              {"p50_ms", p50},
                              {"p99_ms", p99},
                              {"in_gbps", phase.in_gbps},
                              {"out_gbps", phase.out_gbps}});
}

}  // namespace

// Node 0 is measured. It reads objects of node 1; node 2, which has little memory, reads objects of node 0.
absl::Status Traffic(const Options& options, nlohmann::json& figures) {
  figures["machine"] = Machine();
  figures["engines"] = kEngines;
  figures["landings_per_second"] = kLandingsPerSecond;
  const double seconds = options.quick ? 2 : options.seconds > 0 ? options.seconds : 20;
  const auto far = tools::LocalNodes::Start(std::vector<tools::LocalDaemonOptions>{
      {.dram_bytes = (options.quick ? 192 : 768) * kMiB, .threads = 1, .metrics = true},
      {.dram_bytes = (options.quick ? 320 : 1024) * kMiB, .threads = 1},
      {.dram_bytes = 40 * kMiB, .threads = 1}});
  if (!far.ok()) return far.status();
  const tools::LocalNodes& nodes = **far;
  for (size_t node = 0; node < 3; ++node) RunOn(nodes.daemon(node).pid(), Half(node > 0));
  RunOn(nodes.etcd().pid(), Half(true));
  Prompts drawn(11);
  const auto local = Draw(drawn, kLocal, kOneSegment);
  const size_t far_prompts = options.quick ? 3 : kFarPrompts;
  const auto remote =
      Draw(drawn, far_prompts, kFarSegments * EmulatedEngine::kSegmentTokens + EmulatedEngine::kQuestionTokens);
  if (absl::Status status = PublishAll(nodes.daemon(0), local); !status.ok()) return status;
  if (absl::Status status = PublishAll(nodes.daemon(1), remote); !status.ok()) return status;
  const auto known = [&] {
    return MetricOf(nodes.daemon(0).metrics_port(), "ashlar_directory_entries") >=
           static_cast<double>(far_prompts * kFarSegments);
  };
  for (int tries = 0; tries < 500 && !known(); ++tries) std::this_thread::sleep_for(std::chrono::milliseconds(20));

  std::vector<std::unique_ptr<LocalEngine>> engines;
  for (size_t i = 0; i < kEngines; ++i) engines.push_back(std::make_unique<LocalEngine>(nodes.daemon(0), local, i));
  for (const auto& engine : engines) {
    for (int tries = 0; tries < 3000 && !engine->ready(); ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (!engine->ready()) return absl::InternalError("an engine did not start");
  }
  Counts in, out;
  std::printf("%10s %10s %10s %10s %10s %10s %10s\n", "traffic", "landings", "misses", "p50_ms", "p99_ms", "in_GB/s",
              "out_GB/s");
  Measure(engines, seconds / 4, in, out);
  const Phase alone = Measure(engines, seconds, in, out);
  Report("none", alone, figures);
  const FarReader reader(nodes.daemon(0), false, remote, in), fetcher(nodes.daemon(2), true, local, out);
  Measure(engines, seconds / 4, in, out);
  const Phase under = Measure(engines, seconds, in, out);
  Report("both ways", under, figures);
  const double ratio = Percentile(under.milliseconds, 0.99) / Percentile(alone.milliseconds, 0.99);
  std::printf("p99 under traffic is %.2f times that alone; %zu far landings failed\n", ratio,
              static_cast<size_t>(in.errors + out.errors));
  figures["p99_ratio"] = ratio;
  figures["far_errors"] = in.errors + out.errors;
  return absl::OkStatus();
}

}  // namespace ashlar::bench
