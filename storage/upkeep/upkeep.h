// Upkeep: what operators do with many objects at once: list, count, forget and verify them.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "proto/key.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/lookup/explainer.h"
#include "storage/objects/object_table.h"
#include "storage/prefix/prefixes.h"
#include "storage/tier/tiers.h"
#include "storage/upkeep/forgetting.h"
#include "storage/upkeep/inventory.h"
#include "storage/upkeep/scrubber.h"

namespace ashlar::storage {

// A cache's; the metadata thread.
class Upkeep {
 public:
  Upkeep(ObjectTable& table, Prefixes& prefixes, Explainer& explainer, const Tiers& tiers, Executor& copying,
         const Clock& clock)
      : table_(table),
        prefixes_(prefixes),
        explainer_(explainer),
        disk_(tiers.ssd),
        inventory_(table, clock),
        scrubber_(table, tiers.ssd, copying, clock) {}

  const Inventory& inventory() const { return inventory_; }
  Scrubber& scrubber() { return scrubber_; }
  const Scrubber& scrubber() const { return scrubber_; }
  // Whether the disk has nothing of a tenant that is not configured. UNAVAILABLE: it cannot be opened.
  absl::Status CheckUnknown(const std::string& tenant) const {
    if (disk_ == nullptr) return absl::OkStatus();
    if (!disk_->has_disk()) return absl::UnavailableError("the ssd tier's disk cannot be opened");
    if (!disk_->recovery().unknown_tenants.contains(tenant)) return absl::OkStatus();
    return absl::FailedPreconditionError("the disk has objects of this tenant, which is not configured here");
  }
  // UNAVAILABLE where the disk cannot be opened: its objects would come back with it.
  absl::StatusOr<std::shared_ptr<Forgetting>> Forget(TenantId tenant, std::optional<NamespaceId> ns) {
    if (disk_ != nullptr && !disk_->has_disk()) {
      return absl::UnavailableError("the ssd tier's disk cannot be opened, and its objects would come back with it");
    }
    return std::make_shared<Forgetting>(table_, prefixes_, explainer_, disk_, tenant, ns);
  }

 private:
  ObjectTable& table_;
  Prefixes& prefixes_;
  Explainer& explainer_;
  SsdTier* const disk_;
  const Inventory inventory_;
  Scrubber scrubber_;
};

}  // namespace ashlar::storage
