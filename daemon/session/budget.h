// SPDX-License-Identifier: Apache-2.0
// Budget: a bound on one resource (bytes of regions, regions, bytes of models), for one session or for all sessions of
// a tenant.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"

namespace ashlar::daemon {

// Thread-safe.
class Budget {
 public:
  // Refusals say that `owner` ("a session") has at most `limit` of `what` ("bytes of regions"). An amount taken here is
  // also taken from `within`, unless that is null.
  Budget(std::string owner, std::string what, uint64_t limit, std::shared_ptr<Budget> within = nullptr)
      : owner_(std::move(owner)), what_(std::move(what)), within_(std::move(within)), limit_(limit) {}

  // A taken amount; destroying it gives the amount back.
  using Charge = std::shared_ptr<const void>;
  // RESOURCE_EXHAUSTED, and nothing is taken, beyond the limit of this budget or of one around it.
  static absl::StatusOr<Charge> Take(const std::shared_ptr<Budget>& budget, uint64_t amount);
  // The same from this budget alone, for an amount that is charged to `within` already.
  static absl::StatusOr<Charge> TakeHere(const std::shared_ptr<Budget>& budget, uint64_t amount);

  uint64_t limit() const {
    std::lock_guard lock(mutex_);
    return limit_;
  }
  // What is taken already stays, also above the new limit.
  void set_limit(uint64_t limit) {
    std::lock_guard lock(mutex_);
    limit_ = limit;
  }
  uint64_t taken() const {
    std::lock_guard lock(mutex_);
    return taken_;
  }

 private:
  const std::string owner_, what_;
  const std::shared_ptr<Budget> within_;
  mutable std::mutex mutex_;
  uint64_t limit_;      // guarded by mutex_, as the next one
  uint64_t taken_ = 0;  // above the limit only where that was lowered meanwhile
};

}  // namespace ashlar::daemon
