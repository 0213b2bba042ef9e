// SPDX-License-Identifier: Apache-2.0
// Publication: Reserve, Publish, Abandon.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/engine_service.h"
#include "daemon/engine/request_fields.h"
#include "daemon/engine/tensor_sources.h"
#include "daemon/events/block_texts.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/object.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

// One object of a Publish call, as far as it can be read without its plan.
struct Sources {
  std::string field;
  storage::ReservationId reservation = 0;
  TensorSources tensors;
  std::shared_ptr<const Pages> pages;  // null if unknown or not needed
  std::vector<int32_t> page_table;
  std::vector<uint32_t> group_pages;
  uint64_t first_position = 0;
};

absl::StatusOr<Sources> ReadSources(const std::string& field, const v1::PublishObject& object, const Session& session) {
  if (object.provenance() == static_cast<uint32_t>(Provenance::kComposed)) {
    return Invalid(field, ".provenance: composed states cannot be published; expected exact");
  }
  if (object.provenance() != static_cast<uint32_t>(Provenance::kExact))
    return Invalid(field, ".provenance: ", object.provenance(), " is unknown; expected 1 (exact)");
  if (object.first_position() > kMaxPosition)
    return Invalid(field, ".first_position: out of range; expected at most ", kMaxPosition);
  Sources sources{.field = field, .reservation = object.reservation()};
  for (int i = 0; i < object.parts_size(); ++i) {
    const std::string part = absl::StrCat(field, ".parts[", i, "]");
    if (absl::Status status = sources.tensors.Add(part, i, object.parts(i), session); !status.ok()) return status;
  }
  sources.pages = session.FindPages(object.pages_id());
  if (sources.pages != nullptr) {
    const absl::Status whole = sources.pages->region()->CheckWhole(absl::StrCat(field, ".pages_id"));
    if (!whole.ok()) return whole;
  }
  if (static_cast<uint64_t>(object.page_table_size()) > limits::kMaxPromptTokens) {
    return Invalid(field, ".page_table: too many; expected at most ", limits::kMaxPromptTokens);
  }
  sources.page_table.assign(object.page_table().begin(), object.page_table().end());
  sources.group_pages.assign(object.group_pages().begin(), object.group_pages().end());
  sources.first_position = object.first_position();
  return sources;
}

// Returns the plan with the forms that the sources declare. INVALID_ARGUMENT names the field.
absl::StatusOr<ObjectHeader> PlanSources(const Sources& sources, const ObjectHeader& plan) {
  std::vector<TransitionRun> runs;
  for (const auto& [run, part] : sources.tensors.runs()) {
    const absl::Status status = CheckRun(plan, run);
    if (!status.ok()) return Invalid(sources.field, ".parts[", part, "].", status.message());
    runs.push_back(run);
  }
  absl::StatusOr<ObjectHeader> planned = PlanForms(plan, runs);
  if (!planned.ok()) return Invalid(sources.field, ".parts: ", planned.status().message());
  return planned;
}

// Keeps the memory of a publish mapped while it is read.
struct KeptPublish {
  TensorSources::Regions regions;
  std::shared_ptr<const Pages> pages;
};

// Returns nothing unless the sources are exactly the parts of `plan`, inside their regions and pages.
std::optional<storage::PublishSource> Fit(const Sources& sources, ObjectHeader plan) {
  auto kept = std::make_shared<KeptPublish>();
  storage::PublishSource fitted;
  if (!sources.tensors.Fit(plan, fitted.tensors, kept->regions)) return std::nullopt;
  if (std::ranges::any_of(plan.parts, [](const Part& part) { return IsPaged(part.form); })) {
    const std::shared_ptr<const Pages>& pages = sources.pages;
    if (pages == nullptr || !pages->model().Has(plan)) return std::nullopt;
    const uint64_t first = sources.first_position + plan.first_token;
    const auto tables = pages->Divide(sources.page_table.size(), sources.group_pages);
    if (!tables.ok()) return std::nullopt;
    if (!pages->CheckPositions(sources.page_table, *tables, first, plan.stored_tokens).ok()) return std::nullopt;
    auto page_table = std::make_shared<std::vector<int32_t>>(sources.page_table);
    fitted.rows = pages->RowsIn(*page_table, *tables);
    fitted.page_table = std::move(page_table);
    fitted.first_position = sources.first_position;
    kept->pages = pages;
  }
  fitted.plan = std::move(plan);
  fitted.keep = std::move(kept);
  return fitted;
}

// One call, until its last object has an outcome. Metadata thread only.
struct PublishCall {
  v1::PublishReply* reply;
  EngineService::Done done;
  int pending;

  void Set(int object, PublishOutcome outcome) {
    reply->set_outcomes(object, static_cast<uint32_t>(outcome));
    if (--pending == 0) done(absl::OkStatus());
  }
};

}  // namespace

// One call, while objects wait for memory. Metadata thread only.
struct EngineService::ReserveCall {
  std::shared_ptr<Session> session;
  std::vector<std::optional<NamedObject>> objects;
  const v1::ReserveRequest& request;
  v1::ReserveReply* reply;
  Done done;
  bool may_wait = true;  // the system has not refused memory
};

void EngineService::Reserve(const v1::ReserveRequest& request, v1::ReserveReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr) return done(Invalid("model: unknown handle ", request.model()));
  if (static_cast<uint64_t>(request.objects_size()) > limits::kMaxObjectsPerCall) {
    return done(Invalid("objects: too many; expected at most ", limits::kMaxObjectsPerCall));
  }
  const auto call = std::make_shared<ReserveCall>(ReserveCall{*session, {}, request, reply, done});
  for (int i = 0; i < request.objects_size(); ++i) {
    auto named = ReadObjectName(absl::StrCat("objects[", i, "]"), request.objects(i), *model);
    if (!named.ok()) return done(named.status());
    call->objects.push_back(*std::move(named));
  }
  sessions_.OnLoop(*session, CallClass::kRequest, done, [this, call] { ReserveFrom(call, 0); });
}

void EngineService::ReserveFrom(const std::shared_ptr<ReserveCall>& call, size_t first) {
  const Session::Description& about = call->session->about();
  for (size_t i = first; i < call->objects.size(); ++i) {
    const std::optional<NamedObject>& object = call->objects[i];
    storage::Cache::Reservation reservation{ReserveOutcome::kTooShort, 0};
    if (object.has_value()) {
      const auto grown = [this, call, i](bool memory) {
        call->may_wait = memory;
        ReserveFrom(call, i);
      };
      if (call->may_wait && cache_.WhenGrown(about.id, object->plan, grown)) return;
      router_.YieldSpace(about.tenant, object->plan.key);
      reservation = cache_.Reserve(about.id, object->plan, object->text, storage::PoolKind::kPublic, object->recompute,
                                   object->flops);
    }
    if (reservation.outcome == ReserveOutcome::kGranted) {
      NoteSegment(about.tenant, *object, call->request.objects(static_cast<int>(i)));
    }
    // Only a segment can be too short; a checkpoint may have one token.
    const ObjectKind kind = object.has_value() ? object->plan.kind : ObjectKind::kSegment;
    observer_.Reserved(about.tenant, kind, reservation.outcome);
    v1::ReserveResult* result = call->reply->add_results();
    result->set_outcome(static_cast<uint32_t>(reservation.outcome));
    if (reservation.outcome == ReserveOutcome::kGranted) result->set_reservation(reservation.id);
  }
  call->done(absl::OkStatus());
}

// Events have the tokens of a segment, except with a salt or media, as those of blocks.
void EngineService::NoteSegment(storage::TenantId tenant, const NamedObject& object, const v1::ObjectName& name) {
  if (texts_ == nullptr || !texts_->keeps_segments() || object.plan.kind != ObjectKind::kSegment) return;
  if (!name.salt().empty() || !name.media().empty()) return;
  absl::StatusOr<std::vector<int32_t>> tokens = UnpackTokens(name.tokens());
  if (tokens.ok()) texts_->NoteSegment(tenant, object.plan.ns, object.plan.key, *std::move(tokens));
}

void EngineService::Publish(const v1::PublishRequest& request, v1::PublishReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  if (static_cast<uint64_t>(request.objects_size()) > limits::kMaxObjectsPerCall) {
    return done(Invalid("objects: too many; expected at most ", limits::kMaxObjectsPerCall));
  }
  if (request.deadline_ns() < 0) return done(Invalid("deadline_ns: negative; expected 0 or more"));
  auto objects = std::make_shared<std::vector<Sources>>();
  for (int i = 0; i < request.objects_size(); ++i) {
    auto sources = ReadSources(absl::StrCat("objects[", i, "]"), request.objects(i), **session);
    if (!sources.ok()) return done(sources.status());
    objects->push_back(*std::move(sources));
  }
  const storage::Nanos deadline = request.deadline_ns();
  const Done refused = BusyAsData(done, [reply, count = request.objects_size()] {
    reply->mutable_outcomes()->Resize(count, static_cast<uint32_t>(PublishOutcome::kBusy));
  });
  sessions_.OnLoop(*session, CallClass::kRequest, refused, [this, session = *session, objects, deadline, reply, done] {
    const storage::SessionId id = session->about().id;
    const int count = static_cast<int>(objects->size());
    if (count == 0) return done(absl::OkStatus());
    std::vector<std::optional<ObjectHeader>> plans;  // nothing for an unknown reservation
    for (const Sources& sources : *objects) {
      plans.emplace_back();
      const ObjectHeader* reserved = cache_.Planned(id, sources.reservation);
      if (reserved == nullptr) continue;
      absl::StatusOr<ObjectHeader> plan = PlanSources(sources, *reserved);
      if (!plan.ok()) return done(plan.status());  // returns before anything has changed
      plans.back() = *std::move(plan);
    }
    reply->mutable_outcomes()->Resize(count, 0);
    auto call = std::make_shared<PublishCall>(PublishCall{reply, done, count});
    for (int i = 0; i < count; ++i) {
      const Sources& sources = (*objects)[i];
      if (!plans[i].has_value()) {
        call->Set(i, PublishOutcome::kUnknownReservation);
        continue;
      }
      std::optional<storage::PublishSource> fitted = Fit(sources, *std::move(plans[i]));
      if (!fitted.has_value()) {
        cache_.Abandon(id, sources.reservation);
        call->Set(i, PublishOutcome::kBadSource);
        continue;
      }
      fitted->deadline = deadline;
      cache_.Publish(id, sources.reservation, *std::move(fitted),
                     [call, i](PublishOutcome outcome) { call->Set(i, outcome); });
    }
  });
}

void EngineService::Abandon(const v1::AbandonRequest& request, v1::AbandonReply*, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  if (static_cast<uint64_t>(request.reservations_size()) > limits::kMaxObjectsPerCall) {
    return done(Invalid("reservations: too many; expected at most ", limits::kMaxObjectsPerCall));
  }
  std::vector<storage::ReservationId> reservations(request.reservations().begin(), request.reservations().end());
  sessions_.OnLoop(*session, CallClass::kRelease, done,
                   [this, session = *session, reservations = std::move(reservations), done] {
                     for (const storage::ReservationId reservation : reservations)
                       cache_.Abandon(session->about().id, reservation);
                     done(absl::OkStatus());
                   });
}

}  // namespace ashlar::daemon
