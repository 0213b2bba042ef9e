// SPDX-License-Identifier: Apache-2.0
// Model::Publish and Model::Land: moving bytes between the engine's memory and the cache.
#include <algorithm>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/session/batching.h"
#include "client/session/lending_call.h"
#include "client/session/model.h"
#include "client/session/part_sources.h"
#include "client/session/rpc.h"
#include "proto/limits.h"

namespace ashlar {
namespace {

using internal::Deadline;
using internal::ModelBinding;

constexpr size_t kFieldBytes = 16;  // limit of the bytes around an embedded message

PublishOutcome ToPublishOutcome(uint32_t wire) {
  const bool known = wire >= static_cast<uint32_t>(PublishOutcome::kPublished) &&
                     wire <= static_cast<uint32_t>(PublishOutcome::kUnavailable);
  return known ? static_cast<PublishOutcome>(wire) : PublishOutcome::kUnavailable;
}

PublishOutcome ToPublishOutcome(const absl::Status& status) {
  if (absl::IsInvalidArgument(status)) return PublishOutcome::kBadSource;
  if (absl::IsResourceExhausted(status)) return PublishOutcome::kBusy;
  return PublishOutcome::kUnavailable;
}

absl::StatusOr<std::vector<PublishOutcome>> AskPublish(internal::Connection& connection,
                                                       std::span<const v1::PublishObject> objects, Deadline deadline) {
  v1::PublishRequest request;
  request.mutable_objects()->Add(objects.begin(), objects.end());
  v1::PublishReply reply;
  const absl::Status status = internal::CallLending(connection, &internal::Rpc::Publish, request, reply, deadline);
  if (!status.ok()) return status;
  if (static_cast<size_t>(reply.outcomes_size()) != objects.size()) {
    return absl::InternalError("the daemon's reply has the wrong number of objects");
  }
  std::vector<PublishOutcome> outcomes;
  for (uint32_t outcome : reply.outcomes()) outcomes.push_back(ToPublishOutcome(outcome));
  return outcomes;
}

}  // namespace

std::optional<PublishOutcome> Model::Describe(const Publication& publication, const ModelBinding& binding,
                                              v1::PublishObject& object) const {
  const auto& [reservation, parts] = publication;
  if (!reservation.granted() || reservation.generation != binding.connection->generation()) {
    return PublishOutcome::kUnknownReservation;
  }
  // The daemon has not yet had space for the pages' region, so it does not know the pages.
  if (binding.pages_missing && !parts.page_table.empty()) return PublishOutcome::kBusy;
  object.set_reservation(reservation.id);
  object.set_provenance(static_cast<uint32_t>(parts.provenance));
  object.set_pages_id(binding.pages_id);
  object.mutable_page_table()->Add(parts.page_table.begin(), parts.page_table.end());
  object.mutable_group_pages()->Add(parts.group_pages.begin(), parts.group_pages.end());
  object.set_first_position(parts.first_position);
  if (parts.linear.empty()) return std::nullopt;
  if (parts.region.memory_ == nullptr) return PublishOutcome::kBadSource;
  const std::optional<uint64_t> region_id = parts.region.memory_->IdOn(*binding.connection);
  if (!region_id.has_value()) return PublishOutcome::kBusy;  // the daemon has no space for it now, and was not asked
  const internal::PartSources sources(opened_->layout(), *parts.region.memory_, *region_id);
  for (const PublishParts::Linear& tensors : parts.linear) {
    if (!sources.Add(tensors, *object.mutable_parts())) return PublishOutcome::kBadSource;
  }
  for (const PublishParts::Run& run : parts.runs) {
    if (!sources.Add(run, *object.mutable_parts())) return PublishOutcome::kBadSource;
  }
  return std::nullopt;
}

PublishOutcome Model::Publish(const Reservation& reservation, const PublishParts& parts) {
  const Publication publication{reservation, parts};
  return Publish(std::span(&publication, 1)).front();
}

std::vector<PublishOutcome> Model::Publish(std::span<const Publication> objects) {
  const Deadline deadline = reconnector_->CallDeadline();
  const absl::StatusOr<ModelBinding> binding = Bind();
  std::vector<PublishOutcome> outcomes(objects.size(), PublishOutcome::kUnavailable);
  if (!binding.ok()) return outcomes;
  std::vector<v1::PublishObject> asked;
  std::vector<size_t> places;  // places of `asked` among `objects`
  for (size_t i = 0; i < objects.size(); ++i) {
    v1::PublishObject object;
    if (const auto outcome = Describe(objects[i], *binding, object); outcome.has_value()) {
      outcomes[i] = *outcome;
      continue;
    }
    asked.push_back(std::move(object));
    places.push_back(i);
  }
  const std::vector<PublishOutcome> answers = internal::AskInCalls<PublishOutcome>(
      std::span<const v1::PublishObject>(asked), limits::kMaxObjectsPerCall,
      [](const v1::PublishObject& object) { return internal::Load{object.ByteSizeLong() + kFieldBytes}; },
      [&](std::span<const v1::PublishObject> part) { return AskPublish(*binding->connection, part, deadline); },
      [](const v1::PublishObject&, const absl::Status& status) { return ToPublishOutcome(status); });
  for (size_t i = 0; i < answers.size(); ++i) outcomes[places[i]] = answers[i];
  // Bad sources end their reservation, even if the daemon was not asked or refused to read.
  std::vector<Reservation> bad;
  for (size_t i = 0; i < objects.size(); ++i) {
    if (outcomes[i] == PublishOutcome::kBadSource) bad.push_back(objects[i].reservation);
  }
  if (!bad.empty()) Abandon(bad);
  return outcomes;
}

// No other thread has the landing before it is returned, so its mutex is not held.
ABSL_NO_THREAD_SAFETY_ANALYSIS
Landing Model::Land(const Match& match, std::span<const int32_t> page_table, std::span<const LandSegment> segments,
                    std::span<const uint32_t> group_pages) {
  auto landing = std::make_unique<Landing::State>(opened_->layout());
  const absl::StatusOr<ModelBinding> binding = Bind();
  MissReason refusal = MissReason::kNone;  // reason of the landing as a whole
  if (!binding.ok()) {
    refusal = internal::ToMissReason(binding.status());
  } else if (match.connection_ != binding->connection || match.lease_ == nullptr) {
    refusal = MissReason::kLeaseLost;
  } else if (match.ns_ != ns()) {
    refusal = MissReason::kInvalidRequest;
  } else if (!std::ranges::all_of(segments, &LandSegment::tuples_only)) {  // pages are needed
    if (binding->pages == nullptr) refusal = MissReason::kInvalidRequest;
    if (binding->pages_missing) refusal = MissReason::kBusy;
  }

  const bool rotary_shifts = binding.ok() && binding->connection->protocol() >= limits::kProtocolWithRotaryShift;
  v1::LandRequest request;
  std::vector<size_t> tuples_only;  // for each object of that field, its index in `reasons`
  for (const LandSegment& segment : segments) {
    const Match::Objects objects = match.ObjectsOf(segment);
    const size_t place = landing->reasons.size();
    landing->reasons.push_back(objects.reason != MissReason::kNone ? objects.reason : refusal);
    landing->tuples.push_back(segment.end_block > 0 ? nullptr : match.TuplesIn(segment.segment));
    const bool shifted = segment.rotary_shift != 0 && !segment.tuples_only;
    if (shifted && !rotary_shifts && landing->reasons.back() == MissReason::kNone) {
      landing->reasons.back() = MissReason::kInvalidRequest;
    }
    if (landing->reasons.back() != MissReason::kNone) continue;
    for (const uint32_t object : objects.numbers) {
      if (segment.tuples_only) {
        tuples_only.push_back(place);
        request.add_tuples_only(object);
        continue;
      }
      landing->asked.push_back(place);
      v1::LandSegment* asked = request.add_segments();
      asked->set_segment(object);
      asked->set_first_position(segment.first_position);
      asked->set_rotary_shift(segment.rotary_shift);
    }
  }
  landing->asked.insert(landing->asked.end(), tuples_only.begin(), tuples_only.end());
  if (landing->asked.empty()) {
    landing->decided = true;
    return Landing(std::move(landing));
  }

  request.set_lease(match.lease_->lease());
  request.set_pages_id(binding->pages_id);
  request.mutable_page_table()->Add(page_table.begin(), page_table.end());
  request.mutable_group_pages()->Add(group_pages.begin(), group_pages.end());
  landing->model = binding->model;
  landing->lease = match.lease_;
  landing->pages = binding->pages;
  binding->connection->leases().Used(match.lease_->lease());
  landing->call = internal::LandCall::Start(binding->connection, request);
  if (landing->call == nullptr) {
    for (size_t asked : landing->asked) landing->reasons[asked] = MissReason::kBusy;
    landing->decided = true;
  }
  return Landing(std::move(landing));
}

}  // namespace ashlar
