// SPDX-License-Identifier: Apache-2.0
#include "storage/testing/ssd_folder.h"

#include <cstring>
#include <utility>

namespace ashlar::storage {

SsdFolder::SsdFolder() : contents_(61), io_(/*threads=*/4) {
  contents_.Fill(/*seed=*/5);
}

absl::StatusOr<std::vector<SsdTier::Recovered>> SsdFolder::Open(const std::string& folder) {
  auto file = OpenBlockFile(folder + "/slab", SsdTier::SlabBytes(kExtents * limits::kExtentBytes));
  if (!file.ok()) return file.status();
  file_ = *std::move(file);
  auto records = OpenRecordStore(folder + "/index");
  if (!records.ok()) return records.status();
  records_ = *std::move(records);
  auto tier = SsdTier::Open({.new_id = {7}}, *file_, *records_, io_);
  if (!tier.ok()) return tier.status();
  tier_ = *std::move(tier);
  if (absl::Status status = tier_->AddTenant(kTenant, "acme", kExtents * limits::kExtentBytes); !status.ok()) {
    return status;
  }
  return tier_->Recover();
}

ObjectHeader SsdFolder::HeaderOf(const Version& version, uint64_t extents) {
  ObjectHeader header = HeaderOfExtents(version.number, extents);
  std::memcpy(header.ns.bytes.data(), &version.generation, sizeof version.generation);
  return header;
}

SsdFolder::Version SsdFolder::VersionOf(const ObjectHeader& header) {
  Version version;
  std::memcpy(&version.number, header.key.bytes.data(), sizeof version.number);
  std::memcpy(&version.generation, header.ns.bytes.data(), sizeof version.generation);
  return version;
}

const std::byte* SsdFolder::ExtentOf(const Version& version, uint64_t extent) const {
  const uint64_t mixed = (version.generation * 0x9E3779B97F4A7C15 + version.number) * 0xD6E8FEB86659FD93;
  return contents_[((mixed >> 32) + extent * 17) % contents_.extents()];
}

}  // namespace ashlar::storage
