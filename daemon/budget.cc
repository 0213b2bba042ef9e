#include "daemon/region_budget.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ashlar::daemon {

absl::StatusOr<RegionBudget::Charge> RegionBudget::TakeHere(const std::shared_ptr<RegionBudget>& budget,
                                                            uint64_t bytes) {
  {
    std::lock_guard lock(budget->mutex_);
    if (bytes > budget->limit_ - budget->taken_) {
      return absl::ResourceExhaustedError(
          absl::StrCat(budget->owner_, " has at most ", budget->limit_, " bytes of regions"));
    }
    budget->taken_ += bytes;
  }
  return Charge(budget.get(), [budget, bytes](const void*) {
    std::lock_guard lock(budget->mutex_);
    budget->taken_ -= bytes;
  });
}

absl::StatusOr<RegionBudget::Charge> RegionBudget::Take(const std::shared_ptr<RegionBudget>& budget, uint64_t bytes) {
  absl::StatusOr<Charge> here = TakeHere(budget, bytes);
  if (!here.ok() || budget->within_ == nullptr) return here;
  const absl::StatusOr<Charge> around = Take(budget->within_, bytes);
  if (!around.ok()) return around;
  return std::make_shared<const std::pair<Charge, Charge>>(*std::move(here), *around);
}

}  // namespace ashlar::daemon
