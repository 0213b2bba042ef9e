// SPDX-License-Identifier: Apache-2.0
#include "client/session/match.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "ashlar/v1/cache.pb.h"

namespace ashlar {
namespace {

using internal::Connection;
using internal::Deadline;
using internal::MappedObject;
using internal::MappedRun;

absl::StatusOr<std::unique_ptr<MappedObject>> Map(const v1::SegmentMatch& found, Connection& connection,
                                                  const internal::ExpectedObject& expected, Deadline deadline) {
  std::vector<MappedRun> runs;
  runs.reserve(found.extents_size());
  for (const v1::ExtentRun& run : found.extents()) {
    absl::StatusOr<std::shared_ptr<const internal::SharedMemory>> arena =
        connection.arenas().Get(run.arena(), deadline);
    if (!arena.ok()) return arena.status();
    runs.push_back({*std::move(arena), run.first(), run.count()});
  }
  return MappedObject::Open(runs, expected);
}

// Returns the miss reason of a hit that cannot be mapped.
MissReason MappingFailed(const absl::Status& status) {
  if (absl::IsDataLoss(status)) return MissReason::kChecksumFailed;
  if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status)) {
    return internal::ToMissReason(status);
  }
  return MissReason::kTierError;
}

}  // namespace

Match Match::Missed(std::span<const uint64_t> segment_lengths, MissReason reason) {
  Match match;
  uint64_t start = 0;
  for (size_t i = 0; i < segment_lengths.size(); ++i) {
    match.segments_.push_back(
        {.reason = reason, .kind = KindOfSegment(i), .start = start, .tokens = segment_lengths[i]});
    start += segment_lengths[i];
  }
  match.objects_.resize(segment_lengths.size());
  return match;
}

Match Match::Answered(const v1::PromptMatch& answer, const std::shared_ptr<Connection>& connection,
                      const Layout& layout, const NamespaceId& ns, std::span<const uint64_t> segment_lengths,
                      Deadline deadline) {
  // Held before anything else, so that unused parts are released with it.
  absl::StatusOr<std::shared_ptr<internal::LeaseHold>> lease = nullptr;
  if (!answer.lease().empty()) lease = internal::LeaseHold::Make(connection, answer.lease(), deadline);
  if (!lease.ok()) return Missed(segment_lengths, MissReason::kTimedOut);
  if (static_cast<size_t>(answer.segments_size()) != segment_lengths.size()) {
    return Missed(segment_lengths, MissReason::kInvalidRequest);  // a lease that was attached with other lengths
  }
  Match match = Missed(segment_lengths, MissReason::kNeverSeen);
  match.ns_ = ns;
  match.checkpoint_positions_.assign(answer.checkpoint_positions().begin(), answer.checkpoint_positions().end());
  if (*lease != nullptr) {
    match.lease_ = *std::move(lease);
    match.connection_ = connection;
  }
  for (size_t i = 0; i < segment_lengths.size(); ++i) {
    const v1::SegmentMatch& found = answer.segments(static_cast<int>(i));
    SegmentResult& segment = match.segments_[i];
    segment.reason = internal::ToMissReason(found.miss_reason());
    if (segment.hit() && match.lease_ == nullptr) segment.reason = MissReason::kLeaseLost;
    if (!segment.hit()) continue;
    absl::StatusOr<std::unique_ptr<MappedObject>> object =
        Map(found, *connection, {&layout, ns, segment.kind, segment.tokens, segment.start}, deadline);
    if (!object.ok()) {
      segment.reason = MappingFailed(object.status());
      continue;
    }
    segment.tier = static_cast<TierKind>(found.tier());
    segment.bytes = found.bytes();
    match.objects_[i] = *std::move(object);
  }
  const bool first = !match.segments_.empty() && match.segments_.front().hit();
  match.prefix_depth_ = first ? match.segments_.front().tokens : 0;
  if (answer.has_prefix() && match.lease_ != nullptr) match.TakePrefix(answer.prefix(), layout, deadline);
  return match;
}

void Match::TakePrefix(const v1::PrefixMatch& answer, const Layout& layout, Deadline deadline) {
  PrefixResult found{.depth = answer.depth(),
                     .provenance = static_cast<Provenance>(answer.provenance()),
                     .own = answer.own(),
                     .span_tokens = answer.span_tokens()};
  if (!answer.has_checkpoint() || answer.has_span() != (found.span_tokens > 0) || found.span_tokens >= found.depth) {
    return;
  }
  const auto take = [&](const v1::SegmentMatch& object) {
    found.tier = std::max(found.tier, static_cast<TierKind>(object.tier()));
    found.bytes += object.bytes();
    return object.miss_reason() == static_cast<uint32_t>(MissReason::kNone);
  };
  const bool all_hit = std::ranges::all_of(answer.blocks(), take) && take(answer.checkpoint()) &&
                       (!answer.has_span() || take(answer.span()));
  if (!all_hit) return;
  // Keys and values are verified when they land; only states are read in place.
  const internal::ExpectedObject states{&layout, ns_, ObjectKind::kCheckpoint, found.depth - found.span_tokens, 0};
  auto object = Map(answer.checkpoint(), *connection_, states, deadline);
  if (!object.ok()) return;
  if (answer.has_span()) {
    internal::ExpectedObject inputs{&layout, ns_, ObjectKind::kSpan, found.depth, states.tokens};
    inputs.span_tokens = found.span_tokens;
    auto mapped = Map(answer.span(), *connection_, inputs, deadline);
    if (!mapped.ok()) return;
    span_ = *std::move(mapped);
  }
  checkpoint_ = *std::move(object);
  if (connection_->protocol() >= limits::kProtocolWithPrefixBlocks) {
    found.blocks = static_cast<uint32_t>(answer.blocks_size());
  }
  for (const v1::SegmentMatch& block : answer.blocks()) block_numbers_.push_back(block.object());
  checkpoint_number_ = answer.checkpoint().object();
  if (answer.has_span()) span_number_ = answer.span().object();
  prefix_ = found;
  prefix_depth_ = found.depth;
  resumable_.assign(answer.resumable().begin(), answer.resumable().end());
}

Match::Objects Match::ObjectsOf(const LandSegment& segment) const {
  if (segment.segment == LandSegment::kPrefix) {
    if (checkpoint_ == nullptr || segment.first_position != 0 || segment.rotary_shift != 0)
      return {MissReason::kInvalidRequest, {}};
    const auto first = static_cast<int64_t>(std::min<size_t>(segment.present_blocks, block_numbers_.size()));
    if (segment.end_block > 0) {
      if (segment.end_block > block_numbers_.size() || segment.present_blocks >= segment.end_block)
        return {MissReason::kInvalidRequest, {}};
      return {MissReason::kNone, {block_numbers_.begin() + first, block_numbers_.begin() + segment.end_block}};
    }
    std::vector<uint32_t> numbers(block_numbers_.begin() + first, block_numbers_.end());
    numbers.push_back(checkpoint_number_);
    if (span_ != nullptr) numbers.push_back(span_number_);
    return {MissReason::kNone, std::move(numbers)};
  }
  if (segment.segment >= segments_.size()) return {MissReason::kInvalidRequest, {}};
  return {segments_[segment.segment].reason, {segment.segment}};
}

std::shared_ptr<MappedObject> Match::TuplesIn(uint32_t segment) const {
  if (segment == LandSegment::kPrefix) return checkpoint_;
  return segment < objects_.size() ? objects_[segment] : nullptr;
}

std::vector<LandSegment> Match::WhatToLand() const {
  std::vector<LandSegment> landable;
  if (checkpoint_ != nullptr) landable.push_back({.segment = LandSegment::kPrefix});
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    if (segments_[i].hit()) landable.push_back({i, segments_[i].start});
  }
  return landable;
}

std::optional<std::vector<size_t>> Match::PlacesOf(const v1::PromptMatch& answer) const {
  const size_t before = checkpoint_ == nullptr ? 0 : 1;
  std::vector<size_t> places;
  for (int i = 0; i < answer.segments_size(); ++i) {
    if (answer.segments(i).miss_reason() != 0) continue;
    const auto segment = static_cast<size_t>(i);
    if (segment >= segments_.size() || !segments_[segment].hit()) return std::nullopt;
    places.push_back(before + places.size());
  }
  const bool has_prefix = answer.prefix().has_checkpoint();
  if (has_prefix != (checkpoint_ != nullptr)) return std::nullopt;
  places.insert(places.end(), ObjectsOf({.segment = LandSegment::kPrefix}).numbers.size(), 0);
  return places;
}

const std::vector<MappedTuple>* Match::TuplesOf(const MappedObject* object) const {
  return creator_.InChild() || lease_ == nullptr || object == nullptr ? nullptr : &object->tuples();
}

const std::vector<MappedTuple>* Match::tuples(size_t segment) const {
  return segment < objects_.size() ? TuplesOf(objects_[segment].get()) : nullptr;
}
const std::vector<MappedTuple>* Match::prefix_states() const {
  return TuplesOf(checkpoint_.get());
}

const MappedSpan* Match::prefix_span() const {
  const bool readable = span_ != nullptr && TuplesOf(span_.get()) != nullptr;
  return readable ? &span_->span() : nullptr;
}

bool Match::valid() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // orders the earlier reads of tuples before the check
  return !creator_.InChild() && lease_ != nullptr && connection_->channel().Alive();
}

std::string Match::lease() const {
  return lease_ == nullptr ? std::string() : lease_->lease();
}
void Match::Release() {
  lease_.reset();
}

}  // namespace ashlar
