// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/rates.h"

#include <algorithm>

namespace ashlar::storage {
namespace {

constexpr Nanos kSecond = 1'000'000'000;
constexpr double kLongestDebt = 3600.0 * kSecond;  // longest debt: one amount at a far too low rate

// Returns the time in which the bucket refills `amount`.
Nanos TimeFor(uint64_t amount, uint64_t per_second) {
  const double rough = static_cast<double>(amount) * kSecond / static_cast<double>(per_second);
  if (rough > kLongestDebt) return static_cast<Nanos>(kLongestDebt);
  using Wide = unsigned __int128;
  return static_cast<Nanos>(Wide{amount} * kSecond / per_second);
}

}  // namespace

bool Rates::Bucket::Empty(Nanos now) const {
  return per_second != kUnlimited && full_at > now && full_at - now + TimeFor(1, per_second) > kSecond;
}

const Rates::Bucket* Rates::Find(TenantId tenant) const {
  const auto found = buckets_.find(tenant);
  return found == buckets_.end() ? nullptr : &found->second;
}

void Rates::SetLimit(TenantId tenant, uint64_t per_second) {
  MutexLock lock(mutex_);
  buckets_[tenant].per_second = per_second;
}

uint64_t Rates::limit(TenantId tenant) const {
  MutexLock lock(mutex_);
  const Bucket* const bucket = Find(tenant);
  return bucket == nullptr ? kUnlimited : bucket->per_second;
}

bool Rates::Take(TenantId tenant, uint64_t amount) {
  MutexLock lock(mutex_);
  const auto found = buckets_.find(tenant);
  if (found == buckets_.end()) return true;
  Bucket& bucket = found->second;
  if (bucket.per_second == kUnlimited) return true;
  const Nanos now = clock_.Now();
  if (bucket.Empty(now)) {
    ++bucket.refused;
    return false;
  }
  bucket.full_at = std::max(bucket.full_at, now) + TimeFor(amount, bucket.per_second);
  return true;
}

bool Rates::Spent(TenantId tenant) const {
  MutexLock lock(mutex_);
  const Bucket* const bucket = Find(tenant);
  return bucket != nullptr && bucket->Empty(clock_.Now());
}

uint64_t Rates::refused(TenantId tenant) const {
  MutexLock lock(mutex_);
  const Bucket* const bucket = Find(tenant);
  return bucket == nullptr ? 0 : bucket->refused;
}

}  // namespace ashlar::storage
