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
#include "daemon/engine/admission_calls.h"
#include "daemon/engine/prefill_calls.h"
#include "daemon/engine/session_calls.h"
#include "daemon/peer/fetch/remote_lookup.h"
#include "daemon/router/prompt_probe.h"
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
class ObjectName;
class PromptMatch;
}  // namespace ashlar::v1

namespace ashlar::daemon {

class BlockTexts;
class PromptHandoff;
struct ParsedPrompt;
struct CompositionPlan;
struct NamedObject;

// The replies of a call that lands.
class LandingReplies {
 public:
  virtual ~LandingReplies() = default;
  // Attention layers that have landed. On the metadata thread, before `Ended`.
  virtual void Landed(uint32_t layers) = 0;
  virtual void Ended(absl::StatusOr<std::vector<MissReason>> verdict) = 0;
  // Only for LookupAndLand: called once, on the metadata thread, unless `Ended` gets an error. May come after `Ended`.
  virtual void Matched(v1::PromptMatch match) = 0;
};

// Every call calls `done` exactly once; request and reply must live until then. A status other than OK means that
// nothing was changed (cache.proto lists the statuses).
class EngineService final : public PromptProber {
 public:
  using Done = SessionCalls::Done;

  // All must outlive the service. `observer` is notified of misses that the cache does not see, `models` of opened
  // models, and `texts` of the blocks of committed texts (may be null). `remote` finds objects of prompts on other
  // nodes before the local lookup; null outside a cluster. `handoff` runs on the metadata thread; empty outside a
  // cluster.
  EngineService(storage::Cache& cache, storage::Observer& observer, EventLoop& loop, SessionTable& table,
                ModelRegistry& models, Router& router, RemoteLookup* remote = nullptr, BlockTexts* texts = nullptr,
                std::function<PromptHandoff&()> handoff = nullptr)
      : sessions_(loop, table),
        cache_(cache),
        observer_(observer),
        loop_(loop),
        table_(table),
        models_(models),
        router_(router),
        remote_(remote),
        texts_(texts),
        handoff_(std::move(handoff)),
        admissions_(sessions_, cache),
        prefills_(sessions_, router) {}

  // Checks the secret of a call from `user`. PERMISSION_DENIED for a session of another user. UNAUTHENTICATED for an
  // unknown or ended session, unless `callers` is kAll. Every call also checks that its session is open.
  absl::Status Authenticate(const std::string& secret, uid_t user, Callers callers) const {
    return sessions_.Authenticate(secret, user, callers);
  }

  // The calls of ashlar.v1.Cache, in the order of proto/cache_calls.h. Unary calls fill `reply`; the streams of
  // landings call `replies`, which must stay until its last call. Quiesce also answers for sessions that have ended.
  // Admissions and prefill have their own classes, below.
  void OpenModel(const v1::OpenModelRequest& request, v1::OpenModelReply* reply, Done done);
  void CloseModel(const v1::CloseModelRequest& request, v1::CloseModelReply* reply, Done done);
  void DeclarePages(const v1::DeclarePagesRequest& request, v1::DeclarePagesReply* reply, Done done);
  void Match(const v1::MatchRequest& request, v1::MatchReply* reply, Done done);
  void Reserve(const v1::ReserveRequest& request, v1::ReserveReply* reply, Done done);
  void Publish(const v1::PublishRequest& request, v1::PublishReply* reply, Done done);
  void Abandon(const v1::AbandonRequest& request, v1::AbandonReply* reply, Done done);
  void Commit(const v1::CommitRequest& request, v1::CommitReply* reply, Done done);
  void Land(const v1::LandRequest& request, LandingReplies& replies);
  void LookupAndLand(const v1::LookupAndLandRequest& request, LandingReplies& replies);
  void Advance(const v1::AdvanceRequest& request, v1::CompositionReply* reply, Done done);
  void Quiesce(const v1::QuiesceRequest& request, v1::QuiesceReply* reply, Done done);
  void Release(const v1::ReleaseRequest& request, v1::ReleaseReply* reply, Done done);
  void AttachLease(const v1::AttachLeaseRequest& request, v1::AttachLeaseReply* reply, Done done);
  void HandOff(const v1::HandOffRequest& request, v1::HandOffReply* reply, Done done);
  void Probe(const v1::ProbeRequest& request, v1::ProbeReply* reply, Done done);
  void ProbeHere(storage::TenantId tenant, const ProbedModel& model, std::shared_ptr<const v1::Prompt> prompt,
                 std::function<void(absl::StatusOr<Here>)> done) override;
  AdmissionCalls& admissions() { return admissions_; }
  PrefillCalls& prefills() { return prefills_; }
  // Cancels a landing that the engine no longer waits for. `Ended` is still called.
  void CancelLanding(const std::string& secret, storage::LandingId landing);

  // The limit of calls per second and tenant. Calls beyond it are refused, except calls that release something.
  storage::Rates& call_rates() { return sessions_.rates(); }
  const storage::Rates& call_rates() const { return sessions_.rates(); }

  // The metadata thread only.
  storage::PagePool::Levels PageLevels(storage::TenantId tenant) const { return admissions_.pools().levels(tenant); }
  void EraseTextsAndPages(storage::TenantId tenant, const std::optional<NamespaceId>& ns);  // see AdminParts

 private:
  class PromptLookup;  // the lookup of one prompt, with its answer
  struct LandOrder;    // the decoded request of a landing
  struct ReserveCall;
  void ReserveFrom(const std::shared_ptr<ReserveCall>& call, size_t first);
  void NoteSegment(storage::TenantId tenant, const NamedObject& object, const v1::ObjectName& name);
  void NoteBacklog(const Session& session, const Model& model, uint64_t tokens, const PromptLookup& lookup);
  // Starts a landing under a lease that the session holds. If the targets do not match, calls `Ended` and returns
  // false. The metadata thread only.
  bool Begin(const Session& session, LandOrder& landing, const storage::Match& match, LandingReplies& replies);

  // Returns the tenant's open model that a probe names, and the number of sessions that have opened it.
  struct Opened {
    std::shared_ptr<const Model> model;
    std::shared_ptr<const Model> of_segments;  // the model in which segments are looked up; often the same
    uint32_t sessions = 0;
  };
  // An engine may open a model twice: a layout with prefixes, and one without them for its segments. `segmented`: the
  // prompt has segments.
  absl::StatusOr<Opened> FindOpened(storage::TenantId tenant, const ProbedModel& name, bool segmented) const;

  // Calls `then` with what other nodes have of the prompts, immediately if nothing. The prompts must live until then.
  // The caller must keep the argument of `then` until its lookups have ended.
  void FindElsewhere(storage::TenantId tenant, const std::vector<const ParsedPrompt*>& prompts,
                     std::function<void(RemoteLookup::Adopted)> then);

  // Returns a `done` that turns RESOURCE_EXHAUSTED into OK with the reply that `write_busy` writes. Used for calls
  // during which the daemon accesses the engine's memory: gRPC itself returns RESOURCE_EXHAUSTED when memory runs out,
  // so that status would not prove that nothing was started.
  static Done BusyAsData(Done done, std::function<void()> write_busy);

  SessionCalls sessions_;
  storage::Cache& cache_;
  storage::Observer& observer_;
  EventLoop& loop_;
  SessionTable& table_;
  ModelRegistry& models_;
  Router& router_;
  RemoteLookup* const remote_;
  BlockTexts* const texts_;
  const std::function<PromptHandoff&()> handoff_;
  OpenLayouts layouts_;
  AdmissionCalls admissions_;
  PrefillCalls prefills_;
};

}  // namespace ashlar::daemon
