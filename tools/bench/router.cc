// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench router`: time to first token of a cold prompt whose segments several nodes' engines compute at once
// (HYPIC Fig. 14's shape), for segments of one length and of mixed lengths, and for tuples of qwen3-next's size.
// Prefill, also of seams and question, is emulated: an engine sleeps as long as its GPU would compute. All else is
// real: daemons of a cluster with etcd, tuples, keys and values, transfers, landings, and compositions (on the CPU).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/engine.h"
#include "examples/testing/local_nodes.h"
#include "proto/outcome.h"
#include "tools/bench/bench.h"
#include "tools/bench/emulated_engine.h"

namespace ashlar::bench {
namespace {

constexpr size_t kNodes = 8;
constexpr size_t kWholeNodes = 4;                      // with tuples of qwen3-next's size: memory limits them
constexpr uint64_t kWholeDram = uint64_t{2560} << 20;  // bytes per node; a prompt of 11 segments has 1.5 GB
constexpr uint64_t kShortest = 1200, kLongest = 4800;  // tokens of the segments of mixed lengths
constexpr double kTokensPerSecond = EmulatedEngine::kTokensPerSecond;

using Lengths = std::vector<uint64_t>;

uint64_t Sum(const Lengths& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
}

// Evenly spaced from the shortest to the longest, taken from both ends alternately, so that neither the first nor the
// last ones are all long.
Lengths Mixed(size_t count) {
  Lengths lengths;
  for (size_t i = 0; i < count; ++i) {
    const size_t place = i % 2 == 0 ? i / 2 : count - 1 - i / 2;
    lengths.push_back(kShortest + place * (kLongest - kShortest) / (count - 1));
  }
  return lengths;
}

struct Bound {
  double milliseconds = 0;
  uint64_t last = 0;  // tokens of the segment that ends last
};

// Longest first, each to the least loaded worker.
Bound LongestFirst(Lengths lengths, size_t workers) {
  std::sort(lengths.begin(), lengths.end(), std::greater<>());
  std::vector<Bound> shares(workers);
  const auto less = [](const Bound& a, const Bound& b) { return a.milliseconds < b.milliseconds; };
  for (const uint64_t tokens : lengths) {
    Bound& share = *std::min_element(shares.begin(), shares.end(), less);
    share.milliseconds += static_cast<double>(tokens) / kTokensPerSecond * 1e3;
    share.last = tokens;
  }
  return *std::max_element(shares.begin(), shares.end(), less);
}

// Engines that offer prefill, on all nodes except the first, while this lives.
class Helpers {
 public:
  ~Helpers() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  absl::Status Start(const tools::LocalNodes& nodes, size_t count, EmulatedSize size) {
    for (size_t node = 1; node <= count; ++node) {
      engines_.push_back(std::make_unique<EmulatedEngine>());
      const absl::Status status = engines_.back()->Open(nodes.daemon(node).sockets(), EmulatedEngine::PagesOf(kLongest),
                                                        kTokensPerSecond, size);
      if (!status.ok()) return status;
    }
    for (const auto& engine : engines_) threads_.emplace_back([this, &engine = *engine] { engine.Serve(stop_); });
    // The requester's node remembers for a second that the others had none.
    if (count > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    return absl::OkStatus();
  }

 private:
  std::atomic<bool> stop_ = false;
  std::vector<std::unique_ptr<EmulatedEngine>> engines_;
  std::vector<std::thread> threads_;
};

struct Bench {
  const tools::LocalNodes& nodes;
  EmulatedEngine asker, reader, holder;  // of the first node; also there, taking every hit; of the second node
  Prompts prompts;
  int repetitions = 1;
  EmulatedSize size;

  // With pages for prompts of `tokens`.
  absl::Status Open(uint64_t tokens) {
    const tools::DaemonSockets first = nodes.daemon(0).sockets(), second = nodes.daemon(1).sockets();
    const uint64_t one = EmulatedEngine::PagesOf(kLongest + EmulatedEngine::kQuestionTokens);
    absl::Status status = asker.Open(first, EmulatedEngine::PagesOf(tokens), kTokensPerSecond, size);
    if (status.ok()) status = reader.Open(first, one, 0, size);
    if (status.ok()) status = holder.Open(second, one, 0, size);
    return status;
  }
};

// From the lookup until a segment of the second node has landed on the first one.
absl::Status MeasureTransfer(Bench& bench, uint64_t tokens, double& milliseconds) {
  std::vector<double> times;
  const Lengths one = {tokens};
  for (int i = -1; i < bench.repetitions; ++i) {
    const std::vector<int32_t> prompt = bench.prompts.Next(tokens + EmulatedEngine::kQuestionTokens);
    if (const auto published = bench.holder.Ask(prompt, false, one); !published.ok()) return published.status();
    absl::StatusOr<EmulatedEngine::Landed> landed;
    bool came = false;
    // Until the first node has learned of it.
    for (int tries = 0; tries < 250 && !came; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      landed = bench.reader.Land(prompt, one);
      if (!landed.ok()) return landed.status();
      came = landed->tiers[static_cast<size_t>(TierKind::kRemote)] == 1;
    }
    if (!came) return absl::InternalError(absl::StrCat("a segment of another node was missed: ", landed->missed));
    if (i >= 0) times.push_back(landed->landed_ms);  // the first one may make the connection
  }
  milliseconds = Median(times);
  return absl::OkStatus();
}

absl::Status Measure(Bench& bench, const Lengths& lengths, size_t workers, nlohmann::json& cases) {
  std::vector<double> ttft, combine, landing, composing;
  uint64_t elsewhere = 0, hits = 0, seam_tokens = 0;
  const uint64_t tokens = Sum(lengths) + EmulatedEngine::kQuestionTokens;
  // The first one measures rates, which are not needed for a single worker.
  for (int i = workers > 1 ? -1 : 0; i < bench.repetitions; ++i) {
    const auto times = bench.asker.Ask(bench.prompts.Next(tokens), workers > 1, lengths);
    if (!times.ok()) return times.status();
    if (i < 0) continue;
    ttft.push_back(times->ttft_ms);
    combine.push_back(times->combine_ms);
    landing.push_back(times->landing_ms);
    composing.push_back(times->composing_ms);
    seam_tokens = times->seam_tokens;
    elsewhere = times->elsewhere;
    hits += times->hits;
  }
  Bound bound = LongestFirst(lengths, workers);
  bound.milliseconds += static_cast<double>(seam_tokens) / kTokensPerSecond * 1e3;
  double transfer = 0;  // with a single worker nothing is transferred
  if (workers > 1) {
    if (absl::Status status = MeasureTransfer(bench, bound.last, transfer); !status.ok()) return status;
  }
  const double median = Median(ttft);
  const double alone = cases.empty() ? median : cases[0]["ttft_ms"].get<double>();
  cases.push_back({{"workers", workers},
                   {"ttft_ms", median},
                   {"bound_ms", bound.milliseconds},
                   {"transfer_ms", transfer},
                   {"of_it", median / (bound.milliseconds + transfer)},
                   {"combine_ms", Median(combine)},
                   {"landing_ms", Median(landing)},
                   {"composing_ms", Median(composing)},
                   {"seam_tokens", seam_tokens},
                   {"speed_up", alone / median},
                   {"elsewhere", elsewhere},
                   {"landed", static_cast<double>(hits) / bench.repetitions}});
  return absl::OkStatus();
}

void Print(const std::string& name, const Lengths& lengths, const nlohmann::json& cases) {
  std::printf("%zu segments of %s, %zu tokens, %.0f tokens a second\n%8s %10s %10s %12s %8s %12s %11s %8s %10s\n",
              lengths.size(), name.c_str(), static_cast<size_t>(Sum(lengths)), kTokensPerSecond, "workers", "ttft_ms",
              "bound_ms", "transfer_ms", "of it", "composing_ms", "landing_ms", "speed-up", "elsewhere");
  for (const nlohmann::json& one : cases) {
    std::printf("%8zu %10.0f %10.0f %12.1f %8.3f %12.1f %11.1f %8.2f %10zu\n", one["workers"].get<size_t>(),
                one["ttft_ms"].get<double>(), one["bound_ms"].get<double>(), one["transfer_ms"].get<double>(),
                one["of_it"].get<double>(), one["composing_ms"].get<double>(), one["landing_ms"].get<double>(),
                one["speed_up"].get<double>(), one["elsewhere"].get<size_t>());
  }
}

struct Series {
  std::string name, field;  // of the table; of the JSON file
  Lengths lengths;
  nlohmann::json cases = nlohmann::json::array();
};

// All series, with 1, 2, 4, … engines up to `count`.
absl::Status Run(EmulatedSize size, size_t count, uint64_t dram_bytes, int repetitions, std::vector<Series>& series) {
  auto nodes = tools::LocalNodes::Start(count, {.dram_bytes = dram_bytes, .threads = 1});
  if (!nodes.ok()) return nodes.status();
  Bench bench{.nodes = **nodes, .asker = {}, .reader = {}, .holder = {}, .prompts = Prompts()};
  bench.repetitions = repetitions;
  bench.size = size;
  uint64_t tokens = 0;
  for (const Series& one : series) tokens = std::max(tokens, Sum(one.lengths) + EmulatedEngine::kQuestionTokens);
  absl::Status status = bench.Open(tokens);
  for (size_t workers = 1; workers <= count && status.ok(); workers *= 2) {
    Helpers helpers;
    status = helpers.Start(bench.nodes, workers - 1, size);
    for (Series& one : series) {
      if (status.ok()) status = Measure(bench, one.lengths, workers, one.cases);
    }
  }
  return status;
}

}  // namespace

absl::Status Router(const Options& options, nlohmann::json& figures) {
  const size_t count = options.quick ? 2 : kNodes, segments = options.quick ? 3 : EmulatedEngine::kSegments;
  const int repetitions = options.quick ? 1 : std::min(options.repetitions, 3);
  const Lengths equal(segments, EmulatedEngine::kSegmentTokens), mixed = Mixed(segments);
  figures["machine"] = Machine();
  figures["segments"] = segments;
  figures["segment_tokens"] = EmulatedEngine::kSegmentTokens;
  figures["mixed_tokens"] = mixed;
  figures["tokens_per_second"] = kTokensPerSecond;
  figures["tuple_bytes"] = EmulatedEngine::kScaled.tuple_bytes();
  figures["whole_tuple_bytes"] = EmulatedEngine::kWhole.tuple_bytes();
  std::vector<Series> scaled = {{"one length", "cases", equal}, {"mixed lengths", "mixed_cases", mixed}};
  std::vector<Series> whole = {{"one length, tuples of qwen3-next", "whole_cases", equal}};
  absl::Status status = Run(EmulatedEngine::kScaled, count, uint64_t{512} << 20, repetitions, scaled);
  if (status.ok()) status = Run(EmulatedEngine::kWhole, std::min(count, kWholeNodes), kWholeDram, repetitions, whole);
  if (!status.ok()) return status;
  for (std::vector<Series>* all : {&scaled, &whole}) {
    for (Series& one : *all) {
      Print(one.name, one.lengths, one.cases);
      figures[one.field] = std::move(one.cases);
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::bench
