// SPDX-License-Identifier: Apache-2.0
#include "client/engine/missing_runs.h"

#include <algorithm>
#include <utility>

#include "client/engine/boundary.h"
#include "client/engine/page_tables.h"
#include "client/engine/status.h"
#include "client/engine/tensors.h"

namespace ashlar::engine {
namespace {

// Returns whether a publish would fix the miss. If the daemon is gone or overloaded, further calls would only cost
// time.
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

// The run that computes these tokens alone.
Run RunOf(const ashlar::Layout& layout, ObjectKind kind, std::span<const int32_t> tokens, uint32_t segment) {
  const bool whole = kind == ObjectKind::kCheckpoint;
  return {.tokens = tokens.data(),
          .token_count = tokens.size(),
          .segment = segment,
          .capture_begin = whole ? 0 : layout.head,
          .capture_end = tokens.size() - (whole ? 0 : layout.tail),
          .transition = !whole};
}

}  // namespace

MissingRuns::~MissingRuns() {
  // If memory runs out, the daemon reclaims the reservations at its own deadline.
  const auto abandon = [this] {
    EndPrefill();
    AbandonAll();
  };
  RunOr(abandon, [] {});
}

MissingRuns::Reserved MissingRuns::Reserve(std::span<const MissReason> reasons, bool cold_parallel) {
  const std::vector<uint64_t>& lengths = text_.lengths();
  std::vector<ObjectRun> objects;
  std::vector<Run> runs;
  std::vector<std::vector<MediaHash>> media(lengths.size());
  uint64_t start = 0;
  for (uint32_t i = 0; i < lengths.size(); start += lengths[i++]) {
    if (!WorthFilling(reasons[i])) continue;
    const std::span<const int32_t> tokens = text_.tokens().subspan(start, lengths[i]);
    runs.push_back(RunOf(cache_.layout(), KindOfSegment(i), tokens, i));
    media[i] = MediaWithin(text_.media(), start, start + lengths[i]);
    objects.push_back({.kind = KindOfSegment(i), .tokens = tokens, .media = media[i], .salt = text_.salt()});
  }
  if (objects.empty()) return Reserved::kNothing;
  if (cold_parallel && cache_.tensor_parallel_size == 1) {
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
  bool present = false;
  if (!cache_.publishes()) {
    // With reservations, this cache would block the process that publishes the runs.
    if (elsewhere_ == 0) return Reserved::kNothing;
    runs_ = runs;
    reservations_.resize(runs.size());
  } else if (!objects.empty()) {
    ReserveRuns(runs, objects, &present);
  }
  if (!runs_.empty() || elsewhere_ > 0) return Reserved::kRuns;
  return present ? Reserved::kPresent : Reserved::kNothing;
}

size_t MissingRuns::ReserveRuns(const std::vector<Run>& runs, const std::vector<ObjectRun>& objects, bool* present) {
  size_t granted = 0;
  const std::vector<Reservation> reservations = cache_.model.Reserve(objects);
  for (size_t i = 0; i < reservations.size(); ++i) {
    *present |= reservations[i].outcome == ReserveOutcome::kAlreadyPresent;
    if (!reservations[i].granted()) continue;  // another engine is faster, and its copy will serve
    runs_.push_back(runs[i]);
    reservations_.push_back(reservations[i]);
    ++granted;
  }
  return granted;
}

void MissingRuns::TakeWork(const PrefillWork& work, const Reservation& reservation) {
  work_ = {.assignment = work.assignment, .generation = work.generation};
  runs_.push_back(RunOf(cache_.layout(), work.kind, text_.tokens(), 0));
  reservations_.push_back(reservation);
}

void MissingRuns::MoveTokens(const int32_t* from) {
  for (std::vector<Run>* const runs : {&runs_, &cold_}) {
    for (Run& run : *runs) run.tokens = text_.tokens().data() + (run.tokens - from);
  }
}

Status MissingRuns::WaitCold(std::chrono::milliseconds timeout) {
  if (prefill_.id == 0 || elsewhere_ == 0) return {};
  const std::vector<PrefillState> before = prefill_.states;
  const bool pending = cache_.model.AwaitPrefill(prefill_, timeout);
  if (cancelled_) return Pending();  // no engine would compute the reserved runs
  std::vector<Run> runs;
  std::vector<ObjectRun> objects;
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i] != PrefillState::kPending || prefill_.states[i] != PrefillState::kOwn) continue;
    runs.push_back(cold_[i]);
    objects.push_back({.kind = cold_[i].transition ? ObjectKind::kSegment : ObjectKind::kCheckpoint,
                       .tokens = {cold_[i].tokens, cold_[i].token_count},
                       .media = {},
                       .salt = text_.salt()});
  }
  size_t more = runs.size();
  if (!cache_.publishes()) {
    runs_.insert(runs_.end(), runs.begin(), runs.end());
    reservations_.resize(runs_.size());
  } else if (more > 0) {
    bool present = false;
    more = ReserveRuns(runs, objects, &present);
  }
  if (more > 0) {
    return MakeStatus(Code::kRestart, "missing() lists segments that no other engine has computed");
  }
  return pending ? Pending() : Status();
}

Status MissingRuns::WaitColdUntil(std::chrono::steady_clock::time_point until) {
  constexpr std::chrono::milliseconds kPart{500};
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    const Status status = WaitCold(std::clamp(left, std::chrono::milliseconds(0), kPart));
    if (status.code != Code::kPending || cancelled_ || left <= kPart) return status;
  }
}

Status MissingRuns::Check(uint32_t run, const ComputedRun& computed, const std::string& index) const {
  if (run >= runs_.size())
    return Invalid("missing", index, ": ", run, " is out of range; the request has ", runs_.size(), " missing runs");
  if (!reservations_[run].granted()) {
    return Invalid("missing", index, ": ", run, " was already published or abandoned");
  }
  if (computed.linear == nullptr && computed.linear_count > 0) return Invalid("computed", index, ".linear: null");
  const std::string field = absl::StrCat("computed", index);
  const GivenPages pages = PagesOf(computed);
  if (Status status = CheckTables(cache_.groups, pages, field); !status.ok()) return status;
  if (Status status = CheckNotKept(cache_.groups, pages, cache_.quarantine, field); !status.ok()) return status;
  if (cache_.has_pages()) {
    Status status = CheckReach(cache_.groups, pages, computed.first_position, runs_[run].token_count, field);
    if (!status.ok()) return status;
  }
  return CheckTensors(cache_.layout(), cache_.region, {computed.linear, computed.linear_count}, runs_[run].transition,
                      field + ".linear");
}

TakenRun MissingRuns::TakeOut(uint32_t run) {
  const Run& taken = runs_[run];
  const auto begin = static_cast<uint64_t>(taken.tokens - text_.tokens().data());
  return {.run = taken,
          .reservation = std::exchange(reservations_[run], {}),
          .work = std::exchange(work_, std::nullopt),
          .tokens = {taken.tokens, taken.tokens + taken.token_count},
          .media = MediaWithin(text_.media(), begin, begin + taken.token_count),
          .salt = text_.salt()};
}

void MissingRuns::Abandon(uint32_t run) {
  if (run >= reservations_.size()) return;
  if (work_.has_value()) {
    work_->refused = true;
    cache_.Served(*std::exchange(work_, std::nullopt), false);
  }
  cache_.model.Abandon(reservations_[run]);
  reservations_[run] = {};
}

Status MissingRuns::MarkPublished(uint32_t run) {
  if (run >= runs_.size())
    return Invalid("missing: ", run, " is out of range; the request has ", runs_.size(), " missing runs");
  if (!work_.has_value() || reservations_[run].granted()) {
    return MakeStatus(Code::kFailedPrecondition, "missing: no other process publishes this run; call Publish");
  }
  cache_.Served(*std::exchange(work_, std::nullopt), true);
  return {};
}

void MissingRuns::AbandonAll() {
  if (work_.has_value()) cache_.Served(*std::exchange(work_, std::nullopt), false);
  std::erase_if(reservations_, [](const Reservation& reservation) { return !reservation.granted(); });
  if (!reservations_.empty()) {
    // If the queue is full or blocked by a daemon that hangs, the daemon reclaims the reservations at its own deadline.
    const auto abandon = [model = cache_.model, reservations = std::move(reservations_)]() mutable {
      RunOr([&] { model.Abandon(reservations); }, [] {});
    };
    cache_.background.Start(abandon, Background::Late{.patience = cache_.patience, .otherwise = [] {}});
  }
  reservations_.clear();
  runs_.clear();
}

void MissingRuns::EndPrefill() {
  if (prefill_.id == 0) return;
  cache_.background.Start([model = cache_.model, plan = std::exchange(prefill_, {})]() mutable {
    RunOr([&] { model.EndPrefill(plan); }, [] {});
  });
}

}  // namespace ashlar::engine
