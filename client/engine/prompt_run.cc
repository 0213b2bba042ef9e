// SPDX-License-Identifier: Apache-2.0
#include "client/engine/prompt_run.h"

#include <utility>

#include "client/engine/status.h"
#include "proto/prefix.h"

namespace ashlar::engine {

Status PromptRun::Take(const Prompt& prompt, const std::string& field) {
  if (Status status = text_.Take(cache_, prompt, field); !status.ok()) return status;
  if (prompt.fill && !cache_.publishes() && !(prompt.cold_parallel && !prompt.store_only)) {
    return Invalid(field, ".fill: the cache has no pages to publish from; expected cold_parallel");
  }
  if (prompt.store_only && !prompt.fill) return Invalid(field, ".store_only: requires fill");
  fill_ = prompt.fill;
  cold_parallel_ = prompt.cold_parallel && !prompt.store_only;
  store_only_ = prompt.store_only;
  const GivenPages pages = PagesOf(prompt);
  if (pages.none()) return {};
  if (cache_.shares_in_place) {
    return Invalid(field, ".page_table: the daemon allocates the pages of this cache; call Admit");
  }
  return TakePages(pages, field);
}

Status PromptRun::Take(const PlanToLand& plan, const std::string& field) {
  if (Status status = text_.Take(cache_, plan, field); !status.ok()) return status;
  const GivenPages pages = PagesOf(plan);
  if (pages.none() && !cache_.has_attention()) return {};
  return TakePages(pages, field);
}

Status PromptRun::TakePages(const GivenPages& given, const std::string& field) {
  Status status = pages_.Take(given, text_.token_count(), field);
  if (status.ok()) pages_.Lend();
  return status;
}

void PromptRun::Take(PrefillWork work, const Reservation& reservation) {
  text_.Take(std::move(work.tokens));
  missing_.TakeWork(work, reservation);
  plan_.Make();
}

void PromptRun::OwnTokens() {
  const int32_t* const given = text_.tokens().data();
  text_.OwnTokens();
  missing_.MoveTokens(given);
}

void PromptRun::Begin(CacheState& cache, std::span<const std::shared_ptr<PromptRun>> all) {
  std::vector<std::shared_ptr<PromptRun>> prompt_runs;
  for (const auto& prompt_run : all) {
    if (prompt_run->cancelled_) {
      prompt_run->Miss(MissReason::kCancelled);
    } else if (prompt_run->store_only_) {
      prompt_run->plan_.MissAll(MissReason::kNeverSeen);  // the reservation's outcome says whether it is cached
    } else {
      prompt_runs.push_back(prompt_run);
    }
  }
  if (prompt_runs.size() == 1) {
    prompt_runs[0]->LookUp();
  } else if (!prompt_runs.empty()) {
    std::vector<ashlar::Prompt> prompts;
    prompts.reserve(prompt_runs.size());
    for (const auto& prompt_run : prompt_runs) prompts.push_back(prompt_run->text_.Asked());
    std::vector<ashlar::Match> matches = cache.model.Lookup(prompts);
    for (size_t i = 0; i < prompt_runs.size(); ++i) prompt_runs[i]->LandMatch(std::move(matches[i]));
  }
  for (const auto& prompt_run : all) prompt_run->ReserveMissing();
}

void PromptRun::LookUp() {
  ashlar::Prompt asked = text_.Asked();
  const GroupedPages& tables = pages_.tables();
  const bool one_call = !tables.empty() && cache_.has_attention() && !text_.shifted();
  if (!one_call) return LandMatch(cache_.model.Lookup(asked));
  asked.needed_in = {};
  auto [match, wanted, landing] = cache_.model.LookupAndLand(asked, tables.entries, tables.group_pages);
  match_.Take(std::move(match));
  plan_.TakeMatch();
  for (const LandSegment& segment : wanted) plan_.Use(segment.segment);
  landing_.Adopt(std::move(landing), std::move(wanted));
  plan_.Make();
}

void PromptRun::LandMatch(ashlar::Match match) {
  match_.Take(std::move(match));
  plan_.TakeMatch();
  std::vector<LandSegment> wanted;
  if (match_->prefix().depth > 0 && landing_.FitsPrefix()) wanted.push_back({.segment = LandSegment::kPrefix});
  for (uint32_t i = 0; i < match_->segments().size(); ++i) {
    if (match_->segments()[i].hit()) wanted.push_back(AtItsPlace(i));
  }
  Land(std::move(wanted));
}

void PromptRun::Attach() {
  if (cancelled_) return Miss(MissReason::kCancelled);
  const PlannedLanding& planned = *text_.planned();
  match_.Take(cache_.model.Attach(std::string(planned.lease.begin(), planned.lease.end()), text_.lengths()));
  plan_.TakeMatch();
  std::vector<LandSegment> wanted;
  bool all = true;
  if (planned.prefix_tokens > 0) {
    const bool there = match_->prefix().depth == planned.prefix_tokens;
    const auto present = static_cast<uint32_t>(text_.present_tokens() / PrefixBlockTokens(cache_.layout()));
    if (there) wanted.push_back({.segment = LandSegment::kPrefix, .present_blocks = present});
    all &= there;
  }
  for (const uint32_t segment : planned.segments) {
    const bool hit = match_->segments()[segment].hit();
    if (hit) wanted.push_back(AtItsPlace(segment));
    all &= hit;
  }
  Land(std::move(wanted));
  if (!all) plan_.Abandon();  // other processes compute by another plan
}

LandSegment PromptRun::AtItsPlace(uint32_t segment) const {
  return {.segment = segment,
          .first_position = match_->segments()[segment].start,
          .rotary_shift = text_.rotary_shift(segment)};
}

// Without pages the plan lists what could land.
void PromptRun::Land(std::vector<LandSegment> wanted) {
  for (const LandSegment& segment : wanted) plan_.Use(segment.segment);
  if (!cancelled_) landing_.Start(std::move(wanted));
  plan_.Make();
}

void PromptRun::ReserveMissing() {
  if (!fill_ || cancelled_) return;
  const MissingRuns::Reserved reserved = missing_.Reserve(plan_.reasons(), cold_parallel_);
  if (reserved == MissingRuns::Reserved::kNothing) return;
  // Filling also uses the pages, and takes much longer than landing the hits again.
  landing_.End(cache_.land);
  plan_.UseNothing();
  plan_.SetFilling(reserved == MissingRuns::Reserved::kRuns);
  plan_.Make();
  if (plan_.filling() || pages_.kept() || store_only_) return;
  pages_.Lend();
  LookAgain();
}

Status PromptRun::TakeOtherPages(const GivenPages& given) {
  if (!plan_.filling()) return MakeStatus(Code::kFailedPrecondition, "nothing was missing()");
  if (cache_.shares_in_place && !given.none()) {
    return Invalid("look_again.page_table: the daemon allocates the pages of this cache");
  }
  if (!given.none()) return TakePages(given, "look_again");
  if (pages_.kept())
    return MakeStatus(Code::kFailedPrecondition, "page_table: the cache owns the request's pages; give other pages");
  pages_.Lend();
  return {};
}

void PromptRun::LookAgain() {
  missing_.AbandonAll();
  plan_.SetFilling(false);
  fill_ = false;
  if (cancelled_) return Miss(MissReason::kCancelled);
  LookUp();
  missing_.EndPrefill();  // the match holds what other engines have computed
}

void PromptRun::Miss(MissReason reason) {
  missing_.EndPrefill();
  missing_.AbandonAll();
  fill_ = false;
  plan_.MissAll(reason);
}

void PromptRun::PlanIsKnown() {
  if (!landing_.in_progress()) pages_.Return();
}

Status PromptRun::Move(const GivenPages& given) {
  if (!pages_.empty() || !cache_.has_attention() || cache_.shares_in_place) {
    return MakeStatus(Code::kFailedPrecondition, "move: the request takes no pages, or already has them");
  }
  return pages_.Take(given, text_.token_count(), "move");
}

Status PromptRun::DropSegments(std::span<const uint32_t> segments) {
  if (landing_.in_progress())
    return MakeStatus(Code::kFailedPrecondition, "the landing is in progress; call Finish first");
  return plan_.DropSegments(segments);
}

void PromptRun::Cancel() {
  missing_.EndPrefill();
  missing_.AbandonAll();
  landing_.Cancel();
  plan_.SetFilling(false);
  plan_.UseNothing();
  plan_.Make();
  match_.Release();
}

Status PromptRun::Quiesced() {
  if (pages_.kept()) return pages_.Claim();
  if (!landing_.quiesced()) return Pending();
  if (cancelled_) {
    landing_.End(std::chrono::milliseconds(0));
    match_.Release();  // the lookup may have been in progress when it was cancelled, and may have found a lease since
  }
  pages_.Return();
  return {};
}

}  // namespace ashlar::engine
