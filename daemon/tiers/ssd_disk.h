// SPDX-License-Identifier: Apache-2.0
// SsdDisk: the opened disk of the ssd tier: slab and records.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/executor.h"
#include "storage/tier/block_file.h"
#include "storage/tier/record_store.h"
#include "storage/tier/ssd_tier.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Each member uses the previous ones.
struct SsdDisk {
  std::unique_ptr<storage::BlockFile> file;
  std::unique_ptr<storage::RecordStore> records;
  std::unique_ptr<storage::SsdTier> tier;
  std::vector<storage::SsdTier::Recovered> recovered;
  bool quarantined = false;  // the records were damaged and have been renamed
};

// Adds the budgets of tenants with one. A tenant's number is its index in the list.
absl::Status AddSsdTenants(const v1::Config& config, storage::SsdTier& tier);

// Opens the configured ssd tier with the tenants' budgets, and logs what was found. Takes as long as allocating the
// slab and reading its records, on the calling thread. Damaged records are renamed, or refused with DATA_LOSS and the
// remedy, as ssd.on_damage says. RESOURCE_EXHAUSTED and UNAVAILABLE are temporary (storage::MayPass). Errors name the
// field ssd.folder.
absl::StatusOr<SsdDisk> OpenSsdDisk(const v1::Config& config, storage::Executor& io);

}  // namespace ashlar::daemon
