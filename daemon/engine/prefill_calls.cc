// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/prefill_calls.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/request_fields.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/prefill_limits.h"

namespace ashlar::daemon {
namespace {

absl::Status CheckWait(int64_t wait_ns) {
  if (wait_ns >= 0 && wait_ns <= limits::kMaxPrefillWaitNanos) return absl::OkStatus();
  return Invalid("wait_ns: out of range; expected 0 to ", limits::kMaxPrefillWaitNanos);
}

absl::StatusOr<ColdSegment> ReadCold(const std::string& field, const v1::ObjectName& name, const Model& model,
                                     storage::TenantId tenant) {
  if (!name.media().empty())
    return Invalid(field, ".media: must be empty; other engines cannot prefill segments with media");
  if (!name.salt().empty())
    return Invalid(field, ".salt: must be empty; other engines cannot prefill segments with a salt");
  if (name.tokens().size() > limits::kMaxPrefillTokens * sizeof(int32_t)) {
    return Invalid(field, ".tokens: too many; expected at most ", limits::kMaxPrefillTokens);
  }
  const auto named = ReadObjectName(field, name, model);
  if (!named.ok()) return named.status();
  if (!named->has_value()) return Invalid(field, ".tokens: too short; expected more tokens than the two seams have");
  const ObjectHeader& plan = (*named)->plan;
  return ColdSegment{.work = {.tenant = tenant,
                              .ns = model.ns,
                              .key = plan.key,
                              .kind = plan.kind,
                              .tokens = name.tokens().size() / sizeof(int32_t),
                              .packed = std::make_shared<const std::string>(name.tokens())},
                     .shard = plan.shard,
                     .bytes = plan.bytes};
}

}  // namespace

void PrefillCalls::EndRoutesWith(const std::shared_ptr<Session>& session) {
  Session::MetadataState& state = session->metadata();
  if (std::exchange(state.ends_routes, true)) return;
  state.when_drained.push_back([this, id = session->about().id] { router_.SessionEnded(id); });
}

void PrefillCalls::PlanPrefill(const v1::PlanPrefillRequest& request, v1::PlanPrefillReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr) return done(Invalid("model: unknown handle ", request.model()));
  if (model->shard.size > 1) {
    return done(
        absl::UnimplementedError("model: has several tensor-parallel shards; other engines cannot prefill for it"));
  }
  if (static_cast<uint64_t>(request.objects_size()) > limits::kMaxObjectsPerCall) {
    return done(Invalid("objects: too many; expected at most ", limits::kMaxObjectsPerCall));
  }
  if (request.objects().empty()) return done(Invalid("objects: empty; expected at least one"));
  const storage::TenantId tenant = (*session)->about().tenant;
  std::vector<ColdSegment> cold;
  for (int i = 0; i < request.objects_size(); ++i) {
    auto one = ReadCold(absl::StrCat("objects[", i, "]"), request.objects(i), *model, tenant);
    if (!one.ok()) return done(one.status());
    cold.push_back(*std::move(one));
  }
  const PlanAsker asker{.session = (*session)->about().id,
                        .tenant = tenant,
                        .tokens_per_second = model->tokens_per_second,
                        .computes = !request.warm()};
  const auto answer = [reply, done](const absl::StatusOr<Router::Planned>& planned) {
    if (!planned.ok()) return done(planned.status());
    reply->set_plan(planned->plan);
    for (const bool elsewhere : planned->elsewhere) reply->add_computed_elsewhere(elsewhere);
    reply->set_expected_ns(planned->expected);
    done(absl::OkStatus());
  };
  sessions_.OnLoop(*session, CallClass::kRequest, done,
                   [this, session = *session, asker, cold = std::move(cold), answer]() mutable {
                     EndRoutesWith(session);
                     router_.Plan(asker, std::move(cold), answer);
                   });
}

void PrefillCalls::AwaitPrefill(const v1::AwaitPrefillRequest& request, v1::AwaitPrefillReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  if (absl::Status status = CheckWait(request.wait_ns()); !status.ok()) return done(status);
  const auto answer = [reply, done](const absl::StatusOr<Router::States>& states) {
    if (!states.ok()) return done(states.status());
    for (const PlannedSegmentState state : *states) reply->add_states(static_cast<uint32_t>(state));
    done(absl::OkStatus());
  };
  sessions_.OnLoop(*session, CallClass::kRequest, done,
                   [this, session = *session, plan = request.plan(), wait = request.wait_ns(), answer] {
                     router_.Await(session->about().id, plan, wait, answer);
                   });
}

void PrefillCalls::EndPrefill(const v1::EndPrefillRequest& request, v1::EndPrefillReply*, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  sessions_.OnLoop(*session, CallClass::kRelease, done, [this, session = *session, plan = request.plan(), done] {
    router_.End(session->about().id, plan);
    done(absl::OkStatus());
  });
}

void PrefillCalls::ServePrefill(const v1::ServePrefillRequest& request, v1::ServePrefillReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr) return done(Invalid("model: unknown handle ", request.model()));
  if (model->shard.size > 1) {
    return done(
        absl::UnimplementedError("model: has several tensor-parallel shards; it cannot prefill for other engines"));
  }
  if (static_cast<uint64_t>(request.results_size()) > limits::kMaxPrefillResults) {
    return done(Invalid("results: too many; expected at most ", limits::kMaxPrefillResults));
  }
  if (absl::Status status = CheckWait(request.wait_ns()); !status.ok()) return done(status);
  std::vector<PrefillWorkers::Result> results;
  for (const v1::PrefillResult& result : request.results())
    results.push_back({result.assignment(), result.published(), result.refused()});
  const PrefillWorkers::Engine engine{.session = (*session)->about().id,
                                      .model = request.model(),
                                      .tenant = (*session)->about().tenant,
                                      .ns = model->ns,
                                      .tokens_per_second = model->tokens_per_second};
  const auto answer = [reply, done](const absl::StatusOr<PrefillWorkers::Given>& given) {
    if (!given.ok()) return done(given.status());
    if (given->assignment == 0) return done(absl::OkStatus());
    reply->set_assignment(given->assignment);
    reply->mutable_object()->set_kind(static_cast<uint32_t>(given->work.kind));
    reply->mutable_object()->set_tokens(*given->work.packed);
    reply->set_due_in_ns(given->due_in);
    done(absl::OkStatus());
  };
  sessions_.OnLoop(*session, CallClass::kRequest, done,
                   [this, session = *session, engine, results = std::move(results), wait = request.wait_ns(), answer] {
                     EndRoutesWith(session);
                     router_.workers().Serve(engine, results, wait, answer);
                   });
}

}  // namespace ashlar::daemon
