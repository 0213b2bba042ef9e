// SPDX-License-Identifier: Apache-2.0
#include "client/engine/in_place_pages.h"

#include <algorithm>
#include <utility>

#include "client/engine/boundary.h"
#include "client/engine/status.h"

namespace ashlar::engine {
namespace {

// Limit of the time for which a landing that has ended asks the daemon. Calls of its request wait meanwhile.
constexpr std::chrono::milliseconds kReport{20};

Status AdmitStatus(AdmitOutcome outcome, const ashlar::PageShortage& shortage, PageShortage* out) {
  switch (outcome) {
    case AdmitOutcome::kAdmitted:
      return {};
    case AdmitOutcome::kNoPages:
      if (out != nullptr) *out = {shortage.needed, shortage.free, shortage.reclaimable, shortage.held};
      return MakeStatus(Code::kNoPages,
                        absl::StrCat("own_pages: the request needs ", shortage.needed, " more pages; ", shortage.free,
                                     " are free and ", shortage.reclaimable, " can be reclaimed"));
    case AdmitOutcome::kOldRequests:
      return MakeStatus(Code::kFailedPrecondition, "requests from before a reconnect still hold pages; end them first");
    case AdmitOutcome::kInvalid:
      return MakeStatus(Code::kInvalidArgument, "own_pages: the daemon refused the request");
    case AdmitOutcome::kBusy:
      return MakeStatus(Code::kUnavailable, "the daemon is busy; call Admit again");
    case AdmitOutcome::kUnavailable:
      return MakeStatus(Code::kUnavailable, "the daemon did not answer");
  }
  return MakeStatus(Code::kInternal, "unknown outcome of Admit");
}

}  // namespace

Status AdmitInPlace(CacheState& cache, const ashlar::Prompt& prompt, uint32_t own_pages, const Sharing& sharing,
                    PageShortage* shortage, std::shared_ptr<InPlacePages>* out) {
  Admitted admitted = cache.model.Admit(prompt, own_pages, sharing.blocks, sharing.unshared, sharing.fills_later);
  if (!admitted.admission.has_value()) return AdmitStatus(admitted.outcome, admitted.shortage, shortage);
  *out = std::make_shared<InPlacePages>(*std::move(admitted.admission), sharing.blocks, sharing.fills_later);
  return {};
}

InPlacePages::InPlacePages(Admission admission, uint32_t blocks, bool fills_later) : admission_(std::move(admission)) {
  const std::vector<Admission::Segment>& segments = admission_.segments();
  filling_.assign(segments.size(), Filling{.wanted = !fills_later});
  for (uint32_t i = 0; i < segments.size(); ++i) {
    const Admission::Segment& segment = segments[i];
    uint32_t first = i < segments.size() - blocks ? 0 : i;
    while (first < i && (segment.pages.empty() || segments[first].pages != segment.pages)) ++first;
    first_.push_back(first);
    tables_.push_back(admission_.PageTable(i));
    segments_.push_back({.first_slot = segment.placement.first_slot,
                         .first_token = segment.placement.first_token,
                         .end_token = segment.placement.end_token,
                         .pages = tables_.back().data(),
                         .page_count = tables_.back().size()});
  }
  pages_.segments = segments_.data();
  pages_.segment_count = static_cast<uint32_t>(segments_.size()) - blocks;
  for (size_t i = pages_.segment_count; i < segments_.size(); ++i) {
    prefix_.insert(prefix_.end(), tables_[i].begin(), tables_[i].end());
    pages_.prefix.end_token += segments_[i].end_token;
  }
  pages_.prefix.pages = prefix_.data();
  pages_.prefix.page_count = prefix_.size();
  TakeOwnPages();
}

std::vector<int32_t> InPlacePages::PrefixTable(uint32_t blocks) const {
  const size_t shared = blocks == 0 ? 0 : prefix_.size() / this->blocks() * blocks;
  std::vector<int32_t> table(prefix_.begin(), prefix_.begin() + static_cast<ptrdiff_t>(shared));
  table.insert(table.end(), own_pages_.begin(), own_pages_.end());
  return table;
}

void InPlacePages::TakeOwnPages() {
  own_pages_ = admission_.own_pages();
  pages_.own_pages = own_pages_.data();
  pages_.own_page_count = own_pages_.size();
}

Status InPlacePages::Extend(uint32_t own_pages, PageShortage* shortage) {
  MutexLock lock(mutex_);
  ashlar::PageShortage found;
  const Status status = AdmitStatus(admission_.Extend(own_pages, &found), found, shortage);
  if (status.ok()) TakeOwnPages();
  return status;
}

MissReason InPlacePages::WhyNotFilled(uint32_t part) const {
  MutexLock lock(mutex_);
  const uint32_t first = first_[part];
  if (admission_.segments()[first].content == PageContent::kFilled) return MissReason::kNone;
  return filling_[first].failed == MissReason::kNone ? MissReason::kTimedOut : filling_[first].failed;
}

void InPlacePages::SetWanted(uint32_t part, bool wanted) {
  reported_ &= filling_[part].wanted == wanted;
  filling_[part].wanted = wanted;
}

bool InPlacePages::Refresh(std::chrono::milliseconds timeout) {
  if (reported_) return admission_.Refresh(timeout);
  std::vector<uint32_t> to_fill;
  for (uint32_t i = 0; i < filling_.size(); ++i) {
    const Filling& filling = filling_[i];
    const bool fills = filling.under_way || (filling.wanted && filling.failed == MissReason::kNone);
    if (first_[i] == i && fills) to_fill.push_back(i);
  }
  reported_ = admission_.Refresh(timeout, to_fill);
  return reported_;
}

void InPlacePages::FillOnly(std::span<const uint32_t> parts, std::chrono::milliseconds timeout) {
  MutexLock lock(mutex_);
  std::vector<bool> wanted(filling_.size());
  for (const uint32_t part : parts) wanted[first_[part]] = true;
  for (uint32_t i = 0; i < filling_.size(); ++i) {
    if (first_[i] == i) SetWanted(i, wanted[i]);
  }
  if (!reported_) Refresh(timeout);
}

InPlacePages::State InPlacePages::Fill(CacheState& cache, const ashlar::Match& match, std::span<const uint32_t> parts,
                                       std::chrono::milliseconds timeout) {
  MutexLock lock(mutex_);
  const auto content = [this](uint32_t part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return admission_.segments()[first_[part]].content;
  };
  const auto filled_elsewhere = [&](uint32_t part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return content(part) == PageContent::kBeingFilled;
  };
  for (const uint32_t part : parts) SetWanted(first_[part], true);
  // The other request may have filled them, or ended; the daemon has then passed the filling to this request.
  if (std::ranges::any_of(parts, filled_elsewhere) && !Refresh(timeout) && !admission_.valid()) return State::kFailed;
  std::vector<uint32_t> to_land;
  bool all_filled = true, failed = false;
  for (const uint32_t part : parts) {
    const uint32_t first = first_[part];
    if (content(part) == PageContent::kFilled) continue;
    all_filled = false;
    failed |= filling_[first].failed != MissReason::kNone;
    if (content(part) != PageContent::kToFill || filling_[first].failed != MissReason::kNone) continue;
    if (!std::exchange(filling_[first].under_way, true)) to_land.push_back(first);
  }
  if (!to_land.empty()) Land(cache, match, to_land);
  if (failed) return State::kFailed;
  return all_filled ? State::kFilled : State::kFilling;
}

// Shared pages hold a part in the form that every request expects, from its first slot. Each segment is a separate
// landing.
void InPlacePages::Land(CacheState& cache, const ashlar::Match& match, std::span<const uint32_t> parts) {
  const uint32_t first_block = pages_.segment_count;
  auto landings = std::make_shared<std::vector<PartsLanding>>();
  for (size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
    const uint32_t part = parts[begin];
    end = begin + 1;
    LandSegment target{.segment = part, .first_position = segments_[part].first_slot};
    if (part >= first_block) {
      while (end < parts.size() && parts[end] == parts[end - 1] + 1) ++end;
      target = {.segment = LandSegment::kPrefix,
                .present_blocks = part - first_block,
                .end_block = parts[end - 1] + 1 - first_block};
    }
    const std::vector<int32_t>& table = part < first_block ? tables_[part] : prefix_;
    const std::span<const uint32_t> together = parts.subspan(begin, end - begin);
    landings->push_back(
        {.parts = {together.begin(), together.end()}, .landing = cache.model.Land(match, table, {&target, 1})});
  }
  const auto wait = [self = shared_from_this(), landings, timeout = cache.land,
                     landed = std::vector<uint32_t>(parts.begin(), parts.end())] {
    for (PartsLanding& landing : *landings) self->Landed(landing, timeout);
    landings->clear();  // waits until they are quiesced
    RunOr([&] { self->Quiesced(landed); }, [] {});
  };
  if (cache.fills.Start(wait) != nullptr) return;
  // Destroying a landing waits for the daemon, which may hang.
  for (PartsLanding& landed : *landings) cache.quarantine.KeepLanding(std::move(landed.landing), shared_from_this());
  for (const uint32_t part : parts) filling_[part].failed = MissReason::kBusy;
}

void InPlacePages::Landed(PartsLanding& landed, std::chrono::milliseconds timeout) {
  MissReason reason = MissReason::kBusy;
  RunOr([&] { reason = landed.landing.Wait(timeout).front(); }, [] {});
  bool marked = false;
  const Admission* const admission = &admission_;  // without the lock: polls must not wait for the daemon
  if (reason == MissReason::kNone) RunOr([&] { marked = admission->ReportFilled(landed.parts); }, [] {});
  if (reason == MissReason::kNone) reason = MissReason::kDaemonUnavailable;
  MutexLock lock(mutex_);
  if (marked) admission_.SetFilled(landed.parts);
  for (const uint32_t part : landed.parts) filling_[part].failed = marked ? MissReason::kNone : reason;
  changed_.NotifyAll();
}

void InPlacePages::Quiesced(std::span<const uint32_t> parts) {
  MutexLock lock(mutex_);
  for (const uint32_t part : parts) {
    filling_[part].under_way = false;
    reported_ &= filling_[part].failed == MissReason::kNone;
  }
  if (!reported_) Refresh(kReport);
}

void InPlacePages::WaitForChange(std::chrono::milliseconds timeout) {
  MutexLock lock(mutex_);
  changed_.WaitFor(mutex_, timeout);
}

}  // namespace ashlar::engine
