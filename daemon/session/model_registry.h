// SPDX-License-Identifier: Apache-2.0
// ModelRegistry: the models that engines opened last. Operators' questions name them, and misses are compared with
// them.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "daemon/session/pages.h"
#include "proto/limits.h"
#include "storage/tier/tier.h"

namespace ashlar::daemon {

// Thread-safe. Models stay after their sessions, and charged to their tenant; of each a bounded number, with layouts of
// bounded size, the one that was opened longest ago going first.
class ModelRegistry {
 public:
  // Are told of a namespace once for each of its models that is remembered, and once when that is erased. May be
  // empty; called with a lock held, so they must not call the registry.
  struct Events {
    std::function<void(const NamespaceId&)> remembered, erased;
  };
  explicit ModelRegistry(Events events = {}) : events_(std::move(events)) {}

  static constexpr size_t kModels = 64;                                 // of a tenant
  static constexpr size_t kLayoutBytes = limits::kMaxLayoutTableBytes;  // of a tenant's models together

  void Remember(storage::TenantId tenant, std::shared_ptr<const Model> model);
  // All of a tenant's.
  void Erase(storage::TenantId tenant);
  // Null: not remembered.
  std::shared_ptr<const Model> Find(storage::TenantId tenant, const NamespaceId& ns) const;
  // All whose namespace begins with these bytes, the one that was opened last first.
  std::vector<std::shared_ptr<const Model>> List(storage::TenantId tenant, absl::string_view ns_prefix = "") const;

 private:
  struct Opened {
    std::shared_ptr<const Model> model;
    size_t layout_bytes = 0;
  };
  const Events events_;
  mutable std::mutex mutex_;
  std::map<storage::TenantId, std::deque<Opened>> opened_;  // the last one first; guarded by mutex_
};

}  // namespace ashlar::daemon
