// SPDX-License-Identifier: Apache-2.0
#include "client/engine/prompt_run.h"

#include <algorithm>
#include <numeric>

#include "client/engine/boundary.h"
#include "client/engine/describe.h"
#include "client/engine/status.h"
#include "proto/limits.h"

namespace ashlar::engine {
namespace {

std::string FieldOf(const std::string& field, const char* name) {
  return absl::StrCat(field, ".", name);
}

Status CheckPointer(const void* pointer, uint64_t count, const std::string& field) {
  return pointer == nullptr && count > 0 ? Invalid(field, ": null") : Status();
}

}  // namespace

PromptRun::~PromptRun() {
  // Where memory runs out, the daemon reclaims the reservations by its own deadline, and the landing, which goes with
  // this, waits until it is quiet.
  RunOr([this] { AbandonAll(); }, [] {});
  const auto end_landing = [this] {
    if (landing_.has_value()) landing_->Wait(std::chrono::milliseconds(0));
    // Whether or not anything still writes there: the engine is told in one way.
    if (owner_ == Owner::kDaemon) KeepPages();
  };
  RunOr(end_landing, [] {});
}

Status PromptRun::Take(const Prompt& prompt, const std::string& field) {
  Status status = CheckPointer(prompt.tokens, prompt.token_count, FieldOf(field, "tokens"));
  if (status.ok()) {
    status = CheckPointer(prompt.segment_lengths, prompt.segment_count, FieldOf(field, "segment_lengths"));
  }
  if (!status.ok()) return status;
  if (prompt.token_count > limits::kMaxPromptTokens) {
    return Invalid(field, ".token_count: more than ", limits::kMaxPromptTokens);
  }
  if (prompt.segment_count > 0) {
    if (const absl::Status composable = CheckComposable(cache_.layout()); !composable.ok())
      return MakeStatus(Code::kInvalidArgument, absl::StrCat(field, ".segment_lengths: ", composable.message()));
  }
  if (prompt.segment_count > limits::kMaxSegments) {
    return Invalid(field, ".segment_count: more than ", limits::kMaxSegments);
  }
  tokens_ = {prompt.tokens, prompt.token_count};
  token_count_ = prompt.token_count;
  lengths_.assign(prompt.segment_lengths, prompt.segment_lengths + prompt.segment_count);
  uint64_t end = 0;
  for (size_t i = 0; i < lengths_.size(); end += lengths_[i++]) {
    if (lengths_[i] == 0 || lengths_[i] > token_count_ - end) {
      return Invalid(field, ".segment_lengths[", i, "]: ", lengths_[i], " is out of range; ", token_count_ - end,
                     " tokens are left");
    }
  }
  if (!lengths_.empty() && end == token_count_) {
    return Invalid(field,
                   ".segment_lengths: the segments cover the whole prompt; leave at least its last token outside");
  }
  if (Status shifts = TakeShifts(prompt.rotary_shifts, prompt.segment_count, field); !shifts.ok()) return shifts;
  if (prompt.needed_in_ms > limits::kMaxNeededInNanos / 1'000'000)
    return Invalid(field, ".needed_in_ms: more than ", limits::kMaxNeededInNanos / 1'000'000);
  absl::StatusOr<std::vector<MediaHash>> media =
      DescribeMedia(prompt.media, prompt.media_count, token_count_, FieldOf(field, "media"));
  if (!media.ok()) return ToStatus(media.status());
  media_ = *std::move(media);
  const absl::StatusOr<Salt> salt = DescribeSalt(prompt.salt, prompt.salt_bytes, FieldOf(field, "salt"));
  if (!salt.ok()) return ToStatus(salt.status());
  salt_ = *salt;
  begun_ = true;
  needed_in_ = std::chrono::milliseconds(prompt.needed_in_ms);
  std::ranges::copy(prompt.conversation, conversation_.begin());
  // Its reservations would keep other engines from computing what this one cannot.
  if (prompt.fill && cache_.has_attention() && !cache_.has_pages()) {
    return Invalid(field, ".fill: the cache has no pages to publish from");
  }
  if (prompt.store_only && !prompt.fill) return Invalid(field, ".store_only: requires fill");
  fill_ = prompt.fill;
  cold_parallel_ = prompt.cold_parallel && !prompt.store_only;
  store_only_ = prompt.store_only;
  const GivenPages pages = PagesOf(prompt);
  if (cache_.shares_in_place && !pages.none()) {
    return Invalid(field, ".page_table: the daemon allocates the pages of this cache; call Admit");
  }
  return pages.none() ? Status() : TakePages(pages, field, Owner::kDaemon);
}

Status PromptRun::TakeShifts(const int64_t* shifts, uint64_t count, const std::string& field) {
  rotary_shifts_.assign(lengths_.size(), 0);
  if (shifts == nullptr) return {};
  if (count != lengths_.size()) {
    return Invalid(field, ".rotary_shift_count: ", count, "; expected ", lengths_.size(), " (one per segment)");
  }
  rotary_shifts_.assign(shifts, shifts + count);
  if (std::ranges::count(rotary_shifts_, 0) == static_cast<ptrdiff_t>(count)) return {};
  if (shifts[0] != 0) return Invalid(field, ".rotary_shifts[0]: ", shifts[0], "; expected 0");
  uint64_t start = 0;
  for (size_t i = 0; i < count; start += lengths_[i++]) {
    if (shifts[i] < -static_cast<int64_t>(start)) {
      return Invalid(field, ".rotary_shifts[", i, "]: ", shifts[i], "; the segment starts at ", start);
    }
  }
  if (cache_.shares_in_place) return Invalid(field, ".rotary_shifts: not with memory.share_in_place");
  const auto rotates = [](const ashlar::Layer& layer) {
    const auto* const linear = std::get_if<LinearLayer>(&layer);
    return linear != nullptr && linear->rope.kind != RopeStyle::kNone;
  };
  if (std::ranges::any_of(cache_.layout().layers, rotates)) {
    return Invalid(field, ".rotary_shifts: not for models whose linear layers rotate keys");
  }
  return {};
}

LandSegment PromptRun::AtItsPlace(uint32_t segment) const {
  return {
      .segment = segment, .first_position = match_->segments()[segment].start, .rotary_shift = rotary_shifts_[segment]};
}

Status PromptRun::TakePages(const GivenPages& given, const std::string& field, Owner owner) {
  if (Status status = CheckTables(cache_.groups, given, field); !status.ok()) return status;
  if (Status status = CheckReach(cache_.groups, given, 0, token_count_, field); !status.ok()) return status;
  if (given.page_count > 0 && !cache_.has_pages()) return Invalid(field, ".page_table: the cache has no pages");
  if (Status status = CheckNotKept(cache_.groups, given, cache_.quarantine, field); !status.ok()) return status;
  pages_ = GroupedPages::From(given);
  owner_ = pages_.empty() ? Owner::kNobody : owner;
  doubt_.reset();
  return {};
}

void PromptRun::Take(PrefillWork work, const Reservation& reservation) {
  own_tokens_ = std::move(work.tokens);
  tokens_ = own_tokens_;
  token_count_ = tokens_.size();
  work_ = {.assignment = work.assignment, .generation = work.generation};
  const ashlar::Layout& layout = cache_.layout();
  const bool whole = work.kind == ObjectKind::kCheckpoint;
  runs_.push_back({.tokens = tokens_.data(),
                   .token_count = token_count_,
                   .capture_begin = whole ? 0 : layout.head,
                   .capture_end = token_count_ - (whole ? 0 : layout.tail),
                   .transition = !whole});
  reservations_.push_back(reservation);
  MakePlan();
}

void PromptRun::OwnTokens() {
  if (tokens_.data() == own_tokens_.data()) return;
  own_tokens_.assign(tokens_.begin(), tokens_.end());
  for (std::vector<Run>* const runs : {&runs_, &cold_}) {
    for (Run& run : *runs) run.tokens = own_tokens_.data() + (run.tokens - tokens_.data());
  }
  tokens_ = own_tokens_;
}

bool PromptRun::LandsAtOnce() const {
  const bool shifted = std::ranges::any_of(rotary_shifts_, [](int64_t shift) { return shift != 0; });
  return !pages_.empty() && cache_.has_attention() && !shifted;
}

ashlar::Prompt PromptRun::Asked() const {
  return {.tokens = tokens_,
          .segment_lengths = lengths_,
          .needed_in = needed_in_,
          .conversation = conversation_,
          .media = media_,
          .salt = salt_};
}

void PromptRun::Begin(CacheState& cache, std::span<const std::shared_ptr<PromptRun>> all) {
  std::vector<std::shared_ptr<PromptRun>> prompt_runs;
  for (const auto& prompt_run : all) {
    if (prompt_run->cancelled_) {
      prompt_run->Miss(MissReason::kCancelled);
    } else if (prompt_run->store_only_) {
      prompt_run->MissUnasked();
    } else {
      prompt_runs.push_back(prompt_run);
    }
  }
  if (prompt_runs.size() == 1 && prompt_runs[0]->LandsAtOnce()) {
    prompt_runs[0]->LookupAndLand();
  } else if (!prompt_runs.empty()) {
    std::vector<ashlar::Prompt> prompts;
    for (const auto& prompt_run : prompt_runs) prompts.push_back(prompt_run->Asked());
    std::vector<ashlar::Match> matches = cache.model.Lookup(prompts);
    for (size_t i = 0; i < prompt_runs.size(); ++i) {
      prompt_runs[i]->TakeMatch(std::move(matches[i]));
      prompt_runs[i]->LandHits(prompt_runs[i]->AllHits());
    }
  }
  for (const auto& prompt_run : all) prompt_run->ReserveMissing();
}

void PromptRun::LookupAndLand() {
  ashlar::Prompt asked = Asked();
  asked.needed_in = {};
  auto [match, wanted, landing] = cache_.model.LookupAndLand(asked, pages_.entries, pages_.group_pages);
  TakeMatch(std::move(match));
  wanted_ = std::move(wanted);
  for (const LandSegment& segment : wanted_) Use(segment.segment, true);
  StartLanding(std::move(landing));
  MakePlan();
}

void PromptRun::TakeMatch(ashlar::Match match) {
  match_ = std::move(match);
  used_.assign(lengths_.size(), false);
  prefix_used_ = gave_up_ = false;
  lost_.clear();
  reasons_.clear();
  std::ranges::transform(match_->segments(), std::back_inserter(reasons_), &SegmentResult::reason);
  captures_.clear();
  if (cache_.prefixes.capture_tokens == 0) return;
  captures_ = planned_.has_value() ? planned_->captures : match_->checkpoint_positions();
  // A span begins before the prompt's last token: the same prompt can be resumed there, for another answer.
  if (cache_.prefixes.span_tokens == 0 || token_count_ < 2) return;
  captures_.insert(std::ranges::lower_bound(captures_, token_count_ - 1), token_count_ - 1);
  captures_.erase(std::unique(captures_.begin(), captures_.end()), captures_.end());
}

std::vector<LandSegment> PromptRun::AllHits() const {
  std::vector<LandSegment> there;
  if (match_->prefix().depth > 0) there.push_back({.segment = LandSegment::kPrefix});
  for (uint32_t i = 0; i < match_->segments().size(); ++i) {
    if (match_->segments()[i].hit()) there.push_back(AtItsPlace(i));
  }
  return there;
}

// Without pages the plan says what could land. A model without attention has none: its tuples are brought up.
void PromptRun::LandHits(std::vector<LandSegment> wanted) {
  // Keys and values of segments that are shared in place are landed by InPlacePages.
  const bool tuples_only = !cache_.has_attention() || cache_.shares_in_place;
  for (LandSegment& segment : wanted) {
    Use(segment.segment, true);
    segment.tuples_only = tuples_only;
  }
  wanted_ = std::move(wanted);
  const bool lands = (tuples_only || !pages_.empty()) && !cancelled_;
  if (lands && !wanted_.empty()) {
    StartLanding(cache_.model.Land(*match_, pages_.entries, wanted_, pages_.group_pages));
  }
  MakePlan();
  if (in_place_ != nullptr) FillShared();
}

void PromptRun::Miss(MissReason reason) {
  AbandonAll();
  reasons_.assign(lengths_.size(), reason);
  used_.assign(lengths_.size(), false);
  prefix_used_ = filling_ = fill_ = false;
  // Other processes compute by another plan.
  gave_up_ = planned_.has_value() && (planned_->prefix_tokens > 0 || !planned_->segments.empty());
  MakePlan();
}

void PromptRun::MissUnasked() {
  reasons_.assign(lengths_.size(), MissReason::kNeverSeen);  // the reservation says whether it is there
  used_.assign(lengths_.size(), false);
  MakePlan();
}

void PromptRun::Use(uint32_t segment, bool used) {
  if (segment == LandSegment::kPrefix) {
    prefix_used_ = used;
  } else {
    used_[segment] = used;
  }
}

void PromptRun::UseNothing() {
  used_.assign(used_.size(), false);
  prefix_used_ = false;
}

bool PromptRun::AnyUsed() const {
  return prefix_used_ || std::ranges::find(used_, true) != used_.end();
}

void PromptRun::MakePlan() {
  const ashlar::Layout& layout = cache_.layout();
  heads_.clear();
  rebuilt_.clear();
  std::vector<CachedRun> cached;
  plan_ = {};
  if (prefix_used_) {
    const PrefixResult& prefix = match_->prefix();
    cached.push_back({Step::kPrefix, true, 0, prefix.depth});
    plan_.prefix_tokens = prefix.depth;
    plan_.own = prefix.own;
    plan_.exact = prefix.provenance == Provenance::kExact;
    plan_.prefix_tier = static_cast<uint8_t>(prefix.tier);
    plan_.prefix_span_tokens = prefix.span_tokens;
  }
  segments_.clear();
  uint64_t start = 0;
  for (uint32_t i = 0; i < lengths_.size(); start += lengths_[i++]) {
    Segment& segment = segments_.emplace_back(Segment{.start = start, .tokens = lengths_[i], .used = used_[i]});
    segment.reason = static_cast<uint8_t>(reasons_[i]);
    if (match_.has_value()) {
      segment.tier = static_cast<uint8_t>(match_->segments()[i].tier);
      segment.bytes = match_->segments()[i].bytes;
    }
    if (!used_[i]) continue;
    const bool whole = KindOfSegment(i) == ObjectKind::kCheckpoint;
    const uint64_t head = whole ? 0 : layout.head, tail = whole ? 0 : layout.tail;
    cached.push_back({i, whole, start + head, start + lengths_[i] - tail});
    plan_.exact &= whole;
  }
  steps_ = BuildSteps(token_count_, cached, captures_);
  for (const Step& step : steps_) plan_.cached_tokens += step.kind == StepKind::kCompute ? 0 : step.end - step.begin;
  plan_.steps = steps_.data();
  plan_.step_count = static_cast<uint32_t>(steps_.size());
  plan_.segments = segments_.data();
  plan_.segment_count = static_cast<uint32_t>(segments_.size());
}

void PromptRun::Release() {
  MutexLock lock(commit_mutex_);
  release_later_ = commits_ > 0;
  if (match_.has_value() && commits_ == 0) match_->Release();
}

void PromptRun::BeginCommit() {
  MutexLock lock(commit_mutex_);
  ++commits_;
}

void PromptRun::EndCommit() {
  MutexLock lock(commit_mutex_);
  if (--commits_ == 0 && release_later_ && match_.has_value()) match_->Release();
}

}  // namespace ashlar::engine
