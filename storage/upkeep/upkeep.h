// SPDX-License-Identifier: Apache-2.0
// Upkeep: operators' actions on many objects: list, count, erase and verify.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/key.h"
#include "storage/adoption.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/lookup/explainer.h"
#include "storage/objects/object_table.h"
#include "storage/prefix/prefixes.h"
#include "storage/tier/tiers.h"
#include "storage/upkeep/erasure.h"
#include "storage/upkeep/inventory.h"
#include "storage/upkeep/scrubber.h"

namespace ashlar::storage {

// Belongs to a cache; the metadata thread only.
class Upkeep {
 public:
  Upkeep(ObjectTable& table, Prefixes& prefixes, Explainer& explainer, const Adoption& adoption, const Tiers& tiers,
         Executor& copying, const Clock& clock)
      : table_(table),
        prefixes_(prefixes),
        explainer_(explainer),
        adoption_(adoption),
        disk_(tiers.ssd),
        inventory_(table, clock),
        scrubber_(table, tiers.ssd, copying, clock) {}

  const Inventory& inventory() const { return inventory_; }
  Scrubber& scrubber() { return scrubber_; }
  const Scrubber& scrubber() const { return scrubber_; }
  // Starts an Erasure. UNAVAILABLE if the disk is not open or its objects are still being adopted, because they would
  // come back.
  absl::StatusOr<std::shared_ptr<Erasure>> Erase(TenantId tenant, std::string name, std::optional<NamespaceId> ns) {
    if (disk_ != nullptr && !disk_->has_disk()) {
      return absl::UnavailableError("the disk of the ssd tier is not open; its objects are not loaded yet");
    }
    if (adoption_.pending()) return absl::UnavailableError("the objects of the ssd tier are being loaded");
    return std::make_shared<Erasure>(table_, prefixes_, explainer_, disk_, tenant, std::move(name), ns);
  }

 private:
  ObjectTable& table_;
  Prefixes& prefixes_;
  Explainer& explainer_;
  const Adoption& adoption_;
  SsdTier* const disk_;
  const Inventory inventory_;
  Scrubber scrubber_;
};

}  // namespace ashlar::storage
