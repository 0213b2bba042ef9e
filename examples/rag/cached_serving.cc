// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/cached_serving.h"

#include <algorithm>
#include <cstring>

#include "examples/rag/daemon_advancer.h"
#include "examples/rag/engine_model.h"
#include "examples/rag/engine_status.h"
#include "examples/rag/local_pages.h"
#include "examples/refengine/flops.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::rag {
namespace {

using refengine::AdvanceOptions;
using refengine::KvPages;
using refengine::ModelConfig;
using refengine::Sequence;
using refengine::Step;

// With several unresolved landings, any of them may quiesce first.
constexpr std::chrono::milliseconds kAskEach{10};

engine::Workers Lend(kernels::Workers& workers) {
  return {&workers, workers.Size(), [](void* context, int64_t count, kernels::Workers::Body body, void* body_context) {
            static_cast<kernels::Workers*>(context)->Run(count, body, body_context);
          }};
}

// The states after the prefix of a plan whose tuples have been read.
refengine::RecurrentState PrefixState(const ModelConfig& config, const SetPrompt& set) {
  refengine::RecurrentState state(config);
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    const refengine::CachedLayer& cached = set.tuples[0].layers[static_cast<size_t>(layer)];
    const int32_t linear = config.kind_index(layer);
    const std::span<float> heads = state.State(linear), window = state.ConvWindow(linear);
    const size_t floats = heads.size() / static_cast<size_t>(config.linear.value_heads);
    for (int32_t head = 0; head < config.linear.value_heads; ++head) {
      std::memcpy(heads.data() + head * floats, cached.tuple.heads[head].state, floats * sizeof(float));
    }
    std::memcpy(window.data(), cached.conv_tail, window.size_bytes());
  }
  return state;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CachedServing>> CachedServing::Open(const Runtime& runtime,
                                                                   const ServingOptions& options) {
  const ModelConfig& config = runtime.model.config();
  const CachedServing* const share_with = options.share_with;
  const int32_t pages = share_with == nullptr ? options.pages : share_with->pool_->pages();
  std::unique_ptr<CachedServing> serving(new CachedServing(runtime, options));
  const EngineModel model(runtime.model, options.seams, kPageTokens);
  const std::vector<engine::PagePlace> places = PlacesOf(config, kPageTokens, pages);
  engine::OpenOptions open;
  open.rpc_socket = options.rpc_socket.c_str();
  open.session_socket = options.session_socket.c_str();
  open.timeout_ms = static_cast<uint32_t>(options.timeout.count());
  open.share_with = share_with == nullptr ? nullptr : &share_with->cache_;
  open.model = model.described();
  open.memory = {.kind = share_with == nullptr ? engine::MemoryKind::kHosted : engine::MemoryKind::kShared,
                 .pages = static_cast<uint32_t>(pages),
                 .places = places.data(),
                 .place_count = static_cast<uint32_t>(places.size()),
                 .bytes = KvPages::RequiredBytes(config, kPageTokens, pages)};
  open.capture_tokens = options.prefixes.capture_tokens;
  open.span_tokens = options.prefixes.span_tokens;
  open.span_dtype = options.prefixes.span_dtype;
  open.epsilon = options.epsilon;
  open.compose = options.compose == ComposeBy::kDaemon ? engine::ComposeBy::kDaemon : engine::ComposeBy::kProcess;
  open.land_ms = static_cast<uint32_t>(options.patience.land.count());
  open.quiet_ms = 0;  // usually there are other pages
  open.workers = Lend(runtime.workers);
  if (const engine::Status opened = engine::Cache::Open(open, &serving->cache_); !opened.ok()) return ToStatus(opened);
  if (share_with != nullptr) {
    serving->pool_ = share_with->pool_;
    return serving;
  }
  const std::span memory(reinterpret_cast<std::byte*>(serving->cache_.data()), serving->cache_.bytes());
  serving->pool_ = std::make_shared<KvPages>(config, kPageTokens, pages, memory);
  return serving;
}

absl::Status CachedServing::Prefill(const engine::Run& run, Sequence& scratch) {
  const Step step = Step::Compute({run.tokens, run.token_count});
  if (!run.transition) return runtime_.engine.Advance(scratch, {&step, 1});
  const refengine::CaptureRange interior{.begin = static_cast<int64_t>(run.capture_begin),
                                         .end = static_cast<int64_t>(run.capture_end),
                                         .linear = tuple_memory_.buffers()};
  return runtime_.engine.Advance(scratch, {&step, 1}, {.captures = {&interior, 1}});
}

absl::Status CachedServing::Fill(engine::Request& request, uint32_t& filled) {
  uint32_t missing;
  const engine::Run* const runs = request.missing(&missing);
  for (; filled < missing; ++filled) {
    const uint32_t i = filled;
    Sequence scratch(runtime_.model.config(), *pool_);
    const absl::Status status = Prefill(runs[i], scratch);
    if (absl::IsResourceExhausted(status)) break;  // no pages to fill with: missed segments are computed in place
    if (!status.ok()) return status;
    // Published immediately, not all at the end: others find a segment while the next one is computed.
    const std::vector<engine::LinearTensors> tensors =
        runs[i].transition ? tuple_memory_.Tensors() : TensorsOf(runtime_.model.config(), scratch.recurrent());
    const std::vector<int32_t>& pages = scratch.page_table();
    const engine::Status published = request.Publish(
        i, {tensors.data(), static_cast<uint32_t>(tensors.size()), pages.data(), pages.size()}, nullptr);
    if (!published.ok()) return ToStatus(published);
  }
  return absl::OkStatus();
}

absl::Status CachedServing::FillTogether(engine::Request& request) {
  const auto deadline = std::chrono::steady_clock::now() + options_.patience.cold;
  uint32_t filled = 0;
  for (;;) {
    if (absl::Status status = Fill(request, filled); !status.ok()) return status;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    const auto wait = static_cast<uint32_t>(std::clamp<int64_t>(left.count(), 0, UINT32_MAX));
    const engine::Status waited = request.WaitCold(wait);
    // A segment that did not arrive, for any reason, is computed in place.
    if (waited.code != engine::Code::kRestart) return absl::OkStatus();
  }
}

absl::StatusOr<bool> CachedServing::ServePrefill(std::chrono::milliseconds wait) {
  engine::Request work;
  const engine::Status asked = cache_.ServePrefill(static_cast<uint32_t>(wait.count()), &work);
  if (asked.code == engine::Code::kPending) return false;
  if (!asked.ok()) return ToStatus(asked);
  uint32_t filled = 0;
  if (absl::Status status = Fill(work, filled); !status.ok()) return status;
  return true;
}

StoredSegments CachedServing::stored() const {
  engine::StoredSegments stored;
  cache_.StoredSegments(&stored);
  StoredSegments out{stored.segments, stored.bytes, stored.own_bytes, {}};
  for (uint8_t form = 0; form < std::size(stored.heads); ++form) {
    if (stored.heads[form] > 0) out.heads[static_cast<TransitionForm>(form)] = stored.heads[form];
  }
  return out;
}

void CachedServing::TakeQuiescedPages(std::chrono::milliseconds patience) {
  int32_t pages[256];
  uint64_t count = cache_.TakeQuiescedPages(pages, std::size(pages), static_cast<uint32_t>(patience.count()));
  for (; count > 0; count = cache_.TakeQuiescedPages(pages, std::size(pages), 0)) {
    for (uint64_t i = 0; i < count; ++i) pool_->Free(pages[i]);
    kept_pages_ -= count;
  }
}

absl::Status CachedServing::NewSequence(const RagPrompt& prompt, SetPrompt& set) {
  set.sequence = std::make_unique<Sequence>(runtime_.model.config(), *pool_);
  const auto deadline = std::chrono::steady_clock::now() + options_.patience.quiet;
  while (!set.sequence->Reserve(static_cast<int64_t>(prompt.tokens.size()))) {
    if (kept_pages_ == 0) return absl::ResourceExhaustedError("pages: too few for this prompt");
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::ResourceExhaustedError("pages: too few for this prompt while landings are unresolved");
    }
    TakeQuiescedPages(kAskEach);
  }
  return absl::OkStatus();
}

void CachedServing::EndSequence(SetPrompt& set) {
  if (set.request.pages_kept()) kept_pages_ += set.sequence->Surrender();
  set.sequence.reset();
}

void CachedServing::Abandon(SetPrompt& set) {
  const bool kept = set.request.pages_kept();  // and counted
  set.request.Cancel();
  const bool unresolved = !kept && set.request.PollQuiesced().code == engine::Code::kPending;
  if (unresolved && set.sequence != nullptr) kept_pages_ += set.sequence->Surrender();
  set.request = engine::Request();
}

void CachedServing::BuildChain(const RagPrompt& prompt, SetPrompt& set) const {
  const engine::Plan& plan = set.plan();
  set.resumed = plan.prefix_tokens;
  set.prefix_state.reset();
  set.landed.clear();
  for (uint32_t i = 0; i < plan.segment_count; ++i) set.landed.push_back(plan.segments[i].used);
  set.chain.clear();
  set.tuples.assign(plan.step_count, StepTuples(runtime_.model.config()));
  set.snapshots.clear();
  set.snapshots.reserve(plan.step_count);  // steps point into it
  for (uint32_t i = 0; i < plan.step_count; ++i) {
    const engine::Step& step = plan.steps[i];
    const auto count = static_cast<int64_t>(step.end - step.begin);
    const std::vector<refengine::CachedLayer>& layers = set.tuples[i].layers;
    switch (step.kind) {
      case engine::StepKind::kCompute:
        set.chain.push_back(Step::Compute(std::span(prompt.tokens).subspan(step.begin, step.end - step.begin)));
        break;
      case engine::StepKind::kCheckpoint:
        set.chain.push_back(Step::Checkpoint(count, layers));
        break;
      case engine::StepKind::kInterior:
        set.chain.push_back(Step::Cached(count, layers));
        break;
    }
    if (!step.capture) continue;
    set.snapshots.push_back({static_cast<int64_t>(step.end), {}});
    set.chain.back().snapshot = &set.snapshots.back().state;
  }
}

absl::Status CachedServing::Compute(const RagPrompt& prompt, SetPrompt& set, std::vector<float>& logits) {
  const ModelConfig& config = runtime_.model.config();
  for (;;) {
    BuildChain(prompt, set);
    DaemonAdvancer advancer(set.request, config);
    AdvanceOptions options{.last_logits = logits.data(), .tape = tape_};
    options.on_layer = [&](int32_t layer) { return ReadLayer(set.request, config, layer, set.tuples); };
    if (options_.compose == ComposeBy::kDaemon) options.advancer = &advancer;
    const absl::Status advanced = runtime_.engine.Advance(*set.sequence, set.chain, options);
    if (!advanced.ok() && !absl::IsCancelled(advanced)) return advanced;
    const bool before_last = set.resumed + 1 == prompt.tokens.size();
    if (advanced.ok() && set.resumed > 0 && (set.plan().prefix_span_tokens > 0 || before_last)) {
      set.prefix_state = PrefixState(config, set);
    }
    const engine::Status finished = set.request.Finish();
    if (finished.ok()) return advanced;
    if (finished.code == engine::Code::kOtherPages) {
      EndSequence(set);
      if (absl::Status status = NewSequence(prompt, set); !status.ok()) return status;
      const std::vector<int32_t>& pages = set.sequence->page_table();
      if (const engine::Status moved = set.request.Move(pages.data(), pages.size()); !moved.ok())
        return ToStatus(moved);
    } else if (finished.code != engine::Code::kRestart) {
      return ToStatus(finished);
    }
    set.sequence->Rewind(0, refengine::RecurrentState(config));
  }
}

absl::Status CachedServing::Begin(const RagPrompt& prompt, const ConversationId& conversation, SetPrompt& set,
                                  Served& served) {
  if (absl::Status status = NewSequence(prompt, set); !status.ok()) return status;
  engine::Prompt asked{.tokens = prompt.tokens.data(),
                       .token_count = prompt.tokens.size(),
                       .segment_lengths = prompt.segment_lengths.data(),
                       .segment_count = prompt.segment_lengths.size(),
                       .page_table = set.sequence->page_table().data(),
                       .page_count = set.sequence->page_table().size(),
                       .fill = true,
                       .cold_parallel = options_.cold_parallel};
  std::ranges::copy(conversation, asked.conversation);
  const engine::Status begun = cache_.Begin(&asked, 1, &set.request);
  if (!begun.ok() && begun.code != engine::Code::kOtherPages) return ToStatus(begun);
  const engine::Plan& plan = set.plan();
  for (uint32_t i = 0; i < plan.segment_count; ++i) {
    const auto reason = static_cast<MissReason>(plan.segments[i].reason);
    if (reason == MissReason::kCovered) continue;
    if (reason == MissReason::kNone) {
      ++served.hits;
      ++served.hit_tiers[static_cast<TierKind>(plan.segments[i].tier)];
    } else {
      ++served.misses;
      ++served.miss_reasons[reason];
    }
  }
  uint32_t missing;
  set.request.missing(&missing);
  const bool fills = missing > 0 || set.request.segments_computed_elsewhere() > 0;
  if (!fills && begun.ok()) return absl::OkStatus();
  EndSequence(set);  // filling also takes pages
  if (absl::Status status = FillTogether(set.request); !status.ok()) return status;
  if (absl::Status status = NewSequence(prompt, set); !status.ok()) return status;
  const std::vector<int32_t>& pages = set.sequence->page_table();
  const engine::Status again =
      fills ? set.request.LookAgain(pages.data(), pages.size()) : set.request.Move(pages.data(), pages.size());
  return again.ok() ? absl::OkStatus() : ToStatus(again);
}

absl::StatusOr<Served> CachedServing::Serve(const RagPrompt& prompt, const ConversationId& conversation) {
  const Stopwatch watch;
  TakeQuiescedPages(std::chrono::milliseconds(0));
  last_ = std::make_unique<SetPrompt>();
  Served served{.logits = std::vector<float>(refengine::kVocabulary)};
  absl::Status status = Begin(prompt, conversation, *last_, served);
  if (status.ok()) status = Compute(prompt, *last_, served.logits);
  if (!status.ok()) {
    Abandon(*last_);
    return status;
  }
  served.ttft_ms = watch.Milliseconds();
  for (const Step& step : last_->chain) served.computed_tokens += step.tokens.size();
  served.flops = refengine::ChainFlops(runtime_.model.config(), 0, last_->chain).total();
  return served;
}

}  // namespace ashlar::rag
