// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/model_registry.h"

#include <algorithm>
#include <utility>

namespace ashlar::daemon {
namespace {

bool BeginsWith(const NamespaceId& ns, absl::string_view prefix) {
  const absl::string_view bytes(reinterpret_cast<const char*>(ns.bytes.data()), ns.bytes.size());
  return bytes.substr(0, prefix.size()) == prefix;
}

}  // namespace

void ModelRegistry::Remember(storage::TenantId tenant, std::shared_ptr<const Model> model) {
  const size_t layout_bytes = MemoryOf(model->layout);
  std::deque<Opened> gone;  // destroyed after the lock
  MutexLock lock(mutex_);
  std::deque<Opened>& opened = opened_[tenant];
  const auto again = std::ranges::find_if(opened, [&](const Opened& other) { return other.model->ns == model->ns; });
  if (again != opened.end()) {
    gone.push_back(std::move(*again));
    opened.erase(again);
  } else if (events_.remembered) {
    events_.remembered(model->ns);
  }
  opened.push_front({std::move(model), layout_bytes});
  size_t all_bytes = 0;
  for (const Opened& other : opened) all_bytes += other.layout_bytes;
  while (opened.size() > kModels || all_bytes > kLayoutBytes) {
    all_bytes -= opened.back().layout_bytes;
    if (events_.erased) events_.erased(opened.back().model->ns);
    gone.push_back(std::move(opened.back()));
    opened.pop_back();
  }
}

void ModelRegistry::Erase(storage::TenantId tenant) {
  std::deque<Opened> gone;  // destroyed after the lock
  MutexLock lock(mutex_);
  const auto opened = opened_.find(tenant);
  if (opened != opened_.end()) gone.swap(opened->second);
  for (const Opened& one : gone) {
    if (events_.erased) events_.erased(one.model->ns);
  }
}

std::shared_ptr<const Model> ModelRegistry::Find(storage::TenantId tenant, const NamespaceId& ns) const {
  MutexLock lock(mutex_);
  const auto opened = opened_.find(tenant);
  if (opened == opened_.end()) return nullptr;
  for (const Opened& candidate : opened->second) {
    if (candidate.model->ns == ns) return candidate.model;
  }
  return nullptr;
}

std::vector<std::shared_ptr<const Model>> ModelRegistry::List(storage::TenantId tenant,
                                                              absl::string_view ns_prefix) const {
  std::vector<std::shared_ptr<const Model>> models;
  MutexLock lock(mutex_);
  const auto opened = opened_.find(tenant);
  if (opened == opened_.end()) return models;
  for (const Opened& candidate : opened->second) {
    if (BeginsWith(candidate.model->ns, ns_prefix)) models.push_back(candidate.model);
  }
  return models;
}

}  // namespace ashlar::daemon
