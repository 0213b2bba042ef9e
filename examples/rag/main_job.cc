// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/main_job.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>

#include "absl/strings/str_cat.h"
#include "examples/rag/baselines.h"
#include "examples/rag/local_pages.h"
#include "examples/rag/retrieval.h"
#include "examples/refengine/flops.h"
#include "examples/testing/local_nodes.h"
#include "kernels/host/thread_pool.h"

namespace ashlar::rag {
namespace {

using refengine::ModelConfig;

constexpr int64_t kDefaultWidth = 8;  // HYPIC's seam window
constexpr int64_t kWidths[] = {4, kDefaultWidth, 32};
constexpr size_t kPrefixPrompts = 16;  // prompts that the prefix cache keeps

// FNV-1a of the bytes: two runs with the same bits have the same digest.
uint64_t Digest(const std::vector<float>& logits) {
  uint64_t digest = 0xcbf29ce484222325;
  for (const std::byte byte : std::as_bytes(std::span(logits))) {
    digest = (digest ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  }
  return digest;
}

// One node's engine: the caches of all seam widths share a session and pages.
struct NodeEngine {
  std::map<int64_t, std::unique_ptr<CachedServing>> ashlar;  // by seam width
};

// Everything that a run needs, created once.
class MainJob {
 public:
  explicit MainJob(const JobOptions& options)
      : options_(options),
        pool_(options.threads),
        config_(refengine::DemoConfig(options.seed, options.family)),
        model_(config_),
        kernels_(kernels::Host()),
        queue_(kernels_.MakeQueue(&pool_)),
        engine_(model_, kernels_, pool_) {}

  absl::StatusOr<RunResult> Run();

 private:
  absl::Status Prepare();
  absl::Status StartNodes(size_t longest);
  absl::Status Connect(const tools::LocalDaemon& daemon, size_t longest, NodeEngine& node);
  absl::StatusOr<RequestResult> Request(size_t number);
  absl::Status OtherWidths(NodeEngine& node, const RagPrompt& prompt, const std::vector<float>& full_logits);
  StoredSegments Stored() const;
  Runtime runtime() { return {model_, engine_, kernels_, *queue_, pool_}; }

  const JobOptions options_;
  kernels::ThreadPool pool_;
  const ModelConfig config_;
  const refengine::Model model_;
  const kernels::Kernels& kernels_;
  const std::unique_ptr<kernels::Queue> queue_;
  refengine::Engine engine_;

  std::vector<Section> sections_;
  std::vector<std::string> questions_;
  std::vector<RagPrompt> prompts_;
  double fma_peak_ = 0;

  std::unique_ptr<tools::LocalNodes> daemons_;
  std::unique_ptr<LocalPages> own_pages_, prefix_pages_;
  std::unique_ptr<FullRecompute> full_;
  std::unique_ptr<ExactPrefixes> prefix_;
  std::unique_ptr<NaiveAddition> naive_;
  std::vector<NodeEngine> nodes_;
  std::map<int64_t, std::vector<double>> logits_by_width_;
  std::unique_ptr<Layer0Fidelity> layer0_;
};

absl::Status MainJob::Prepare() {
  CutOptions cut{.max_sections = static_cast<size_t>(options_.sections)};
  absl::StatusOr<std::vector<Section>> sections = ReadSections(options_.docs, cut);
  if (!sections.ok()) return sections.status();
  sections_ = std::move(*sections);
  const Bm25 index(sections_);
  questions_ = MakeQuestions(sections_, index, static_cast<size_t>(options_.requests), options_.seed);
  size_t longest = 0;
  for (const std::string& question : questions_) {
    prompts_.push_back(
        MakePrompt(sections_, index.Search(question, static_cast<size_t>(options_.sections_per_prompt)), question));
    longest = std::max(longest, prompts_.back().tokens.size());
  }

  if (absl::Status status = StartNodes(longest); !status.ok()) return status;
  own_pages_ = std::make_unique<LocalPages>(config_, PagesFor(longest, 2));
  prefix_pages_ = std::make_unique<LocalPages>(config_, PagesFor(longest, kPrefixPrompts + 1));
  full_ = std::make_unique<FullRecompute>(runtime(), own_pages_->pool());
  prefix_ = std::make_unique<ExactPrefixes>(runtime(), prefix_pages_->pool(), kPrefixPrompts);
  naive_ = std::make_unique<NaiveAddition>(runtime(), own_pages_->pool());
  layer0_ = std::make_unique<Layer0Fidelity>(runtime(), pool_, static_cast<int64_t>(longest));
  fma_peak_ = refengine::FmaPeak(pool_);
  return absl::OkStatus();
}

absl::Status MainJob::StartNodes(size_t longest) {
  // Each cache must hold every section once per seam width.
  const uint64_t all = (uint64_t{1} << 30) + std::size(kWidths) * sections_.size() * (uint64_t{8} << 20);
  auto daemons =
      tools::LocalNodes::Start(options_.nodes, {.dram_bytes = options_.dram_bytes > 0 ? options_.dram_bytes : all,
                                                .hbm_bytes = options_.hbm_bytes,
                                                .ssd_bytes = options_.ssd_bytes,
                                                .admission = "all",  // every section is published once
                                                .threads = static_cast<uint32_t>(pool_.Size())});
  if (!daemons.ok()) return daemons.status();
  daemons_ = std::move(*daemons);
  nodes_.resize(daemons_->size());
  for (size_t node = 0; node < nodes_.size(); ++node) {
    absl::Status status = Connect(daemons_->daemon(node), longest, nodes_[node]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status MainJob::Connect(const tools::LocalDaemon& daemon, size_t longest, NodeEngine& node) {
  const CachedServing* first = nullptr;
  for (int64_t width : kWidths) {
    auto serving = CachedServing::Open(
        runtime(), {.rpc_socket = daemon.sockets().rpc_socket,
                    .session_socket = daemon.sockets().session_socket,
                    .seams = {width, width},
                    // The prompt being served, those whose landings have not quiesced, and a segment being filled.
                    .pages = PagesFor(longest, std::size(kWidths) + 2),
                    .share_with = first,
                    .compose = options_.compose,
                    .epsilon = options_.epsilon});
    if (!serving.ok()) return serving.status();
    if (first == nullptr) first = serving->get();
    node.ashlar[width] = std::move(*serving);
  }
  return absl::OkStatus();
}

absl::Status MainJob::OtherWidths(NodeEngine& node, const RagPrompt& prompt, const std::vector<float>& full_logits) {
  for (auto& [width, serving] : node.ashlar) {
    if (width == kDefaultWidth) continue;
    const absl::StatusOr<Served> served = serving->Serve(prompt);
    if (!served.ok()) return served.status();
    logits_by_width_[width].push_back(RelativeL2(served->logits, full_logits));
    serving->last() = {};
  }
  return absl::OkStatus();
}

absl::StatusOr<RequestResult> MainJob::Request(size_t number) {
  const RagPrompt& prompt = prompts_[number];
  NodeEngine& node = nodes_[number % nodes_.size()];
  CachedServing& ashlar = *node.ashlar.at(kDefaultWidth);
  const absl::StatusOr<Served> full = full_->Serve(prompt), prefix = prefix_->Serve(prompt),
                               naive = naive_->Serve(prompt), cached = ashlar.Serve(prompt);
  RequestResult result{.question = questions_[number],
                       .node = number % nodes_.size(),
                       .tokens = prompt.tokens.size(),
                       .segments = prompt.segment_lengths.size()};
  for (const auto& [way, served] :
       {std::pair{"full", &full}, {"prefix", &prefix}, {"naive", &naive}, {"ashlar", &cached}}) {
    if (!served->ok())
      return absl::Status(served->status().code(), absl::StrCat(way, ": ", served->status().message()));
    result.ways[way] = {.ttft_ms = (*served)->ttft_ms,
                        .next_token = refengine::GreedyToken((*served)->logits),
                        .logits_rel_l2 = RelativeL2((*served)->logits, full->logits)};
  }
  result.logits_digest = Digest(cached->logits);
  result.hits = cached->hits;
  result.misses = cached->misses;
  result.hit_tiers = cached->hit_tiers;
  result.miss_reasons = cached->miss_reasons;
  result.landed = static_cast<uint64_t>(std::ranges::count(ashlar.last().landed, true));
  result.computed_tokens = cached->computed_tokens;
  result.full_flops_ratio = full->flops / (full->ttft_ms * 1e-3) / fma_peak_;
  result.flop_floor_speedup = full->flops / cached->flops;
  logits_by_width_[kDefaultWidth].push_back(result.ways["ashlar"].logits_rel_l2);
  const absl::StatusOr<std::optional<Layer0Error>> layer0 = layer0_->Measure(prompt, ashlar.last(), own_pages_->pool());
  if (!layer0.ok()) return layer0.status();
  result.layer0 = *layer0;
  ashlar.last() = {};  // leases of served prompts would take the space of later ones
  if (absl::Status status = OtherWidths(node, prompt, full->logits); !status.ok()) return status;
  return result;
}

StoredSegments MainJob::Stored() const {
  StoredSegments all;
  for (const NodeEngine& node : nodes_) {
    const StoredSegments stored = node.ashlar.at(kDefaultWidth)->stored();
    all.segments += stored.segments;
    all.bytes += stored.bytes;
    all.own_bytes += stored.own_bytes;
    for (const auto& [form, heads] : stored.heads) all.heads[form] += heads;
  }
  return all;
}

absl::StatusOr<RunResult> MainJob::Run() {
  if (absl::Status status = Prepare(); !status.ok()) return status;
  std::printf("%zu sections of %s, %zu requests of up to %ld sections each\n\n", sections_.size(),
              options_.docs.c_str(), prompts_.size(), static_cast<long>(options_.sections_per_prompt));
  PrintHeader();
  RunResult run{.fma_peak_gflops = fma_peak_ / 1e9,
                .threads = pool_.Size(),
                .sections = static_cast<int64_t>(sections_.size()),
                .sections_per_prompt = options_.sections_per_prompt,
                .nodes = nodes_.size()};
  for (size_t i = 0; i < prompts_.size(); ++i) {
    absl::StatusOr<RequestResult> request = Request(i);
    if (!request.ok()) return request.status();
    PrintRequest(i + 1, *request);
    run.requests.push_back(std::move(*request));
  }
  run.epsilon = options_.epsilon;
  run.stored = Stored();
  for (const auto& [width, errors] : logits_by_width_) {
    double sum = 0;
    for (double error : errors) sum += error;
    run.ashlar_logits_by_width[width] = sum / static_cast<double>(errors.size());
  }
  return run;
}

}  // namespace

absl::StatusOr<RunResult> RunMainJob(const JobOptions& options) {
  return MainJob(options).Run();
}

}  // namespace ashlar::rag
