// SPDX-License-Identifier: Apache-2.0
// Session: the connection of one engine process, with its memory and models.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/session/budget.h"
#include "daemon/session/landing_ledger.h"
#include "daemon/session/pages.h"
#include "daemon/session/region.h"
#include "kernels/mutex.h"
#include "storage/cache.h"

namespace ashlar::daemon {

class Session {
 public:
  struct Description {
    storage::SessionId id = 0;
    std::string secret;  // 16 random bytes, known only to its engine
    storage::TenantId tenant = 0;
    std::string tenant_name;
    pid_t pid = 0;
    uid_t uid = 0;
    std::string client;              // name given by the client
    std::string release;             // version of its library; empty if unknown
    RegionBudgets regions;           // budgets of its regions
    std::shared_ptr<Budget> models;  // budget of its models
  };

  static constexpr size_t kMaxModels = 64;

  explicit Session(Description description) : about_(std::move(description)) {}

  const Description& about() const { return about_; }

  // Thread-safe. Handles are never reused. RESOURCE_EXHAUSTED beyond the limit above. Find… returns null for an unknown
  // or removed handle.
  absl::StatusOr<uint64_t> AddRegion(std::shared_ptr<Region> region);
  absl::StatusOr<uint64_t> AddModel(std::shared_ptr<const Model> model);
  // Replaces the earlier declaration of a model's pages. INVALID_ARGUMENT for an unknown or removed model.
  absl::StatusOr<uint64_t> AddPages(uint64_t model, std::shared_ptr<const Pages> pages);
  std::shared_ptr<const Region> FindRegion(uint64_t handle) const;
  std::shared_ptr<const Model> FindModel(uint64_t handle) const;
  std::shared_ptr<const Pages> FindPages(uint64_t handle) const;

  // Removes a model with its pages. Unknown handles are ignored.
  void RemoveModel(uint64_t handle);
  // Removes a region with the pages declared in it. Transfers in flight may keep it mapped for a while.
  std::shared_ptr<Region> RemoveRegion(uint64_t handle);

  struct Memory {
    uint64_t regions = 0;
    uint64_t bytes = 0;
  };
  Memory memory() const;

  // The GPU that the session's regions are on. `all` of them must be on it.
  struct Far {
    const kernels::Gpu* gpu = nullptr;  // null if no region is on a GPU
    bool all = false;
  };
  Far far() const;
  void SetGpu(const kernels::Gpu* gpu, bool all);
  size_t models() const;  // opened models
  bool HasOpened(const NamespaceId& ns) const;
  // Releases everything, and refuses further additions.
  void Clear();

  // The metadata thread only.
  struct MetadataState {
    bool open = false;     // the cache knows the session
    bool closing = false;  // it is freeing what the session held
    LandingLedger landings;
    std::vector<std::function<void()>> when_drained;
    bool ends_requests = false;  // requests of its engine hold pages, or have held pages
    bool ends_routes = false;    // it has planned or offered prefill
  };
  MetadataState& metadata() { return metadata_; }

 private:
  const Description about_;

  mutable Mutex mutex_;
  bool cleared_ ABSL_GUARDED_BY(mutex_) = false;
  Far far_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_handle_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, std::shared_ptr<Region>> regions_ ABSL_GUARDED_BY(mutex_);
  struct OpenModel {
    std::shared_ptr<const Model> model;
    uint64_t pages = 0;  // handle; 0 or removed: none
  };
  std::map<uint64_t, OpenModel> models_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::shared_ptr<const Pages>> pages_ ABSL_GUARDED_BY(mutex_);

  MetadataState metadata_;
};

}  // namespace ashlar::daemon
