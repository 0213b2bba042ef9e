// SPDX-License-Identifier: Apache-2.0
// AdminService: the calls of ashlar.v1.Admin for operators, without their transport.
//
// Calls come on any thread except the metadata thread. The calling thread hashes texts and compares models, and waits
// for the metadata thread.
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

// The parts of the daemon that the service uses. All must outlive it.
struct AdminParts {
  storage::Cache& cache;
  EventLoop& loop;
  const SessionTable& sessions;
  const ModelRegistry& models;
  const Metrics& metrics;
  const storage::Clock& clock;
  std::vector<std::string> tenants;        // index is the TenantId
  std::function<Levels()> measure;         // runs on the metadata thread
  std::function<bool(bool)> set_draining;  // returns false if the daemon is stopping and stays in draining
  std::function<double()> drain_seconds;
  Router& router;
  std::function<std::string()> config;  // effective configuration as YAML
  std::string node;                     // node name of this daemon in the cluster; empty without one
  EventHub& events;
  // Drops a tenant's recorded texts and its unused shared pages; shared pages in use are no longer found. With a
  // namespace, only of that namespace. Runs on the metadata thread.
  std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_texts_and_pages;
  // Runs on any thread except the metadata thread. With `dry_run`, returns the changes without applying them.
  std::function<absl::StatusOr<std::vector<ConfigChange>>(bool dry_run)> reload;
  Cluster* cluster = nullptr;  // null outside a cluster
};

// The calls of proto/admin_calls.h. The message of an error begins with the field (admin.proto).
class AdminService {
 public:
  explicit AdminService(AdminParts parts) : parts_(std::move(parts)), started_(parts_.clock.Now()) {}

  // Passes events to `send` on the calling thread until `send` returns false.
  absl::Status Follow(const v1::EventsRequest& request, const std::function<bool(const v1::EventBatch&)>& send,
                      const std::function<bool()>& ended) const;

  // In the order of proto/admin_calls.h.
  absl::Status Explain(const v1::Texts& request, v1::ExplainReply* reply) const;
  absl::Status LastMisses(const v1::LastMissesRequest& request, v1::LastMissesReply* reply) const;
  absl::Status Models(const v1::ModelsRequest& request, v1::ModelsReply* reply) const;
  absl::Status Stats(const v1::StatsRequest& request, v1::StatsReply* reply) const;
  absl::Status Sessions(const v1::SessionsRequest& request, v1::SessionsReply* reply) const;
  absl::Status Peers(const v1::PeersRequest& request, v1::PeersReply* reply) const;
  absl::Status GetConfig(const v1::GetConfigRequest& request, v1::GetConfigReply* reply) const;
  absl::Status Pin(const v1::PinRequest& request, v1::ObjectsReply* reply) const;
  absl::Status Unpin(const v1::Texts& request, v1::ObjectsReply* reply) const;
  absl::Status Evict(const v1::Texts& request, v1::ObjectsReply* reply) const;
  absl::Status Drain(const v1::DrainRequest& request, v1::DrainReply* reply) const;
  absl::Status Undrain(const v1::UndrainRequest& request, v1::DrainReply* reply) const;
  absl::Status GetDrain(const v1::GetDrainRequest& request, v1::DrainReply* reply) const;
  absl::Status Warm(const v1::Texts& request, v1::WarmReply* reply) const;
  absl::Status List(const v1::ListRequest& request, v1::ListReply* reply) const;
  absl::Status Erase(const v1::EraseRequest& request, v1::EraseReply* reply) const;
  absl::Status Verify(const v1::VerifyRequest& request, v1::VerifyReply* reply) const;
  absl::Status GetVerify(const v1::GetVerifyRequest& request, v1::VerifyReply* reply) const;
  absl::Status Reload(const v1::ReloadRequest& request, v1::ReloadReply* reply) const;
  absl::Status Probe(const v1::AdminProbeRequest& request, v1::ProbeReply* reply) const;

 private:
  // NOT_FOUND for an unknown tenant name.
  absl::StatusOr<storage::TenantId> FindTenant(const std::string& name) const;
  // Returns all tenants for an empty name.
  absl::StatusOr<std::vector<storage::TenantId>> FindTenants(const std::string& name) const;
  // The decoded texts of a request. INVALID_ARGUMENT and NOT_FOUND name the field.
  struct ParsedTexts {
    storage::TenantId tenant = 0;
    std::shared_ptr<const Model> model;
    std::vector<storage::Query> queries;
  };
  absl::StatusOr<ParsedTexts> ReadTexts(const v1::Texts& texts) const;
  // Returns the model that the request names. If only a complete namespace is given and no model of it is known, the
  // result has the namespace only.
  absl::StatusOr<std::shared_ptr<const Model>> FindModel(storage::TenantId tenant, const v1::Texts& request) const;
  absl::Status DescribeDrain(v1::DrainReply* reply) const;
  // Runs `ask` on the metadata thread and waits for it. RESOURCE_EXHAUSTED if the queue is full.
  absl::Status OnLoop(const std::function<void()>& ask) const;
  // Runs long `work` on the metadata thread in slices of one quantum until it returns true.
  absl::Status InSlices(const std::function<bool(storage::Slice&)>& work) const;
  // Selects objects by tenant and namespace (as in Texts.ns). An empty value selects all. The tenant of a namespace is
  // looked up.
  absl::StatusOr<storage::Selection> Select(const std::string& tenant, const std::string& ns) const;

  // Applies `act` to the object of each text on the metadata thread. The result is false for a text without an object.
  absl::Status WithEach(const v1::Texts& texts, v1::ObjectsReply* reply,
                        const std::function<bool(storage::TenantId, const Key&)>& act) const;

  // Erase on this node only, and on all nodes. Both wait at most the given number of seconds.
  absl::Status EraseHere(const v1::EraseRequest& request, const storage::Selection& selection, double wait,
                         v1::EraseReply* reply) const;
  absl::Status EraseEverywhere(const v1::EraseRequest& request, const storage::Selection& selection, double wait,
                               v1::EraseReply* reply) const;
  // An erasure that several calls of one ashlarctl command continue.
  struct Pending {
    std::string token;
    storage::TenantId tenant = 0;
    std::optional<NamespaceId> ns;
    std::shared_ptr<storage::Erasure> erasure;
  };
  // Returns the erasure of `token`, or starts a new one. A new erasure also covers what was published since an earlier
  // one began. The metadata thread only.
  absl::StatusOr<Pending> ErasureOf(const std::string& token, const storage::Selection& selection) const;

  class Differences;
  void WriteText(storage::TenantId tenant, const storage::Query& query, const storage::Explanation& why,
                 const Model* model, storage::Nanos now, Differences& differences, v1::ExplainedText* out) const;
  void WriteHolders(const ParsedTexts& asked, const std::set<std::string>& unreachable, v1::ExplainReply* reply) const;

  const AdminParts parts_;
  const storage::Nanos started_;
  // Erasures that the disk has not acknowledged, oldest first, and the number of all erasures. The metadata thread
  // only.
  mutable std::deque<Pending> erasures_;
  mutable uint64_t erasures_begun_ = 0;
};

}  // namespace ashlar::daemon
