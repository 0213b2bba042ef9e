// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/calls/match_impl.h"

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

// Returns the reason for the miss that a hit becomes when it cannot be mapped.
MissReason MappingFailed(const absl::Status& status) {
  if (absl::IsDataLoss(status)) return MissReason::kChecksumFailed;
  if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status)) {
    return internal::ToMissReason(status);
  }
  return MissReason::kTierError;
}

}  // namespace

std::unique_ptr<Match::Impl> Match::Impl::Missed(std::span<const uint64_t> segment_lengths, MissReason reason) {
  auto impl = std::make_unique<Impl>();
  uint64_t start = 0;
  for (size_t i = 0; i < segment_lengths.size(); ++i) {
    impl->segments.push_back(
        {.reason = reason, .kind = KindOfSegment(i), .start = start, .tokens = segment_lengths[i]});
    start += segment_lengths[i];
  }
  impl->objects.resize(segment_lengths.size());
  return impl;
}

std::unique_ptr<Match::Impl> Match::Impl::Answered(const v1::PromptMatch& answer,
                                                   const std::shared_ptr<Connection>& connection, const Layout& layout,
                                                   const NamespaceId& ns, std::span<const uint64_t> segment_lengths,
                                                   Deadline deadline) {
  // Held before anything else: what is not used is released with it.
  absl::StatusOr<std::shared_ptr<internal::LeaseHold>> lease = nullptr;
  if (!answer.lease().empty()) lease = internal::LeaseHold::Make(connection, answer.lease(), deadline);
  if (!lease.ok()) return Missed(segment_lengths, MissReason::kTimedOut);
  if (static_cast<size_t>(answer.segments_size()) != segment_lengths.size()) {
    return Missed(segment_lengths, MissReason::kInvalidRequest);  // a lease that was attached with other lengths
  }
  auto impl = Missed(segment_lengths, MissReason::kNeverSeen);
  impl->ns = ns;
  impl->checkpoint_positions.assign(answer.checkpoint_positions().begin(), answer.checkpoint_positions().end());
  if (*lease != nullptr) {
    impl->lease = *std::move(lease);
    impl->connection = connection;
  }
  for (size_t i = 0; i < segment_lengths.size(); ++i) {
    const v1::SegmentMatch& found = answer.segments(static_cast<int>(i));
    SegmentResult& segment = impl->segments[i];
    segment.reason = internal::ToMissReason(found.miss_reason());
    if (segment.hit() && impl->lease == nullptr) segment.reason = MissReason::kLeaseLost;
    if (!segment.hit()) continue;
    absl::StatusOr<std::unique_ptr<MappedObject>> object =
        Map(found, *connection, {&layout, ns, segment.kind, segment.tokens, segment.start}, deadline);
    if (!object.ok()) {
      segment.reason = MappingFailed(object.status());
      continue;
    }
    segment.tier = static_cast<TierKind>(found.tier());
    segment.bytes = found.bytes();
    impl->objects[i] = *std::move(object);
  }
  const bool first = !impl->segments.empty() && impl->segments.front().hit();
  impl->prefix_depth = first ? impl->segments.front().tokens : 0;
  if (answer.has_prefix() && impl->lease != nullptr) impl->TakePrefix(answer.prefix(), layout, deadline);
  return impl;
}

void Match::Impl::TakePrefix(const v1::PrefixMatch& answer, const Layout& layout, Deadline deadline) {
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
  // Keys and values are landed, and verified then; only states are read in place.
  const internal::ExpectedObject states{&layout, ns, ObjectKind::kCheckpoint, found.depth - found.span_tokens, 0};
  auto object = Map(answer.checkpoint(), *connection, states, deadline);
  if (!object.ok()) return;
  if (answer.has_span()) {
    internal::ExpectedObject inputs{&layout, ns, ObjectKind::kSpan, found.depth, states.tokens};
    inputs.span_tokens = found.span_tokens;
    auto mapped = Map(answer.span(), *connection, inputs, deadline);
    if (!mapped.ok()) return;
    span = *std::move(mapped);
  }
  checkpoint = *std::move(object);
  for (const v1::SegmentMatch& block : answer.blocks()) block_numbers.push_back(block.object());
  checkpoint_number = answer.checkpoint().object();
  if (answer.has_span()) span_number = answer.span().object();
  prefix = found;
  prefix_depth = found.depth;
  resumable.assign(answer.resumable().begin(), answer.resumable().end());
}

Match::Impl::Objects Match::Impl::ObjectsOf(const LandSegment& segment) const {
  if (segment.segment == LandSegment::kPrefix) {
    if (checkpoint == nullptr || segment.first_position != 0 || segment.rotary_shift != 0)
      return {MissReason::kInvalidRequest, {}};
    const auto first = static_cast<int64_t>(std::min<size_t>(segment.present_blocks, block_numbers.size()));
    std::vector<uint32_t> numbers(block_numbers.begin() + first, block_numbers.end());
    numbers.push_back(checkpoint_number);
    if (span != nullptr) numbers.push_back(span_number);
    return {MissReason::kNone, std::move(numbers)};
  }
  if (segment.segment >= segments.size()) return {MissReason::kInvalidRequest, {}};
  return {segments[segment.segment].reason, {segment.segment}};
}

std::shared_ptr<MappedObject> Match::Impl::TuplesIn(uint32_t segment) const {
  if (segment == LandSegment::kPrefix) return checkpoint;
  return segment < objects.size() ? objects[segment] : nullptr;
}

std::vector<LandSegment> Match::Impl::WhatToLand() const {
  std::vector<LandSegment> landable;
  if (checkpoint != nullptr) landable.push_back({.segment = LandSegment::kPrefix});
  for (uint32_t i = 0; i < segments.size(); ++i) {
    if (segments[i].hit()) landable.push_back({i, segments[i].start});
  }
  return landable;
}

std::optional<std::vector<size_t>> Match::Impl::PlacesOf(const v1::PromptMatch& answer) const {
  const size_t before = checkpoint == nullptr ? 0 : 1;
  std::vector<size_t> places;
  for (int i = 0; i < answer.segments_size(); ++i) {
    if (answer.segments(i).miss_reason() != 0) continue;
    const auto segment = static_cast<size_t>(i);
    if (segment >= segments.size() || !segments[segment].hit()) return std::nullopt;
    places.push_back(before + places.size());
  }
  const bool has_prefix = answer.prefix().has_checkpoint();
  if (has_prefix != (checkpoint != nullptr)) return std::nullopt;
  places.insert(places.end(), ObjectsOf({.segment = LandSegment::kPrefix}).numbers.size(), 0);
  return places;
}

const std::vector<MappedTuple>* Match::Impl::TuplesOf(const MappedObject* object) const {
  return creator.InChild() || lease == nullptr || object == nullptr ? nullptr : &object->tuples();
}

Match::Match(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Match::Match(Match&&) noexcept = default;
Match& Match::operator=(Match&&) noexcept = default;
Match::~Match() = default;

uint64_t Match::prefix_depth() const {
  return impl_->prefix_depth;
}
const std::vector<uint64_t>& Match::checkpoint_positions() const {
  return impl_->checkpoint_positions;
}
const std::vector<SegmentResult>& Match::segments() const {
  return impl_->segments;
}
const PrefixResult& Match::prefix() const {
  return impl_->prefix;
}
const std::vector<uint64_t>& Match::resumable() const {
  return impl_->resumable;
}

const std::vector<MappedTuple>* Match::tuples(size_t segment) const {
  return segment < impl_->objects.size() ? impl_->TuplesOf(impl_->objects[segment].get()) : nullptr;
}
const std::vector<MappedTuple>* Match::prefix_states() const {
  return impl_->TuplesOf(impl_->checkpoint.get());
}

const MappedSpan* Match::prefix_span() const {
  const bool readable = impl_->span != nullptr && impl_->TuplesOf(impl_->span.get()) != nullptr;
  return readable ? &impl_->span->span() : nullptr;
}

bool Match::valid() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // orders the earlier reads of tuples before the check
  return !impl_->creator.InChild() && impl_->lease != nullptr && impl_->connection->channel().Alive();
}

std::string Match::lease() const {
  return impl_->lease == nullptr ? std::string() : impl_->lease->lease();
}
void Match::Release() {
  impl_->lease.reset();
}

}  // namespace ashlar
