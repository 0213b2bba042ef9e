// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/session_calls.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/log.h"

namespace ashlar::daemon {
namespace {

absl::Status UnknownSession() {
  return absl::UnauthenticatedError("session: unknown or ended; connect again");
}

}  // namespace

absl::StatusOr<std::shared_ptr<Session>> SessionCalls::Resolve(const std::string& secret) const {
  std::shared_ptr<Session> session = table_.Find(secret);
  if (session == nullptr) return UnknownSession();
  return session;
}

absl::Status SessionCalls::Authenticate(const std::string& secret, uid_t user, Callers callers) const {
  const std::optional<SessionTable::Owner> owner = table_.OwnerOf(secret);
  if (owner.has_value() && owner->uid != user) {
    Log(LogLevel::kWarning, "call refused: the session belongs to another user",
        {{"session", owner->session}, {"session_uid", owner->uid}, {"uid", user}});
    return absl::PermissionDeniedError("session: opened by another user; call as the user that opened it");
  }
  return callers == Callers::kSessions ? Resolve(secret).status() : absl::OkStatus();
}

void SessionCalls::OnLoop(std::shared_ptr<Session> session, CallClass call_class, Done done, EventLoop::Work work) {
  const storage::TenantId tenant = session->about().tenant;
  if (call_class == CallClass::kRequest && !rates_.Take(tenant, 1)) {
    const uint64_t limit = rates_.limit(tenant);
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

}  // namespace ashlar::daemon
