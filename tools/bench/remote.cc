// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench remote`: from the lookup of a prompt until all of it is landed from another node, against landing from
// the node's own memory and disk, and against computing. Computing is emulated; everything else is real.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/testing/local_nodes.h"
#include "proto/outcome.h"
#include "tools/bench/bench.h"
#include "tools/bench/emulated_engine.h"
#include "tools/bench/processes.h"

namespace ashlar::bench {
namespace {

constexpr uint64_t kDram = uint64_t{1} << 30;
constexpr uint64_t kQuestion = EmulatedEngine::kQuestionTokens;

// Ended with its last use.
class Folder {
 public:
  explicit Folder(const std::string& dir) {
    std::string name = absl::StrCat(dir.empty() ? "/tmp" : dir, "/ashlar-remote-XXXXXX");
    if (mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~Folder() {
    std::error_code error;
    if (!path_.empty()) std::filesystem::remove_all(path_, error);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct Case {
  std::string source;
  uint64_t segments = 0, bytes = 0;
  std::vector<double> milliseconds;
};

absl::Status Expect(const EmulatedEngine::Landed& landed, uint64_t segments, TierKind tier) {
  const uint64_t there = landed.tiers[static_cast<size_t>(tier)];
  if (landed.hits == segments && there == segments) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(landed.hits, " of ", segments, " segments found, ", there, " of them in ",
                                          std::string(Name(tier)), "; last miss: ", landed.missed));
}

absl::Status LandFrom(EmulatedEngine& engine, const std::vector<int32_t>& prompt, TierKind tier, Case& figure) {
  const auto landed = engine.Land(prompt);
  if (!landed.ok()) return landed.status();
  const absl::Status found = Expect(*landed, figure.segments, tier);
  if (!found.ok()) return absl::InternalError(absl::StrCat(figure.source, ": ", found.message()));
  figure.milliseconds.push_back(landed->landed_ms);
  figure.bytes = landed->bytes;
  return absl::OkStatus();
}

// Another node publishes each prompt; the first landing here is remote, and the second one is local.
absl::Status RemoteAndOwn(const std::vector<std::vector<int32_t>>& prompts, Case& remote, Case& own) {
  const auto nodes = tools::LocalNodes::Start(2, {.dram_bytes = kDram, .threads = 1, .metrics = true});
  if (!nodes.ok()) return nodes.status();
  EmulatedEngine holder, asker;
  absl::Status status = holder.Open((*nodes)->daemon(1).sockets(), EmulatedEngine::kPromptPages, 0);
  if (status.ok()) status = asker.Open((*nodes)->daemon(0).sockets(), EmulatedEngine::kPromptPages, 0);
  double told = 0;
  for (size_t i = 0; i < prompts.size() && status.ok(); ++i) {
    if (const auto published = holder.Ask(prompts[i], false); !published.ok()) return published.status();
    told += static_cast<double>(remote.segments);
    const auto known = [&] { return MetricOf((*nodes)->daemon(0).metrics_port(), "ashlar_directory_entries") >= told; };
    for (int tries = 0; tries < 500 && !known(); ++tries) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    status = LandFrom(asker, prompts[i], TierKind::kRemote, remote);
    if (status.ok()) status = LandFrom(asker, prompts[i], TierKind::kDram, own);
  }
  // The first one makes the connection, and is not measured.
  if (remote.milliseconds.size() > 1) remote.milliseconds.erase(remote.milliseconds.begin());
  return status;
}

// A restarted daemon has only its disk.
absl::Status Disk(const std::vector<std::vector<int32_t>>& prompts, const std::string& dir, Case& disk) {
  const Folder folder(dir);
  tools::LocalDaemonOptions options{
      .dram_bytes = kDram, .ssd_bytes = uint64_t{2} << 30, .admission = "all", .threads = 1, .metrics = true};
  options.ssd_folder = absl::StrCat(folder.path(), "/ssd");
  {
    const auto daemon = tools::LocalDaemon::Start(options);
    if (!daemon.ok()) return daemon.status();
    EmulatedEngine engine;
    absl::Status status = engine.Open((*daemon)->sockets(), EmulatedEngine::kPromptPages, 0);
    if (!status.ok()) return status;
    for (const auto& prompt : prompts) {
      if (const auto published = engine.Ask(prompt, false); !published.ok()) return published.status();
    }
    const auto memory_only = [&] { return MetricOf((*daemon)->metrics_port(), "ashlar_memory_only_bytes"); };
    for (int tries = 0; tries < 3000 && memory_only() > 0; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  const auto daemon = tools::LocalDaemon::Start(options);
  if (!daemon.ok()) return daemon.status();
  EmulatedEngine engine;
  absl::Status status = engine.Open((*daemon)->sockets(), EmulatedEngine::kPromptPages, 0);
  for (size_t i = 0; i < prompts.size() && status.ok(); ++i) {
    status = LandFrom(engine, prompts[i], TierKind::kSsd, disk);
  }
  return status;
}

absl::Status Compute(Prompts& prompts, uint64_t tokens, Case& computed) {
  const auto daemon = tools::LocalDaemon::Start({.dram_bytes = kDram, .threads = 1});
  if (!daemon.ok()) return daemon.status();
  EmulatedEngine engine;
  absl::Status status = engine.Open((*daemon)->sockets(), EmulatedEngine::kPromptPages);
  if (!status.ok()) return status;
  const auto times = engine.Ask(prompts.Next(tokens), false);
  if (times.ok()) computed.milliseconds.push_back(times->ttft_ms);
  return times.status();
}

}  // namespace

absl::Status Remote(const Options& options, nlohmann::json& figures) {
  figures["machine"] = Machine();
  figures["tokens_per_second"] = EmulatedEngine::kTokensPerSecond;
  Prompts prompts(7);
  std::vector<Case> cases;
  std::vector<uint64_t> sizes = {1};
  if (!options.quick) sizes.push_back(EmulatedEngine::kSegments);
  const int repetitions = options.quick ? 2 : std::min(options.repetitions, 9);
  for (const uint64_t segments : sizes) {
    const uint64_t tokens = segments * EmulatedEngine::kSegmentTokens + kQuestion;
    std::vector<std::vector<int32_t>> asked;
    for (int i = 0; i <= repetitions; ++i) asked.push_back(prompts.Next(tokens));
    Case own{.source = "dram", .segments = segments}, remote{.source = "remote", .segments = segments};
    Case disk{.source = "ssd", .segments = segments}, computed{.source = "compute", .segments = segments};
    if (absl::Status status = RemoteAndOwn(asked, remote, own); !status.ok()) return status;
    if (absl::Status status = Disk(asked, options.dir, disk); !status.ok()) return status;
    if (absl::Status status = Compute(prompts, tokens, computed); !status.ok()) return status;
    computed.bytes = own.bytes;
    for (Case* one : {&own, &remote, &disk, &computed}) cases.push_back(std::move(*one));
  }
  std::printf("%10s %10s %10s %12s %10s %10s %10s\n", "from", "segments", "MiB", "landed_ms", "p10", "p90", "GB/s");
  for (const Case& one : cases) {
    const double median = Median(one.milliseconds);
    const double rate = static_cast<double>(one.bytes) / median / 1e6;
    std::printf("%10s %10zu %10.1f %12.1f %10.1f %10.1f %10.2f\n", one.source.c_str(),
                static_cast<size_t>(one.segments), static_cast<double>(one.bytes) / (1 << 20), median,
                Percentile(one.milliseconds, 0.1), Percentile(one.milliseconds, 0.9), rate);
    figures["cases"].push_back({{"source", one.source},
                                {"segments", one.segments},
                                {"bytes", one.bytes},
                                {"landed_ms", median},
                                {"p10_ms", Percentile(one.milliseconds, 0.1)},
                                {"p90_ms", Percentile(one.milliseconds, 0.9)},
                                {"gbps", rate}});
  }
  return absl::OkStatus();
}

}  // namespace ashlar::bench
