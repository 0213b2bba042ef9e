// SPDX-License-Identifier: Apache-2.0
// Cluster: this node's part in a cluster as the configuration asks for it: who the others are, what they have, and how
// they are reached.
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
  // `config` as ParseConfig accepted it, with a cluster. `loop` is the metadata thread's; connections are made and
  // ended on `slow`. All must outlive it; none need run yet. Nobody is served or asked before Serve.
  // `gpu`: one that has a tier; null: none has. `disk_io`: the threads of the ssd tier's disk; null: there is none.
  static absl::StatusOr<std::unique_ptr<Cluster>> Make(const v1::Config& config, EventLoop& loop, EventLoop& slow,
                                                       const storage::Clock& clock, const kernels::Gpu* gpu,
                                                       storage::Executor* disk_io);
  ~Cluster();

  // For the cache, which is made with it.
  storage::RemoteSource& source();
  storage::TellResidence residence();
  // Comments for the configuration in effect: what carries the bytes between nodes.
  std::string DescribeTransport() const;
  // Once, when there is a cache, before any of the loops runs. `tiers`: those of memory, by the numbers of their
  // arenas; their arenas must outlive this. `erase_beside` as in AdminParts.
  void Attach(storage::Cache& cache, const std::vector<storage::MemoryTier*>& tiers, Router& router,
              std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_beside);
  // Once, when the loops run. UNAVAILABLE when the configured address cannot be listened on.
  absl::Status Serve();
  RemoteLookup& lookup();
  // The other nodes that are known to hold these objects (Directory::Locate). Any thread.
  std::vector<Located> Locate(const NamespaceId& ns, std::span<const Key> keys) const;
  // Nodes that do not answer at present (Peers::Unreachable). The metadata thread only, as the next one.
  std::set<std::string> Unreachable() const;
  PromptHandOff& hand_off();  // after Attach
  // Models of a namespace are open on this node, or not any more. Counted. Any thread.
  void Follow(const NamespaceId& ns);
  void Unfollow(const NamespaceId& ns);

  // Has all nodes erase a tenant, by its name, or one of its namespaces: those that are present, and those that come
  // back within kErasureLifeSeconds. `done` as in Directory::Erase. Any thread.
  ClusterErasure::Id Erase(const std::string& tenant, const std::optional<NamespaceId>& ns,
                           std::function<void(const absl::Status&)> done);
  struct ErasureState {
    std::vector<std::pair<std::string, bool>> nodes;  // present ones, this one first: has it erased?
    std::optional<storage::Erasure::Progress> here;   // none: it has not begun here, or had been done before a restart
  };
  // None: the directory does not remember it. The metadata thread only, as the next ones.
  std::optional<ErasureState> erasure(const ClusterErasure::Id& id) const;

  // The cache has begun to drain, or has ended that.
  void SetDraining(bool draining);
  ClusterFigures figures() const;
  // Leaves the cluster; the metadata thread must still run. No peer is served or asked afterwards.
  void Leave();

 private:
  struct Impl;
  explicit Cluster(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
