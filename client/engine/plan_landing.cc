// SPDX-License-Identifier: Apache-2.0
#include "client/engine/plan_landing.h"

#include <algorithm>

#include "client/engine/boundary.h"
#include "client/engine/status.h"
#include "proto/prefix.h"

namespace ashlar::engine {
namespace {

using std::chrono::milliseconds;

// A lookup that was not answered in time may still be landing, but usually is not.
constexpr milliseconds kUsualQuiesce{10};
// Time for which a poll asks the daemon for the state of shared pages, and interval at which a wait does.
constexpr milliseconds kAskAboutPages{10};
constexpr milliseconds kAskAgain{2};

}  // namespace

PlanLanding::~PlanLanding() {
  const auto end = [this] {
    Cancel();
    if (pages_.lent()) {
      // Kept whether or not a transfer still writes to them, so that the engine gets them back by one call.
      pages_.Keep(std::exchange(landing_, std::nullopt));
    } else if (landing_.has_value() && !landing_->quiesced()) {
      pages_.Keep(std::exchange(landing_, std::nullopt), in_place_);
    }
  };
  // If memory runs out, destroying the landing waits until it is quiesced.
  RunOr(end, [] {});
}

void PlanLanding::Start(std::vector<LandSegment> wanted) {
  cache_.quarantine.EndLandings();
  // Keys and values that are shared in place are landed by InPlacePages.
  const bool tuples_only = !cache_.has_attention() || cache_.shares_in_place;
  for (LandSegment& segment : wanted) segment.tuples_only = tuples_only;
  if (cache_.shares_in_place && cache_.has_attention() && plan_.uses_prefix()) {
    waiting_ = std::move(wanted);
    LandWaiting();
  } else if (!wanted.empty() && (tuples_only || !pages_.empty())) {
    const GroupedPages& tables = pages_.tables();
    Landing landing = cache_.model.Land(*match_, tables.entries, wanted, tables.group_pages);
    Adopt(std::move(landing), std::move(wanted));
  }
  if (in_place_ != nullptr) FillShared();
}

void PlanLanding::Adopt(Landing landing, std::vector<LandSegment> wanted) {
  landing_ = std::move(landing);
  wanted_ = std::move(wanted);
  asked_since_.reset();
  taken_since_.reset();
  layer_since_.reset();
  if (!wanted_.empty()) return;
  // If the match did not arrive in time, its objects may still be landing.
  if (landing_->WaitQuiesced(kUsualQuiesce)) {
    landing_.reset();
  } else {
    plan_.Abandon();
  }
}

Status PlanLanding::Admit(uint32_t own_pages, PageShortage* shortage) {
  if (!cache_.shares_in_place) {
    return MakeStatus(Code::kFailedPrecondition, "memory.share_in_place: the cache was opened without it");
  }
  if (!text_.begun()) return MakeStatus(Code::kFailedPrecondition, "the request has no prompt");
  cache_.quarantine.EndLandings();  // releases admissions whose landings have quiesced
  const uint64_t least = OwnPagesOfPrefix();
  if (std::max<uint64_t>(own_pages, admitted().own_page_count) < least)
    return Invalid("own_pages: ", own_pages, "; the prefix's tokens after its shared pages need ", least, " pages");
  const bool first = in_place_ == nullptr;
  Status status;
  if (first) {
    ashlar::Prompt asked = text_.Asked();
    asked.needed_in = {};
    asked.conversation = {};
    // While the prompt is filled, the plan does not use the prefix yet.
    const bool may_use_prefix = plan_.uses_prefix() || (plan_.filling() && match_.get() != nullptr);
    const Sharing sharing{.blocks = may_use_prefix ? cache_.SharedBlocks(*match_) : 0,
                          .unshared = UnsharedSegments(),
                          .fills_later = plan_.filling()};
    status = AdmitInPlace(cache_, asked, own_pages, sharing, shortage, &in_place_);
  } else {
    status = in_place_->Extend(own_pages, shortage);
  }
  if (!status.ok() || plan_.filling()) return status;
  LandWaiting();
  if (first) FillShared();
  return status;
}

uint64_t PlanLanding::OwnPagesOfPrefix() const {
  if (waiting_.empty()) return 0;
  const uint64_t shared = uint64_t{cache_.SharedBlocks(*match_)} * PrefixBlockTokens(cache_.layout());
  return (match_->prefix().depth - shared + cache_.page_tokens - 1) / cache_.page_tokens;
}

void PlanLanding::LandWaiting() {
  if (waiting_.empty() || !plan_.uses_prefix() || in_place_ == nullptr) return;
  if (admitted().own_page_count < OwnPagesOfPrefix()) return;
  const uint32_t blocks = cache_.SharedBlocks(*match_);
  for (LandSegment& segment : waiting_) {
    if (segment.segment != LandSegment::kPrefix) continue;
    segment.tuples_only = false;
    segment.present_blocks = blocks;
  }
  Landing landing = cache_.model.Land(*match_, in_place_->PrefixTable(blocks), waiting_);
  Adopt(std::move(landing), std::exchange(waiting_, {}));
}

const AdmittedPages& PlanLanding::admitted() const {
  static const AdmittedPages none;
  return in_place_ == nullptr ? none : in_place_->pages();
}

Status PlanLanding::CheckPages() const {
  if (plan_.filling()) {
    return MakeStatus(Code::kFailedPrecondition, "missing() is not empty: call LookAgain first");
  }
  if (pages_.kept()) return MakeStatus(Code::kOtherPages, "the pages belong to the cache: call Move");
  if (!plan_.uses_any() || !cache_.has_attention()) return {};
  if (cache_.shares_in_place) {
    if (in_place_ == nullptr) return MakeStatus(Code::kFailedPrecondition, "the request has no pages: call Admit");
    return waiting_.empty()
               ? Status()
               : MakeStatus(Code::kFailedPrecondition, "the request has too few own pages for its prefix: call Admit");
  }
  return pages_.empty() ? MakeStatus(Code::kFailedPrecondition, "page_table: the request was begun without one")
                        : Status();
}

Status PlanLanding::ReachLayer(uint32_t layer, bool wait) {
  if (layer >= cache_.layout().layers.size())
    return Invalid("layer: ", layer, " is out of range; the model has ", cache_.layout().layers.size(), " layers");
  if (Status status = CheckPages(); !status.ok()) return status;
  if (!plan_.uses_any()) return {};
  if (landing_.has_value()) {
    if (Status status = ReachLanded(layer, wait); !status.ok()) return status;
  }
  return HasRows(cache_.layout().layers[layer]) ? ReachShared(wait) : Status();
}

Status PlanLanding::ReachLanded(uint32_t layer, bool wait) {
  if (landing_->WaitLayers(layer + 1, wait ? cache_.land : milliseconds(0))) return {};
  if (wait) return plan_.Abandon();
  if (landing_->quiesced()) return landing_->WaitLayers(layer + 1, milliseconds(0)) ? Status() : plan_.Abandon();
  const Clock::time_point now = Clock::now();
  if (!layer_since_.has_value() || layer_since_->first != layer) layer_since_ = {layer, now};
  return now - layer_since_->second < cache_.land ? Pending() : plan_.Abandon();
}

std::vector<uint32_t> PlanLanding::SharedParts() const {
  std::vector<uint32_t> parts = plan_.UsedSegments();
  const auto first_block = static_cast<uint32_t>(text_.lengths().size());
  const uint32_t blocks = plan_.uses_prefix() ? cache_.SharedBlocks(*match_) : 0;
  for (uint32_t i = 0; i < blocks; ++i) parts.push_back(first_block + i);
  return parts;
}

std::vector<uint32_t> PlanLanding::UnsharedSegments() const {
  std::vector<uint32_t> unshared;
  if (plan_.filling()) return unshared;  // any of them may be a hit afterwards
  const std::vector<uint32_t> used = plan_.UsedSegments();
  for (uint32_t i = 0; i < text_.lengths().size(); ++i) {
    if (!std::ranges::binary_search(used, i)) unshared.push_back(i);
  }
  return unshared;
}

InPlacePages::State PlanLanding::FillShared() {
  const std::vector<uint32_t> used = SharedParts();
  return used.empty() ? InPlacePages::State::kFilled : in_place_->Fill(cache_, *match_, used, kAskAboutPages);
}

Status PlanLanding::ReachShared(bool wait) {
  if (in_place_ == nullptr) return {};
  const Clock::time_point begin = Clock::now();
  for (;;) {
    const InPlacePages::State state = FillShared();
    if (state == InPlacePages::State::kFailed) return plan_.Abandon();
    if (state == InPlacePages::State::kFilled) {
      shared_since_.reset();
      return {};
    }
    const Clock::time_point now = Clock::now();
    if (!wait && !shared_since_.has_value()) shared_since_ = now;
    const Clock::time_point since = wait ? begin : *shared_since_;
    if (now - since >= cache_.land) return plan_.Abandon();
    if (!wait) return Pending();
    in_place_->WaitForChange(kAskAgain);
  }
}

void PlanLanding::DropUnfilled() {
  for (const uint32_t part : SharedParts()) {
    const MissReason reason = in_place_->WhyNotFilled(part);
    if (reason != MissReason::kNone) plan_.Drop(part < text_.lengths().size() ? part : LandSegment::kPrefix, reason);
  }
}

Status PlanLanding::Finish(bool wait) {
  if (Status status = CheckPages(); !status.ok()) return status;
  if (landing_.has_value()) {
    const Verdict verdict = TakeVerdict(wait);
    if (verdict == Verdict::kPending) return Pending();
    if (verdict == Verdict::kUnresolved) {
      const bool own = in_place_ != nullptr && !std::ranges::all_of(wanted_, &LandSegment::tuples_only);
      const bool pages = !pages_.empty() || own;
      // Until it is quiesced, the landing may begin to write to own pages, so the admission is held.
      pages_.Keep(std::exchange(landing_, std::nullopt), own ? std::exchange(in_place_, nullptr) : nullptr);
      plan_.UseNothing();
      plan_.Abandon();
      plan_.Finish();
      if (in_place_ != nullptr) in_place_->FillOnly({}, kAskAboutPages);
      const char* const other = cache_.shares_in_place ? "Admit" : "Move";
      return pages ? MakeStatus(Code::kOtherPages,
                                absl::StrCat("the daemon may still write to the request's pages: call ", other))
                   : MakeStatus(Code::kRestart, "the hits failed to land; the plan computes them");
    }
    landing_.reset();
  }
  pages_.Return();
  if (in_place_ != nullptr && plan_.uses_any()) {
    const Status shared = plan_.abandoned() ? Status() : ReachShared(wait);
    if (shared.code == Code::kPending) return shared;
    DropUnfilled();
  }
  // The leases under which tuples were read ended with the session.
  if (plan_.uses_any() && !match_->valid()) {
    plan_.UseNothing();
    plan_.Abandon();
  }
  if (in_place_ != nullptr && plan_.abandoned()) in_place_->FillOnly(SharedParts(), kAskAboutPages);
  return plan_.Finish();
}

PlanLanding::Verdict PlanLanding::TakeVerdict(bool wait) {
  const Clock::time_point now = Clock::now();
  if (!taken_since_.has_value()) {
    if (!asked_since_.has_value()) asked_since_ = now;
    if (!wait && !landing_->quiesced() && now - *asked_since_ < cache_.land) return Verdict::kPending;
    const std::vector<MissReason> reasons = landing_->Wait(wait ? cache_.land : milliseconds(0));
    for (size_t i = 0; i < wanted_.size(); ++i) {
      if (reasons[i] != MissReason::kNone) plan_.Drop(wanted_[i].segment, reasons[i]);
    }
    taken_since_ = now;
  }
  if (wait) landing_->WaitQuiesced(cache_.quiesce);
  if (landing_->quiesced()) return Verdict::kTaken;
  return !wait && now - *taken_since_ < cache_.quiesce ? Verdict::kPending : Verdict::kUnresolved;
}

void PlanLanding::Cancel() {
  waiting_.clear();
  if (landing_.has_value()) landing_->Wait(milliseconds(0));
}

void PlanLanding::End(milliseconds patience) {
  Cancel();
  if (landing_.has_value() && !landing_->WaitQuiesced(patience)) {
    return pages_.Keep(std::exchange(landing_, std::nullopt), in_place_);
  }
  landing_.reset();
  pages_.Return();
}

}  // namespace ashlar::engine
