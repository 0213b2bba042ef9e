#include "daemon/region_budget.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ashlar::daemon {

absl::StatusOr<RegionBudget::Charge> RegionBudget::Take(const std::shared_ptr<RegionBudget>& budget, uint64_t bytes) {
  {
    std::lock_guard lock(budget->mutex_);
    if (bytes > budget->limit_ - budget->taken_) {
      return absl::ResourceExhaustedError(
          absl::StrCat(budget->owner_, " has at most ", budget->limit_, " bytes of regions"));
    }
    budget->taken_ += bytes;
  }
  const Charge here(budget.get(), [budget, bytes](const void*) {
    std::lock_guard lock(budget->mutex_);
    budget->taken_ -= bytes;
  });
  if (budget->within_ == nullptr) return here;
  const absl::StatusOr<Charge> around = Take(budget->within_, bytes);
  if (!around.ok()) return around;
  return std::make_shared<const std::pair<Charge, Charge>>(here, *around);
}

}  // namespace ashlar::daemon
