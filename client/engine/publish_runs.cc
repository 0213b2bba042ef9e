// SPDX-License-Identifier: Apache-2.0
#include "client/engine/publish_runs.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "client/engine/adapt_transitions.h"
#include "client/engine/page_tables.h"
#include "client/engine/tensors.h"
#include "proto/object.h"

namespace ashlar::engine {
namespace {

void Count(const ashlar::Layout& layout, uint64_t tokens, std::span<const PublishParts::Run> published,
           StoredSegments& stored) {
  std::vector<TransitionRun> runs;
  for (const PublishParts::Run& run : published) runs.push_back(run.heads);
  const absl::StatusOr<ObjectHeader> plan = PlanObject(layout, {}, {}, ObjectKind::kSegment, tokens);
  const absl::StatusOr<ObjectHeader> header = plan.ok() ? PlanForms(*plan, runs) : plan.status();
  if (!header.ok()) return;  // not a segment
  ++stored.segments;
  stored.bytes += header->bytes;
  stored.own_bytes += plan->bytes;
  for (uint32_t layer = 0; layer < layout.layers.size(); ++layer) {
    const auto* const linear = std::get_if<LinearLayer>(&layout.layers[layer]);
    if (linear == nullptr) continue;
    bool own = true;
    for (const TransitionRun& run : runs) {
      if (run.layer != layer) continue;
      stored.heads[static_cast<size_t>(run.form)] += run.heads;
      own = false;
    }
    if (own) stored.heads[static_cast<size_t>(linear->transition)] += linear->value_heads;
  }
}

ObjectRun TextOf(const TakenRun& taken) {
  return {.kind = taken.run.transition ? ObjectKind::kSegment : ObjectKind::kCheckpoint,
          .tokens = taken.tokens,
          .media = taken.media,
          .salt = taken.salt};
}

// Tensors of up to this size are staged for one call of the daemon; the tensors of one run may be larger.
constexpr uint64_t kStagedForACall = uint64_t{64} << 20;

std::span<const LinearTensors> TensorsOf(const ComputedRun& computed) {
  return {computed.linear, computed.linear_count};
}

// Bytes to be staged; 0: everything is published from its place.
uint64_t StagedBytes(const CacheState& cache, const Run& run, const ComputedRun& computed) {
  const ashlar::Layout& layout = cache.layout();
  if (!run.transition && LieIn(cache.region, layout, TensorsOf(computed))) return 0;
  uint64_t bytes = 0;
  for (const LinearTensors& tensors : TensorsOf(computed)) {
    bytes += TensorBytes(layout.layers[tensors.layer]).staged(run.transition);
  }
  return bytes;
}

// `held`: null if nothing needs staging.
PublishParts PartsOf(CacheState& cache, const Run& run, const ComputedRun& computed, const GroupedPages& pages,
                     Staging::Held* held) {
  const ashlar::Layout& layout = cache.layout();
  const std::span<const LinearTensors> linear = TensorsOf(computed);
  PublishParts parts{.linear = {},
                     .runs = {},
                     .region = cache.region,
                     .page_table = pages.entries,
                     .first_position = computed.first_position,
                     .provenance = Provenance::kExact,
                     .group_pages = pages.group_pages};
  if (held == nullptr) {
    parts.linear = InPlace(linear);
    return parts;
  }
  parts.region = held->region();
  parts.linear = Stage(layout, linear, *held);
  std::vector<DenseTransitions> dense;
  for (size_t i = 0; run.transition && i < linear.size(); ++i) {
    const auto& layer = std::get<LinearLayer>(layout.layers[linear[i].layer]);
    const uint64_t size = TensorBytes(layout.layers[linear[i].layer]).transition;
    std::byte* const stored = held->Take(size);
    if (layer.transition == TransitionForm::kDense) {
      dense.push_back({linear[i].layer, linear[i].transition, linear[i].decay, stored});
    } else {
      std::memcpy(stored, linear[i].transition, size);
      parts.linear[i].transition = stored;
    }
  }
  if (!dense.empty()) parts.runs = AdaptTransitions(layout, run.token_count, dense, cache.epsilon, cache.workers.get());
  return parts;
}

// Publishes again the runs whose reservations ended before they were computed, unless another engine has reserved or
// published them since.
void PublishEnded(CacheState& cache, std::span<const TakenRun> taken, std::span<Publication> publications,
                  std::span<PublishOutcome> outcomes) {
  std::vector<size_t> ended;
  std::vector<ObjectRun> texts;
  for (size_t i = 0; i < taken.size(); ++i) {
    if (outcomes[i] != PublishOutcome::kUnknownReservation) continue;
    ended.push_back(i);
    texts.push_back(TextOf(taken[i]));
  }
  if (ended.empty()) return;
  const std::vector<Reservation> reservations = cache.model.Reserve(texts);
  std::vector<size_t> places;
  std::vector<Publication> again;
  for (size_t i = 0; i < ended.size(); ++i) {
    if (!reservations[i].granted()) continue;
    publications[ended[i]].reservation = reservations[i];
    again.push_back(publications[ended[i]]);
    places.push_back(ended[i]);
  }
  const std::vector<PublishOutcome> published = cache.model.Publish(again);
  for (size_t i = 0; i < places.size(); ++i) outcomes[places[i]] = published[i];
}

// Makes one call of the model for runs with `bytes` staged bytes.
void PublishTogether(CacheState& cache, std::span<const TakenRun> taken, std::span<const ComputedRun> computed,
                     uint64_t bytes, std::span<PublishOutcome> outcomes) {
  std::optional<Staging::Held> held;
  if (bytes > 0) {
    absl::StatusOr<Staging::Held> space = cache.staging.Hold(bytes);
    if (!space.ok()) {
      const bool full = absl::IsResourceExhausted(space.status());
      std::ranges::fill(outcomes, full ? PublishOutcome::kBusy : PublishOutcome::kUnavailable);
      return AbandonRuns(cache, taken);
    }
    held.emplace(*std::move(space));
  }
  std::vector<GroupedPages> pages;
  for (const ComputedRun& run : computed) pages.push_back(GroupedPages::From(PagesOf(run)));
  std::vector<Publication> publications;
  for (size_t i = 0; i < taken.size(); ++i) {
    const bool staged = StagedBytes(cache, taken[i].run, computed[i]) > 0;
    publications.push_back(
        {taken[i].reservation, PartsOf(cache, taken[i].run, computed[i], pages[i], staged ? &*held : nullptr)});
  }
  std::ranges::copy(cache.model.Publish(publications), outcomes.begin());
  PublishEnded(cache, taken, publications, outcomes);
  std::vector<Reservation> kept;
  for (size_t i = 0; i < taken.size(); ++i) {
    if (outcomes[i] == PublishOutcome::kPublished && taken[i].run.transition) {
      MutexLock lock(cache.stored_mutex);
      Count(cache.layout(), taken[i].run.token_count, publications[i].parts.runs, cache.stored);
    }
    // A busy daemon keeps the reservation.
    if (outcomes[i] == PublishOutcome::kBusy) kept.push_back(publications[i].reservation);
  }
  if (!kept.empty()) cache.model.Abandon(kept);
}

}  // namespace

std::vector<PublishOutcome> PublishRuns(CacheState& cache, std::span<const TakenRun> taken,
                                        std::span<const ComputedRun> computed) {
  std::vector<PublishOutcome> outcomes(taken.size(), PublishOutcome::kUnavailable);
  size_t end = 0;
  for (size_t begin = 0; begin < taken.size(); begin = end) {
    uint64_t bytes = 0;
    for (; end < taken.size(); ++end) {
      const uint64_t more = StagedBytes(cache, taken[end].run, computed[end]);
      if (end > begin && bytes + more > kStagedForACall) break;
      bytes += more;
    }
    const size_t count = end - begin;
    PublishTogether(cache, taken.subspan(begin, count), computed.subspan(begin, count), bytes,
                    std::span(outcomes).subspan(begin, count));
  }
  for (size_t i = 0; i < taken.size(); ++i) {
    if (taken[i].work.has_value()) cache.Served(*taken[i].work, outcomes[i] == PublishOutcome::kPublished);
  }
  return outcomes;
}

void AbandonRuns(CacheState& cache, std::span<const TakenRun> taken) {
  std::vector<Reservation> reservations;
  for (const TakenRun& one : taken) reservations.push_back(one.reservation);
  cache.model.Abandon(reservations);
}

}  // namespace ashlar::engine
