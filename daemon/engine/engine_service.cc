// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/engine_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/request_fields.h"
#include "daemon/events/block_texts.h"

namespace ashlar::daemon {

void EngineService::FindElsewhere(storage::TenantId tenant, const std::vector<const ParsedPrompt*>& prompts,
                                  std::function<void(RemoteLookup::Adopted)> then) {
  const bool refused = sessions_.rates().Spent(tenant);  // for the next calls
  if (remote_ == nullptr || refused) return then(nullptr);
  std::vector<RemoteQuestion> questions;
  for (const ParsedPrompt* prompt : prompts) {
    questions.push_back({prompt->segments, prompt->text.has_value() ? &*prompt->text : nullptr});
  }
  remote_->Find(tenant, questions, std::move(then));
}

EngineService::Done EngineService::BusyAsData(Done done, std::function<void()> write_busy) {
  return [done = std::move(done), write_busy = std::move(write_busy)](absl::Status status) {
    if (!absl::IsResourceExhausted(status)) return done(std::move(status));
    write_busy();
    done(absl::OkStatus());
  };
}

void EngineService::OpenModel(const v1::OpenModelRequest& request, v1::OpenModelReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const Session::Description& about = (*session)->about();
  auto model = Model::Open(about.tenant_name, request, layouts_, about.models);
  if (absl::IsResourceExhausted(model.status())) {  // models remembered for operators are dropped first
    models_.Erase(about.tenant);
    model = Model::Open(about.tenant_name, request, layouts_, about.models);
  }
  if (!model.ok()) return done(model.status());
  const absl::StatusOr<uint64_t> handle = (*session)->AddModel(*model);
  if (!handle.ok()) return done(handle.status());
  models_.Remember(about.tenant, *model);
  reply->set_model(*handle);
  reply->set_ns((*model)->ns.bytes.data(), (*model)->ns.bytes.size());
  reply->set_tenant(about.tenant_name);
  done(absl::OkStatus());
}

void EngineService::CloseModel(const v1::CloseModelRequest& request, v1::CloseModelReply*, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  (*session)->RemoveModel(request.model());
  sessions_.OnLoop(*session, CallClass::kRelease, done, [this, session = *session, model = request.model(), done] {
    router_.workers().ModelClosed(session->about().id, model);
    done(absl::OkStatus());
  });
}

void EngineService::EraseTextsAndPages(storage::TenantId tenant, const std::optional<NamespaceId>& ns) {
  admissions_.pools().Erase(tenant);
  if (texts_ != nullptr) texts_->Erase(tenant, ns);
}

void EngineService::DeclarePages(const v1::DeclarePagesRequest& request, v1::DeclarePagesReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  auto model = (*session)->FindModel(request.model());
  if (model == nullptr)
    return done(absl::InvalidArgumentError(absl::StrCat("model: unknown handle ", request.model())));
  auto region = (*session)->FindRegion(request.region());
  if (region == nullptr) {
    return done(absl::InvalidArgumentError(absl::StrCat("region: unknown handle ", request.region())));
  }
  auto pages = Pages::Declare(std::move(model), std::move(region), request);
  if (!pages.ok()) return done(pages.status());
  auto charge = Budget::Take((*session)->about().models, (*pages)->MemoryBytes());
  if (!charge.ok()) {
    return done(absl::ResourceExhaustedError(absl::StrCat("layers: ", charge.status().message())));
  }
  (*pages)->Keep(*std::move(charge));
  const auto add = [session = *session, pages = *pages, &request, reply, done] {
    const absl::StatusOr<uint64_t> handle = session->AddPages(request.model(), pages);
    if (!handle.ok()) return done(handle.status());
    reply->set_pages_id(*handle);
    done(absl::OkStatus());
  };
  if (!request.allocate()) return add();
  // The pool outlives the declaration while requests hold pages.
  auto of_pool = Budget::Take((*session)->about().models, storage::PagePool::MemoryBytes(request.pages()));
  if (!of_pool.ok()) return done(absl::ResourceExhaustedError(absl::StrCat("pages: ", of_pool.status().message())));
  sessions_.OnLoop(*session, CallClass::kRequest, done,
                   [this, session = *session, pages = *pages, of_pool = *std::move(of_pool), &request, done, add] {
                     auto pool = admissions_.pools().Open(session->about().tenant, pages->region()->block(),
                                                          request.pages(), of_pool);
                     if (!pool.ok()) return done(pool.status());
                     pages->Allocate(*std::move(pool));
                     add();
                   });
}

}  // namespace ashlar::daemon
