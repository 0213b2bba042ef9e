// SPDX-License-Identifier: Apache-2.0
// The composition service: Advance.
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/composition_plan.h"
#include "daemon/engine/engine_service.h"

namespace ashlar::daemon {
namespace {

void Write(const storage::CompositionVerdict& verdict, v1::CompositionReply* reply) {
  reply->set_miss_reason(static_cast<uint32_t>(verdict.outcome));
  for (const MissReason reason : verdict.interiors) reply->add_segments(static_cast<uint32_t>(reason));
}

}  // namespace

void EngineService::Advance(const v1::AdvanceRequest& request, v1::CompositionReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  auto read = ReadAdvance(request, **session);
  if (!read.ok()) return done(read.status());
  auto plan = std::make_shared<CompositionPlan>(*std::move(read));
  const size_t interiors = plan->composition.interiors.size();
  const Done refused = BusyAsData(done, [reply, interiors] {
    Write({MissReason::kBusy, std::vector<MissReason>(interiors)}, reply);
  });
  sessions_.OnLoop(*session, CallClass::kRequest, refused,
                   [this, session = *session, plan = std::move(plan), interiors, reply, done] {
                     const storage::SessionId id = session->about().id;
                     if (!session->metadata().landings.MayStart(plan->number)) {
                       observer_.Composed(session->about().tenant, MissReason::kCancelled, 0);
                       Write({MissReason::kCancelled, std::vector<MissReason>(interiors)}, reply);
                       return done(absl::OkStatus());
                     }
                     if (const auto match = cache_.Held(id, plan->lease); match.ok()) {
                       if (absl::Status status = CheckInteriors(*plan, *match); !status.ok())
                         return done(std::move(status));
                     }
                     cache_.Compose(id, plan->number, plan->lease, std::move(plan->composition),
                                    [reply, done](const storage::CompositionVerdict& verdict) {
                                      Write(verdict, reply);
                                      done(absl::OkStatus());
                                    });
                   });
}

}  // namespace ashlar::daemon
