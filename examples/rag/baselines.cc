// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/baselines.h"

#include <algorithm>

#include "examples/refengine/flops.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::rag {
namespace {

using refengine::HeldCheckpoint;
using refengine::LayerTables;
using refengine::SeamWidths;
using refengine::Sequence;
using refengine::Step;
using refengine::StoredSegment;

std::vector<int32_t> Copy(std::span<const int32_t> tokens) {
  return {tokens.begin(), tokens.end()};
}

// Advances the sequence, and measures the time at which the first token's logits are ready.
absl::Status Finish(const Runtime& runtime, Sequence& sequence, std::span<const Step> chain, const Stopwatch& watch,
                    Served& served) {
  served.logits.resize(refengine::kVocabulary);
  const absl::Status status = runtime.engine.Advance(sequence, chain, {.last_logits = served.logits.data()});
  served.ttft_ms = watch.Milliseconds();
  for (const Step& step : chain) served.computed_tokens += step.tokens.size();
  served.flops = refengine::ChainFlops(runtime.model.config(), 0, chain).total();
  return status;
}

}  // namespace

absl::StatusOr<Served> FullRecompute::Serve(const RagPrompt& prompt) {
  const Stopwatch watch;
  Served served{.misses = prompt.segment_lengths.size()};
  Sequence sequence(runtime_.model.config(), pool_);
  const Step chain[] = {Step::Compute(prompt.tokens)};
  if (absl::Status status = Finish(runtime_, sequence, chain, watch, served); !status.ok()) return status;
  return served;
}

ExactPrefixes::Hit ExactPrefixes::Longest(const RagPrompt& prompt) {
  Hit best;
  for (Entry& entry : entries_) {
    const auto differs =
        std::mismatch(prompt.tokens.begin(), prompt.tokens.end(), entry.tokens.begin(), entry.tokens.end());
    const uint64_t common = static_cast<uint64_t>(differs.first - prompt.tokens.begin());
    auto at = entry.checkpoints.upper_bound(std::min<uint64_t>(common, prompt.tokens.size() - 1));
    if (at == entry.checkpoints.begin()) continue;
    --at;
    if (at->first > best.depth) best = {&entry, at->first};
  }
  return best;
}

absl::StatusOr<Served> ExactPrefixes::Serve(const RagPrompt& prompt) {
  const Stopwatch watch;
  const refengine::ModelConfig& config = runtime_.model.config();
  if (entries_.size() == capacity_) entries_.pop_back();
  Served served;
  const Hit hit = Longest(prompt);
  auto sequence = std::make_unique<Sequence>(config, pool_);
  if (!sequence->Reserve(static_cast<int64_t>(prompt.tokens.size()))) {
    return absl::ResourceExhaustedError("prefix cache: too few pages");
  }
  std::vector<Step> chain;
  uint64_t position = 0;
  if (hit.entry != nullptr) {
    StoredSegment rows(config, static_cast<int64_t>(hit.depth), SeamWidths{});
    rows.GatherRows(runtime_.model, *hit.entry->sequence, 0, runtime_.kernels, runtime_.queue);
    rows.LandRows(runtime_.model, *sequence, 0, runtime_.kernels, runtime_.queue);
    chain.push_back(Step::Checkpoint(static_cast<int64_t>(hit.depth), hit.entry->checkpoints.at(hit.depth).layers()));
    position = hit.depth;
  }
  std::vector<std::pair<uint64_t, refengine::RecurrentState>> snapshots;
  snapshots.reserve(prompt.segment_lengths.size());
  uint64_t end = 0;
  for (uint64_t length : prompt.segment_lengths) {
    end += length;
    if (end <= position) {
      ++served.hits;
      continue;
    }
    ++served.misses;
    chain.push_back(Step::Compute(std::span(prompt.tokens).subspan(position, end - position)));
    snapshots.emplace_back(end, config);
    chain.back().snapshot = &snapshots.back().second;
    position = end;
  }
  chain.push_back(Step::Compute(std::span(prompt.tokens).subspan(position)));
  if (absl::Status status = Finish(runtime_, *sequence, chain, watch, served); !status.ok()) return status;

  Entry entry{.tokens = prompt.tokens, .sequence = std::move(sequence)};
  for (auto& [depth, state] : snapshots) entry.checkpoints.emplace(depth, HeldCheckpoint(config, std::move(state)));
  entries_.push_front(std::move(entry));
  return served;
}

NaiveAddition::NaiveAddition(const Runtime& runtime, refengine::KvPages& pool)
    : runtime_(runtime),
      pool_(pool),
      identity_(runtime.model.config(), refengine::ReplacedTransitions::With::kIdentity) {}

absl::StatusOr<NaiveAddition::First*> NaiveAddition::FirstSegment(std::span<const int32_t> tokens) {
  auto it = first_.find(Copy(tokens));
  if (it != first_.end()) return &it->second;
  const refengine::ModelConfig& config = runtime_.model.config();
  Sequence sequence(config, pool_);
  refengine::RecurrentState state(config);
  Step run = Step::Compute(tokens);
  run.snapshot = &state;
  if (absl::Status status = runtime_.engine.Advance(sequence, {&run, 1}); !status.ok()) return status;
  First first{HeldCheckpoint(config, std::move(state)), StoredSegment(config, static_cast<int64_t>(tokens.size()), {})};
  first.rows.GatherRows(runtime_.model, sequence, 0, runtime_.kernels, runtime_.queue);
  return &first_.emplace(Copy(tokens), std::move(first)).first->second;
}

absl::StatusOr<StoredSegment*> NaiveAddition::Segment(std::span<const int32_t> tokens) {
  auto it = segments_.find(Copy(tokens));
  if (it != segments_.end()) return &it->second;
  StoredSegment segment(runtime_.model.config(), static_cast<int64_t>(tokens.size()), SeamWidths{});
  if (absl::Status status = PrefillIsolated(runtime_.engine, pool_, tokens, runtime_.kernels, runtime_.queue, segment);
      !status.ok()) {
    return status;
  }
  return &segments_.emplace(Copy(tokens), std::move(segment)).first->second;
}

absl::StatusOr<Served> NaiveAddition::Serve(const RagPrompt& prompt) {
  const Stopwatch watch;
  const size_t known = segments_.size() + first_.size();
  const absl::StatusOr<First*> first = FirstSegment(prompt.Segment(0));
  if (!first.ok()) return first.status();
  Sequence sequence(runtime_.model.config(), pool_);
  if (!sequence.Reserve(static_cast<int64_t>(prompt.tokens.size()))) {
    return absl::ResourceExhaustedError("naive addition: too few pages");
  }
  (*first)->rows.LandRows(runtime_.model, sequence, 0, runtime_.kernels, runtime_.queue);
  std::vector<Step> chain = {Step::Checkpoint((*first)->rows.tokens(), (*first)->checkpoint.layers())};
  std::vector<LayerTables> added;
  added.reserve(prompt.segment_lengths.size());
  for (size_t i = 1; i < prompt.segment_lengths.size(); ++i) {
    const absl::StatusOr<StoredSegment*> segment = Segment(prompt.Segment(i));
    if (!segment.ok()) return segment.status();
    (*segment)->LandRows(runtime_.model, sequence, static_cast<int64_t>(prompt.SegmentStart(i)), runtime_.kernels,
                         runtime_.queue);
    added.push_back(identity_((*segment)->layers()));
    added.back().StandAt(static_cast<int64_t>(prompt.SegmentStart(i)));
    chain.push_back(Step::Cached((*segment)->tokens(), added.back().layers()));
  }
  chain.push_back(Step::Compute(prompt.Query()));
  Served served{.misses = segments_.size() + first_.size() - known};
  served.hits = prompt.segment_lengths.size() - served.misses;
  if (absl::Status status = Finish(runtime_, sequence, chain, watch, served); !status.ok()) return status;
  return served;
}

}  // namespace ashlar::rag
