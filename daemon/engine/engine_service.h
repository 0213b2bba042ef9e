// SPDX-License-Identifier: Apache-2.0
// EngineService: the calls of ashlar.v1.Cache for engines, without their transport.
//
// Calls come on any thread. Checks and hashes that need only the session run there. Then the call moves to the metadata
// thread, the only one that uses the cache. Replies come on either thread.
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

// Every call calls `done` exactly once; request and reply must live until then. A status other than OK means that
// nothing was changed (cache.proto lists the statuses).
class EngineService {
 public:
  using Done = std::function<void(absl::Status)>;

  // All must outlive the service. `observer` is notified of misses that the cache does not see, `models` of opened
  // models, and `texts` of the blocks of committed texts (may be null). `remote` finds objects of prompts on other
  // nodes before the local lookup; null outside a cluster. `hand_off` runs on the metadata thread; empty outside a
  // cluster.
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

  // Checks the secret of a call from `user`. PERMISSION_DENIED for a session of another user. UNAUTHENTICATED for an
  // unknown or ended session, unless `callers` is kAnybody. Every call also checks that its session is open.
  absl::Status Authenticate(const std::string& secret, uid_t user, Callers callers) const;

  struct LandEvents {
    std::function<void(uint32_t layers)> progress;  // called on the metadata thread, before `done`
    std::function<void(absl::StatusOr<std::vector<MissReason>> verdict)> done;
    // Only for LookupAndLand. Called once on the metadata thread, unless `done` gets an error. `done` may come first.
    std::function<void(v1::PromptMatch match)> matched;
  };

  // The calls of proto/cache_calls.h. Unary calls fill `reply`, streams report to `events`. Quiesce also accepts ended
  // sessions.
#define ASHLAR_UNARY(name, request, reply, callers) void name(const v1::request&, v1::reply*, Done done);
#define ASHLAR_STREAM(name, request, reply, callers) void name(const v1::request&, LandEvents events);
  ASHLAR_CACHE_CALLS(ASHLAR_UNARY, ASHLAR_STREAM)
#undef ASHLAR_UNARY
#undef ASHLAR_STREAM
  // Cancels a landing that the engine no longer waits for. `done` is still called.
  void CancelLanding(const std::string& secret, storage::LandingId landing);

  // The limit of calls per second and tenant. Calls beyond it are refused, except calls that release something.
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
  struct LandOrder;    // the decoded request of a landing
  // Starts a landing under a lease that the session holds. Returns false, after calling `done`, if the targets do not
  // match. The metadata thread only.
  bool Begin(const Session& session, LandOrder& landing, const storage::Match& match, const LandEvents& events);

  void Compose(const std::shared_ptr<Session>& session, std::shared_ptr<CompositionPlan> plan,
               v1::CompositionReply* reply, Done done);

  // Ends the session's requests when the session ends. The metadata thread only.
  void EndRequestsWith(const std::shared_ptr<Session>& session);
  // Ends the session's prefill plans and the prefill that it offers when the session ends.
  void EndRoutesWith(const std::shared_ptr<Session>& session);

  // UNAUTHENTICATED for an unknown or ended session.
  absl::StatusOr<std::shared_ptr<Session>> Resolve(const std::string& secret) const;

  enum class Room { kRequest, kRelease };
  // Runs `work` on the metadata thread if the session is still open there. Calls `done` with an error if it is not, if
  // the queue is full, or if the session ends between two slices of the work.
  void OnLoop(std::shared_ptr<Session> session, Room room, Done done, EventLoop::Work work);

  // Calls `then` with what other nodes have of the prompts, immediately if nothing. The prompts must live until then.
  // The caller must keep the argument of `then` until its lookups have ended.
  void FindElsewhere(storage::TenantId tenant, const std::vector<const Asked*>& prompts,
                     std::function<void(RemoteLookup::Adopted)> then);

  // Returns a `done` that turns RESOURCE_EXHAUSTED into OK with the reply that `write_busy` writes. Used for calls
  // during which the daemon accesses the engine's memory: gRPC itself returns RESOURCE_EXHAUSTED when memory runs out,
  // so that status would not prove that nothing was started.
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
  storage::PagePools pools_;  // the metadata thread only
};

}  // namespace ashlar::daemon
