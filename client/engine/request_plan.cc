// SPDX-License-Identifier: Apache-2.0
#include "client/engine/request_plan.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "client/engine/plan_bytes.h"
#include "client/engine/status.h"
#include "proto/prefix.h"

namespace ashlar::engine {

void RequestPlan::TakeMatch() {
  used_.assign(text_.lengths().size(), false);
  prefix_used_ = abandoned_ = false;
  lost_.clear();
  reasons_.clear();
  std::ranges::transform(match_->segments(), std::back_inserter(reasons_), &SegmentResult::reason);
  captures_ = Captures();
}

std::vector<uint64_t> RequestPlan::Captures() const {
  if (cache_.prefixes.capture_tokens == 0) return {};
  const PlannedLanding* const planned = text_.planned();
  std::vector<uint64_t> captures = planned != nullptr ? planned->captures : match_->checkpoint_positions();
  // A span begins before the prompt's last token, so that the same prompt can resume there for another answer.
  if (cache_.prefixes.span_tokens == 0 || text_.token_count() < 2) return captures;
  const uint64_t last = text_.token_count() - 1;
  captures.insert(std::ranges::lower_bound(captures, last), last);
  captures.erase(std::unique(captures.begin(), captures.end()), captures.end());
  return captures;
}

void RequestPlan::MissAll(MissReason reason) {
  reasons_.assign(text_.lengths().size(), reason);
  used_.assign(text_.lengths().size(), false);
  prefix_used_ = filling_ = false;
  // Other processes compute the segments by another plan.
  const PlannedLanding* const planned = text_.planned();
  abandoned_ = planned != nullptr && (planned->prefix_tokens > 0 || !planned->segments.empty());
  Make();
}

void RequestPlan::SetUsed(uint32_t segment, bool used) {
  if (segment == LandSegment::kPrefix) {
    prefix_used_ = used;
  } else {
    used_[segment] = used;
  }
}

void RequestPlan::Drop(uint32_t segment, MissReason reason) {
  SetUsed(segment, false);
  if (segment != LandSegment::kPrefix) reasons_[segment] = reason;
  abandoned_ = true;
}

void RequestPlan::UseNothing() {
  used_.assign(used_.size(), false);
  prefix_used_ = false;
}

bool RequestPlan::uses_any() const {
  return prefix_used_ || std::ranges::find(used_, true) != used_.end();
}

bool RequestPlan::uses_all() const {
  const ashlar::Match* const match = match_.get();
  if (match == nullptr) return true;
  if (match->prefix().depth > 0 && !prefix_used_) return false;
  for (uint32_t i = 0; i < used_.size(); ++i) {
    if (match->segments()[i].hit() && !used_[i]) return false;
  }
  return true;
}

std::vector<uint32_t> RequestPlan::UsedSegments() const {
  std::vector<uint32_t> used;
  for (uint32_t i = 0; i < used_.size(); ++i) {
    if (used_[i]) used.push_back(i);
  }
  return used;
}

void RequestPlan::Make() {
  const ashlar::Layout& layout = cache_.layout();
  const std::vector<uint64_t>& lengths = text_.lengths();
  const ashlar::Match* const match = match_.get();
  std::vector<CachedRun> cached;
  plan_ = {};
  if (prefix_used_) {
    const PrefixResult& prefix = match->prefix();
    cached.push_back({Step::kPrefix, true, 0, prefix.depth});
    plan_.prefix_tokens = prefix.depth;
    plan_.own = prefix.own;
    plan_.exact = prefix.provenance == Provenance::kExact;
    plan_.prefix_tier = static_cast<uint8_t>(prefix.tier);
    plan_.prefix_span_tokens = prefix.span_tokens;
    plan_.shared_prefix_tokens = uint64_t{cache_.SharedBlocks(*match)} * PrefixBlockTokens(layout);
  }
  segments_.clear();
  uint64_t start = 0;
  for (uint32_t i = 0; i < lengths.size(); start += lengths[i++]) {
    Segment& segment = segments_.emplace_back(Segment{.start = start, .tokens = lengths[i], .used = used_[i]});
    segment.reason = static_cast<uint8_t>(reasons_[i]);
    if (match != nullptr) {
      segment.tier = static_cast<uint8_t>(match->segments()[i].tier);
      segment.bytes = match->segments()[i].bytes;
    }
    if (!used_[i]) continue;
    const bool whole = KindOfSegment(i) == ObjectKind::kCheckpoint;
    const uint64_t head = whole ? 0 : layout.head, tail = whole ? 0 : layout.tail;
    cached.push_back({i, whole, start + head, start + lengths[i] - tail});
    plan_.exact &= whole;
  }
  steps_ = BuildSteps(text_.token_count(), cached, captures_);
  for (const Step& step : steps_) plan_.cached_tokens += step.kind == StepKind::kCompute ? 0 : step.end - step.begin;
  plan_.steps = steps_.data();
  plan_.step_count = static_cast<uint32_t>(steps_.size());
  plan_.segments = segments_.data();
  plan_.segment_count = static_cast<uint32_t>(segments_.size());
  ++revision_;
}

Status RequestPlan::Abandon(std::span<const uint32_t> lost) {
  abandoned_ = true;
  lost_.insert(lost_.end(), lost.begin(), lost.end());
  return MakeStatus(Code::kRestart, "a hit failed to land; stop following the plan and call Finish");
}

Status RequestPlan::Finish() {
  exact_.reset();
  if (!abandoned_) {
    exact_ = plan_.exact;
    return {};
  }
  abandoned_ = false;
  for (const uint32_t segment : std::exchange(lost_, {})) SetUsed(segment, false);
  Make();
  return MakeStatus(Code::kRestart, "a hit failed to land; the plan computes it");
}

Status RequestPlan::DropSegments(std::span<const uint32_t> segments) {
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i] != Step::kPrefix && segments[i] >= used_.size()) {
      return Invalid("segments[", i, "]: ", segments[i], " is out of range; the prompt has ", used_.size(),
                     " segments");
    }
  }
  for (const uint32_t segment : segments) SetUsed(segment, false);
  exact_.reset();
  Make();
  return MakeStatus(Code::kRestart, "another rank missed a segment; the plan computes it");
}

std::string RequestPlan::Encode() const {
  if (match_.get() == nullptr || !uses_any()) return "";
  const std::string lease = match_->lease();
  PlannedLanding plan{.tensor_parallel_size = cache_.tensor_parallel_size,
                      .ns = cache_.model.ns(),
                      .tokens = text_.token_count(),
                      .segment_lengths = text_.lengths(),
                      .prefix_tokens = prefix_used_ ? match_->prefix().depth : 0,
                      .segments = UsedSegments(),
                      .captures = captures_};
  if (lease.size() != plan.lease.size()) return "";
  std::ranges::copy(lease, plan.lease.begin());
  return EncodePlan(plan);
}

}  // namespace ashlar::engine
