// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench mirror`: eight daemons that mirror a million entries of a real etcd: memory, the time from scratch,
// announcements a second, etcd's load; and a lookup of a prompt of 128 k tokens without and with a full mirror.
//
// No machine has memory for a million objects eight times over. So their holders are processes that have only the
// daemons' directory; the measured daemons are complete.
#include "tools/bench/mirror.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/session/client.h"
#include "daemon/peer/directory/etcd_directory.h"
#include "examples/testing/child_process.h"
#include "examples/testing/local_nodes.h"
#include "proto/hex.h"
#include "proto/limits.h"
#include "tools/bench/bench.h"
#include "tools/bench/processes.h"

namespace ashlar::bench {
namespace {

using Watch = std::chrono::steady_clock;

constexpr size_t kDaemons = 8;
constexpr uint32_t kLeaseSeconds = 60;  // all of it shares one machine's cores
constexpr uint64_t kPromptTokens = 128 * 1024, kAskedSegment = 2048;
// Odd, while the prompt's tokens are a power of two: checkpoints have distinct depths, anywhere in the prompt.
constexpr uint64_t kDepthStride = 48271;
constexpr int kPrompts = 8;

class SteadyClock final : public storage::Clock {
 public:
  storage::Nanos Now() const override { return std::chrono::nanoseconds(Watch::now().time_since_epoch()).count(); }
};

double Since(Watch::time_point begin) {
  return std::chrono::duration<double>(Watch::now() - begin).count();
}

Digest Draw(std::mt19937_64& random) {
  Digest digest;
  for (uint8_t& byte : digest.bytes) byte = static_cast<uint8_t>(random());
  return digest;
}

// Of ten entries, seven are segments, one is a checkpoint, one a span after it, and one a block of a prefix.
daemon::Holding HoldingOf(uint64_t number) {
  daemon::Holding holding{.bytes = uint64_t{4} << 20};
  const uint64_t depth = 1 + number / 10 * kDepthStride % kPromptTokens;
  if (number % 10 == 0) {
    holding.kind = ObjectKind::kCheckpoint;
    holding.depth = static_cast<uint32_t>(depth);
  } else if (number % 10 == 1) {
    holding.kind = ObjectKind::kSpan;
    holding.span_begin = static_cast<uint32_t>(depth);
    holding.depth = static_cast<uint32_t>(depth + 1 + number / 10 % limits::kMaxSpanTokens);
  } else if (number % 10 == 2) {
    holding.kind = ObjectKind::kPrefixBlock;
  }
  return holding;
}

// An engine whose model uses segments and prefixes.
struct Asker {
  static Layout LayoutOfIt() {
    Layout layout{.page_tokens = 16, .head = 8, .tail = 8};
    LinearLayer linear{.key_heads = 4, .value_heads = 4, .d_k = 128, .d_v = 128};
    linear.conv_channels = 3 * 4 * 128;
    linear.conv_kernel = 4;
    layout.layers.assign(3, linear);
    layout.layers.push_back(AttentionLayer{.kv_heads = 2, .key_dim = 256, .value_dim = 256});
    return layout;
  }
  absl::Status Open(const tools::DaemonSockets& daemon) {
    auto connected = Client::Connect({.rpc_socket = daemon.rpc_socket,
                                      .session_socket = daemon.session_socket,
                                      .timeout = std::chrono::seconds(60)});
    if (!connected.ok()) return connected.status();
    client = *std::move(connected);
    const Identity identity{
        .model_id = "mirror", .weights_digest = "none", .dtype = "fp32", .tokenizer_digest = "none"};
    auto opened = client->OpenModel(identity, LayoutOfIt(), {}, {},
                                    {.capture_tokens = 64, .span_tokens = limits::kMaxSpanTokens});
    if (!opened.ok()) return opened.status();
    model.emplace(*std::move(opened));
    return absl::OkStatus();
  }
  std::unique_ptr<Client> client;
  std::optional<Model> model;
};

// Milliseconds of lookups that find nothing. The prompts are the same each time, so that the daemon learns the same
// about prompts in both phases.
std::vector<double> LookUp(Asker& asker, int rounds) {
  std::mt19937_64 random(5);
  std::vector<std::vector<int32_t>> prompts(kPrompts, std::vector<int32_t>(kPromptTokens));
  for (auto& prompt : prompts) {
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 150'000);
  }
  const std::vector<uint64_t> lengths(kPromptTokens / kAskedSegment, kAskedSegment);
  std::vector<double> milliseconds;
  for (int i = -kPrompts; i < rounds; ++i) {
    const auto& prompt = prompts[static_cast<size_t>(i + kPrompts) % kPrompts];
    const Watch::time_point begin = Watch::now();
    const Match match = asker.model->Lookup(Prompt{.tokens = prompt, .segment_lengths = lengths});
    const bool answered = !match.segments().empty() && match.segments()[0].reason != MissReason::kDaemonUnavailable;
    if (i >= 0 && answered) milliseconds.push_back(Since(begin) * 1e3);
  }
  return milliseconds;
}

bool Until(const std::function<bool()>& holds, double seconds) {
  const Watch::time_point begin = Watch::now();
  while (!holds()) {
    if (Since(begin) > seconds) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return true;
}

uint64_t EntriesOf(const tools::LocalDaemon& daemon) {
  return static_cast<uint64_t>(std::max(0.0, MetricOf(daemon.metrics_port(), "ashlar_directory_entries")));
}

absl::Status Late(const char* what) {
  return absl::DeadlineExceededError(absl::StrCat(what, " did not finish in time"));
}

struct Found {
  double announce_s = 0, scratch_s = 0, etcd_announcing_s = 0, etcd_reading_s = 0;
  uint64_t node_before = 0, node_after = 0, etcd_bytes = 0, mirror_bytes = 0;
  double node_cpu_s = 0;
};

// Makes the holders announce, and waits until all daemons know all of it.
absl::Status Announce(tools::LocalNodes& nodes, std::vector<std::unique_ptr<tools::ChildProcess>>& holders,
                      uint64_t entries, Found& found) {
  const double etcd_before = CpuSeconds(nodes.etcd().pid());
  const double node_before = CpuSeconds(nodes.daemon(0).pid());
  found.node_before = ResidentBytes(nodes.daemon(0).pid());
  const Watch::time_point begin = Watch::now();
  for (auto& holder : holders) {
    if (absl::Status status = holder->WriteLine("go"); !status.ok()) return status;
  }
  for (size_t node = 0; node < nodes.size(); ++node) {
    if (!Until([&] { return EntriesOf(nodes.daemon(node)) >= entries; }, 900)) return Late("announcing");
  }
  found.announce_s = Since(begin);
  found.etcd_announcing_s = CpuSeconds(nodes.etcd().pid()) - etcd_before;
  found.node_cpu_s = CpuSeconds(nodes.daemon(0).pid()) - node_before;
  found.node_after = ResidentBytes(nodes.daemon(0).pid());
  found.mirror_bytes =
      static_cast<uint64_t>(std::max(0.0, MetricOf(nodes.daemon(0).metrics_port(), "ashlar_directory_bytes")));
  found.etcd_bytes = ResidentBytes(nodes.etcd().pid());
  return absl::OkStatus();
}

// The last daemon restarts without any state.
absl::Status FromScratch(tools::LocalNodes& nodes, uint64_t entries, Found& found) {
  const size_t last = nodes.size() - 1;
  if (absl::Status status = nodes.Restart(last); !status.ok()) return status;
  const double etcd_before = CpuSeconds(nodes.etcd().pid());
  Asker again;
  const Watch::time_point begin = Watch::now();
  if (absl::Status status = again.Open(nodes.daemon(last).sockets()); !status.ok()) return status;
  if (!Until([&] { return EntriesOf(nodes.daemon(last)) >= entries; }, 600)) return Late("mirroring from scratch");
  found.scratch_s = Since(begin);
  found.etcd_reading_s = CpuSeconds(nodes.etcd().pid()) - etcd_before;
  return absl::OkStatus();
}

void Report(uint64_t entries, size_t daemons, const Found& found, const std::vector<double>& empty,
            const std::vector<double>& full, nlohmann::json& figures) {
  const double count = static_cast<double>(entries);
  const double ratio = Median(full) / Median(empty);
  std::printf("%zu daemons, %zu entries\n", daemons, static_cast<size_t>(entries));
  std::printf("announced and mirrored by all in %.1f s: %.0f a second; from scratch in %.1f s\n", found.announce_s,
              count / found.announce_s, found.scratch_s);
  std::printf("resident memory of a daemon: %.1f MiB before, %.1f MiB with the mirror (its own count: %.1f MiB)\n",
              static_cast<double>(found.node_before) / (1 << 20), static_cast<double>(found.node_after) / (1 << 20),
              static_cast<double>(found.mirror_bytes) / (1 << 20));
  std::printf("etcd: %.1f s of CPU time while announcing, %.1f s while one reads all, %.0f MiB resident\n",
              found.etcd_announcing_s, found.etcd_reading_s, static_cast<double>(found.etcd_bytes) / (1 << 20));
  std::printf(
      "a lookup of %zu tokens: median %.2f ms without, %.2f ms with a full mirror (%.3f times); p99 %.2f, %.2f\n",
      static_cast<size_t>(kPromptTokens), Median(empty), Median(full), ratio, Percentile(empty, 0.99),
      Percentile(full, 0.99));
  figures["daemons"] = daemons;
  figures["entries"] = entries;
  figures["announcements_per_second"] = count / found.announce_s;
  figures["announce_seconds"] = found.announce_s;
  figures["mirror_seconds"] = found.scratch_s;
  figures["resident_bytes_before"] = found.node_before;
  figures["resident_bytes"] = found.node_after;
  figures["mirror_bytes"] = found.mirror_bytes;
  figures["daemon_cpu_s"] = found.node_cpu_s;
  figures["etcd_cpu_announcing_s"] = found.etcd_announcing_s;
  figures["etcd_cpu_reading_s"] = found.etcd_reading_s;
  figures["etcd_resident_bytes"] = found.etcd_bytes;
  figures["lookup_tokens"] = kPromptTokens;
  figures["lookup_empty_ms"] = Median(empty);
  figures["lookup_full_ms"] = Median(full);
  figures["lookup_empty_p99_ms"] = Percentile(empty, 0.99);
  figures["lookup_full_p99_ms"] = Percentile(full, 0.99);
  figures["lookup_ratio"] = ratio;
}

}  // namespace

int RunMirrorHolder(const std::string& endpoint, const std::string& name, const std::string& ns,
                    const std::string& first_text, const std::string& count_text) {
  const uint64_t first = std::strtoull(first_text.c_str(), nullptr, 10);
  const uint64_t count = std::strtoull(count_text.c_str(), nullptr, 10);
  NamespaceId id;
  const std::string bytes = BytesOfHex(ns);
  if (bytes.size() != id.bytes.size()) return 2;
  std::copy(bytes.begin(), bytes.end(), id.bytes.begin());
  const SteadyClock clock;
  daemon::EtcdDirectoryOptions options{.endpoints = {endpoint}};
  options.lease_seconds = kLeaseSeconds;
  options.writes_per_second = options.cluster_writes_per_second = 1'000'000;  // etcd must be the limit
  options.queued_writes = static_cast<uint32_t>(count);
  // No server is there: the daemons are never asked for data here.
  daemon::EtcdDirectory directory(
      options, {.node = name, .control_address = "127.0.0.1:1", .transport_address = "127.0.0.1:1", .version = "bench"},
      {}, clock);
  if (!Until([&] { return directory.Health().connected; }, 60)) return 1;
  std::cout << "ready" << std::endl;
  std::string line;
  if (!std::getline(std::cin, line)) return 0;
  std::mt19937_64 random(std::hash<std::string>()(name));
  for (uint64_t i = 0; i < count; ++i) directory.Announce(id, Draw(random), HoldingOf(first + i), 1);
  while (std::getline(std::cin, line)) {  // until the starting process ends
  }
  return 0;
}

absl::Status Mirror(const Options& options, nlohmann::json& figures) {
  figures["machine"] = Machine();
  const uint64_t entries = options.quick ? 8'000 : 1'000'000;
  const size_t daemons = options.quick ? 2 : kDaemons;
  const tools::LocalDaemonOptions daemon{.dram_bytes = uint64_t{64} << 20, .threads = 1, .metrics = true};
  const auto nodes = tools::LocalNodes::Start(std::vector<tools::LocalDaemonOptions>(daemons, daemon), kLeaseSeconds);
  if (!nodes.ok()) return nodes.status();
  std::vector<Asker> askers(daemons);
  for (size_t node = 0; node < daemons; ++node) {
    if (absl::Status status = askers[node].Open((*nodes)->daemon(node).sockets()); !status.ok()) return status;
  }
  const NamespaceId ns = askers[0].model->ns();
  const std::string hex = absl::BytesToHexString({reinterpret_cast<const char*>(ns.bytes.data()), ns.bytes.size()});
  std::vector<std::unique_ptr<tools::ChildProcess>> holders(daemons);
  for (size_t i = 0; i < holders.size(); ++i) {
    auto holder = tools::ChildProcess::Start({"ashlar-bench", "mirror-holder", (*nodes)->etcd().endpoint(),
                                              absl::StrCat("holder", i), hex, absl::StrCat(i * (entries / daemons)),
                                              absl::StrCat(entries / daemons)});
    if (!holder.ok()) return holder.status();
    const auto ready = (*holder)->ReadLine(std::chrono::seconds(60));
    if (!ready.ok()) return ready.status();
    holders[i] = *std::move(holder);
  }
  const int rounds = options.quick ? 8 : 96;
  const std::vector<double> empty = LookUp(askers[0], rounds);
  Found found;
  if (absl::Status status = Announce(**nodes, holders, entries, found); !status.ok()) return status;
  const std::vector<double> full = LookUp(askers[0], rounds);
  if (empty.empty() || full.empty()) return absl::InternalError("no lookup was answered");
  askers.back() = Asker();
  if (absl::Status status = FromScratch(**nodes, entries, found); !status.ok()) return status;
  Report(entries, daemons, found, empty, full, figures);
  return absl::OkStatus();
}

}  // namespace ashlar::bench
