// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/budget.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ashlar::daemon {

absl::StatusOr<Budget::Charge> Budget::TakeHere(const std::shared_ptr<Budget>& budget, uint64_t amount) {
  {
    MutexLock lock(budget->mutex_);
    if (amount > budget->limit_ - std::min(budget->taken_, budget->limit_)) {
      return absl::ResourceExhaustedError(
          absl::StrCat(budget->owner_, " has at most ", budget->limit_, " ", budget->what_));
    }
    budget->taken_ += amount;
  }
  return Charge(budget.get(), [budget, amount](const void*) {
    MutexLock lock(budget->mutex_);
    budget->taken_ -= amount;
  });
}

absl::StatusOr<Budget::Charge> Budget::Take(const std::shared_ptr<Budget>& budget, uint64_t amount) {
  absl::StatusOr<Charge> here = TakeHere(budget, amount);
  if (!here.ok() || budget->within_ == nullptr) return here;
  const absl::StatusOr<Charge> around = Take(budget->within_, amount);
  if (!around.ok()) return around;
  return std::make_shared<const std::pair<Charge, Charge>>(*std::move(here), *around);
}

}  // namespace ashlar::daemon
