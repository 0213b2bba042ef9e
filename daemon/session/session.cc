// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

absl::Status Ended() {
  return absl::UnauthenticatedError("session: ended; connect again");
}

template <typename Map>
typename Map::mapped_type FindIn(const Map& map, uint64_t handle) {
  const auto found = map.find(handle);
  return found == map.end() ? nullptr : found->second;
}

}  // namespace

absl::StatusOr<uint64_t> Session::AddRegion(std::shared_ptr<Region> region) {
  MutexLock lock(mutex_);
  if (cleared_) return Ended();
  regions_.emplace(next_handle_, std::move(region));
  return next_handle_++;
}

Session::Far Session::far() const {
  MutexLock lock(mutex_);
  return far_;
}

void Session::SetGpu(const kernels::Gpu* gpu, bool all) {
  MutexLock lock(mutex_);
  far_ = {gpu, all};
}

absl::StatusOr<uint64_t> Session::AddModel(std::shared_ptr<const Model> model) {
  MutexLock lock(mutex_);
  if (cleared_) return Ended();
  if (models_.size() >= kMaxModels) {
    return absl::ResourceExhaustedError(
        absl::StrCat("model: a session may have at most ", kMaxModels, " open models; close one"));
  }
  models_.emplace(next_handle_, OpenModel{std::move(model)});
  return next_handle_++;
}

absl::StatusOr<uint64_t> Session::AddPages(uint64_t model, std::shared_ptr<const Pages> pages) {
  decltype(pages_)::node_type before;  // destroyed after the lock, with the mapping that it keeps
  MutexLock lock(mutex_);
  if (cleared_) return Ended();
  const auto opened = models_.find(model);
  if (opened == models_.end()) return absl::InvalidArgumentError(absl::StrCat("model: unknown handle ", model));
  before = pages_.extract(opened->second.pages);
  opened->second.pages = next_handle_;
  pages_.emplace(next_handle_, std::move(pages));
  return next_handle_++;
}

void Session::RemoveModel(uint64_t handle) {
  decltype(models_)::node_type model;  // destroyed after the lock
  decltype(pages_)::node_type pages;
  MutexLock lock(mutex_);
  model = models_.extract(handle);
  if (model) pages = pages_.extract(model.mapped().pages);
}

std::shared_ptr<const Region> Session::FindRegion(uint64_t handle) const {
  MutexLock lock(mutex_);
  return FindIn(regions_, handle);
}

std::shared_ptr<const Model> Session::FindModel(uint64_t handle) const {
  MutexLock lock(mutex_);
  const auto found = models_.find(handle);
  return found == models_.end() ? nullptr : found->second.model;
}

std::shared_ptr<const Pages> Session::FindPages(uint64_t handle) const {
  MutexLock lock(mutex_);
  return FindIn(pages_, handle);
}

std::shared_ptr<Region> Session::RemoveRegion(uint64_t handle) {
  MutexLock lock(mutex_);
  const auto found = regions_.find(handle);
  if (found == regions_.end()) return nullptr;
  std::shared_ptr<Region> region = std::move(found->second);
  regions_.erase(found);
  // `region` is held here, so that no region is unmapped and no callback runs under the lock.
  std::erase_if(pages_, [&](const auto& entry) { return entry.second->region() == region; });
  return region;
}

Session::Memory Session::memory() const {
  MutexLock lock(mutex_);
  Memory memory{.regions = regions_.size()};
  for (const auto& [handle, region] : regions_) memory.bytes += region->size();
  return memory;
}

bool Session::HasOpened(const NamespaceId& ns) const {
  MutexLock lock(mutex_);
  return std::ranges::any_of(models_, [&](const auto& opened) { return opened.second.model->ns == ns; });
}

size_t Session::models() const {
  MutexLock lock(mutex_);
  return models_.size();
}

void Session::Clear() {
  decltype(regions_) regions;
  decltype(pages_) pages;
  decltype(models_) models;
  MutexLock lock(mutex_);
  cleared_ = true;
  regions.swap(regions_);
  pages.swap(pages_);
  models.swap(models_);
}  // the maps are destroyed after the lock is released

}  // namespace ashlar::daemon
