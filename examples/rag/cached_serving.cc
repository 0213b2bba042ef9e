#include "examples/rag/cached_serving.h"

#include <algorithm>

#include "ashlar/adapt_transitions.h"
#include "examples/rag/resumed_state.h"
#include "examples/refengine/flops.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::rag {
namespace {

using refengine::AdvanceOptions;
using refengine::CachedLayer;
using refengine::ModelConfig;
using refengine::PagePool;
using refengine::Sequence;
using refengine::Step;

// Of several landings in quarantine any may be quiet first.
constexpr std::chrono::milliseconds kAskEach{10};

std::vector<CachedLayer> Layers(const std::vector<MappedTuple>& tuples) {
  std::vector<CachedLayer> layers;
  for (const MappedTuple& tuple : tuples) {
    layers.push_back({tuple.view, static_cast<const float*>(tuple.conv_tail)});  // its layout says fp32
  }
  return layers;
}

// What computing costs: the operations of n tokens are a n + b n².
CostModel Cost(const ModelConfig& config) {
  constexpr int64_t kTokens = 1024;
  const double once = refengine::PrefillFlops(config, kTokens).total();
  const double twice = refengine::PrefillFlops(config, 2 * kTokens).total();
  const double square = (twice - 2 * once) / (2.0 * kTokens * kTokens);
  return {.flops_per_token = once / kTokens - square * kTokens, .flops_per_token_squared = square};
}

// A miss that a publish would mend; where the daemon is gone or swamped, asking it for more would only cost time.
bool WorthFilling(MissReason reason) {
  switch (reason) {
    case MissReason::kNeverSeen:
    case MissReason::kBeingPublished:
    case MissReason::kEvicted:
    case MissReason::kChecksumFailed:
    case MissReason::kTierError:
    case MissReason::kAbandoned:
    case MissReason::kExpired:
    case MissReason::kNamespaceDiffers:
    case MissReason::kBudgetRefused:
    case MissReason::kDeclined:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool SetPrompt::any_landed() const {
  return resumed > 0 || std::ranges::find(landed, true) != landed.end();
}

void SetPrompt::SetLanded(uint32_t segment, bool value) {
  if (segment == LandSegment::kPrefix) {
    resumed = value ? match->prefix().depth : 0;
  } else {
    landed[segment] = value;
  }
}

void SetPrompt::SetNothingLanded() {
  resumed = 0;
  landed.assign(landed.size(), false);
}

absl::StatusOr<std::unique_ptr<CachedServing>> CachedServing::Open(Client& client, const Runtime& runtime,
                                                                   PagePool& pool, const Region& region,
                                                                   refengine::SeamWidths seams,
                                                                   const ServingOptions& options) {
  const ModelConfig& config = runtime.model.config();
  if (region.size() < RegionBytes(config, pool.page_tokens(), pool.pages())) {
    return absl::InvalidArgumentError("region: smaller than RegionBytes");
  }
  std::unique_ptr<CachedServing> serving(new CachedServing(runtime, pool, region, seams, options));
  const Layout layout = runtime.model.layout(static_cast<uint32_t>(seams.head), static_cast<uint32_t>(seams.tail),
                                             static_cast<uint32_t>(pool.page_tokens()));
  absl::StatusOr<Model> model = client.OpenModel(runtime.model.identity(), layout, {}, Cost(config), options.prefixes);
  if (!model.ok()) return model.status();
  serving->model_ = *model;
  if (absl::Status status = serving->model_.DeclarePages(region, DeclaredPages(config, pool)); !status.ok())
    return status;
  if (options.compose == ComposeBy::kDaemon) {
    auto advancer = DaemonAdvancer::Make(client, serving->model_, config);
    if (!advancer.ok()) return advancer.status();
    serving->advancer_ = *std::move(advancer);
  }
  return serving;
}

absl::StatusOr<CachedServing::Found> CachedServing::Find(const RagPrompt& prompt, const ConversationId& conversation,
                                                         SetPrompt& set) {
  if (absl::Status status = NewSequence(prompt, set); !status.ok()) return status;
  auto [match, segments, landing] = model_.LookupAndLand(
      Prompt{.tokens = prompt.tokens, .segment_lengths = prompt.segment_lengths, .conversation = conversation},
      set.sequence->page_table());
  set.match = std::move(match);
  return Found{std::move(segments), std::move(landing)};
}

void CachedServing::PutAside(std::unique_ptr<Sequence> sequence, Landing landing) {
  if (!landing.quiet()) quarantined_.push_back({std::move(sequence), std::move(landing)});
}

absl::Status CachedServing::Prefill(ObjectKind kind, std::span<const int32_t> tokens, Sequence& scratch) {
  Step run = Step::Compute(tokens);
  if (kind == ObjectKind::kSegment) {
    const refengine::CaptureRange interior{
        .begin = seams_.head, .end = static_cast<int64_t>(tokens.size()) - seams_.tail, .linear = staging_.buffers()};
    return runtime_.engine.Advance(scratch, {&run, 1}, {.captures = {&interior, 1}});
  }
  if (absl::Status status = runtime_.engine.Advance(scratch, {&run, 1}); !status.ok()) return status;
  staging_.Take(scratch.recurrent());
  return absl::OkStatus();
}

PublishParts CachedServing::Staged(ObjectKind kind, uint64_t tokens, const Sequence& scratch) const {
  const ModelConfig& config = runtime_.model.config();
  const bool dense = config.linear.form() == TransitionForm::kDense;
  PublishParts parts{.linear = staging_.Parts(), .region = region_, .page_table = scratch.page_table()};
  if (kind != ObjectKind::kSegment) return parts;
  std::vector<DenseTransitions> transitions;
  for (size_t i = 0; i < parts.linear.size(); ++i) {
    float* const transition = staging_.buffers()[i].transition;
    std::byte* const stored = reinterpret_cast<std::byte*>(transition);
    if (!dense) parts.linear[i].transition = stored;
    transitions.push_back({.layer = parts.linear[i].layer, .computed = transition, .stored = stored});
  }
  if (dense) parts.runs = AdaptTransitions(model_.layout(), tokens, transitions, options_.epsilon, &runtime_.workers);
  return parts;
}

void CachedServing::Count(uint64_t tokens, const PublishParts& published) {
  const refengine::LinearConfig& linear = runtime_.model.config().linear;
  std::vector<TransitionRun> runs;
  for (const PublishParts::Run& run : published.runs) runs.push_back(run.heads);
  const absl::StatusOr<ObjectHeader> plan = PlanObject(model_.layout(), {}, {}, ObjectKind::kSegment, tokens);
  const absl::StatusOr<ObjectHeader> stored = plan.ok() ? PlanForms(*plan, runs) : plan.status();
  if (!stored.ok()) return;  // no segment
  ++stored_.segments;
  stored_.bytes += stored->bytes;
  stored_.own_bytes += plan->bytes;
  for (const TransitionRun& run : runs) stored_.heads[run.form] += run.heads;
  if (!runs.empty()) return;
  const auto heads = static_cast<uint64_t>(linear.value_heads) * published.linear.size();
  stored_.heads[linear.form()] += heads;
}

std::vector<ObjectRun> CachedServing::WhatToFill(const RagPrompt& prompt, const Match& match) {
  std::vector<ObjectRun> runs;
  for (size_t i = 0; i < match.segments().size(); ++i) {
    if (!WorthFilling(match.segments()[i].reason)) continue;
    runs.push_back({.kind = KindOfSegment(i), .tokens = prompt.Segment(i)});
  }
  return runs;
}

absl::Status CachedServing::Fill(std::span<const ObjectRun> runs) {
  const std::vector<Reservation> reservations = model_.Reserve(runs);
  for (size_t i = 0; i < reservations.size(); ++i) {
    if (!reservations[i].granted()) continue;  // another engine is faster: its copy is as good as ours
    Sequence scratch(runtime_.model.config(), pool_);
    if (absl::Status status = Prefill(runs[i].kind, runs[i].tokens, scratch); !status.ok()) {
      for (; i < reservations.size(); ++i) model_.Abandon(reservations[i]);
      if (!absl::IsResourceExhausted(status)) return status;
      break;  // no pages to fill with: what is missed is computed in its place
    }
    // At once, not all at the end: others find it while the next is computed, and one segment's staging is enough.
    const PublishParts staged = Staged(runs[i].kind, runs[i].tokens.size(), scratch);
    const PublishOutcome outcome = model_.Publish(reservations[i], staged);
    if (outcome == PublishOutcome::kPublished && runs[i].kind == ObjectKind::kSegment) {
      Count(runs[i].tokens.size(), staged);
    }
    if (outcome == PublishOutcome::kBusy) model_.Abandon(reservations[i]);  // a busy daemon keeps it for us
  }
  return absl::OkStatus();
}

void CachedServing::FreeQuietSlots() {
  std::erase_if(quarantined_, [](const Quarantined& slots) { return slots.landing.quiet(); });
}

absl::Status CachedServing::NewSequence(const RagPrompt& prompt, SetPrompt& set) {
  set.sequence = std::make_unique<Sequence>(runtime_.model.config(), pool_);
  const auto give_up = std::chrono::steady_clock::now() + options_.patience.quiet;
  while (!set.sequence->Reserve(static_cast<int64_t>(prompt.tokens.size()))) {
    if (quarantined_.empty()) return absl::ResourceExhaustedError("pages: too few for this prompt");
    if (std::chrono::steady_clock::now() >= give_up) {
      return absl::ResourceExhaustedError("pages: too few for this prompt while landings are in doubt");
    }
    for (Quarantined& slots : quarantined_) slots.landing.WaitQuiet(kAskEach);
    FreeQuietSlots();
  }
  return absl::OkStatus();
}

void CachedServing::BuildChain(const RagPrompt& prompt, SetPrompt& set) const {
  set.chain.clear();
  set.layers.resize(prompt.segment_lengths.size());
  uint64_t computed = 0;  // up to here the chain stands
  auto compute_to = [&](uint64_t position) {
    if (position > computed)
      set.chain.push_back(Step::Compute(std::span(prompt.tokens).subspan(computed, position - computed)));
  };
  if (set.resumed > 0) {
    if (set.match->prefix_span() != nullptr) {
      set.rebuilt.emplace(runtime_.model.config(), ResumedState(runtime_, model_.layout(), *set.match));
      set.prefix_layers.assign(set.rebuilt->layers().begin(), set.rebuilt->layers().end());
    } else {
      set.prefix_layers = Layers(*set.match->prefix_states());
    }
    set.chain.push_back(Step::Checkpoint(static_cast<int64_t>(set.resumed), set.prefix_layers));
    computed = set.resumed;
  }
  for (size_t i = 0; i < prompt.segment_lengths.size(); ++i) {
    if (!set.landed[i]) continue;
    const bool whole = KindOfSegment(i) == ObjectKind::kCheckpoint;
    const uint64_t begin = prompt.SegmentStart(i) + (whole ? 0 : seams_.head);
    const uint64_t end = prompt.SegmentStart(i) + prompt.segment_lengths[i] - (whole ? 0 : seams_.tail);
    set.layers[i] = Layers(*set.match->tuples(i));
    compute_to(begin);
    const auto count = static_cast<int64_t>(end - begin);
    set.chain.push_back(whole ? Step::Checkpoint(count, set.layers[i]) : Step::Cached(count, set.layers[i]));
    computed = end;
  }
  compute_to(prompt.tokens.size());
  if (options_.prefixes.capture_tokens == 0) return;
  const std::vector<uint64_t>& asked = set.match->checkpoint_positions();
  std::vector<int64_t> depths(asked.begin(), asked.end());
  // A span begins before the prompt's last token: the same prompt can be resumed there, for another answer.
  const auto last = static_cast<int64_t>(prompt.tokens.size()) - 1;
  if (options_.prefixes.span_tokens > 0 && last > 0) {
    depths.insert(std::ranges::lower_bound(depths, last), last);
    depths.erase(std::ranges::unique(depths).begin(), depths.end());
  }
  set.snapshots = refengine::SnapshotAt(0, depths, set.chain);
}

absl::Status CachedServing::AdvanceWhileLanding(Landing& landing, const RagPrompt& prompt, SetPrompt& set,
                                                AdvanceOptions& options) {
  // Nothing of a layer is read before it has come. A span's inputs are read before the first layer, all of them.
  const auto wait = [&](int32_t layers) {
    return landing.WaitLayers(static_cast<uint32_t>(layers), options_.patience.land);
  };
  const bool rebuilds = set.resumed > 0 && set.match->prefix_span() != nullptr;
  if (rebuilds && !wait(runtime_.model.config().layers())) return absl::CancelledError("the span has not come");
  BuildChain(prompt, set);
  options.on_layer = [wait](int32_t layer) { return wait(layer + 1); };
  if (advancer_ != nullptr && advancer_->Begin(*set.match, set.layers)) options.advancer = advancer_.get();
  return runtime_.engine.Advance(*set.sequence, set.chain, options);
}

absl::Status CachedServing::AdvanceBehind(Found found, const RagPrompt& prompt, SetPrompt& set,
                                          std::vector<float>& logits) {
  auto& [wanted, landing] = found;
  set.landed.assign(prompt.segment_lengths.size(), false);
  for (const LandSegment& segment : wanted) set.SetLanded(segment.segment, true);
  AdvanceOptions options{.last_logits = logits.data(), .tape = tape_};
  if (wanted.empty()) {
    BuildChain(prompt, set);
    // Of a match that did not come in time something may be landing all the same.
    if (!landing.WaitQuiet(kAskEach)) {
      PutAside(std::move(set.sequence), std::move(landing));
      if (absl::Status status = NewSequence(prompt, set); !status.ok()) return status;
    }
    return runtime_.engine.Advance(*set.sequence, set.chain, options);
  }

  const absl::Status advanced = AdvanceWhileLanding(landing, prompt, set, options);
  const std::vector<MissReason> verdict = landing.Wait(options_.patience.land);
  bool landed = true;
  for (size_t i = 0; i < wanted.size(); ++i) {
    set.SetLanded(wanted[i].segment, verdict[i] == MissReason::kNone);
    landed &= verdict[i] == MissReason::kNone;
  }
  if (options.advancer != nullptr) {
    for (const uint32_t segment : advancer_->lost()) set.landed[segment] = false;
  }
  // With the session, the leases ended under which the tuples were read.
  if (!set.match->valid()) {
    landed = false;
    set.SetNothingLanded();
  }
  if (advanced.ok() ? landed : !absl::IsCancelled(advanced)) return advanced;

  // Some of it did not land, or not in time: this prefill starts again with what is missing computed. Slots that may
  // still be written into are not touched until they are quiet.
  if (landing.quiet()) {
    set.sequence->Rewind(0, refengine::RecurrentState(runtime_.model.config()));
  } else {
    PutAside(std::move(set.sequence), std::move(landing));
    set.SetNothingLanded();
    if (absl::Status status = NewSequence(prompt, set); !status.ok()) return status;
  }
  return AdvanceAgain(prompt, set, logits);
}

absl::Status CachedServing::AdvanceAgain(const RagPrompt& prompt, SetPrompt& set, std::vector<float>& logits) {
  for (;;) {
    BuildChain(prompt, set);
    const absl::Status advanced =
        runtime_.engine.Advance(*set.sequence, set.chain, {.last_logits = logits.data(), .tape = tape_});
    if (!advanced.ok() || !set.any_landed() || set.match->valid()) return advanced;
    set.SetNothingLanded();
    set.sequence->Rewind(0, refengine::RecurrentState(runtime_.model.config()));
  }
}

absl::StatusOr<Served> CachedServing::Serve(const RagPrompt& prompt, const ConversationId& conversation) {
  const Stopwatch watch;
  FreeQuietSlots();
  last_ = std::make_unique<SetPrompt>();
  absl::StatusOr<Found> found = Find(prompt, conversation, *last_);
  if (!found.ok()) return found.status();
  Served served{.logits = std::vector<float>(refengine::kVocabulary)};
  for (const SegmentResult& segment : last_->match->segments()) {
    if (segment.reason == MissReason::kCovered) continue;
    if (segment.hit()) {
      ++served.hits;
      ++served.hit_tiers[segment.tier];
    } else {
      ++served.misses;
      ++served.miss_reasons[segment.reason];
    }
  }
  const std::vector<ObjectRun> missing = WhatToFill(prompt, *last_->match);
  if (!missing.empty()) {
    // Filling takes pages, too, and much longer than to land again what was found.
    found->landing.Wait(options_.patience.land);
    PutAside(std::move(last_->sequence), std::move(found->landing));
    if (absl::Status status = Fill(missing); !status.ok()) return status;
    found = Find(prompt, conversation, *last_);
    if (!found.ok()) return found.status();
  }
  absl::Status advanced = AdvanceBehind(*std::move(found), prompt, *last_, served.logits);
  if (!advanced.ok()) return advanced;
  served.ttft_ms = watch.Milliseconds();
  for (const Step& step : last_->chain) served.computed_tokens += step.tokens.size();
  served.flops = refengine::ChainFlops(runtime_.model.config(), 0, last_->chain).total();
  return served;
}

}  // namespace ashlar::rag
