// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/session_table.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "daemon/runtime/log.h"

namespace ashlar::daemon {

std::string RandomSecret() {
  std::string secret(kSecretBytes, '\0');
  while (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    // Only a signal before the pool is seeded can interrupt such a short request.
  }
  return secret;
}

absl::Status SessionTable::Open(std::shared_ptr<Session> session, std::function<void()> opened) {
  const bool posted = loop_.Post(session->about().tenant, [this, session, opened = std::move(opened)] {
    const Session::Description& about = session->about();
    cache_.OpenSession(about.id, about.tenant);
    session->metadata().open = true;
    {
      MutexLock lock(mutex_);
      sessions_.emplace(about.secret, Entry{session});
    }
    Log(LogLevel::kInfo, "session opened",
        {{"session", about.id},
         {"pid", about.pid},
         {"uid", about.uid},
         {"tenant", about.tenant_name},
         {"client", about.client}});
    opened();
  });
  return posted ? absl::OkStatus() : absl::ResourceExhaustedError("the daemon's metadata queue is full; try again");
}

void SessionTable::Close(const std::shared_ptr<Session>& session, std::string reason) {
  {
    MutexLock lock(mutex_);
    const auto found = sessions_.find(session->about().secret);
    if (found != sessions_.end()) found->second.ended = true;
  }
  // First ends the leases and reservations that others wait for. The closure that opens the session may still be
  // queued; this one follows it.
  loop_.PostCompletion(session->about().tenant,
                       [this, session, memory = session->memory(), reason = std::move(reason)](storage::Slice& slice) {
                         return CloseOnLoop(session, memory, reason, slice);
                       });
  session->Clear();  // transfers in flight keep what they use
}

bool SessionTable::CloseOnLoop(const std::shared_ptr<Session>& session, const Session::Memory& memory,
                               const std::string& reason, storage::Slice& slice) {
  Session::MetadataState& state = session->metadata();
  const Session::Description& about = session->about();
  if (std::exchange(state.open, false)) {
    state.closing = true;
    MutexLock lock(mutex_);
    sessions_.at(about.secret).ended = true;
  }
  if (!state.closing) return true;
  const auto freed = cache_.CloseSession(
      about.id, [this, session] { Drained(session); }, slice);
  if (!freed.has_value()) return false;
  state.closing = false;
  Log(LogLevel::kInfo, "session closed",
      {{"session", about.id},
       {"pid", about.pid},
       {"uid", about.uid},
       {"tenant", about.tenant_name},
       {"client", about.client},
       {"reason", reason},
       {"leases", freed->leases},
       {"reservations", freed->reservations},
       {"regions", memory.regions},
       {"region_bytes", memory.bytes}});
  return true;
}

void SessionTable::Drained(const std::shared_ptr<Session>& session) {
  for (const std::function<void()>& drained : session->metadata().when_drained) drained();
  session->metadata().when_drained.clear();
  MutexLock lock(mutex_);
  sessions_.erase(session->about().secret);
}

std::shared_ptr<Session> SessionTable::Find(absl::string_view secret) const {
  MutexLock lock(mutex_);
  const auto found = sessions_.find(secret);
  return found == sessions_.end() || found->second.ended ? nullptr : found->second.session;
}

std::optional<SessionTable::Owner> SessionTable::OwnerOf(absl::string_view secret) const {
  MutexLock lock(mutex_);
  const auto found = sessions_.find(secret);
  if (found == sessions_.end()) return std::nullopt;
  const Session::Description& about = found->second.session->about();
  return Owner{about.id, about.tenant, about.uid};
}

void SessionTable::WhenDrained(absl::string_view secret, std::function<void()> drained) {
  std::shared_ptr<Session> session;
  {
    MutexLock lock(mutex_);
    const auto found = sessions_.find(secret);
    if (found != sessions_.end()) session = found->second.session;
  }
  if (session == nullptr) return drained();
  session->metadata().when_drained.push_back(std::move(drained));
}

std::vector<SessionTable::Listed> SessionTable::List() const {
  std::vector<Listed> all;
  {
    MutexLock lock(mutex_);
    for (const auto& [secret, entry] : sessions_) all.push_back({entry.session, entry.ended});
  }
  std::ranges::sort(all, {}, [](const Listed& listed) { return listed.session->about().id; });
  return all;
}

size_t SessionTable::size() const {
  MutexLock lock(mutex_);
  return sessions_.size();
}

}  // namespace ashlar::daemon
