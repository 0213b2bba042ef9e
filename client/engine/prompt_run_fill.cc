// SPDX-License-Identifier: Apache-2.0
// Filling: runs that a prompt misses and this engine computes alone are reserved, published or given up.
#include <algorithm>
#include <cstring>
#include <utility>

#include "client/engine/adapt_transitions.h"
#include "client/engine/boundary.h"
#include "client/engine/prompt_run.h"
#include "client/engine/status.h"
#include "client/engine/tensors.h"
#include "proto/limits.h"
#include "proto/object.h"

namespace ashlar::engine {
namespace {

// Returns whether a publish would mend the miss. If the daemon is gone or overloaded, asking it for more would only
// cost time.
bool WorthFilling(MissReason reason) {
  switch (reason) {
    case MissReason::kNeverSeen:
    case MissReason::kBeingPublished:
    case MissReason::kEvicted:
    case MissReason::kChecksumFailed:
    case MissReason::kTierError:
    case MissReason::kAbandoned:
    case MissReason::kHolderUnreachable:
    case MissReason::kExpired:
    case MissReason::kNamespaceDiffers:
    case MissReason::kBudgetRefused:
    case MissReason::kDeclined:
      return true;
    default:
      return false;
  }
}

void Count(const ashlar::Layout& layout, uint64_t tokens, std::span<const PublishParts::Run> published,
           StoredSegments& stored) {
  std::vector<TransitionRun> runs;
  for (const PublishParts::Run& run : published) runs.push_back(run.heads);
  const absl::StatusOr<ObjectHeader> plan = PlanObject(layout, {}, {}, ObjectKind::kSegment, tokens);
  const absl::StatusOr<ObjectHeader> header = plan.ok() ? PlanForms(*plan, runs) : plan.status();
  if (!header.ok()) return;  // no segment
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

}  // namespace

// Returns how many were granted. `there`: one is in the cache by now.
size_t PromptRun::Reserve(const std::vector<Run>& runs, const std::vector<ObjectRun>& objects, bool* there) {
  size_t granted = 0;
  const std::vector<Reservation> reservations = cache_.model.Reserve(objects);
  for (size_t i = 0; i < reservations.size(); ++i) {
    *there |= reservations[i].outcome == ReserveOutcome::kAlreadyPresent;
    if (!reservations[i].granted()) continue;  // another engine is faster: its copy is as good as ours
    runs_.push_back(runs[i]);
    reservations_.push_back(reservations[i]);
    ++granted;
  }
  return granted;
}

void PromptRun::ReserveMissing() {
  if (!fill_ || cancelled_) return;
  const ashlar::Layout& layout = cache_.layout();
  std::vector<ObjectRun> objects;
  std::vector<Run> runs;
  std::vector<std::vector<MediaHash>> media(lengths_.size());
  uint64_t start = 0;
  for (uint32_t i = 0; i < lengths_.size(); start += lengths_[i++]) {
    if (!WorthFilling(reasons_[i])) continue;
    const bool whole = KindOfSegment(i) == ObjectKind::kCheckpoint;
    runs.push_back({.tokens = tokens_.data() + start,
                    .token_count = lengths_[i],
                    .segment = i,
                    .capture_begin = whole ? 0 : layout.head,
                    .capture_end = lengths_[i] - (whole ? 0 : layout.tail),
                    .transition = !whole});
    media[i] = MediaWithin(media_, start, start + lengths_[i]);
    objects.push_back(
        {.kind = KindOfSegment(i), .tokens = tokens_.subspan(start, lengths_[i]), .media = media[i], .salt = salt_});
  }
  if (objects.empty()) return;
  if (cold_parallel_ && cache_.tensor_parallel_size == 1) {
    prefill_ = cache_.model.PlanPrefill(objects);
    cold_ = runs;
    elsewhere_ = static_cast<size_t>(std::ranges::count(prefill_.states, PrefillState::kPending));
    size_t kept = 0;
    for (size_t i = 0; i < cold_.size(); ++i) {
      if (prefill_.states[i] == PrefillState::kPending) continue;
      runs[kept] = cold_[i];
      objects[kept++] = objects[i];
    }
    runs.resize(kept);
    objects.resize(kept);
  }
  bool there = false;
  if (!objects.empty()) Reserve(runs, objects, &there);
  if (runs_.empty() && !there && elsewhere_ == 0) return;
  // Filling takes pages, too, and much longer than landing the hits again.
  EndLanding(cache_.land);
  UseNothing();
  MakePlan();
  filling_ = !runs_.empty() || elsewhere_ > 0;
  if (filling_ || pages_kept() || store_only_) return;
  owner_ = pages_.empty() ? Owner::kNobody : Owner::kDaemon;
  LookAgain();  // it has been published meanwhile
}

Status PromptRun::WaitCold(std::chrono::milliseconds timeout) {
  if (!filling_ || elsewhere_ == 0) return {};
  const std::vector<PrefillState> before = prefill_.states;
  const bool pending = cache_.model.AwaitPrefill(prefill_, timeout);
  if (cancelled_) return {.code = Code::kPending};  // nobody would compute what is reserved
  std::vector<Run> runs;
  std::vector<ObjectRun> objects;
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i] != PrefillState::kPending || prefill_.states[i] != PrefillState::kOwn) continue;
    runs.push_back(cold_[i]);
    objects.push_back({.kind = cold_[i].transition ? ObjectKind::kSegment : ObjectKind::kCheckpoint,
                       .tokens = {cold_[i].tokens, cold_[i].token_count},
                       .media = {},
                       .salt = salt_});
  }
  bool there = false;
  if (!objects.empty() && Reserve(runs, objects, &there) > 0) {
    return MakeStatus(Code::kRestart, "missing() lists segments that no other engine has computed");
  }
  return pending ? Status{.code = Code::kPending} : Status();
}

Status PromptRun::WaitColdUntil(Clock::time_point until) {
  constexpr std::chrono::milliseconds kPart{500};
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    const Status status = WaitCold(std::clamp(left, std::chrono::milliseconds(0), kPart));
    if (status.code != Code::kPending || cancelled_ || left <= kPart) return status;
  }
}

// What the plan has kept is this engine's to find again, or nobody's. Without waiting for the daemon.
void PromptRun::EndPrefill() {
  if (prefill_.id == 0) return;
  cache_.background.Start([model = cache_.model, plan = std::exchange(prefill_, {})]() mutable {
    RunOr([&] { model.EndPrefill(plan); }, [] {});
  });
}

Status PromptRun::Check(uint32_t missing, const ComputedRun& computed, const std::string& index) const {
  if (missing >= runs_.size())
    return Invalid("missing", index, ": ", missing, " is out of range; the request has ", runs_.size(),
                   " missing runs");
  if (!reservations_[missing].granted()) {
    return Invalid("missing", index, ": ", missing, " was already published or abandoned");
  }
  if (computed.linear == nullptr && computed.linear_count > 0) return Invalid("computed", index, ".linear: null");
  const std::string field = absl::StrCat("computed", index);
  const GivenPages pages = PagesOf(computed);
  if (Status status = CheckTables(cache_.groups, pages, field); !status.ok()) return status;
  if (Status status = CheckNotKept(cache_.groups, pages, cache_.quarantine, field); !status.ok()) return status;
  const uint64_t tokens = runs_[missing].token_count;
  if (cache_.has_pages()) {
    Status status = CheckReach(cache_.groups, pages, computed.first_position, tokens, field);
    if (!status.ok()) return status;
  }
  return CheckTensors(cache_.layout(), cache_.region, {computed.linear, computed.linear_count},
                      runs_[missing].transition, field + ".linear");
}

PromptRun::Taken PromptRun::TakeOut(uint32_t missing) {
  const Run& run = runs_[missing];
  const auto begin = static_cast<uint64_t>(run.tokens - tokens_.data());
  return {.run = run,
          .reservation = std::exchange(reservations_[missing], {}),
          .work = std::exchange(work_, std::nullopt),
          .tokens = {run.tokens, run.tokens + run.token_count},
          .media = MediaWithin(media_, begin, begin + run.token_count),
          .salt = salt_};
}

ObjectRun PromptRun::Taken::Text() const {
  return {.kind = run.transition ? ObjectKind::kSegment : ObjectKind::kCheckpoint,
          .tokens = tokens,
          .media = media,
          .salt = salt};
}

namespace {

// Tensors of so many bytes are staged for one call of the daemon; those of one run may be more.
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

// `held`: null where nothing is to be staged.
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

// Publishes again those whose reservations had ended before the runs were computed, where nobody else has reserved or
// published them since.
void PublishEnded(CacheState& cache, std::span<const PromptRun::Taken> taken, std::span<Publication> publications,
                  std::span<PublishOutcome> outcomes) {
  std::vector<size_t> ended;
  std::vector<ObjectRun> texts;
  for (size_t i = 0; i < taken.size(); ++i) {
    if (outcomes[i] != PublishOutcome::kUnknownReservation) continue;
    ended.push_back(i);
    texts.push_back(taken[i].Text());
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

// One call of the model for runs of which `bytes` are staged.
void PublishTogether(CacheState& cache, std::span<const PromptRun::Taken> taken, std::span<const ComputedRun> computed,
                     uint64_t bytes, std::span<PublishOutcome> outcomes) {
  std::optional<Staging::Held> held;
  if (bytes > 0) {
    absl::StatusOr<Staging::Held> room = cache.staging.Hold(bytes);
    if (!room.ok()) {
      const bool full = absl::IsResourceExhausted(room.status());
      std::ranges::fill(outcomes, full ? PublishOutcome::kBusy : PublishOutcome::kUnavailable);
      return AbandonRuns(cache, taken);
    }
    held.emplace(*std::move(room));
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
    // A busy daemon keeps it for us.
    if (outcomes[i] == PublishOutcome::kBusy) kept.push_back(publications[i].reservation);
  }
  if (!kept.empty()) cache.model.Abandon(kept);
}

}  // namespace

std::vector<PublishOutcome> PublishRuns(CacheState& cache, std::span<const PromptRun::Taken> taken,
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

void AbandonRuns(CacheState& cache, std::span<const PromptRun::Taken> taken) {
  std::vector<Reservation> reservations;
  for (const PromptRun::Taken& one : taken) reservations.push_back(one.reservation);
  cache.model.Abandon(reservations);
}

void PromptRun::Abandon(uint32_t missing) {
  if (missing >= reservations_.size()) return;
  cache_.model.Abandon(reservations_[missing]);
  reservations_[missing] = {};
}

void PromptRun::AbandonAll() {
  EndPrefill();
  if (work_.has_value()) cache_.Served(*std::exchange(work_, std::nullopt), false);
  std::erase_if(reservations_, [](const Reservation& reservation) { return !reservation.granted(); });
  if (!reservations_.empty()) {
    // If the queue is full, or stands behind a daemon that hangs, the daemon reclaims them by its own deadline.
    const auto abandon = [model = cache_.model, reservations = std::move(reservations_)]() mutable {
      RunOr([&] { model.Abandon(reservations); }, [] {});
    };
    cache_.background.Start(abandon, Background::Late{.patience = cache_.patience, .otherwise = [] {}});
  }
  reservations_.clear();
  runs_.clear();
}

Status PromptRun::TakeOtherPages(const GivenPages& given) {
  if (!filling_) return MakeStatus(Code::kFailedPrecondition, "nothing was missing()");
  if (cache_.shares_in_place && !given.none()) {
    return Invalid("look_again.page_table: the daemon allocates the pages of this cache");
  }
  if (!given.none()) return TakePages(given, "look_again", Owner::kDaemon);
  if (pages_kept()) return MakeStatus(Code::kFailedPrecondition, "page_table: the request's pages are the cache's");
  if (owner_ == Owner::kEngine) owner_ = Owner::kDaemon;
  return {};
}

void PromptRun::LookAgain() {
  PrefillPlan kept = std::exchange(prefill_, {});  // until the look-up has found what it keeps
  AbandonAll();
  prefill_ = std::move(kept);
  filling_ = fill_ = false;
  if (cancelled_) return Miss(MissReason::kCancelled);
  if (LandsAtOnce()) {
    LookupAndLand();
  } else {
    TakeMatch(cache_.model.Lookup(Asked()));
    LandHits(AllHits());
  }
  EndPrefill();
}

}  // namespace ashlar::engine
