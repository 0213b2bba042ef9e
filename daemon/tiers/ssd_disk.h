// SPDX-License-Identifier: Apache-2.0
// SsdDisk: the disk of the ssd tier, its slab and records, opened and read.
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

// Members stand in the order in which each needs the one before.
struct SsdDisk {
  std::unique_ptr<storage::BlockFile> file;
  std::unique_ptr<storage::RecordStore> records;
  std::unique_ptr<storage::SsdTier> tier;
  std::vector<storage::SsdTier::Recovered> recovered;
  bool set_aside = false;  // the records were damaged, and have another name now
};

// The tenants' budgets, where they have one. A tenant's number is its place in the list.
absl::Status AddSsdTenants(const v1::Config& config, storage::SsdTier& tier);

// Opens what the configuration names, which has an ssd tier, with a budget for every tenant that has one, and says in
// the log what was found. Takes as long as allocating the slab and reading its records does, on the calling thread.
// Damaged records are set aside, or refused with DATA_LOSS that names the remedy, as ssd.on_damage says.
// RESOURCE_EXHAUSTED and UNAVAILABLE: the disk may do it later (storage::MayPass). Errors name the field ssd.folder.
absl::StatusOr<SsdDisk> OpenSsdDisk(const v1::Config& config, storage::Executor& io);

}  // namespace ashlar::daemon
