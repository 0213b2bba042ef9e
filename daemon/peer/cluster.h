// SPDX-License-Identifier: Apache-2.0
// Cluster: this node's membership in a cluster: the other members, the objects they hold, and the connections to them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/observe/cluster_metrics.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/peers.h"
#include "daemon/runtime/event_loop.h"
#include "kernels/gpu.h"
#include "storage/cache.h"
#include "storage/tier/memory_tier.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

class Cluster {
 public:
  // `config` must come from ParseConfig and have a cluster. `loop` belongs to the metadata thread; connections are made
  // and closed on `slow`. All must outlive the object; none needs to run yet. No peer is served or called before Serve.
  // `gpu` is a GPU with a tier; may be null. `disk_io` are the I/O threads of the ssd tier; null without one.
  static absl::StatusOr<std::unique_ptr<Cluster>> Make(const v1::Config& config, EventLoop& loop, EventLoop& slow,
                                                       const storage::Clock& clock, const kernels::Gpu* gpu,
                                                       storage::Executor* disk_io);
  ~Cluster();

  // The remote source for the cache's options.
  storage::RemoteSource& source();
  storage::ReportResidence residence();
  // Returns YAML comments for the effective configuration: the transport between nodes.
  std::string DescribeTransport() const;
  // Call once after creating the cache, before any loop runs. `tiers` are the memory tiers, indexed by the numbers of
  // their arenas; the arenas must outlive the object. `erase_texts_and_pages` as in AdminParts.
  void Attach(storage::Cache& cache, const std::vector<storage::MemoryTier*>& tiers, Router& router,
              std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_texts_and_pages);
  // Call once when the loops run. UNAVAILABLE if the configured address cannot be listened on.
  absl::Status Serve();
  RemoteLookup& lookup();
  // Returns the other nodes that hold these objects (Directory::Locate). Any thread.
  std::vector<Located> Locate(const NamespaceId& ns, std::span<const Key> keys) const;
  // Returns the nodes that do not answer (Peers::Unreachable). The metadata thread only, like handoff.
  std::set<std::string> Unreachable() const;
  PromptHandoff& handoff();  // call after Attach
  // Models of a namespace are open on this node, or no longer. Calls are counted. Any thread.
  void Follow(const NamespaceId& ns);
  void Unfollow(const NamespaceId& ns);

  // Makes all nodes erase a tenant, or one of its namespaces: present nodes, and nodes that return within
  // kErasureLifeSeconds. `done` as in Directory::Erase. Any thread.
  ClusterErasure::Id Erase(const std::string& tenant, const std::optional<NamespaceId>& ns,
                           std::function<void(const absl::Status&)> done);
  struct ErasureState {
    std::vector<std::pair<std::string, bool>> nodes;  // present nodes, this one first, and whether each has erased
    std::optional<storage::Erasure::Progress> here;   // empty if it has not started here, or was done before a restart
  };
  // Returns nothing for an erasure that the directory does not have. The metadata thread only, like the methods below.
  std::optional<ErasureState> erasure(const ClusterErasure::Id& id) const;

  // The cache has begun to drain, or has ended draining.
  void SetDraining(bool draining);
  ClusterFigures figures() const;
  // Leaves the cluster. The metadata thread must still run. Afterwards no peer is served or called.
  void Leave();

 private:
  struct Impl;
  explicit Cluster(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
