// How much memory regions may hold: those of one session, and those of all sessions of a tenant.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"

namespace ashlar::daemon {

// Thread-safe.
class RegionBudget {
 public:
  // `owner` is named in refusals ("a session"). What is taken here is also taken from `within`, unless that is null.
  RegionBudget(std::string owner, uint64_t limit, std::shared_ptr<RegionBudget> within = nullptr)
      : owner_(std::move(owner)), limit_(limit), within_(std::move(within)) {}

  // Bytes that are taken until this goes.
  using Charge = std::shared_ptr<const void>;
  // RESOURCE_EXHAUSTED, and nothing is taken, beyond the limit of this budget or of one around it.
  static absl::StatusOr<Charge> Take(const std::shared_ptr<RegionBudget>& budget, uint64_t bytes);
  // The same from this budget alone: what is charged around it already.
  static absl::StatusOr<Charge> TakeHere(const std::shared_ptr<RegionBudget>& budget, uint64_t bytes);

  uint64_t taken() const {
    std::lock_guard lock(mutex_);
    return taken_;
  }

 private:
  const std::string owner_;
  const uint64_t limit_;
  const std::shared_ptr<RegionBudget> within_;
  mutable std::mutex mutex_;
  uint64_t taken_ = 0;  // guarded by mutex_; at most limit_
};

}  // namespace ashlar::daemon
