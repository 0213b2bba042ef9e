// SPDX-License-Identifier: Apache-2.0
// AdminService: the calls of ashlar.v1.Admin for operators, apart from their transport.
//
// Calls come on any thread but the metadata thread, for which they wait: texts are hashed, and models compared, on the
// calling thread.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/config/reload.h"
#include "daemon/events/event_hub.h"
#include "daemon/observe/metrics.h"
#include "daemon/router/router.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/session/model_registry.h"
#include "daemon/session/session_table.h"
#include "proto/admin_calls.h"
#include "storage/cache.h"

namespace ashlar::v1 {
class EventBatch;
class EventsRequest;
class ExplainedText;
}  // namespace ashlar::v1

namespace ashlar::daemon {

class Cluster;

// The parts of the daemon that the service queries. All must outlive it.
struct AdminParts {
  storage::Cache& cache;
  EventLoop& loop;
  const SessionTable& sessions;
  const ModelRegistry& models;
  const Metrics& metrics;
  const storage::Clock& clock;
  std::vector<std::string> tenants;        // by TenantId
  std::function<Levels()> measure;         // on the metadata thread
  std::function<bool(bool)> set_draining;  // false: the daemon stops, and goes on draining
  std::function<double()> drain_seconds;
  Router& router;
  std::function<std::string()> config;  // in effect, as YAML
  std::string node;                     // this node's name among its peers; empty: it has none
  EventHub& events;
  // Drops a tenant's texts, of one namespace where it is given, and its shared pages that nobody uses; others are found
  // no more. On the metadata thread.
  std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_beside;
  // Any thread but the metadata thread. `dry_run`: says what it would change.
  std::function<absl::StatusOr<std::vector<ConfigChange>>(bool dry_run)> reload;
  Cluster* cluster = nullptr;  // null: this node is alone
};

// The calls of proto/admin_calls.h. A status other than OK says in its message which field it is about (admin.proto).
class AdminService {
 public:
  explicit AdminService(AdminParts parts) : parts_(std::move(parts)), started_(parts_.clock.Now()) {}

  // Tells `send` of events until it returns false. Its thread is the caller's.
  absl::Status Follow(const v1::EventsRequest& request, const std::function<bool(const v1::EventBatch&)>& send,
                      const std::function<bool()>& ended) const;

#define ASHLAR_CALL(name, request, reply) absl::Status name(const v1::request&, v1::reply*) const;
  ASHLAR_ADMIN_CALLS(ASHLAR_CALL)
#undef ASHLAR_CALL

 private:
  // NOT_FOUND for a name that no tenant has.
  absl::StatusOr<storage::TenantId> FindTenant(const std::string& name) const;
  // All tenants where the name is empty.
  absl::StatusOr<std::vector<storage::TenantId>> FindTenants(const std::string& name) const;
  // The content of a request about texts. INVALID_ARGUMENT and NOT_FOUND name the field.
  struct Asked {
    storage::TenantId tenant = 0;
    std::shared_ptr<const Model> model;
    std::vector<storage::Query> queries;
  };
  absl::StatusOr<Asked> ReadTexts(const v1::Texts& texts) const;
  // The model that the request names. Of a whole namespace that is not remembered, the namespace alone.
  absl::StatusOr<std::shared_ptr<const Model>> FindModel(storage::TenantId tenant, const v1::Texts& request) const;
  absl::Status DescribeDrain(v1::DrainReply* reply) const;
  // Runs `ask` on the metadata thread and waits for it. RESOURCE_EXHAUSTED when the queue is full.
  absl::Status OnLoop(const std::function<void()>& ask) const;
  // The same for long work, in turns of a quantum each, until it returns true.
  absl::Status InSlices(const std::function<bool(storage::Slice&)>& work) const;
  // The objects of a tenant (empty: of all) and of a namespace, as Texts.ns (empty: of all), whose tenant it finds.
  absl::StatusOr<storage::Selection> Select(const std::string& tenant, const std::string& ns) const;

  // Does something with each text's object, on the metadata thread. False: there is none.
  absl::Status WithEach(const v1::Texts& texts, v1::ObjectsReply* reply,
                        const std::function<bool(storage::TenantId, const Key&)>& act) const;

  // Erase of this node alone, and of all nodes; they wait for so many seconds at most.
  absl::Status EraseHere(const v1::EraseRequest& request, const storage::Selection& selection, double wait,
                         v1::EraseReply* reply) const;
  absl::Status EraseEverywhere(const v1::EraseRequest& request, const storage::Selection& selection, double wait,
                               v1::EraseReply* reply) const;
  // An erasure that the calls of one command go on with.
  struct Pending {
    std::string token;
    storage::TenantId tenant = 0;
    std::optional<NamespaceId> ns;
    std::shared_ptr<storage::Erasure> erasure;
  };
  // That of the token, or without one a new one: what was published since another one began is its, too. On the
  // metadata thread.
  absl::StatusOr<Pending> ErasureOf(const std::string& token, const storage::Selection& selection) const;

  class Differences;
  void WriteText(storage::TenantId tenant, const storage::Query& query, const storage::Explanation& why,
                 const Model* model, storage::Nanos now, Differences& differences, v1::ExplainedText* out) const;
  void WriteHolders(const Asked& asked, const std::set<std::string>& unreachable, v1::ExplainReply* reply) const;

  const AdminParts parts_;
  const storage::Nanos started_;
  // Those that the disk has not acknowledged, oldest first. The metadata thread's, as the number of all so far.
  mutable std::deque<Pending> erasures_;
  mutable uint64_t erasures_begun_ = 0;
};

}  // namespace ashlar::daemon
