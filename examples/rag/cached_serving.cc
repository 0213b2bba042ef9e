// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/cached_serving.h"

#include <algorithm>
#include <cstring>

#include "examples/rag/daemon_advancer.h"
#include "examples/rag/engine_status.h"
#include "examples/refengine/flops.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::rag {
namespace {

using refengine::AdvanceOptions;
using refengine::CachedLayer;
using refengine::KvPages;
using refengine::ModelConfig;
using refengine::Sequence;
using refengine::Step;

// Of several landings in doubt any may be quiet first.
constexpr std::chrono::milliseconds kAskEach{10};

// The cost of computing: the operations of n tokens are a n + b n².
CostModel Cost(const ModelConfig& config) {
  constexpr int64_t kTokens = 1024;
  const double once = refengine::PrefillFlops(config, kTokens).total();
  const double twice = refengine::PrefillFlops(config, 2 * kTokens).total();
  const double square = (twice - 2 * once) / (2.0 * kTokens * kTokens);
  return {.flops_per_token = once / kTokens - square * kTokens, .flops_per_token_squared = square};
}

engine::Workers Lend(kernels::Workers& workers) {
  return {&workers, workers.Size(), [](void* context, int64_t count, kernels::Workers::Body body, void* body_context) {
            static_cast<kernels::Workers*>(context)->Run(count, body, body_context);
          }};
}

}  // namespace

refengine::RecurrentState PrefixState(const ModelConfig& config, const SetPrompt& set) {
  refengine::RecurrentState state(config);
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    kernels::TupleView tuple;
    const void* tail = nullptr;
    if (!engine::ViewOf(set.request, 0, static_cast<uint32_t>(layer), &tuple, &tail).ok()) return state;
    const int32_t linear = config.kind_index(layer);
    const std::span<float> heads = state.State(linear), window = state.ConvWindow(linear);
    const size_t floats = heads.size() / static_cast<size_t>(config.linear.value_heads);
    for (int32_t head = 0; head < config.linear.value_heads; ++head) {
      std::memcpy(heads.data() + head * floats, tuple.heads[head].state, floats * sizeof(float));
    }
    std::memcpy(window.data(), tail, window.size_bytes());
  }
  return state;
}

absl::StatusOr<std::unique_ptr<CachedServing>> CachedServing::Open(Client& client, const Runtime& runtime,
                                                                   KvPages& pool, const Region& region,
                                                                   refengine::SeamWidths seams,
                                                                   const ServingOptions& options) {
  const ModelConfig& config = runtime.model.config();
  if (region.size() < RegionBytes(config, pool.page_tokens(), pool.pages())) {
    return absl::InvalidArgumentError("region: smaller than RegionBytes");
  }
  std::unique_ptr<CachedServing> serving(new CachedServing(runtime, pool, options));
  const std::vector<engine::PagePlace> places = PlacesOf(config, pool.page_tokens(), pool.pages());
  engine::OpenOptions open;
  open.memory = {.pages = static_cast<uint32_t>(pool.pages()),
                 .places = places.data(),
                 .place_count = static_cast<uint32_t>(places.size())};
  open.capture_tokens = options.prefixes.capture_tokens;
  open.span_tokens = options.prefixes.span_tokens;
  open.span_dtype = options.prefixes.span_dtype;
  open.epsilon = options.epsilon;
  open.compose = options.compose == ComposeBy::kDaemon ? engine::ComposeBy::kDaemon : engine::ComposeBy::kProcess;
  open.land_ms = static_cast<uint32_t>(options.patience.land.count());
  open.quiet_ms = 0;  // mostly there are other pages
  open.workers = Lend(runtime.workers);
  const Layout layout = runtime.model.layout(static_cast<uint32_t>(seams.head), static_cast<uint32_t>(seams.tail),
                                             static_cast<uint32_t>(pool.page_tokens()));
  const engine::Status opened =
      engine::OpenOn(client, region, runtime.model.identity(), layout, Cost(config), open, &serving->cache_);
  if (!opened.ok()) return ToStatus(opened);
  return serving;
}

absl::Status CachedServing::Prefill(const engine::Run& run, Sequence& scratch) {
  const Step step = Step::Compute({run.tokens, run.token_count});
  if (!run.transition) return runtime_.engine.Advance(scratch, {&step, 1});
  const refengine::CaptureRange interior{.begin = static_cast<int64_t>(run.capture_begin),
                                         .end = static_cast<int64_t>(run.capture_end),
                                         .linear = room_.buffers()};
  return runtime_.engine.Advance(scratch, {&step, 1}, {.captures = {&interior, 1}});
}

absl::Status CachedServing::Fill(engine::Request& request, uint32_t& filled) {
  uint32_t missing;
  const engine::Run* const runs = request.missing(&missing);
  for (; filled < missing; ++filled) {
    const uint32_t i = filled;
    Sequence scratch(runtime_.model.config(), pool_);
    const absl::Status status = Prefill(runs[i], scratch);
    if (absl::IsResourceExhausted(status)) break;  // no pages to fill with: what is missed is computed in its place
    if (!status.ok()) return status;
    // At once, not all at the end: others find it while the next is computed.
    const std::vector<engine::LinearTensors> tensors =
        runs[i].transition ? room_.Tensors() : TensorsOf(runtime_.model.config(), scratch.recurrent());
    const std::vector<int32_t>& pages = scratch.page_table();
    const engine::Status published = request.Publish(
        i, {tensors.data(), static_cast<uint32_t>(tensors.size()), pages.data(), pages.size()}, nullptr);
    if (!published.ok()) return ToStatus(published);
  }
  return absl::OkStatus();
}

absl::Status CachedServing::FillTogether(engine::Request& request) {
  const auto give_up = std::chrono::steady_clock::now() + options_.patience.cold;
  uint32_t filled = 0;
  for (;;) {
    if (absl::Status status = Fill(request, filled); !status.ok()) return status;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(give_up - std::chrono::steady_clock::now());
    const auto wait = static_cast<uint32_t>(std::clamp<int64_t>(left.count(), 0, UINT32_MAX));
    const engine::Status waited = request.WaitCold(wait);
    // A segment that has not come, for any reason, is computed in its place.
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
  cache_.Stored(&stored);
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
    for (uint64_t i = 0; i < count; ++i) pool_.Free(pages[i]);
    kept_pages_ -= count;
  }
}

absl::Status CachedServing::NewSequence(const RagPrompt& prompt, SetPrompt& set) {
  set.sequence = std::make_unique<Sequence>(runtime_.model.config(), pool_);
  const auto give_up = std::chrono::steady_clock::now() + options_.patience.quiet;
  while (!set.sequence->Reserve(static_cast<int64_t>(prompt.tokens.size()))) {
    if (kept_pages_ == 0) return absl::ResourceExhaustedError("pages: too few for this prompt");
    if (std::chrono::steady_clock::now() >= give_up) {
      return absl::ResourceExhaustedError("pages: too few for this prompt while landings are in doubt");
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
  const bool doubtful = !kept && set.request.PollQuiet().code == engine::Code::kPending;
  if (doubtful && set.sequence != nullptr) kept_pages_ += set.sequence->Surrender();
  set.request = engine::Request();
}

bool CachedServing::BuildChain(const RagPrompt& prompt, SetPrompt& set) const {
  const ModelConfig& config = runtime_.model.config();
  const engine::Plan& plan = set.plan();
  set.resumed = plan.prefix_tokens;
  set.rebuilt.reset();
  set.landed.clear();
  for (uint32_t i = 0; i < plan.segment_count; ++i) set.landed.push_back(plan.segments[i].used);
  set.chain.clear();
  set.layers.assign(plan.step_count, {});
  set.snapshots.clear();
  set.snapshots.reserve(plan.step_count);  // steps point into it
  const bool rebuilds = set.resumed > 0 && set.match()->prefix_span() != nullptr;
  // A span's inputs are read before the first layer, all of them.
  if (rebuilds && !set.request.WaitLayer(static_cast<uint32_t>(config.layers()) - 1).ok()) return false;
  for (uint32_t i = 0; i < plan.step_count; ++i) {
    const engine::Step& step = plan.steps[i];
    const auto count = static_cast<int64_t>(step.end - step.begin);
    if (step.kind == engine::StepKind::kCompute) {
      set.chain.push_back(Step::Compute(std::span(prompt.tokens).subspan(step.begin, step.end - step.begin)));
    } else {
      set.layers[i].resize(static_cast<size_t>(config.layers()));
      for (int32_t layer = 0; layer < config.layers(); ++layer) {
        if (config.is_attention(layer)) continue;
        CachedLayer& out = set.layers[i][static_cast<size_t>(layer)];
        const void* tail = nullptr;
        if (!engine::ViewOf(set.request, i, static_cast<uint32_t>(layer), &out.tuple, &tail).ok()) return false;
        out.conv_tail = static_cast<const float*>(tail);  // its layout says fp32
      }
      const bool whole = step.kind == engine::StepKind::kCheckpoint;
      set.chain.push_back(whole ? Step::Checkpoint(count, set.layers[i]) : Step::Cached(count, set.layers[i]));
    }
    if (!step.capture) continue;
    set.snapshots.push_back({static_cast<int64_t>(step.end), {}});
    set.chain.back().snapshot = &set.snapshots.back().state;
  }
  if (rebuilds) set.rebuilt = PrefixState(config, set);
  return true;
}

absl::Status CachedServing::Compute(const RagPrompt& prompt, SetPrompt& set, std::vector<float>& logits) {
  const ModelConfig& config = runtime_.model.config();
  for (;;) {
    absl::Status advanced = absl::CancelledError("the span has not come");
    if (BuildChain(prompt, set)) {
      DaemonAdvancer advancer(set.request, config);
      AdvanceOptions options{.last_logits = logits.data(), .tape = tape_};
      // Nothing of a layer is read before it has come.
      options.on_layer = [&set](int32_t layer) { return set.request.WaitLayer(static_cast<uint32_t>(layer)).ok(); };
      if (options_.compose == ComposeBy::kDaemon) options.advancer = &advancer;
      advanced = runtime_.engine.Advance(*set.sequence, set.chain, options);
    }
    if (!advanced.ok() && !absl::IsCancelled(advanced)) return advanced;
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
  const bool fills = missing > 0 || set.request.elsewhere() > 0;
  if (!fills && begun.ok()) return absl::OkStatus();
  EndSequence(set);  // filling takes pages, too
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
