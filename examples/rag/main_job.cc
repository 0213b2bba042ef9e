#include "examples/rag/main_job.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "examples/local_daemon/local_daemon.h"
#include "examples/rag/baselines.h"
#include "examples/rag/local_pages.h"
#include "examples/rag/retrieval.h"
#include "examples/refengine/flops.h"
#include "kernels/host/thread_pool.h"

namespace ashlar::rag {
namespace {

using refengine::ModelConfig;
using refengine::PagePool;

constexpr int64_t kDefaultWidth = 8;  // HYPIC's seam window
constexpr int64_t kWidths[] = {4, kDefaultWidth, 32};
constexpr size_t kPrefixPrompts = 16;  // that the prefix cache keeps

// Everything one run needs, made once.
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
  absl::StatusOr<RequestResult> Request(const RagPrompt& prompt, const std::string& question);
  absl::Status OtherWidths(const RagPrompt& prompt, const std::vector<float>& full_logits);
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

  std::unique_ptr<tools::LocalDaemon> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<PagePool> shared_pages_;  // in memory that the daemon lands into
  std::unique_ptr<LocalPages> own_pages_, prefix_pages_;
  std::unique_ptr<FullRecompute> full_;
  std::unique_ptr<PrefixCache> prefix_;
  std::unique_ptr<NaiveAddition> naive_;
  std::map<int64_t, std::unique_ptr<CachedServing>> ashlar_;  // by seam width
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

  // The cache must hold every section once a seam width.
  const uint64_t all = (uint64_t{1} << 30) + std::size(kWidths) * sections_.size() * (uint64_t{8} << 20);
  auto daemon = tools::LocalDaemon::Start({.dram_bytes = options_.dram_bytes > 0 ? options_.dram_bytes : all,
                                           .hbm_bytes = options_.hbm_bytes,
                                           .ssd_bytes = options_.ssd_bytes,
                                           .threads = static_cast<uint32_t>(pool_.Size())});
  if (!daemon.ok()) return daemon.status();
  daemon_ = std::move(*daemon);
  auto client = Client::Connect(daemon_->client_options());
  if (!client.ok()) return client.status();
  client_ = std::move(*client);
  // The prompt being served, those whose landings are not quiet yet, and a segment being filled.
  const int32_t pages = PagesFor(longest, std::size(kWidths) + 2);
  absl::StatusOr<Region> region = client_->HostRegion(RegionBytes(config_, kPageTokens, pages));
  if (!region.ok()) return region.status();
  shared_pages_ = std::make_unique<PagePool>(config_, kPageTokens, pages, std::span(region->data(), region->size()));
  for (int64_t width : kWidths) {
    auto serving = CachedServing::Open(*client_, runtime(), *shared_pages_, *region, {width, width},
                                       {.compose = options_.compose, .epsilon = options_.epsilon});
    if (!serving.ok()) return serving.status();
    ashlar_[width] = std::move(*serving);
  }

  own_pages_ = std::make_unique<LocalPages>(config_, PagesFor(longest, 2));
  prefix_pages_ = std::make_unique<LocalPages>(config_, PagesFor(longest, kPrefixPrompts + 1));
  full_ = std::make_unique<FullRecompute>(runtime(), own_pages_->pool());
  prefix_ = std::make_unique<PrefixCache>(runtime(), prefix_pages_->pool(), kPrefixPrompts);
  naive_ = std::make_unique<NaiveAddition>(runtime(), own_pages_->pool());
  layer0_ = std::make_unique<Layer0Fidelity>(runtime(), pool_, static_cast<int64_t>(longest));
  fma_peak_ = refengine::FmaPeak(pool_);
  return absl::OkStatus();
}

absl::Status MainJob::OtherWidths(const RagPrompt& prompt, const std::vector<float>& full_logits) {
  for (auto& [width, serving] : ashlar_) {
    if (width == kDefaultWidth) continue;
    const absl::StatusOr<Served> served = serving->Serve(prompt);
    if (!served.ok()) return served.status();
    logits_by_width_[width].push_back(RelativeL2(served->logits, full_logits));
    serving->last() = {};
  }
  return absl::OkStatus();
}

absl::StatusOr<RequestResult> MainJob::Request(const RagPrompt& prompt, const std::string& question) {
  CachedServing& ashlar = *ashlar_.at(kDefaultWidth);
  const absl::StatusOr<Served> full = full_->Serve(prompt), prefix = prefix_->Serve(prompt),
                               naive = naive_->Serve(prompt), cached = ashlar.Serve(prompt);
  RequestResult result{.question = question, .tokens = prompt.tokens.size(), .segments = prompt.segment_lengths.size()};
  for (const auto& [way, served] :
       {std::pair{"full", &full}, {"prefix", &prefix}, {"naive", &naive}, {"ashlar", &cached}}) {
    if (!served->ok())
      return absl::Status(served->status().code(), absl::StrCat(way, ": ", served->status().message()));
    result.ways[way] = {.ttft_ms = (*served)->ttft_ms,
                        .next_token = refengine::GreedyToken((*served)->logits),
                        .logits_rel_l2 = RelativeL2((*served)->logits, full->logits)};
  }
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
  ashlar.last() = {};  // leases of what has been served would take the room of what comes next
  if (absl::Status status = OtherWidths(prompt, full->logits); !status.ok()) return status;
  return result;
}

absl::StatusOr<RunResult> MainJob::Run() {
  if (absl::Status status = Prepare(); !status.ok()) return status;
  std::printf("%zu sections of %s, %zu requests of up to %ld sections each\n\n", sections_.size(),
              options_.docs.c_str(), prompts_.size(), static_cast<long>(options_.sections_per_prompt));
  PrintHeader();
  RunResult run{.fma_peak_gflops = fma_peak_ / 1e9,
                .threads = pool_.Size(),
                .sections = static_cast<int64_t>(sections_.size()),
                .sections_per_prompt = options_.sections_per_prompt};
  for (size_t i = 0; i < prompts_.size(); ++i) {
    absl::StatusOr<RequestResult> request = Request(prompts_[i], questions_[i]);
    if (!request.ok()) return request.status();
    PrintRequest(i + 1, *request);
    run.requests.push_back(std::move(*request));
  }
  run.epsilon = options_.epsilon;
  run.stored = ashlar_.at(kDefaultWidth)->stored();
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
