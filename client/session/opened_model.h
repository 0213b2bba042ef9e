// SPDX-License-Identifier: Apache-2.0
// OpenedModel: the engine's declaration of a model, and the daemon's handles for it on the current connection.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/connection.h"
#include "client/session/options.h"
#include "client/session/reconnector.h"
#include "client/session/region.h"
#include "client/session/region_memory.h"
#include "kernels/mutex.h"
#include "proto/key.h"
#include "proto/layout.h"

namespace ashlar::internal {

// The daemon's name for an opened model on one connection. Process-bound. Its destructor closes the model there; a
// caller that has used the name in a request keeps the handle until the daemon has answered.
class ModelHandle {
 public:
  ModelHandle(const std::shared_ptr<Connection>& connection, uint64_t id) : connection_(connection), id_(id) {}
  ~ModelHandle();
  ModelHandle(const ModelHandle&) = delete;
  ModelHandle& operator=(const ModelHandle&) = delete;

  uint64_t id() const { return id_; }
  std::shared_ptr<Connection> connection() const { return connection_.lock(); }  // null: gone

 private:
  const std::weak_ptr<Connection> connection_;
  const uint64_t id_;
};

// A model's handles on one connection.
struct ModelBinding {
  std::shared_ptr<Connection> connection;
  std::shared_ptr<const ModelHandle> model;
  uint64_t pages_id = 0;
  std::shared_ptr<RegionMemory> pages;  // memory of the declared pages; null: none, or unknown to the daemon
  uint32_t page_tokens = 0;             // tokens per declared page
  bool pages_missing = false;           // declared, but the daemon has no capacity for their region
};

// Thread-safe. Process-bound.
class OpenedModel : public Restorable {
 public:
  struct Declaration {
    Identity identity;
    Layout layout;
    Shard shard;
    CostModel cost;
    PrefixUse prefixes;
  };
  // Opens it for the first time: the namespace that the daemon answers is the model's for good.
  static absl::StatusOr<std::shared_ptr<OpenedModel>> Open(Declaration declaration,
                                                           const std::shared_ptr<Connection>& connection,
                                                           Deadline deadline);

  const Layout& layout() const { return layout_; }  // layout of this process's shard
  const NamespaceId& ns() const { return ns_; }
  uint32_t shards() const { return declaration_.shard.tensor_parallel_size; }  // number of shards of the model
  const PrefixUse& prefixes() const { return declaration_.prefixes; }
  bool uses_prefixes() const { return declaration_.prefixes.capture_tokens > 0; }

  // UNAVAILABLE while the model is not open on a living connection.
  absl::StatusOr<ModelBinding> binding() const;
  absl::Status DeclarePages(std::shared_ptr<RegionMemory> region, const PagedCache& pages, Deadline deadline);
  absl::Status Restore(const std::shared_ptr<Connection>& connection, Deadline deadline) override;

  // Counts a request as running on the pages that the daemon allocates, as long as the result lives. Null while a
  // request that was admitted on another connection runs: the current daemon does not know of its pages, and may
  // allocate them again.
  std::shared_ptr<const void> CountRequest(uint64_t generation);

 private:
  template <typename T, typename... Args>
  friend std::shared_ptr<T> MakeProcessBound(Args&&... args);
  struct Pages {
    std::shared_ptr<RegionMemory> region;
    PagedCache cache;
  };
  OpenedModel(Declaration declaration, Layout layout)
      : declaration_(std::move(declaration)), layout_(std::move(layout)) {}

  // The daemon's latest answer. It does not keep its connection alive.
  struct Handles {
    std::shared_ptr<const ModelHandle> model;
    uint64_t pages_id = 0;
    bool pages_declared = false;
  };

  absl::StatusOr<std::shared_ptr<const ModelHandle>> OpenOn(const std::shared_ptr<Connection>& connection,
                                                            NamespaceId& ns, Deadline deadline) const;
  absl::StatusOr<uint64_t> DeclareOn(Connection& connection, const ModelHandle& model, const Pages& pages,
                                     Deadline deadline) const;

  const Declaration declaration_;
  const Layout layout_;
  NamespaceId ns_;   // constant once open
  Mutex declaring_;  // held while pages are declared, because the daemon keeps the latest declaration
  mutable Mutex mutex_ ABSL_ACQUIRED_AFTER(declaring_);
  Handles handles_ ABSL_GUARDED_BY(mutex_);
  std::optional<Pages> pages_ ABSL_GUARDED_BY(mutex_);
  // Requests that run, of the connection that admitted the newest; each keeps it.
  struct Requests {
    uint64_t generation;
  };
  std::weak_ptr<const Requests> requests_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::internal
