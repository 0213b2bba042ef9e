// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/in_place_serving.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/rag/engine_status.h"
#include "examples/rag/local_pages.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::rag {
namespace {

using refengine::ModelConfig;
using refengine::Sequence;
using refengine::SharedSpan;
using refengine::Step;

// A page of the sequence is the request's own if it has a position that is not shared.
bool IsOwn(const std::vector<bool>& shared, size_t page) {
  const auto begin = shared.begin() + static_cast<ptrdiff_t>(page * kPageTokens);
  const auto end = shared.begin() + static_cast<ptrdiff_t>(std::min(shared.size(), (page + 1) * kPageTokens));
  return std::find(begin, end, false) != end;
}

size_t OwnPages(const std::vector<bool>& shared) {
  size_t own = 0;
  for (size_t page = 0; page < PagesOf(shared.size()); ++page) own += IsOwn(shared, page);
  return own;
}

// The positions that the plan reads from shared pages.
std::vector<bool> SharedPositions(const engine::Plan& plan, size_t tokens) {
  std::vector<bool> shared(tokens);
  for (uint32_t i = 0; i < plan.step_count; ++i) {
    const engine::Step& step = plan.steps[i];
    if (step.kind == engine::StepKind::kCompute) continue;
    std::fill(shared.begin() + static_cast<ptrdiff_t>(step.begin), shared.begin() + static_cast<ptrdiff_t>(step.end),
              true);
  }
  return shared;
}

}  // namespace

absl::StatusOr<std::unique_ptr<InPlaceServing>> InPlaceServing::Open(const Runtime& runtime, const Options& options) {
  const ModelConfig& config = runtime.model.config();
  std::unique_ptr<InPlaceServing> serving(new InPlaceServing(runtime, options));
  const EngineModel model(runtime.model, options.seams, kPageTokens);
  const std::vector<engine::PagePlace> places = PlacesOf(config, kPageTokens, options.pages);
  engine::OpenOptions open;
  open.rpc_socket = options.rpc_socket.c_str();
  open.session_socket = options.session_socket.c_str();
  open.name = "in-place";
  open.model = model.described();
  open.memory = {.pages = static_cast<uint32_t>(options.pages),
                 .places = places.data(),
                 .place_count = static_cast<uint32_t>(places.size()),
                 .bytes = refengine::KvPages::RequiredBytes(config, kPageTokens, options.pages)};
  open.memory.share_in_place = true;
  open.land_ms = static_cast<uint32_t>(options.land.count());
  if (const engine::Status opened = engine::Cache::Open(open, &serving->cache_); !opened.ok()) return ToStatus(opened);
  const std::span memory(reinterpret_cast<std::byte*>(serving->cache_.data()), serving->cache_.bytes());
  serving->pool_ = std::make_unique<refengine::KvPages>(config, kPageTokens, options.pages, memory);
  return serving;
}

absl::Status InPlaceServing::Admit(Running& running, size_t own_pages) {
  engine::PageShortage shortage;
  const engine::Status admitted = running.request.Admit(static_cast<uint32_t>(own_pages), &shortage);
  if (admitted.code == engine::Code::kNoPages) {
    return absl::ResourceExhaustedError(absl::StrCat("pages: ", shortage.needed, " more are needed, ", shortage.free,
                                                     " are free and ", shortage.held, " are held"));
  }
  return admitted.ok() ? absl::OkStatus() : ToStatus(admitted);
}

absl::Status InPlaceServing::PublishMissing(Running& running) {
  uint32_t count = 0;
  const engine::Run* const runs = running.request.missing(&count);
  if (count == 0) return absl::OkStatus();
  running.missed = count;
  size_t longest = 0;
  for (uint32_t i = 0; i < count; ++i) longest = std::max<size_t>(longest, runs[i].token_count);
  if (absl::Status status = Admit(running, PagesOf(longest)); !status.ok()) return status;
  const engine::AdmittedPages& pages = running.request.admitted();
  for (uint32_t i = 0; i < count; ++i) {
    Sequence alone(runtime_.model.config(), *pool_);
    alone.Place({pages.own_pages, pages.own_pages + PagesOf(runs[i].token_count)}, {});
    const Step step = Step::Compute({runs[i].tokens, runs[i].token_count});
    const refengine::CaptureRange interior{.begin = static_cast<int64_t>(runs[i].capture_begin),
                                           .end = static_cast<int64_t>(runs[i].capture_end),
                                           .linear = tuples_.buffers()};
    refengine::AdvanceOptions options;
    if (runs[i].transition) options.captures = {&interior, 1};
    if (absl::Status status = runtime_.engine.Advance(alone, {&step, 1}, options); !status.ok()) return status;
    const std::vector<engine::LinearTensors> tensors =
        runs[i].transition ? tuples_.Tensors() : TensorsOf(runtime_.model.config(), alone.recurrent());
    const engine::Status published = running.request.Publish(
        i, {tensors.data(), static_cast<uint32_t>(tensors.size()), pages.own_pages, pages.own_page_count}, nullptr);
    if (!published.ok()) return ToStatus(published);
  }
  const engine::Status again = running.request.LookAgain();
  return again.ok() ? absl::OkStatus() : ToStatus(again);
}

namespace {

void CountPages(InPlaceServing::Running& running) {
  const engine::AdmittedPages& pages = running.request.admitted();
  running.own_pages = pages.own_page_count;
  std::set<int32_t> all(pages.own_pages, pages.own_pages + pages.own_page_count);
  for (uint32_t i = 0; i < pages.segment_count; ++i) {
    all.insert(pages.segments[i].pages, pages.segments[i].pages + pages.segments[i].page_count);
  }
  all.erase(-1);
  running.pages.assign(all.begin(), all.end());
}

}  // namespace

void InPlaceServing::Place(const RagPrompt& prompt, const std::vector<bool>& shared, Running& running) {
  const engine::AdmittedPages& pages = running.request.admitted();
  const engine::Plan& plan = running.request.plan();
  std::vector<int32_t> table;
  size_t own = 0;
  for (size_t page = 0; page < PagesOf(shared.size()); ++page) {
    table.push_back(IsOwn(shared, page) ? pages.own_pages[own++] : -1);
  }
  std::vector<SharedSpan> spans;
  for (uint32_t i = 0; i < plan.step_count; ++i) {
    const engine::Step& step = plan.steps[i];
    if (step.kind == engine::StepKind::kCompute) continue;
    const engine::SharedSegment& segment = pages.segments[step.segment];
    const std::vector<int32_t> segment_pages(segment.pages, segment.pages + segment.page_count);
    const auto start = static_cast<int64_t>(prompt.SegmentStart(step.segment));
    spans.push_back({.position = static_cast<int64_t>(step.begin),
                     .tokens = static_cast<int64_t>(step.end - step.begin),
                     .page_table = segment_pages,
                     .first_slot = static_cast<int64_t>(segment.first_slot + step.begin) - start,
                     .origin = start - static_cast<int64_t>(segment.first_slot)});
  }
  running.sequence = std::make_unique<Sequence>(runtime_.model.config(), *pool_);
  running.sequence->Place(std::move(table), std::move(spans));
}

absl::StatusOr<bool> InPlaceServing::Compute(const RagPrompt& prompt, Running& running) {
  const ModelConfig& config = runtime_.model.config();
  const engine::Plan& plan = running.request.plan();
  const std::vector<bool> shared = SharedPositions(plan, prompt.tokens.size());
  if (absl::Status status = Admit(running, OwnPages(shared)); !status.ok()) return status;
  Place(prompt, shared, running);
  std::vector<StepTuples> tuples(plan.step_count, StepTuples(config));
  std::vector<Step> chain;
  for (uint32_t i = 0; i < plan.step_count; ++i) {
    const engine::Step& step = plan.steps[i];
    const auto count = static_cast<int64_t>(step.end - step.begin);
    if (step.kind == engine::StepKind::kCompute) {
      chain.push_back(Step::Compute(std::span(prompt.tokens).subspan(step.begin, step.end - step.begin)));
      continue;
    }
    const bool whole = step.kind == engine::StepKind::kCheckpoint;
    chain.push_back(whole ? Step::Checkpoint(count, tuples[i].layers) : Step::Cached(count, tuples[i].layers));
  }
  running.logits.resize(refengine::kVocabulary);
  const absl::Status advanced = runtime_.engine.Advance(
      *running.sequence, chain, {.last_logits = running.logits.data(), .on_layer = [&](int32_t layer) {
                                   return ReadLayer(running.request, config, layer, tuples);
                                 }});
  if (!advanced.ok() && !absl::IsCancelled(advanced)) return advanced;
  const engine::Status finished = running.request.Finish();
  if (finished.ok() || finished.code == engine::Code::kRestart) return finished.ok();
  return ToStatus(finished);
}

absl::StatusOr<std::unique_ptr<InPlaceServing::Running>> InPlaceServing::Serve(const RagPrompt& prompt) {
  auto running = std::make_unique<Running>();
  const engine::Prompt asked{.tokens = prompt.tokens.data(),
                             .token_count = prompt.tokens.size(),
                             .segment_lengths = prompt.segment_lengths.data(),
                             .segment_count = prompt.segment_lengths.size(),
                             .fill = true};
  const engine::Status begun = cache_.Begin(&asked, 1, &running->request);
  if (!begun.ok()) return ToStatus(begun);
  if (absl::Status status = PublishMissing(*running); !status.ok()) return status;
  for (;;) {
    const absl::StatusOr<bool> computed = Compute(prompt, *running);
    if (!computed.ok()) return computed.status();
    if (!*computed) continue;
    CountPages(*running);
    return running;
  }
}

}  // namespace ashlar::rag
