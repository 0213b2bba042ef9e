// SPDX-License-Identifier: Apache-2.0
// ModelRegistry: the models that engines opened most recently. Operators' requests name them, and misses are compared
// with them.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "daemon/session/pages.h"
#include "kernels/mutex.h"
#include "proto/limits.h"
#include "storage/tier/tier.h"

namespace ashlar::daemon {

// Thread-safe. Models stay after their sessions have ended, charged to their tenant. Number and layout size per tenant
// are bounded; the least recently opened model is dropped first.
class ModelRegistry {
 public:
  // Called once for each model that is added, and once when it is dropped. May be empty. Called with a lock held, so
  // they must not call the registry.
  struct Events {
    std::function<void(const NamespaceId&)> remembered, erased;
  };
  explicit ModelRegistry(Events events = {}) : events_(std::move(events)) {}

  static constexpr size_t kModels = 64;                                 // per tenant
  static constexpr size_t kLayoutBytes = limits::kMaxLayoutTableBytes;  // limit for all models of a tenant

  void Remember(storage::TenantId tenant, std::shared_ptr<const Model> model);
  // Drops all models of a tenant.
  void Erase(storage::TenantId tenant);
  // Null if unknown.
  std::shared_ptr<const Model> Find(storage::TenantId tenant, const NamespaceId& ns) const;
  // Returns all models whose namespace begins with these bytes, most recently opened first.
  std::vector<std::shared_ptr<const Model>> List(storage::TenantId tenant, absl::string_view ns_prefix = "") const;

 private:
  struct Opened {
    std::shared_ptr<const Model> model;
    size_t layout_bytes = 0;
  };
  const Events events_;
  mutable Mutex mutex_;
  std::map<storage::TenantId, std::deque<Opened>> opened_ ABSL_GUARDED_BY(mutex_);  // most recent first
};

}  // namespace ashlar::daemon
