// SPDX-License-Identifier: Apache-2.0
#include "storage/sharing/page_pools.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::storage {

absl::StatusOr<std::shared_ptr<PagePool>> PagePools::Open(TenantId tenant, uint64_t region, uint32_t pages,
                                                          std::shared_ptr<const void> charge) {
  std::erase_if(places_, [](const auto& entry) { return entry.second.pool.expired(); });
  if (const auto earlier = places_.find(region); earlier != places_.end()) {
    const std::shared_ptr<PagePool> pool = earlier->second.pool.lock();
    if (pool != nullptr && pool->InUse()) {
      return absl::ResourceExhaustedError(
          "region: requests still hold pages of an earlier declaration; release them first");
    }
    if (pool != nullptr) pool->Close();
  }
  auto pool = std::make_shared<PagePool>(pages, std::move(charge));
  places_[region] = {tenant, pool};
  return pool;
}

bool PagePools::HasCapacity(SessionId session) const {
  const auto found = sessions_.find(session);
  return found == sessions_.end() || found->second.size() < leases_per_session_;
}

absl::Status PagePools::TooManyRequests() const {
  return absl::ResourceExhaustedError(absl::StrCat("session: ", leases_per_session_,
                                                   " requests hold pages, the limit of a session; release one first"));
}

uint64_t PagePools::References(TenantId tenant) const {
  uint64_t sum = 0;
  for (const auto& [region, place] : places_) {
    const std::shared_ptr<PagePool> pool = place.tenant == tenant ? place.pool.lock() : nullptr;
    if (pool != nullptr) sum += pool->references();
  }
  return sum;
}

absl::StatusOr<PagePool::Answer> PagePools::Admit(SessionId session, TenantId tenant, const LeaseId& lease,
                                                  const std::shared_ptr<PagePool>& pool,
                                                  std::span<const PagePool::Want> segments, uint64_t own_pages,
                                                  uint64_t own_now, bool fills) {
  if (pool->closed())
    return absl::FailedPreconditionError("pages_id: superseded by a later declaration of the region's pages");
  if (leases_.contains(lease)) return absl::AlreadyExistsError("lease: already held");
  if (!HasCapacity(session)) return TooManyRequests();
  if (References(tenant) + segments.size() + 1 > limits::kMaxPageReferences) {
    return absl::ResourceExhaustedError(absl::StrCat("tenant: requests hold ", References(tenant),
                                                     " shared segments; at most ", limits::kMaxPageReferences,
                                                     " may be held; release requests first"));
  }
  const PagePool::Answer answer = pool->Admit(segments, own_pages, own_now, fills);
  if (answer.admission == 0) return answer;
  leases_[lease] = {tenant, {pool, answer.admission}, {session}};
  sessions_[session].insert(lease);
  return answer;
}

const PagePools::Request* PagePools::Find(SessionId session, const LeaseId& lease) const {
  const auto found = leases_.find(lease);
  return found != leases_.end() && found->second.holders.contains(session) ? &found->second.request : nullptr;
}

absl::StatusOr<const PagePools::Request*> PagePools::Attach(SessionId session, TenantId tenant, const LeaseId& lease) {
  const auto found = leases_.find(lease);
  if (found == leases_.end() || found->second.tenant != tenant) return absl::NotFoundError("lease: unknown or expired");
  if (!found->second.holders.contains(session)) {
    if (!HasCapacity(session)) return TooManyRequests();
    found->second.holders.insert(session);
    sessions_[session].insert(lease);
  }
  return &found->second.request;
}

void PagePools::Release(SessionId session, const LeaseId& lease) {
  const auto found = leases_.find(lease);
  if (found == leases_.end() || found->second.holders.erase(session) == 0) return;
  const auto holding = sessions_.find(session);
  holding->second.erase(lease);
  if (holding->second.empty()) sessions_.erase(holding);
  if (!found->second.holders.empty()) return;
  found->second.request.pool->End(found->second.request.admission);
  leases_.erase(found);
}

void PagePools::ReleaseAll(SessionId session) {
  const auto holding = sessions_.find(session);
  if (holding == sessions_.end()) return;
  // In the order of admission, because lease names are random.
  std::map<PagePool::AdmissionId, std::vector<LeaseId>> in_order;
  for (const LeaseId& lease : holding->second) in_order[leases_.at(lease).request.admission].push_back(lease);
  for (const auto& [admission, leases] : in_order) {
    for (const LeaseId& lease : leases) Release(session, lease);
  }
}

void PagePools::Erase(TenantId tenant) {
  for (const auto& [region, place] : places_) {
    if (place.tenant != tenant) continue;
    if (const std::shared_ptr<PagePool> pool = place.pool.lock()) pool->Erase();
  }
}

PagePool::Levels PagePools::levels(TenantId tenant) const {
  PagePool::Levels sum;
  for (const auto& [region, place] : places_) {
    const std::shared_ptr<PagePool> pool = place.tenant == tenant ? place.pool.lock() : nullptr;
    if (pool == nullptr) continue;
    const PagePool::Levels levels = pool->levels();
    sum.pages += levels.pages;
    sum.free += levels.free;
    sum.idle += levels.idle;
    sum.shared += levels.shared;
    sum.own += levels.own;
    sum.admissions += levels.admissions;
    sum.segments += levels.segments;
    sum.reclaimed_segments += levels.reclaimed_segments;
  }
  return sum;
}

}  // namespace ashlar::storage
