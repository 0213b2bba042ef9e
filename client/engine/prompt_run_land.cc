// SPDX-License-Identifier: Apache-2.0
// Landing a plan: layers, the verdict, and pages in doubt.
#include <algorithm>
#include <utility>

#include "client/engine/prompt_run.h"
#include "client/engine/status.h"
#include "proto/prefix.h"

namespace ashlar::engine {
namespace {

using std::chrono::milliseconds;

// A look-up that was not answered in time may still be landing; mostly it is not.
constexpr milliseconds kMostlyQuiet{10};
// How long a poll asks the daemon for the state of shared pages, and how often a wait does.
constexpr milliseconds kAskAboutPages{10};
constexpr milliseconds kAskAgain{2};

Status Pending() {
  return {.code = Code::kPending};
}

}  // namespace

Status PromptRun::Take(const PlanToLand& plan, const std::string& field) {
  if (plan.plan == nullptr) return Invalid(field, ".plan: null");
  absl::StatusOr<PlannedLanding> decoded = DecodePlan({plan.plan, plan.plan_bytes});
  if (!decoded.ok()) return Invalid(field, ".", decoded.status().message());
  if (decoded->ns != cache_.model.ns())
    return Invalid(field, ".namespace: differs from this cache's; expected the same model, layout and tenant");
  if (decoded->tensor_parallel_size != cache_.tensor_parallel_size) {
    return Invalid(field, ".tensor_parallel_size: ", decoded->tensor_parallel_size, "; this model was opened with ",
                   cache_.tensor_parallel_size);
  }
  if (plan.present_tokens > decoded->tokens) {
    return Invalid(field, ".present_tokens: ", plan.present_tokens, "; the prompt has ", decoded->tokens);
  }
  if (cache_.shares_in_place) return Invalid(field, ".plan: the daemon allocates the pages of this cache; use Begin");
  token_count_ = decoded->tokens;
  lengths_ = decoded->segment_lengths;
  planned_ = *std::move(decoded);
  present_tokens_ = plan.present_tokens;
  if (Status status = TakeShifts(plan.rotary_shifts, plan.rotary_shift_count, field); !status.ok()) return status;
  const GivenPages pages = PagesOf(plan);
  if (pages.none() && !cache_.has_attention()) return {};
  return TakePages(pages, field, Owner::kDaemon);
}

std::string PromptRun::PlanBytes() const {
  if (!match_.has_value()) return "";
  const std::string lease = match_->lease();
  PlannedLanding plan{.tensor_parallel_size = cache_.tensor_parallel_size,
                      .ns = cache_.model.ns(),
                      .tokens = token_count_,
                      .segment_lengths = lengths_,
                      .prefix_tokens = prefix_used_ ? match_->prefix().depth : 0,
                      .segments = {},
                      .captures = captures_};
  if (lease.size() != plan.lease.size() || !AnyUsed()) return "";
  std::ranges::copy(lease, plan.lease.begin());
  for (uint32_t i = 0; i < used_.size(); ++i) {
    if (used_[i]) plan.segments.push_back(i);
  }
  return EncodePlan(plan);
}

void PromptRun::Attach() {
  if (cancelled_) return Miss(MissReason::kCancelled);
  TakeMatch(cache_.model.Attach(std::string(planned_->lease.begin(), planned_->lease.end()), lengths_));
  std::vector<LandSegment> wanted;
  bool all = true;
  if (planned_->prefix_tokens > 0) {
    const bool there = match_->prefix().depth == planned_->prefix_tokens;
    const auto present = static_cast<uint32_t>(present_tokens_ / PrefixBlockTokens(cache_.layout()));
    if (there) wanted.push_back({.segment = LandSegment::kPrefix, .present_blocks = present});
    all &= there;
  }
  for (const uint32_t segment : planned_->segments) {
    const SegmentResult& found = match_->segments()[segment];
    if (found.hit()) wanted.push_back(AtItsPlace(segment));
    all &= found.hit();
  }
  LandHits(std::move(wanted));
  gave_up_ |= !all;  // other processes compute by another plan
}

void PromptRun::PlanIsKnown() {
  if (!landing_.has_value() && owner_ == Owner::kDaemon) owner_ = Owner::kEngine;
}

Status PromptRun::AbandonPlan() {
  gave_up_ = true;
  return MakeStatus(Code::kRestart, "a hit failed to land; stop following the plan and call Finish");
}

Status PromptRun::ReachLayer(uint32_t layer, bool wait) {
  if (layer >= cache_.layout().layers.size())
    return Invalid("layer: ", layer, " is out of range; the model has ", cache_.layout().layers.size(), " layers");
  if (filling_) return MakeStatus(Code::kFailedPrecondition, "missing() is not empty: call LookAgain first");
  if (pages_kept()) return MakeStatus(Code::kOtherPages, "the pages belong to the cache: call Move");
  if (Status status = CheckPages(); !status.ok()) return status;
  if (!AnyUsed()) return {};
  if (landing_.has_value()) {
    if (Status status = ReachLanded(layer, wait); !status.ok()) return status;
  }
  return HasRows(cache_.layout().layers[layer]) ? ReachShared(wait) : Status();
}

Status PromptRun::ReachLanded(uint32_t layer, bool wait) {
  if (landing_->WaitLayers(layer + 1, wait ? cache_.land : milliseconds(0))) return {};
  if (wait) return AbandonPlan();
  if (landing_->quiet()) return landing_->WaitLayers(layer + 1, milliseconds(0)) ? Status() : AbandonPlan();
  const Clock::time_point now = Clock::now();
  if (!layer_since_.has_value() || layer_since_->first != layer) layer_since_ = {layer, now};
  return now - layer_since_->second < cache_.land ? Pending() : AbandonPlan();
}

Status PromptRun::CheckPages() const {
  if (!AnyUsed() || !cache_.has_attention()) return {};
  if (cache_.shares_in_place) {
    return in_place_ != nullptr ? Status()
                                : MakeStatus(Code::kFailedPrecondition, "the request has no pages: call Admit");
  }
  return pages_.empty() ? MakeStatus(Code::kFailedPrecondition, "page_table: the request was begun without one")
                        : Status();
}

Status PromptRun::Admit(uint32_t own_pages, PageShortage* lacks) {
  if (!cache_.shares_in_place) {
    return MakeStatus(Code::kFailedPrecondition, "memory.share_in_place: the cache was opened without it");
  }
  if (!begun_) return MakeStatus(Code::kFailedPrecondition, "the request has no prompt");
  if (in_place_ != nullptr) return in_place_->Extend(own_pages, lacks);
  ashlar::Prompt asked = Asked();
  asked.needed_in = {};
  asked.conversation = {};
  const Status status = AdmitInPlace(cache_, asked, own_pages, lacks, &in_place_);
  if (status.ok() && !filling_) FillShared();
  return status;
}

const AdmittedPages& PromptRun::admitted() const {
  static const AdmittedPages none;
  return in_place_ == nullptr ? none : in_place_->pages();
}

std::vector<uint32_t> PromptRun::UsedSegments() const {
  std::vector<uint32_t> used;
  for (uint32_t i = 0; i < used_.size(); ++i) {
    if (used_[i]) used.push_back(i);
  }
  return used;
}

InPlacePages::State PromptRun::FillShared() {
  const std::vector<uint32_t> used = UsedSegments();
  return used.empty() ? InPlacePages::State::kFilled : in_place_->Fill(cache_, *match_, used, kAskAboutPages);
}

Status PromptRun::ReachShared(bool wait) {
  if (in_place_ == nullptr) return {};
  const Clock::time_point begin = Clock::now();
  for (;;) {
    const InPlacePages::State state = FillShared();
    if (state == InPlacePages::State::kFailed) return AbandonPlan();
    if (state == InPlacePages::State::kFilled) {
      shared_since_.reset();
      return {};
    }
    const Clock::time_point now = Clock::now();
    if (!wait && !shared_since_.has_value()) shared_since_ = now;
    const Clock::time_point since = wait ? begin : *shared_since_;
    if (now - since >= cache_.land) return AbandonPlan();
    if (!wait) return Pending();
    in_place_->WaitForChange(kAskAgain);
  }
}

void PromptRun::LoseUnfilled() {
  for (const uint32_t segment : UsedSegments()) {
    const MissReason reason = in_place_->WhyNotFilled(segment);
    if (reason == MissReason::kNone) continue;
    Use(segment, false);
    reasons_[segment] = reason;
    gave_up_ = true;
  }
}

void PromptRun::EndLanding(milliseconds patience) {
  if (landing_.has_value()) {
    landing_->Wait(milliseconds(0));  // what it would land is landed again
    if (!landing_->WaitQuiet(patience)) return KeepPages();
    landing_.reset();
  }
  if (owner_ == Owner::kDaemon) owner_ = Owner::kEngine;
}

void PromptRun::KeepPages() {
  doubt_ = cache_.quarantine.Keep(std::move(landing_), pages_.InSets(cache_.groups));
  landing_.reset();
  pages_.clear();
  if (owner_ != Owner::kNobody) owner_ = Owner::kCache;
}

Status PromptRun::Quiet() {
  if (owner_ == Owner::kCache) {
    switch (cache_.quarantine.Claim(*doubt_)) {
      case Quarantine::Claimed::kDoubtful:
        return Pending();
      case Quarantine::Claimed::kTaken:
        return MakeStatus(Code::kFailedPrecondition, "the pages have come back as quiet pages");
      case Quarantine::Claimed::kQuiet:
        break;
    }
    owner_ = Owner::kNobody;  // the engine's, and no more this request's
    return {};
  }
  if (landing_.has_value() && !landing_->quiet()) return Pending();
  if (cancelled_) {
    landing_.reset();
    Release();  // the look-up may have been under way when it was cancelled, and have found a lease since
  }
  if (owner_ == Owner::kDaemon) owner_ = Owner::kEngine;
  return {};
}

Status PromptRun::Finish(bool wait) {
  if (filling_) return MakeStatus(Code::kFailedPrecondition, "missing() is not empty: call LookAgain first");
  if (pages_kept()) return MakeStatus(Code::kOtherPages, "the pages belong to the cache: call Move");
  if (Status status = CheckPages(); !status.ok()) return status;
  if (landing_.has_value()) {
    const Clock::time_point now = Clock::now();
    if (!doubtful_since_.has_value()) {
      if (!asked_since_.has_value()) asked_since_ = now;
      if (!wait && !landing_->quiet() && now - *asked_since_ < cache_.land) return Pending();
      TakeVerdict(landing_->Wait(wait ? cache_.land : milliseconds(0)));
      doubtful_since_ = now;
    }
    if (wait) landing_->WaitQuiet(cache_.quiet);
    if (!landing_->quiet()) {
      if (!wait && now - *doubtful_since_ < cache_.quiet) return Pending();
      const bool pages = !pages_.empty();
      KeepPages();
      UseNothing();
      gave_up_ = false;
      exact_.reset();
      MakePlan();
      return pages ? MakeStatus(Code::kOtherPages, "the daemon may still write to the request's pages: call Move")
                   : MakeStatus(Code::kRestart, "the hits failed to land; the plan computes them");
    }
    landing_.reset();
  }
  if (owner_ == Owner::kDaemon) owner_ = Owner::kEngine;
  if (in_place_ != nullptr && AnyUsed()) {
    const Status shared = gave_up_ ? Status() : ReachShared(wait);
    if (shared.code == Code::kPending) return shared;
    LoseUnfilled();
  }
  // The leases under which tuples were read ended with the session.
  if (AnyUsed() && !match_->valid()) {
    UseNothing();
    gave_up_ = true;
  }
  exact_.reset();
  if (!gave_up_) {
    exact_ = plan_.exact;
    return {};
  }
  gave_up_ = false;
  for (const uint32_t segment : std::exchange(lost_, {})) Use(segment, false);
  MakePlan();
  return MakeStatus(Code::kRestart, "a hit failed to land; the plan computes it");
}

void PromptRun::TakeVerdict(const std::vector<MissReason>& verdict) {
  for (size_t i = 0; i < wanted_.size(); ++i) {
    if (verdict[i] == MissReason::kNone) continue;
    const uint32_t segment = wanted_[i].segment;
    Use(segment, false);
    if (segment != LandSegment::kPrefix) reasons_[segment] = verdict[i];
    gave_up_ = true;
  }
}

void PromptRun::StartLanding(ashlar::Landing landing) {
  landing_ = std::move(landing);
  asked_since_.reset();
  doubtful_since_.reset();
  layer_since_.reset();
  if (!wanted_.empty()) return;
  // If the match did not come in time, objects of it may still be landing.
  if (landing_->WaitQuiet(kMostlyQuiet)) {
    landing_.reset();
  } else {
    gave_up_ = true;
  }
}

Status PromptRun::Move(const GivenPages& given) {
  if (!pages_.empty() || !cache_.has_attention() || cache_.shares_in_place) {
    return MakeStatus(Code::kFailedPrecondition, "the request has its pages");
  }
  return TakePages(given, "move", Owner::kEngine);
}

Status PromptRun::Lose(std::span<const uint32_t> segments) {
  if (landing_.has_value())
    return MakeStatus(Code::kFailedPrecondition, "the landing is in progress; call Finish first");
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i] != Step::kPrefix && segments[i] >= used_.size()) {
      return Invalid("segments[", i, "]: ", segments[i], " is out of range; the prompt has ", used_.size(),
                     " segments");
    }
  }
  for (const uint32_t segment : segments) Use(segment, false);
  exact_.reset();
  MakePlan();
  return MakeStatus(Code::kRestart, "another rank missed a segment; the plan computes it");
}

void PromptRun::Cancel() {
  AbandonAll();
  filling_ = false;
  if (landing_.has_value()) landing_->Wait(milliseconds(0));
  UseNothing();
  MakePlan();
  Release();
}

}  // namespace ashlar::engine
