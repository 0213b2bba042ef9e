// SPDX-License-Identifier: Apache-2.0
// Rates: how much of one thing tenants may have in a second: bytes moved, calls made.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "storage/executor.h"
#include "storage/ids.h"

namespace ashlar::storage {

// A bucket for each tenant. It fills at the tenant's rate, and holds what comes in one second. Whoever finds one in it
// takes all that he asks for: one object may have more bytes than the bucket holds, and the tenant then waits until the
// bucket has made up for it. Thread-safe.
class Rates {
 public:
  explicit Rates(const Clock& clock) : clock_(clock) {}

  static constexpr uint64_t kUnlimited = 0;
  // Without a call a tenant is unlimited. What was taken before stays taken, at the rate of then.
  void SetLimit(TenantId tenant, uint64_t per_second);
  uint64_t limit(TenantId tenant) const;

  // False: the bucket holds not even one. Nothing was taken, and the refusal was counted.
  bool Take(TenantId tenant, uint64_t amount);
  // Whether Take would refuse. It counts nothing.
  bool Spent(TenantId tenant) const;

  uint64_t refused(TenantId tenant) const;  // ever

 private:
  struct Bucket {
    uint64_t per_second = kUnlimited;
    Nanos full_at = INT64_MIN;  // when it will be full again
    uint64_t refused = 0;

    bool Empty(Nanos now) const;
  };
  const Bucket* Find(TenantId tenant) const;  // with mutex_; null: unlimited

  const Clock& clock_;
  mutable std::mutex mutex_;
  std::map<TenantId, Bucket> buckets_;  // guarded by mutex_
};

}  // namespace ashlar::storage
