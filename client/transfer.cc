// What moves bytes between the engine's memory and the cache: Model::Publish and Model::Land.
#include <algorithm>
#include <utility>
#include <variant>

#include "ashlar/v1/cache.pb.h"
#include "client/batching.h"
#include "client/landing_impl.h"
#include "client/match_impl.h"
#include "client/model_impl.h"
#include "client/rpc.h"
#include "proto/limits.h"
#include "proto/tuple_parts.h"

namespace ashlar {
namespace {

using internal::Deadline;
using internal::ModelBinding;
using internal::RegionMemory;

constexpr size_t kFieldBytes = 16;  // at most, around an embedded message

PublishOutcome ToPublishOutcome(uint32_t wire) {
  const bool known = wire >= static_cast<uint32_t>(PublishOutcome::kPublished) &&
                     wire <= static_cast<uint32_t>(PublishOutcome::kUnavailable);
  return known ? static_cast<PublishOutcome>(wire) : PublishOutcome::kUnavailable;
}

PublishOutcome ToPublishOutcome(const absl::Status& status) {
  if (absl::IsInvalidArgument(status)) return PublishOutcome::kBadSource;
  return PublishOutcome::kUnavailable;
}

// True when the daemon itself refused: then it reads nothing. gRPC never ends a call with these codes by itself, as it
// does with RESOURCE_EXHAUSTED when memory runs short. Any other failure leaves open how far the daemon came.
bool Refused(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsUnauthenticated(status);
}

// Null: it does not lie in the region.
v1::PartSource* AddPart(v1::PublishObject& object, const RegionMemory& region, uint64_t region_id, uint32_t layer,
                        PartForm form, const std::byte* data, uint64_t bytes) {
  const std::optional<uint64_t> offset = region.OffsetOf(data, bytes);
  if (!offset.has_value()) return nullptr;
  v1::PartSource* part = object.add_parts();
  part->set_layer(layer);
  part->set_form(static_cast<uint32_t>(form));
  part->set_region(region_id);
  part->set_offset(*offset);
  return part;
}

// False: a tensor does not belong to the layout, or does not lie in the region.
bool AddTensors(v1::PublishObject& object, const Layout& layout, const RegionMemory& region, uint64_t region_id,
                const PublishParts::Linear& tensors) {
  if (tensors.layer >= layout.layers.size()) return false;
  const auto* linear = std::get_if<LinearLayer>(&layout.layers[tensors.layer]);
  if (linear == nullptr) return false;
  const uint64_t element = ElementBytes(linear->state_dtype), heads = linear->value_heads;
  const auto add = [&](PartForm form, const void* data, uint64_t bytes) {
    const auto* const at = static_cast<const std::byte*>(data);
    return data == nullptr || AddPart(object, region, region_id, tensors.layer, form, at, bytes) != nullptr;
  };
  const uint64_t transition = TransitionBytes(TupleShapeOf(*linear), linear->state_dtype, linear->transition);
  return add(TransitionFormOf(linear->transition), tensors.transition, heads * transition) &&
         add(PartForm::kState, tensors.state, heads * linear->d_k * linear->d_v * element) &&
         add(PartForm::kStateExponents, tensors.state_exponents, heads * sizeof(int32_t)) &&
         (linear->conv_channels == 0 || add(PartForm::kConvTail, tensors.conv_tail,
                                            uint64_t{linear->conv_kernel - 1} * linear->conv_channels * element));
}

// False as above. Whether the forms fit the layer, the daemon says.
bool AddRun(v1::PublishObject& object, const Layout& layout, const RegionMemory& region, uint64_t region_id,
            const PublishParts::Run& run) {
  const TransitionRun& heads = run.heads;
  if (heads.layer >= layout.layers.size()) return false;
  const auto* linear = std::get_if<LinearLayer>(&layout.layers[heads.layer]);
  if (linear == nullptr || heads.heads == 0 || heads.heads > linear->value_heads) return false;
  const uint64_t unit = TransitionBytes(TupleShapeOf(*linear), linear->state_dtype, heads.form, heads.rank);
  const PartForm form = TransitionFormOf(heads.form);
  v1::PartSource* const part =
      unit == 0 ? object.add_parts()
                : AddPart(object, region, region_id, heads.layer, form, run.units, heads.heads * unit);
  if (part == nullptr) return false;
  part->set_layer(heads.layer);
  part->set_form(static_cast<uint32_t>(form));
  part->set_first_head(heads.first_head);
  part->set_heads(heads.heads);
  part->set_rank(heads.rank);
  return true;
}

absl::StatusOr<std::vector<PublishOutcome>> AskPublish(internal::Connection& connection,
                                                       std::span<const v1::PublishObject> objects, Deadline deadline) {
  v1::PublishRequest request;
  request.set_session(connection.session());
  request.set_deadline_ns(connection.channel().InDaemonsClock(deadline));
  request.mutable_objects()->Add(objects.begin(), objects.end());
  v1::PublishReply reply;
  bool sent = false;
  const absl::Status status = connection.rpc().Publish(request, reply, deadline, sent);
  if (!status.ok()) {
    // The caller takes our return for its sources being its own again. In doubt that is so from the deadline on, which
    // the daemon heeds too, or once it is dead.
    if (sent && !Refused(status)) connection.daemon().WaitDead(deadline);
    if (!sent && absl::IsResourceExhausted(status)) {
      return std::vector<PublishOutcome>(objects.size(), PublishOutcome::kBusy);
    }
    return status;
  }
  if (static_cast<size_t>(reply.outcomes_size()) != objects.size()) {
    return absl::InternalError("the daemon answered for another number of objects");
  }
  std::vector<PublishOutcome> outcomes;
  for (uint32_t outcome : reply.outcomes()) outcomes.push_back(ToPublishOutcome(outcome));
  return outcomes;
}

}  // namespace

std::optional<PublishOutcome> Model::Impl::Describe(const Publication& publication, const ModelBinding& binding,
                                                    v1::PublishObject& object) const {
  const auto& [reservation, parts] = publication;
  if (!reservation.granted() || reservation.generation != binding.connection->generation()) {
    return PublishOutcome::kUnknownReservation;
  }
  // What the daemon has no room for now, it would not know.
  if (binding.pages_missing && !parts.page_table.empty()) return PublishOutcome::kBusy;
  object.set_reservation(reservation.id);
  object.set_provenance(static_cast<uint32_t>(parts.provenance));
  object.set_pages_id(binding.pages_id);
  object.mutable_page_table()->Add(parts.page_table.begin(), parts.page_table.end());
  object.set_first_position(parts.first_position);
  if (parts.linear.empty()) return std::nullopt;
  if (parts.region.impl_ == nullptr) return PublishOutcome::kBadSource;
  const RegionMemory& region = *parts.region.impl_;
  const std::optional<uint64_t> region_id = region.IdOn(*binding.connection);
  if (!region_id.has_value()) return PublishOutcome::kBusy;  // the daemon has no room for it now, and was not asked
  for (const PublishParts::Linear& tensors : parts.linear) {
    if (!AddTensors(object, opened->layout(), region, *region_id, tensors)) return PublishOutcome::kBadSource;
  }
  for (const PublishParts::Run& run : parts.runs) {
    if (!AddRun(object, opened->layout(), region, *region_id, run)) return PublishOutcome::kBadSource;
  }
  return std::nullopt;
}

PublishOutcome Model::Publish(const Reservation& reservation, const PublishParts& parts) {
  const Publication publication{reservation, parts};
  return Publish(std::span(&publication, 1)).front();
}

std::vector<PublishOutcome> Model::Publish(std::span<const Publication> objects) {
  const Deadline deadline = impl_->keeper->CallDeadline();
  const absl::StatusOr<ModelBinding> binding = impl_->Bind();
  std::vector<PublishOutcome> outcomes(objects.size(), PublishOutcome::kUnavailable);
  if (!binding.ok()) return outcomes;
  std::vector<v1::PublishObject> asked;
  std::vector<size_t> places;  // of `asked` among `objects`
  for (size_t i = 0; i < objects.size(); ++i) {
    v1::PublishObject object;
    if (const auto outcome = impl_->Describe(objects[i], *binding, object); outcome.has_value()) {
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
  // Bad sources end their reservation, whoever noticed them: the daemon may not have been asked, or have refused to
  // read.
  for (size_t i = 0; i < objects.size(); ++i) {
    if (outcomes[i] == PublishOutcome::kBadSource) Abandon(objects[i].reservation);
  }
  return outcomes;
}

Landing Model::Land(const Match& match, std::span<const int32_t> page_table, std::span<const LandSegment> segments) {
  auto landing = std::make_unique<Landing::Impl>();
  const Match::Impl& matched = *match.impl_;
  const absl::StatusOr<ModelBinding> binding = impl_->Bind();
  MissReason refusal = MissReason::kNone;  // of the landing as a whole
  if (!binding.ok()) {
    refusal = internal::ToMissReason(binding.status());
  } else if (matched.connection != binding->connection || matched.lease == nullptr) {
    refusal = MissReason::kLeaseLost;
  } else if (matched.ns == ns() && binding->pages_missing) {
    refusal = MissReason::kBusy;
  } else if (matched.ns != ns() || binding->pages == nullptr) {
    refusal = MissReason::kInvalidRequest;
  }

  v1::LandRequest request;
  for (const LandSegment& segment : segments) {
    landing->reasons.push_back(refusal);
    MissReason& reason = landing->reasons.back();
    if (segment.segment >= matched.segments.size()) {
      reason = MissReason::kInvalidRequest;
    } else if (const SegmentResult& found = matched.segments[segment.segment]; !found.hit()) {
      reason = found.reason;
    }
    if (reason != MissReason::kNone) continue;
    landing->asked.push_back(landing->reasons.size() - 1);
    v1::LandSegment* asked = request.add_segments();
    asked->set_segment(segment.segment);
    asked->set_first_position(segment.first_position);
  }
  if (landing->asked.empty()) {
    landing->decided = true;
    return Landing(std::move(landing));
  }

  request.set_lease(matched.lease->lease());
  request.set_pages_id(binding->pages_id);
  request.mutable_page_table()->Add(page_table.begin(), page_table.end());
  landing->model = binding->model;
  landing->lease = matched.lease;
  landing->pages = binding->pages;
  landing->call = internal::LandCall::Start(binding->connection, request);
  if (landing->call == nullptr) {
    for (size_t asked : landing->asked) landing->reasons[asked] = MissReason::kBusy;
    landing->decided = true;
  }
  return Landing(std::move(landing));
}

}  // namespace ashlar
