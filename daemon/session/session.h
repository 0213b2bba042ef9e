// SPDX-License-Identifier: Apache-2.0
// Session: one engine process's connection, with the memory and models that it has brought.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/session/budget.h"
#include "daemon/session/landing_ledger.h"
#include "daemon/session/pages.h"
#include "daemon/session/region.h"
#include "storage/cache.h"

namespace ashlar::daemon {

class Session {
 public:
  struct Description {
    storage::SessionId id = 0;
    std::string secret;  // 16 random bytes; only its engine knows them
    storage::TenantId tenant = 0;
    std::string tenant_name;
    pid_t pid = 0;
    uid_t uid = 0;
    std::string client;              // as it calls itself
    std::string release;             // of its library; empty: it did not say
    RegionBudgets regions;           // the budgets of its regions
    std::shared_ptr<Budget> models;  // and its models
  };

  static constexpr size_t kMaxModels = 64;

  explicit Session(Description description) : about_(std::move(description)) {}

  const Description& about() const { return about_; }

  // Thread-safe. Handles are never used twice. RESOURCE_EXHAUSTED beyond the bound above; Find… is null for a handle
  // that is unknown or gone.
  absl::StatusOr<uint64_t> AddRegion(std::shared_ptr<Region> region);
  absl::StatusOr<uint64_t> AddModel(std::shared_ptr<const Model> model);
  // Declares a model's pages in place of its earlier declaration. INVALID_ARGUMENT for a model that is unknown or gone.
  absl::StatusOr<uint64_t> AddPages(uint64_t model, std::shared_ptr<const Pages> pages);
  std::shared_ptr<const Region> FindRegion(uint64_t handle) const;
  std::shared_ptr<const Model> FindModel(uint64_t handle) const;
  std::shared_ptr<const Pages> FindPages(uint64_t handle) const;

  // Takes a model away, with its pages. An unknown handle is none.
  void RemoveModel(uint64_t handle);
  // Takes a region away, with the pages declared in it. Transfers in flight may keep it mapped a while.
  std::shared_ptr<Region> RemoveRegion(uint64_t handle);

  struct Memory {
    uint64_t regions = 0;
    uint64_t bytes = 0;
  };
  Memory memory() const;

  // The GPU that regions of the session lie on; `all` of them must.
  struct Far {
    const kernels::Gpu* gpu = nullptr;  // null: none does
    bool all = false;
  };
  Far far() const;
  void SetGpu(const kernels::Gpu* gpu, bool all);
  size_t models() const;  // opened
  // Releases everything, and refuses more.
  void Clear();

  // The metadata thread only.
  struct MetadataState {
    bool open = false;     // the cache knows the session
    bool closing = false;  // it frees what the session held
    LandingLedger landings;
    std::vector<std::function<void()>> when_drained;
    bool ends_requests = false;  // requests of its engine hold pages, or have held some
    bool ends_routes = false;    // it has planned prefill, or offered some
  };
  MetadataState& metadata() { return metadata_; }

 private:
  const Description about_;

  mutable std::mutex mutex_;
  bool cleared_ = false;  // guarded by mutex_, as all to the next blank line
  Far far_;
  uint64_t next_handle_ = 1;
  std::map<uint64_t, std::shared_ptr<Region>> regions_;
  struct OpenModel {
    std::shared_ptr<const Model> model;
    uint64_t pages = 0;  // handle; 0 or gone: none
  };
  std::map<uint64_t, OpenModel> models_;
  std::map<uint64_t, std::shared_ptr<const Pages>> pages_;

  MetadataState metadata_;
};

}  // namespace ashlar::daemon
