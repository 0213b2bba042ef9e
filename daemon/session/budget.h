// SPDX-License-Identifier: Apache-2.0
// Budget: a limit on one resource (bytes of regions, regions, bytes of models) of a session or of all sessions of a
// tenant.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// Thread-safe.
class Budget {
 public:
  // Error messages say that `owner` ("a session") has at most `limit` of `what` ("bytes of regions"). An amount taken
  // here is also taken from `within`, unless that is null.
  Budget(std::string owner, std::string what, uint64_t limit, std::shared_ptr<Budget> within = nullptr)
      : owner_(std::move(owner)), what_(std::move(what)), within_(std::move(within)), limit_(limit) {}

  // A taken amount; destroying it returns the amount.
  using Charge = std::shared_ptr<const void>;
  // RESOURCE_EXHAUSTED, without a change, beyond the limit of this budget or of an enclosing one.
  static absl::StatusOr<Charge> Take(const std::shared_ptr<Budget>& budget, uint64_t amount);
  // Takes from this budget only, for an amount that is already charged to `within`.
  static absl::StatusOr<Charge> TakeHere(const std::shared_ptr<Budget>& budget, uint64_t amount);

  uint64_t limit() const {
    MutexLock lock(mutex_);
    return limit_;
  }
  // Amounts that are already taken stay, even above the new limit.
  void set_limit(uint64_t limit) {
    MutexLock lock(mutex_);
    limit_ = limit;
  }
  uint64_t taken() const {
    MutexLock lock(mutex_);
    return taken_;
  }

 private:
  const std::string owner_, what_;
  const std::shared_ptr<Budget> within_;
  mutable Mutex mutex_;
  uint64_t limit_ ABSL_GUARDED_BY(mutex_);
  uint64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;  // exceeds the limit only after the limit was lowered
};

}  // namespace ashlar::daemon
