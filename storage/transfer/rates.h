// Rates: the calls that tenants may make in a second, and the bytes that they may have moved.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "absl/strings/string_view.h"
#include "storage/executor.h"
#include "storage/ids.h"

namespace ashlar::storage {

enum class RateKind : uint8_t { kCalls = 0, kBytes = 1 };
inline constexpr RateKind kRates[] = {RateKind::kCalls, RateKind::kBytes};
// As the configuration calls it.
constexpr absl::string_view Name(RateKind kind) {
  return kind == RateKind::kCalls ? "calls_per_second" : "bytes_per_second";
}

// A bucket for each tenant and kind. It fills at the tenant's rate, and holds what comes in one second. Whoever finds
// one call or byte in it takes all that he asks for: one object may be larger than the bucket, and the tenant then
// waits until the bucket has made up for it. Thread-safe.
class Rates {
 public:
  explicit Rates(const Clock& clock) : clock_(clock) {}

  static constexpr uint64_t kUnlimited = 0;
  // Without a call a tenant is unlimited. What was taken before stays taken, at the rate of then.
  void SetLimit(TenantId tenant, RateKind kind, uint64_t per_second);
  uint64_t limit(TenantId tenant, RateKind kind) const;

  // False: the bucket holds not even one. Nothing was taken, and the refusal was counted.
  bool Take(TenantId tenant, RateKind kind, uint64_t amount);
  // Whether Take would refuse. It counts nothing.
  bool Spent(TenantId tenant, RateKind kind) const;

  uint64_t refused(TenantId tenant, RateKind kind) const;  // ever

 private:
  struct Bucket {
    uint64_t per_second = kUnlimited;
    Nanos full_at = INT64_MIN;  // when it will be full again
    uint64_t refused = 0;

    bool Empty(Nanos now) const;
  };
  using Buckets = std::array<Bucket, std::size(kRates)>;
  const Bucket* Find(TenantId tenant, RateKind kind) const;  // with mutex_; null: unlimited

  const Clock& clock_;
  mutable std::mutex mutex_;
  std::map<TenantId, Buckets> buckets_;  // guarded by mutex_
};

}  // namespace ashlar::storage
