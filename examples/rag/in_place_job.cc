// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/in_place_job.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "examples/rag/in_place_serving.h"
#include "examples/rag/local_pages.h"
#include "examples/rag/retrieval.h"
#include "examples/refengine/flops.h"
#include "examples/refengine/tokenizer.h"
#include "examples/testing/local_daemon.h"
#include "kernels/host/thread_pool.h"

namespace ashlar::rag {
namespace {

constexpr refengine::SeamWidths kSeams = {8, 8};  // HYPIC's seam window

// Pages for all prompts at the same time: one copy of each segment, and for each prompt its seams and query, or a
// segment that it computes alone.
int32_t PoolPages(const std::vector<RagPrompt>& prompts) {
  std::set<std::vector<int32_t>> segments;
  uint64_t pages = 0;
  for (const RagPrompt& prompt : prompts) {
    uint64_t longest = 0;
    for (size_t i = 0; i < prompt.segment_lengths.size(); ++i) {
      const std::span<const int32_t> tokens = prompt.Segment(i);
      if (segments.emplace(tokens.begin(), tokens.end()).second) pages += PagesOf(tokens.size()) + 1;
      longest = std::max(longest, prompt.segment_lengths[i]);
    }
    const uint64_t seams = prompt.segment_lengths.size() * (PagesOf(kSeams.head + kSeams.tail) + 2);
    pages += std::max(seams + PagesOf(prompt.Query().size()) + 2, PagesOf(longest));
  }
  return static_cast<int32_t>(pages);
}

class InPlaceJob {
 public:
  explicit InPlaceJob(const JobOptions& options)
      : options_(options),
        threads_(options.threads),
        model_(refengine::DemoConfig(options.seed, options.family)),
        queue_(kernels::Host().MakeQueue(&threads_)),
        engine_(model_, kernels::Host(), threads_) {}

  absl::StatusOr<InPlaceResult> Run();

 private:
  absl::Status Prepare();
  absl::Status OpenCopies(size_t longest);
  absl::StatusOr<InPlaceRequest> Serve(size_t number);
  Runtime runtime() { return {model_, engine_, kernels::Host(), *queue_, threads_}; }

  const JobOptions options_;
  kernels::ThreadPool threads_;
  const refengine::Model model_;
  const std::unique_ptr<kernels::Queue> queue_;
  refengine::Engine engine_;

  std::vector<std::string> questions_;
  std::vector<RagPrompt> prompts_;
  std::unique_ptr<tools::LocalDaemon> daemon_;
  std::unique_ptr<CachedServing> copies_;
  std::unique_ptr<InPlaceServing> in_place_;
  std::vector<std::unique_ptr<InPlaceServing::Running>> running_;
  std::set<int32_t> held_;  // pages of all running requests
};

absl::Status InPlaceJob::Prepare() {
  absl::StatusOr<std::vector<Section>> sections =
      ReadSections(options_.docs, {.max_sections = static_cast<size_t>(options_.sections)});
  if (!sections.ok()) return sections.status();
  const Bm25 index(*sections);
  questions_ = MakeQuestions(*sections, index, static_cast<size_t>(options_.requests), options_.seed);
  size_t longest = 0;
  for (const std::string& question : questions_) {
    prompts_.push_back(
        MakePrompt(*sections, index.Search(question, static_cast<size_t>(options_.sections_per_prompt)), question));
    longest = std::max(longest, prompts_.back().tokens.size());
  }
  std::printf("%zu sections of %s, %zu requests of up to %ld sections each, all running at the same time\n\n",
              sections->size(), options_.docs.c_str(), prompts_.size(),
              static_cast<long>(options_.sections_per_prompt));
  const uint64_t all = (uint64_t{1} << 30) + sections->size() * (uint64_t{8} << 20);
  auto daemon = tools::LocalDaemon::Start({.dram_bytes = options_.dram_bytes > 0 ? options_.dram_bytes : all,
                                           .threads = static_cast<uint32_t>(threads_.Size())});
  if (!daemon.ok()) return daemon.status();
  daemon_ = std::move(*daemon);
  auto in_place = InPlaceServing::Open(runtime(), {.rpc_socket = daemon_->sockets().rpc_socket,
                                                   .session_socket = daemon_->sockets().session_socket,
                                                   .seams = kSeams,
                                                   .pages = PoolPages(prompts_)});
  if (!in_place.ok()) return in_place.status();
  in_place_ = std::move(*in_place);
  return OpenCopies(longest);
}

absl::Status InPlaceJob::OpenCopies(size_t longest) {
  auto copies = CachedServing::Open(
      runtime(), {.rpc_socket = daemon_->sockets().rpc_socket,
                  .session_socket = daemon_->sockets().session_socket,
                  .seams = kSeams,
                  .pages = PagesFor(longest, 3)});  // the prompt, one with an unquiesced landing, and a segment
  if (!copies.ok()) return copies.status();
  copies_ = std::move(*copies);
  return absl::OkStatus();
}

absl::StatusOr<InPlaceRequest> InPlaceJob::Serve(size_t number) {
  const RagPrompt& prompt = prompts_[number];
  auto served = in_place_->Serve(prompt);
  if (!served.ok()) return served.status();
  const InPlaceServing::Running& running = **served;
  const absl::StatusOr<Served> copied = copies_->Serve(prompt);
  if (!copied.ok()) return copied.status();
  copies_->last() = {};
  InPlaceRequest request{.question = questions_[number],
                         .tokens = prompt.tokens.size(),
                         .segments = prompt.segment_lengths.size(),
                         .missed = running.missed,
                         .copy_pages = PagesOf(prompt.tokens.size()),
                         .own_pages = running.own_pages};
  for (const int32_t page : running.pages) request.new_pages += held_.insert(page).second;
  request.same_token = refengine::GreedyToken(running.logits) == refengine::GreedyToken(copied->logits);
  request.logits_rel_l2 = RelativeL2(running.logits, copied->logits);
  running_.push_back(std::move(*served));
  return request;
}

absl::StatusOr<InPlaceResult> InPlaceJob::Run() {
  if (absl::Status status = Prepare(); !status.ok()) return status;
  InPlaceResult result{.page_tokens = kPageTokens, .requests = {}};
  std::printf("%4s %7s %9s %7s %12s %10s %10s %12s\n", "", "tokens", "segments", "missed", "copy pages", "own pages",
              "new pages", "rel. error");
  for (size_t i = 0; i < prompts_.size(); ++i) {
    absl::StatusOr<InPlaceRequest> request = Serve(i);
    if (!request.ok()) return request.status();
    std::printf("%4zu %7lu %9lu %7lu %12lu %10lu %10lu %12.1e\n", i + 1, static_cast<unsigned long>(request->tokens),
                static_cast<unsigned long>(request->segments), static_cast<unsigned long>(request->missed),
                static_cast<unsigned long>(request->copy_pages), static_cast<unsigned long>(request->own_pages),
                static_cast<unsigned long>(request->new_pages), request->logits_rel_l2);
    result.copy_pages += request->copy_pages;
    result.worst_rel_l2 = std::max(result.worst_rel_l2, request->logits_rel_l2);
    result.requests.push_back(std::move(*request));
  }
  result.in_place_pages = held_.size();
  return result;
}

}  // namespace

absl::StatusOr<InPlaceResult> RunInPlaceJob(const JobOptions& options) {
  return InPlaceJob(options).Run();
}

void PrintSummary(const InPlaceResult& result) {
  const double share = 100.0 * static_cast<double>(result.saved_pages()) / static_cast<double>(result.copy_pages);
  const auto same = std::ranges::count_if(result.requests, &InPlaceRequest::same_token);
  std::printf(
      "\n%zu running requests hold %lu pages of %lu tokens; with copies of their own they would hold %lu.\n"
      "Sharing in place saves %lu pages (%.0f %%).\n"
      "First tokens equal to those from landed copies: %ld of %zu; largest relative error of the logits: %.1e\n",
      result.requests.size(), static_cast<unsigned long>(result.in_place_pages),
      static_cast<unsigned long>(result.page_tokens), static_cast<unsigned long>(result.copy_pages),
      static_cast<unsigned long>(result.saved_pages()), share, static_cast<long>(same), result.requests.size(),
      result.worst_rel_l2);
}

nlohmann::json ToJson(const InPlaceResult& result) {
  nlohmann::json requests = nlohmann::json::array();
  for (const InPlaceRequest& request : result.requests) {
    requests.push_back({{"question", request.question},
                        {"tokens", request.tokens},
                        {"segments", request.segments},
                        {"missed", request.missed},
                        {"copy_pages", request.copy_pages},
                        {"own_pages", request.own_pages},
                        {"new_pages", request.new_pages},
                        {"same_token", request.same_token},
                        {"logits_rel_l2", request.logits_rel_l2}});
  }
  return {{"in_place",
           {{"page_tokens", result.page_tokens},
            {"copy_pages", result.copy_pages},
            {"in_place_pages", result.in_place_pages},
            {"saved_pages", result.saved_pages()},
            {"worst_logits_rel_l2", result.worst_rel_l2},
            {"requests", std::move(requests)}}}};
}

}  // namespace ashlar::rag
