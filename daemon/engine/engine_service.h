// SPDX-License-Identifier: Apache-2.0
// EngineService: the calls of ashlar.v1.Cache for engines, apart from their transport.
//
// Calls come on any thread. Checks and hashes that need only the session are made there; then the call moves to the
// metadata thread, which alone talks to the cache. Answers come on either thread.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/peer/fetch/remote_lookup.h"
#include "daemon/router/router.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/session/model_registry.h"
#include "daemon/session/open_layouts.h"
#include "daemon/session/session.h"
#include "daemon/session/session_table.h"
#include "proto/cache_calls.h"
#include "proto/outcome.h"
#include "storage/cache.h"
#include "storage/observer.h"
#include "storage/sharing/page_pools.h"
#include "storage/transfer/rates.h"

namespace ashlar::v1 {
class PromptMatch;
}

namespace ashlar::daemon {

class BlockTexts;
class PromptHandOff;
struct Asked;
struct CompositionPlan;

// Every call answers exactly once, through `done`; request and reply must live until then. A status other than OK means
// that nothing was changed (cache.proto says which there are).
class EngineService {
 public:
  using Done = std::function<void(absl::Status)>;

  // All must outlive the service. `observer` is told of what the cache does not see, `models` of what is opened.
  // `remote` finds prompts' objects on other nodes before they are looked up here; null: there are no other nodes.
  // `texts` is told of the blocks of texts that are committed; null: nobody wants to know. `hand_off` is asked for on
  // the metadata thread; empty: there are no other nodes.
  EngineService(storage::Cache& cache, storage::Observer& observer, EventLoop& loop, SessionTable& table,
                ModelRegistry& models, Router& router, RemoteLookup* remote = nullptr, BlockTexts* texts = nullptr,
                std::function<PromptHandOff&()> hand_off = nullptr)
      : cache_(cache),
        observer_(observer),
        loop_(loop),
        call_rates_(loop.clock()),
        table_(table),
        models_(models),
        router_(router),
        remote_(remote),
        texts_(texts),
        hand_off_(std::move(hand_off)) {}

  // Checks the secret that a call from `user` carries. PERMISSION_DENIED for a session of another user; UNAUTHENTICATED
  // for a session that is unknown or has ended, unless `callers` is kAnybody. Every call checks the latter itself, too.
  absl::Status Authenticate(const std::string& secret, uid_t user, Callers callers) const;

  struct LandEvents {
    std::function<void(uint32_t layers)> progress;  // on the metadata thread, before `done`
    std::function<void(absl::StatusOr<std::vector<MissReason>> verdict)> done;
    // Only for LookupAndLand: called once, on the metadata thread, unless `done` gets a status; `done` may come before
    // it.
    std::function<void(v1::PromptMatch match)> matched;
  };

  // The calls of proto/cache_calls.h: unary ones fill `reply`, streams tell `events`. Quiesce also answers for sessions
  // that have ended.
#define ASHLAR_UNARY(name, request, reply, callers) void name(const v1::request&, v1::reply*, Done done);
#define ASHLAR_STREAM(name, request, reply, callers) void name(const v1::request&, LandEvents events);
  ASHLAR_CACHE_CALLS(ASHLAR_UNARY, ASHLAR_STREAM)
#undef ASHLAR_UNARY
#undef ASHLAR_STREAM
  // The engine does not wait for this landing any more: it ends early, `done` still comes.
  void CancelLanding(const std::string& secret, storage::LandingId landing);

  // The calls that tenants may make in a second: more are refused, but for those that give something back.
  storage::Rates& call_rates() {
    return call_rates_;
  }
  const storage::Rates& call_rates() const {
    return call_rates_;
  }

  // The metadata thread only.
  storage::PagePool::Levels PageLevels(storage::TenantId tenant) const {
    return pools_.levels(tenant);
  }
  void EraseBeside(storage::TenantId tenant, const std::optional<NamespaceId>& ns);  // as in AdminParts

 private:
  class PromptLookup;  // one prompt's, with its answer
  struct LandOrder;    // as its request describes it
  // Lands under a lease that the session holds. False: the targets do not fit the match, and `done` said so. The
  // metadata thread only.
  bool Begin(const Session& session, LandOrder& landing, const storage::Match& match, const LandEvents& events);

  void Compose(const std::shared_ptr<Session>& session, std::shared_ptr<CompositionPlan> plan,
               v1::CompositionReply* reply, Done done);

  // Sees to it that the session's requests end with it. The metadata thread only.
  void EndRequestsWith(const std::shared_ptr<Session>& session);
  // The same of its plans, and of the prefill that it offers.
  void EndRoutesWith(const std::shared_ptr<Session>& session);

  // UNAUTHENTICATED for a session that is unknown or has ended.
  absl::StatusOr<std::shared_ptr<Session>> Resolve(const std::string& secret) const;

  enum class Room { kRequest, kRelease };
  // Runs `work` on the metadata thread if the session is still open there; else, and when the queue is full, `done`.
  // Cut work ends so, too, when the session ends between two slices.
  void OnLoop(std::shared_ptr<Session> session, Room room, Done done, EventLoop::Work work);

  // Calls `then` with what other nodes have of the prompts, which must live until then: at once where that is nothing.
  // Keep what it is given until the look-ups have ended.
  void FindElsewhere(storage::TenantId tenant, const std::vector<const Asked*>& prompts,
                     std::function<void(RemoteLookup::Adopted)> then);

  // `done`, but RESOURCE_EXHAUSTED becomes OK with the reply that `write_busy` has written. For calls during which the
  // daemon reads or writes the engine's memory: gRPC itself ends calls with that status when memory runs short, so as a
  // status it would not prove that nothing was begun.
  static Done BusyAsData(Done done, std::function<void()> write_busy);

  storage::Cache& cache_;
  storage::Observer& observer_;
  EventLoop& loop_;
  storage::Rates call_rates_;
  SessionTable& table_;
  ModelRegistry& models_;
  Router& router_;
  RemoteLookup* const remote_;
  BlockTexts* const texts_;
  const std::function<PromptHandOff&()> hand_off_;
  OpenLayouts layouts_;
  storage::PagePools pools_;  // the metadata thread's
};

}  // namespace ashlar::daemon
