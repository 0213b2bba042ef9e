#include "tools/rag/cached_serving.h"

#include <algorithm>
#include <cstring>

#include "tools/refengine/flops.h"
#include "tools/refengine/tokenizer.h"

namespace ashlar::rag {
namespace {

using refengine::CachedLayer;
using refengine::ModelConfig;
using refengine::PagePool;
using refengine::Sequence;
using refengine::Step;
using refengine::TupleBuffers;

// Of several landings in quarantine any may be quiet first.
constexpr std::chrono::milliseconds kAskEach{10};

size_t Align(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

struct TupleBytes {
  explicit TupleBytes(const ModelConfig& config) {
    const auto& linear = config.linear;
    transition = Align(sizeof(float) * linear.value_heads * linear.transition_floats());
    state = Align(sizeof(float) * linear.value_heads * linear.state_floats());
    conv_tail = Align(sizeof(float) * (linear.conv_kernel - 1) * linear.conv_channels());
  }
  size_t total() const { return transition + state + conv_tail; }
  size_t transition, state, conv_tail;
};

std::vector<TupleBuffers> Staging(const ModelConfig& config, std::byte* at) {
  const TupleBytes bytes(config);
  std::vector<TupleBuffers> buffers;
  for (int32_t i = 0; i < config.linear_layers(); ++i, at += bytes.total()) {
    buffers.push_back({.transition = reinterpret_cast<float*>(at),
                       .state = reinterpret_cast<float*>(at + bytes.transition),
                       .conv_tail = reinterpret_cast<float*>(at + bytes.transition + bytes.state)});
  }
  return buffers;
}

PagedCache Geometry(const ModelConfig& config, const PagePool& pool) {
  PagedCache pages{.page_tokens = static_cast<uint32_t>(pool.page_tokens()),
                   .pages = static_cast<uint32_t>(pool.pages())};
  for (int32_t i = 0; i < config.attention_layers(); ++i) {
    const refengine::PagedLayerGeometry layer = pool.Geometry(i);
    pages.layers.push_back({.layer = layer.layer,
                            .key_offset = layer.key_offset,
                            .value_offset = layer.value_offset,
                            .page_stride = layer.page_stride,
                            .token_stride = layer.token_stride,
                            .key_head_stride = layer.head_stride,
                            .value_head_stride = layer.head_stride});
  }
  return pages;
}

ObjectKind KindOf(size_t segment) {
  return segment == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment;
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

size_t RegionBytes(const ModelConfig& config, int32_t page_tokens, int32_t pages) {
  return Align(PagePool::RequiredBytes(config, page_tokens, pages)) +
         TupleBytes(config).total() * config.linear_layers();
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
  const size_t pages_bytes = Align(PagePool::RequiredBytes(config, pool.page_tokens(), pool.pages()));
  serving->staging_ = Staging(config, region.data() + pages_bytes);
  const Layout layout = runtime.model.layout(static_cast<uint32_t>(seams.head), static_cast<uint32_t>(seams.tail),
                                             static_cast<uint32_t>(pool.page_tokens()));
  absl::StatusOr<Model> model = client.OpenModel(runtime.model.identity(), layout);
  if (!model.ok()) return model.status();
  serving->model_ = *model;
  if (absl::Status status = serving->model_.DeclarePages(region, Geometry(config, pool)); !status.ok()) return status;
  if (options.compose == ComposeBy::kDaemon) {
    auto advancer = DaemonAdvancer::Make(client, serving->model_, config);
    if (!advancer.ok()) return advancer.status();
    serving->advancer_ = *std::move(advancer);
  }
  return serving;
}

Match CachedServing::Lookup(const RagPrompt& prompt) {
  return model_.Lookup(Prompt{.tokens = prompt.tokens, .segment_lengths = prompt.segment_lengths});
}

absl::Status CachedServing::Prefill(ObjectKind kind, std::span<const int32_t> tokens, Sequence& scratch) {
  Step run = Step::Compute(tokens);
  if (kind == ObjectKind::kSegment) {
    const refengine::CaptureRange interior{
        .begin = seams_.head, .end = static_cast<int64_t>(tokens.size()) - seams_.tail, .linear = staging_};
    return runtime_.engine.Advance(scratch, {&run, 1}, {.captures = {&interior, 1}});
  }
  if (absl::Status status = runtime_.engine.Advance(scratch, {&run, 1}); !status.ok()) return status;
  for (int32_t i = 0; i < runtime_.model.config().linear_layers(); ++i) {
    const auto state = scratch.recurrent().State(i), window = scratch.recurrent().ConvWindow(i);
    std::copy(state.begin(), state.end(), staging_[i].state);
    std::copy(window.begin(), window.end(), staging_[i].conv_tail);
  }
  return absl::OkStatus();
}

PublishParts CachedServing::Staged(ObjectKind kind, uint64_t tokens, const Sequence& scratch) const {
  const ModelConfig& config = runtime_.model.config();
  const bool dense = config.linear.form() == kernels::TransitionForm::kDense;
  PublishParts parts{.region = region_, .page_table = scratch.page_table()};
  std::vector<DenseTransitions> transitions;
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    const TupleBuffers& staged = staging_[config.kind_index(layer)];
    auto bytes = [](const float* floats) { return reinterpret_cast<const std::byte*>(floats); };
    PublishParts::Linear& linear = parts.linear.emplace_back();
    linear = {
        .layer = static_cast<uint32_t>(layer), .state = bytes(staged.state), .conv_tail = bytes(staged.conv_tail)};
    if (kind != ObjectKind::kSegment) continue;
    if (!dense) linear.transition = bytes(staged.transition);
    transitions.push_back({.layer = linear.layer,
                           .computed = staged.transition,
                           .stored = reinterpret_cast<std::byte*>(staged.transition)});
  }
  if (kind == ObjectKind::kSegment && dense) {
    parts.runs = AdaptTransitions(model_.layout(), tokens, transitions, options_.epsilon, &runtime_.workers);
  }
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
  stored_.heads[static_cast<TransitionKind>(linear.form())] += heads;
}

absl::StatusOr<bool> CachedServing::Fill(const RagPrompt& prompt, const Match& match) {
  std::vector<ObjectRun> runs;
  for (size_t i = 0; i < match.segments().size(); ++i) {
    if (!WorthFilling(match.segments()[i].reason)) continue;
    runs.push_back({.kind = KindOf(i), .tokens = prompt.Segment(i)});
  }
  const std::vector<Reservation> reservations = runs.empty() ? std::vector<Reservation>{} : model_.Reserve(runs);
  bool published = false;
  for (size_t i = 0; i < reservations.size(); ++i) {
    if (!reservations[i].granted()) {
      // Another engine was faster: its copy is as good as ours.
      published |= reservations[i].outcome == ReserveOutcome::kAlreadyPresent;
      continue;
    }
    Sequence scratch(runtime_.model.config(), pool_);
    if (absl::Status status = Prefill(runs[i].kind, runs[i].tokens, scratch); !status.ok()) {
      for (; i < reservations.size(); ++i) model_.Abandon(reservations[i]);
      if (!absl::IsResourceExhausted(status)) return status;
      break;  // no pages to fill with: what is missed is computed in its place
    }
    // At once, not all at the end: others find it while the next is computed, and one segment's staging is enough.
    const PublishParts staged = Staged(runs[i].kind, runs[i].tokens.size(), scratch);
    const PublishOutcome outcome = model_.Publish(reservations[i], staged);
    published |= outcome == PublishOutcome::kPublished;
    if (outcome == PublishOutcome::kPublished && runs[i].kind == ObjectKind::kSegment) {
      Count(runs[i].tokens.size(), staged);
    }
    if (outcome == PublishOutcome::kBusy) model_.Abandon(reservations[i]);  // a busy daemon keeps it for us
  }
  return published;
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
  for (size_t i = 0; i < prompt.segment_lengths.size(); ++i) {
    if (!set.landed[i]) continue;
    const bool whole = KindOf(i) == ObjectKind::kCheckpoint;
    const uint64_t begin = prompt.SegmentStart(i) + (whole ? 0 : seams_.head);
    const uint64_t end = prompt.SegmentStart(i) + prompt.segment_lengths[i] - (whole ? 0 : seams_.tail);
    set.layers[i].clear();
    for (const MappedTuple& tuple : *set.match->tuples(i)) {
      set.layers[i].push_back({tuple.view, static_cast<const float*>(tuple.conv_tail)});  // its layout says fp32
    }
    compute_to(begin);
    const auto count = static_cast<int64_t>(end - begin);
    set.chain.push_back(whole ? Step::Checkpoint(count, set.layers[i]) : Step::Cached(count, set.layers[i]));
    computed = end;
  }
  compute_to(prompt.tokens.size());
}

absl::Status CachedServing::LandAndAdvance(const RagPrompt& prompt, SetPrompt& set, std::vector<float>& logits) {
  std::vector<LandSegment> wanted;
  for (uint32_t i = 0; i < set.landed.size(); ++i) {
    set.landed[i] = set.match->segments()[i].hit() && set.match->tuples(i) != nullptr;
    if (set.landed[i]) wanted.push_back({i, prompt.SegmentStart(i)});
  }
  if (absl::Status status = NewSequence(prompt, set); !status.ok()) return status;
  BuildChain(prompt, set);
  refengine::AdvanceOptions options{.last_logits = logits.data()};
  if (wanted.empty()) return runtime_.engine.Advance(*set.sequence, set.chain, options);

  const ModelConfig& config = runtime_.model.config();
  Landing landing = model_.Land(*set.match, set.sequence->page_table(), wanted);
  options.on_layer = [&](int32_t layer) {
    return !config.is_attention(layer) ||
           landing.WaitLayers(static_cast<uint32_t>(config.kind_index(layer)) + 1, options_.patience.land);
  };
  if (advancer_ != nullptr && advancer_->Begin(*set.match, set.layers)) options.advancer = advancer_.get();
  const absl::Status advanced = runtime_.engine.Advance(*set.sequence, set.chain, options);
  const std::vector<MissReason> verdict = landing.Wait(options_.patience.land);
  bool landed = true;
  for (size_t i = 0; i < wanted.size(); ++i) {
    set.landed[wanted[i].segment] = verdict[i] == MissReason::kNone;
    landed &= verdict[i] == MissReason::kNone;
  }
  if (options.advancer != nullptr) {
    for (const uint32_t segment : advancer_->lost()) set.landed[segment] = false;
  }
  // With the session, the leases ended under which the tuples were read.
  if (!set.match->valid()) {
    landed = false;
    set.landed.assign(set.landed.size(), false);
  }
  if (advanced.ok() ? landed : !absl::IsCancelled(advanced)) return advanced;

  // Some of it did not land, or not in time: this prefill starts again with what is missing computed. Slots that may
  // still be written into are not touched until they are quiet.
  if (landing.quiet()) {
    set.sequence->Rewind(0, refengine::RecurrentState(config));
  } else {
    quarantined_.push_back({std::move(set.sequence), std::move(landing)});
    set.landed.assign(set.landed.size(), false);
    if (absl::Status status = NewSequence(prompt, set); !status.ok()) return status;
  }
  return AdvanceAgain(prompt, set, logits);
}

absl::Status CachedServing::AdvanceAgain(const RagPrompt& prompt, SetPrompt& set, std::vector<float>& logits) {
  for (;;) {
    BuildChain(prompt, set);
    const absl::Status advanced = runtime_.engine.Advance(*set.sequence, set.chain, {.last_logits = logits.data()});
    const bool read_tuples = std::ranges::find(set.landed, true) != set.landed.end();
    if (!advanced.ok() || !read_tuples || set.match->valid()) return advanced;
    set.landed.assign(set.landed.size(), false);
    set.sequence->Rewind(0, refengine::RecurrentState(runtime_.model.config()));
  }
}

absl::StatusOr<Served> CachedServing::Serve(const RagPrompt& prompt) {
  const Stopwatch watch;
  FreeQuietSlots();
  last_ = std::make_unique<SetPrompt>();
  last_->match = Lookup(prompt);
  Served served{.logits = std::vector<float>(refengine::kVocabulary)};
  for (const SegmentResult& segment : last_->match->segments()) {
    ++(segment.hit() ? served.hits : served.misses);
    if (segment.hit()) ++served.hit_tiers[segment.tier];
  }
  if (served.misses > 0) {
    const absl::StatusOr<bool> published = Fill(prompt, *last_->match);
    if (!published.ok()) return published.status();
    if (*published) last_->match = Lookup(prompt);
  }
  last_->landed.assign(prompt.segment_lengths.size(), false);
  if (absl::Status status = LandAndAdvance(prompt, *last_, served.logits); !status.ok()) return status;
  served.ttft_ms = watch.Milliseconds();
  for (const Step& step : last_->chain) served.computed_tokens += step.tokens.size();
  served.flops = refengine::ChainFlops(runtime_.model.config(), 0, last_->chain).total();
  return served;
}

}  // namespace ashlar::rag
