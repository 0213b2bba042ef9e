// SPDX-License-Identifier: Apache-2.0
// Rates: limits on an amount per second and tenant, such as bytes moved or calls made.
#pragma once

#include <cstdint>
#include <map>

#include "kernels/mutex.h"
#include "storage/executor.h"
#include "storage/ids.h"

namespace ashlar::storage {

// A token bucket per tenant, which refills at the tenant's rate and holds one second's worth. A request is granted in
// full if the bucket has at least one token, because an object may have more bytes than the bucket holds; the tenant
// then waits until the bucket has recovered. Thread-safe.
class Rates {
 public:
  explicit Rates(const Clock& clock) : clock_(clock) {}

  static constexpr uint64_t kUnlimited = 0;
  // Unlimited by default. Tokens already taken stay taken, at the old rate.
  void SetLimit(TenantId tenant, uint64_t per_second);
  uint64_t limit(TenantId tenant) const;

  // Returns false, counting the refusal, if the bucket is empty.
  bool Take(TenantId tenant, uint64_t amount);
  // Returns whether Take would refuse, without counting.
  bool Spent(TenantId tenant) const;

  uint64_t refused(TenantId tenant) const;  // since the start

 private:
  struct Bucket {
    uint64_t per_second = kUnlimited;
    Nanos full_at = INT64_MIN;  // when the bucket will be full
    uint64_t refused = 0;

    bool Empty(Nanos now) const;
  };
  const Bucket* Find(TenantId tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // returns null if unlimited

  const Clock& clock_;
  mutable Mutex mutex_;
  std::map<TenantId, Bucket> buckets_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::storage
