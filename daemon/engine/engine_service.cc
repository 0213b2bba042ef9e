// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/engine_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/request_fields.h"
#include "daemon/events/block_texts.h"
#include "daemon/runtime/log.h"

namespace ashlar::daemon {
namespace {

absl::Status UnknownSession() {
  return absl::UnauthenticatedError("session: unknown or ended; connect again");
}

}  // namespace

absl::StatusOr<std::shared_ptr<Session>> EngineService::Resolve(const std::string& secret) const {
  std::shared_ptr<Session> session = table_.Find(secret);
  if (session == nullptr) return UnknownSession();
  return session;
}

absl::Status EngineService::Authenticate(const std::string& secret, uid_t user, Callers callers) const {
  const std::optional<SessionTable::Owner> owner = table_.OwnerOf(secret);
  if (owner.has_value() && owner->uid != user) {
    Log(LogLevel::kWarning, "call refused: the session belongs to another user",
        {{"session", owner->session}, {"session_uid", owner->uid}, {"uid", user}});
    return absl::PermissionDeniedError("session: opened by another user; call as the user that opened it");
  }
  return callers == Callers::kSessions ? Resolve(secret).status() : absl::OkStatus();
}

void EngineService::OnLoop(std::shared_ptr<Session> session, CallClass call_class, Done done, EventLoop::Work work) {
  const storage::TenantId tenant = session->about().tenant;
  if (call_class == CallClass::kRequest && !call_rates_.Take(tenant, 1)) {
    const uint64_t limit = call_rates_.limit(tenant);
    return done(
        absl::ResourceExhaustedError(absl::StrCat("calls_per_second: the tenant exceeded its limit of ", limit)));
  }
  auto closure = [session = std::move(session), done, work = std::move(work)](storage::Slice& slice) {
    if (session->metadata().open) return EventLoop::Call(work, slice);
    done(UnknownSession());
    return true;
  };
  constexpr auto kOn = EventLoop::On::kAnyThread;
  const bool posted = call_class == CallClass::kRelease ? loop_.PostRelease(tenant, std::move(closure), kOn)
                                                        : loop_.Post(tenant, std::move(closure), kOn);
  if (!posted) done(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again"));
}

void EngineService::FindElsewhere(storage::TenantId tenant, const std::vector<const ParsedPrompt*>& prompts,
                                  std::function<void(RemoteLookup::Adopted)> then) {
  const bool refused = call_rates_.Spent(tenant);  // for the next calls
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
  const auto session = Resolve(request.session());
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
  const auto session = Resolve(request.session());
  if (!session.ok()) return done(session.status());
  (*session)->RemoveModel(request.model());
  OnLoop(*session, CallClass::kRelease, done, [this, session = *session, model = request.model(), done] {
    router_.workers().ModelClosed(session->about().id, model);
    done(absl::OkStatus());
  });
}

void EngineService::EraseTextsAndPages(storage::TenantId tenant, const std::optional<NamespaceId>& ns) {
  pools_.Erase(tenant);
  if (texts_ != nullptr) texts_->Erase(tenant, ns);
}

void EngineService::DeclarePages(const v1::DeclarePagesRequest& request, v1::DeclarePagesReply* reply, Done done) {
  const auto session = Resolve(request.session());
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
  OnLoop(*session, CallClass::kRequest, done,
         [this, session = *session, pages = *pages, of_pool = *std::move(of_pool), &request, done, add] {
           auto pool = pools_.Open(session->about().tenant, pages->region()->block(), request.pages(), of_pool);
           if (!pool.ok()) return done(pool.status());
           pages->Allocate(*std::move(pool));
           add();
         });
}

}  // namespace ashlar::daemon
