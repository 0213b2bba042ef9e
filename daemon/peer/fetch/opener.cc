// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/fetch/opener.h"

#include <algorithm>
#include <utility>

#include "daemon/peer/channels/call_failure.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

std::shared_ptr<const RemoteMemory> MemoryOf(PeerOpened& answer) {
  if (answer.arenas.empty()) return nullptr;
  auto memory = std::make_shared<RemoteMemory>();
  for (PeerArena& arena : answer.arenas) {
    memory->arenas.push_back({std::move(arena.remote_key), arena.base, arena.bytes});
  }
  for (const PeerRun& run : answer.runs) memory->runs.push_back({run.arena, run.offset, run.bytes});
  return memory;
}

}  // namespace

// The control plane has checked that this is the requested object.
absl::StatusOr<OpenedObject> TakeOpened(PeerOpened& answer, const std::shared_ptr<const Member>& member,
                                        storage::Nanos asked_at) {
  if (answer.miss != MissReason::kNone) return absl::NotFoundError(Name(answer.miss));
  absl::StatusOr<ObjectHeader> header = DecodeHeader(answer.header);
  if (!header.ok()) return header.status();
  return OpenedObject{.member = member,
                      .header = *std::move(header),
                      .encoded = std::move(answer.header),
                      .lease = answer.lease,
                      .grant = {.number = answer.grant.number, .secret = answer.grant.secret},
                      .memory = MemoryOf(answer),
                      .leased_until = asked_at + storage::Nanos{1'000'000} * answer.lease_ms};
}

void Opener::Open(storage::TenantId tenant, std::shared_ptr<const Member> member, std::vector<PeerObject> wanted,
                  std::function<void(Opened)> done) {
  const storage::Nanos asked_at = clock_.Now();
  const size_t count = wanted.size();
  using Reply = absl::StatusOr<std::vector<PeerOpened>>;
  const auto answered = [this, tenant, member, count, asked_at, done = std::move(done)](Reply& reply) {
    if (reply.ok()) {
      rates_.Answered(member->node, clock_.Now() - asked_at);
    } else if (WhatFailed(reply.status()) == CallFailure::kNode) {
      rates_.Failed(member->node);
    }
    Opened opened;
    for (size_t i = 0; i < count; ++i) {
      if (reply.ok()) {
        opened.push_back(TakeOpened((*reply)[i], member, asked_at));
        absl::StatusOr<OpenedObject>& object = opened.back();
        if (!object.ok() || !directory_.BeingErased(names_.at(tenant), object->header.ns)) continue;
        Close(member, object->lease);
        object = absl::NotFoundError("the object is being erased");
      } else {
        opened.push_back(reply.status());
      }
    }
    done(std::move(opened));
  };
  asker_.Open(*member, names_.at(tenant), {.objects = std::move(wanted), .lease_ms = kLeaseMillis},
              [this, tenant, answered](Reply reply) {
                const auto shared = std::make_shared<Reply>(std::move(reply));
                loop_.PostCompletion(tenant, [answered, shared] { answered(*shared); });
              });
}

void Opener::Close(const std::shared_ptr<const Member>& member, const PeerLease& lease) {
  Closing& closing = closing_[member->incarnation];
  closing.member = member;
  closing.leases.push_back(lease);
  if (closing.leases.size() % limits::kMaxPeerLeasesPerCall == 0) Flush();
}

void Opener::Flush() {
  for (auto& [incarnation, closing] : std::exchange(closing_, {})) {
    for (size_t begin = 0; begin < closing.leases.size(); begin += limits::kMaxPeerLeasesPerCall) {
      const auto first = closing.leases.begin() + static_cast<ptrdiff_t>(begin);
      const size_t count = std::min<size_t>(closing.leases.size() - begin, limits::kMaxPeerLeasesPerCall);
      CloseSome(closing.member, {first, first + static_cast<ptrdiff_t>(count)});
    }
  }
}

// If too many calls are in flight, a later Flush repeats them. After other errors the leases end with the connection or
// expire.
void Opener::CloseSome(const std::shared_ptr<const Member>& member, std::vector<PeerLease> leases) {
  asker_.Close(*member, leases, [this, member, leases](const absl::Status& status) {
    if (status.ok() || WhatFailed(status) != CallFailure::kBusy) return;
    loop_.PostCompletion(storage::kNoTenant, [this, member, leases] {
      Closing& closing = closing_[member->incarnation];
      closing.member = member;
      closing.leases.insert(closing.leases.end(), leases.begin(), leases.end());
    });
  });
}

}  // namespace ashlar::daemon
