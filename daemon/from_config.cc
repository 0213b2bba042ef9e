// SPDX-License-Identifier: Apache-2.0
#include "daemon/from_config.h"

#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kLeaseSecond = 1'000'000'000;

uint64_t RandomWord() {
  uint64_t word = 0;
  while (getrandom(&word, sizeof word, 0) != sizeof word) {
    // Only a signal before the pool is seeded can interrupt such a short request.
  }
  return word;
}

storage::AdmissionMode AdmissionFrom(const std::string& name) {
  if (name == "all") return storage::AdmissionMode::kAll;
  return name == "tinylfu" ? storage::AdmissionMode::kTinyLfu : storage::AdmissionMode::kSecondUse;
}

}  // namespace

std::vector<std::string> TenantNames(const v1::Config& config) {
  std::vector<std::string> names;
  for (const v1::Tenant& tenant : config.tenants()) names.push_back(tenant.name());
  return names;
}

storage::CacheOptions OptionsFrom(const v1::Config& config, storage::ReportResidence residence) {
  const v1::Leases& leases = config.leases();
  storage::CacheOptions options;
  options.unused_lease = static_cast<storage::Nanos>(leases.unused_seconds()) * kLeaseSecond;
  options.reservation = static_cast<storage::Nanos>(leases.reservation_seconds()) * kLeaseSecond;
  options.objects.admission = AdmissionFrom(config.ssd().admission());
  options.objects.eviction = config.eviction() == "lru" ? storage::EvictionMode::kLru : storage::EvictionMode::kPrice;
  options.landings_per_session = config.workers().landings_per_session();
  options.random = RandomWord;
  options.objects.residence = std::move(residence);
  return options;
}

uint64_t HbmBytes(const v1::Config& config) {
  uint64_t bytes = 0;
  for (const v1::Hbm& hbm : config.hbm()) bytes += hbm.capacity_bytes();
  return bytes;
}

// Returns each tenant's share of a bound on queued work.
size_t ShareOf(size_t bound, const v1::Config& config) {
  return std::max<size_t>(bound / static_cast<size_t>(config.tenants_size()), 1);
}

std::map<uid_t, TenantUser> TenantsByUid(const v1::Config& config) {
  std::map<uid_t, TenantUser> users;
  for (int i = 0; i < config.tenants_size(); ++i) {
    const v1::Tenant& tenant = config.tenants(i);
    const TenantUser user = {
        .id = static_cast<storage::TenantId>(i),
        .name = tenant.name(),
        .regions = {std::make_shared<Budget>("a tenant", "bytes of regions", tenant.region_bytes()),
                    std::make_shared<Budget>("a tenant", "regions", tenant.max_regions())},
        .models = std::make_shared<Budget>("a tenant", "bytes of models", tenant.model_bytes()),
        .max_sessions = tenant.max_sessions(),
        .unsent = std::make_shared<std::atomic<uint64_t>>(0)};
    for (uint32_t uid : tenant.uids()) users[uid] = user;
  }
  return users;
}

void SetCallRates(const v1::Config& config, storage::Rates* rates) {
  for (int i = 0; i < config.tenants_size(); ++i) {
    rates->SetLimit(static_cast<storage::TenantId>(i), config.tenants(i).calls_per_second());
  }
}

}  // namespace ashlar::daemon
