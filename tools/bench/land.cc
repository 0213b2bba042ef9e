// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench land`: landing cached attention pages through a real daemon, against memcpy.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <span>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/session/client.h"
#include "examples/testing/local_daemon.h"
#include "kernels/host/thread_pool.h"
#include "tools/bench/bench.h"

namespace ashlar::bench {
namespace {

using std::chrono::seconds;

constexpr uint32_t kAttentionLayers = 4, kKvHeads = 2, kHeadDim = 256, kRotaryDim = 64, kPageTokens = 16, kSeam = 8;
constexpr uint64_t kSegments = 4, kInterior = 1024;  // of one prompt: 64 MiB of keys and values
constexpr uint64_t kSegmentTokens = kInterior + 2 * kSeam;
constexpr uint64_t kRowBytes = kKvHeads * kHeadDim * sizeof(float);
constexpr uint64_t kLandedBytes = kSegments * kInterior * kRowBytes * 2 * kAttentionLayers;

Layout BenchLayout(uint32_t linear_layers) {
  Layout layout{.page_tokens = kPageTokens, .head = kSeam, .tail = kSeam};
  LinearLayer linear{.key_heads = 16, .value_heads = 32, .d_k = 128, .d_v = 128};
  linear.conv_channels = (2 * 16 + 32) * 128;
  linear.conv_kernel = 4;
  layout.layers.assign(linear_layers, linear);
  AttentionLayer attention{.kv_heads = kKvHeads, .key_dim = kHeadDim, .value_dim = kHeadDim};
  attention.rope = {.kind = RopeStyle::kHalfSplit, .rotary_dim = kRotaryDim};
  for (uint32_t i = 0; i < kRotaryDim / 2; ++i) {
    attention.rope.frequencies.push_back(std::pow(1e7, -2.0 * i / kRotaryDim));
  }
  layout.layers.insert(layout.layers.end(), kAttentionLayers, attention);
  return layout;
}

// An engine's side of the benchmark: pages and staging in one hosted region, and segments published from them.
class Engine {
 public:
  Engine(Client& client, uint32_t linear_layers, int sets)
      : client_(client), layout_(BenchLayout(linear_layers)), sets_(static_cast<size_t>(sets)) {}

  absl::Status Prepare() {
    Identity identity{.model_id = "bench", .weights_digest = "none", .dtype = "fp32", .tokenizer_digest = "none"};
    auto model = client_.OpenModel(identity, layout_);
    if (!model.ok()) return model.status();
    model_ = *model;
    const uint64_t tokens = kSegments * kSegmentTokens + kPageTokens;
    const size_t prompt_pages = tokens / kPageTokens + 1;
    const size_t pages = prompt_pages * sets_.size();
    const uint64_t plane = pages * kPageTokens * kRowBytes;
    pages_bytes_ = plane * 2 * kAttentionLayers;
    auto region = client_.HostRegion(pages_bytes_ + StagingBytes());
    if (!region.ok()) return region.status();
    region_ = *region;
    PagedCache paged{.page_tokens = kPageTokens, .pages = static_cast<uint32_t>(pages)};
    const uint32_t first = static_cast<uint32_t>(layout_.layers.size()) - kAttentionLayers;
    for (uint32_t i = 0; i < kAttentionLayers; ++i) {
      paged.layers.push_back({.layer = first + i,
                              .key_offset = 2 * i * plane,
                              .value_offset = (2 * i + 1) * plane,
                              .page_stride = kPageTokens * kRowBytes,
                              .token_stride = kRowBytes,
                              .key_head_stride = kHeadDim * sizeof(float),
                              .value_head_stride = kHeadDim * sizeof(float)});
    }
    if (absl::Status status = model_.DeclarePages(region_, paged); !status.ok()) return status;
    float* floats = reinterpret_cast<float*>(region_.data());
    for (size_t i = 0; i < region_.size() / sizeof(float); ++i) floats[i] = static_cast<float>(i % 1021) / 1021;
    std::vector<int32_t> shuffled(pages);
    std::iota(shuffled.begin(), shuffled.end(), 0);
    std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(7));
    for (size_t i = 0; i < sets_.size(); ++i) {
      const auto page = shuffled.begin() + static_cast<ptrdiff_t>(i * prompt_pages);
      sets_[i].page_table.assign(page, page + static_cast<ptrdiff_t>(prompt_pages));
    }
    return absl::OkStatus();
  }

  absl::Status PublishAll() {
    for (size_t i = 0; i < sets_.size(); ++i) {
      Set& set = sets_[i];
      set.tokens.assign(kPageTokens, 0);  // a first segment that was never published: the others come after position 0
      set.lengths.assign(1, kPageTokens);
      for (uint64_t s = 0; s < kSegments; ++s) {
        set.tokens.insert(set.tokens.end(), kSegmentTokens, static_cast<int32_t>(i * kSegments + s + 1));
        set.lengths.push_back(kSegmentTokens);
      }
      if (absl::Status status = Publish(set); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  Match Lookup(size_t set) {
    return model_.Lookup(Prompt{.tokens = sets_[set].tokens, .segment_lengths = sets_[set].lengths});
  }

  // Bytes per second from the call to the verdict.
  absl::StatusOr<double> LandOnce(size_t set, const Match& match) {
    std::vector<LandSegment> segments;
    for (uint32_t s = 1; s <= kSegments; ++s) segments.push_back({s, match.segments()[s].start});
    std::vector<MissReason> verdict;
    const double elapsed =
        Seconds([&] { verdict = model_.Land(match, sets_[set].page_table, segments).Wait(seconds(30)); });
    for (MissReason reason : verdict) {
      if (reason != MissReason::kNone) return absl::InternalError(absl::StrCat("landing: ", Text(Name(reason))));
    }
    return kLandedBytes / elapsed;
  }

 private:
  static std::string Text(absl::string_view text) { return std::string(text); }

  uint64_t StagingBytes() const {
    for (const Layer& layer : layout_.layers) {
      if (auto* linear = std::get_if<LinearLayer>(&layer)) {
        const uint64_t heads = uint64_t{linear->value_heads} * linear->d_k * (linear->d_k + linear->d_v);
        return (heads + uint64_t{linear->conv_kernel - 1} * linear->conv_channels) * sizeof(float);
      }
    }
    return 0;
  }

  struct Set {
    std::vector<int32_t> page_table, tokens;
    std::vector<uint64_t> lengths;
  };

  // All segments but the first, each with the current contents of the set's memory.
  absl::Status Publish(const Set& set) {
    std::vector<ObjectRun> runs;
    for (uint64_t s = 0; s < kSegments; ++s) {
      const auto tokens = std::span(set.tokens).subspan(kPageTokens + s * kSegmentTokens, kSegmentTokens);
      runs.push_back({.kind = ObjectKind::kSegment, .tokens = tokens});
    }
    std::vector<Publication> objects;
    for (const Reservation& reservation : model_.Reserve(runs)) {
      if (!reservation.granted())
        return absl::InternalError(absl::StrCat("reserve: ", Text(Name(reservation.outcome))));
      objects.push_back({reservation, Parts(set)});
    }
    for (PublishOutcome outcome : model_.Publish(objects)) {
      if (outcome != PublishOutcome::kPublished)
        return absl::InternalError(absl::StrCat("publish: ", Text(Name(outcome))));
    }
    return absl::OkStatus();
  }

  PublishParts Parts(const Set& set) const {
    PublishParts parts{.region = region_, .page_table = set.page_table};
    for (uint32_t i = 0; i < layout_.layers.size(); ++i) {
      const auto* linear = std::get_if<LinearLayer>(&layout_.layers[i]);
      if (linear == nullptr) continue;
      const std::byte* staging = region_.data() + pages_bytes_;
      const uint64_t transition = uint64_t{linear->value_heads} * linear->d_k * linear->d_k * sizeof(float);
      const uint64_t state = uint64_t{linear->value_heads} * linear->d_k * linear->d_v * sizeof(float);
      parts.linear.push_back({.layer = i,
                              .transition = staging,
                              .state = staging + transition,
                              .conv_tail = staging + transition + state});
    }
    return parts;
  }

  Client& client_;
  const Layout layout_;
  Model model_;
  Region region_;
  uint64_t pages_bytes_ = 0;
  std::vector<Set> sets_;  // prompts with separate pages
};

absl::Status LandPages(Client& client, const Options& options, kernels::Workers& workers, nlohmann::json& cases) {
  Engine engine(client, /*linear_layers=*/0, kColdSets);
  if (absl::Status status = engine.Prepare(); !status.ok()) return status;
  if (absl::Status status = engine.PublishAll(); !status.ok()) return status;
  std::vector<Match> matches;
  for (size_t set = 0; set < kColdSets; ++set) matches.push_back(engine.Lookup(set));
  MemcpyLimit memcpy_limit(kLandedBytes);
  std::vector<double> landings;
  std::vector<std::vector<double>> limits(static_cast<size_t>(workers.Size()));
  // Landing and limit alternate, so that a noisy neighbour slows both. The first round over all sets touches the
  // memory.
  for (int i = 0; i < kColdSets + options.repetitions; ++i) {
    const absl::StatusOr<double> rate = engine.LandOnce(i % kColdSets, matches[i % kColdSets]);
    if (!rate.ok()) return rate.status();
    if (i >= kColdSets) landings.push_back(*rate);
    for (int threads = 1; threads <= workers.Size(); ++threads) {
      limits[threads - 1].push_back(memcpy_limit.Measure(threads, 0, workers));
    }
  }
  double limit = 0;
  for (const std::vector<double>& rates : limits) limit = std::max(limit, Median(rates));
  const double rate = Median(landings);
  cases.push_back({{"op", "land"},
                   {"bytes", kLandedBytes},
                   {"gb_per_s", rate / 1e9},
                   {"limit_gb_per_s", limit / 1e9},
                   {"ratio", rate / limit}});
  std::printf("%-14s %12s %10s %14s %8s\n", "op", "bytes", "GB/s", "memcpy GB/s", "ratio");
  std::printf("%-14s %12lu %10.2f %14.2f %8.2f\n", "land", static_cast<unsigned long>(kLandedBytes), rate / 1e9,
              limit / 1e9, rate / limit);
  return absl::OkStatus();
}

absl::Status MapTuples(Client& client, const Options& options, nlohmann::json& handovers) {
  std::printf("\n%-14s %12s %14s %18s\n", "op", "bytes", "map µs", "match+map µs");
  for (uint32_t linear_layers : {2u, 8u, 24u}) {
    Engine engine(client, linear_layers, /*sets=*/1);
    if (absl::Status status = engine.Prepare(); !status.ok()) return status;
    if (absl::Status status = engine.PublishAll(); !status.ok()) return status;
    std::vector<double> mapping, whole;
    uint64_t bytes = 0;
    for (int i = 0; i <= options.repetitions; ++i) {
      double map_seconds = 0;
      const double elapsed = Seconds([&] {
        const Match match = engine.Lookup(0);
        map_seconds = Seconds([&] {
          for (size_t s = 1; s <= kSegments; ++s) bytes = match.tuples(s) == nullptr ? 0 : match.segments()[s].bytes;
        });
      });
      if (bytes == 0) return absl::InternalError("map_tuples: a published segment was not found");
      if (i == 0) continue;  // the first one maps the arenas
      mapping.push_back(map_seconds);
      whole.push_back(elapsed);
    }
    handovers.push_back({{"op", "map_tuples"},
                         {"bytes", bytes * kSegments},
                         {"map_us", Median(mapping) * 1e6},
                         {"match_and_map_us", Median(whole) * 1e6}});
    std::printf("%-14s %12lu %14.1f %18.1f\n", "map_tuples", static_cast<unsigned long>(bytes * kSegments),
                Median(mapping) * 1e6, Median(whole) * 1e6);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Land(const Options& options, nlohmann::json& figures) {
  const int threads = options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency());
  kernels::ThreadPool pool(threads);
  auto daemon = tools::LocalDaemon::Start({.dram_bytes = 3ull << 30, .threads = static_cast<uint32_t>(threads)});
  if (!daemon.ok()) return daemon.status();
  const tools::DaemonSockets& sockets = (*daemon)->sockets();
  auto client = Client::Connect({.rpc_socket = sockets.rpc_socket, .session_socket = sockets.session_socket});
  if (!client.ok()) return client.status();
  figures["machine"] = Machine();
  nlohmann::json& cases = figures["cases"] = nlohmann::json::array();
  if (absl::Status status = LandPages(**client, options, pool, cases); !status.ok()) return status;
  nlohmann::json& handovers = figures["handovers"] = nlohmann::json::array();
  return MapTuples(**client, options, handovers);
}

}  // namespace ashlar::bench
