// SPDX-License-Identifier: Apache-2.0
// A real SSD tier in a folder, with threads for its input and output, and objects whose bytes name their version.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "storage/testing/disk_objects.h"
#include "storage/testing/executors.h"
#include "storage/tier/ssd_tier.h"

namespace ashlar::storage {

class SsdFolder {
 public:
  static constexpr TenantId kTenant = 1;
  static constexpr uint64_t kExtents = 96;  // extents of the tier
  static constexpr uint64_t kNumbers = 32;  // objects that may exist at once
  static constexpr uint64_t kMaxExtents = 6;

  // One of many objects stored under its number by successive processes.
  struct Version {
    uint64_t number = 0;
    uint64_t generation = 0;
    bool operator==(const Version&) const = default;
  };

  SsdFolder();

  // Opens the tier and returns the objects that it acknowledged in earlier lives. The folder must exist.
  absl::StatusOr<std::vector<SsdTier::Recovered>> Open(const std::string& folder);

  SsdTier& tier() { return *tier_; }
  ThreadedExecutor& io() { return io_; }

  // A header that depends only on version and number of extents.
  static ObjectHeader HeaderOf(const Version& version, uint64_t extents);
  static Version VersionOf(const ObjectHeader& header);
  const std::byte* ExtentOf(const Version& version, uint64_t extent) const;

 private:
  ExtentMemory contents_;
  std::unique_ptr<BlockFile> file_;
  std::unique_ptr<RecordStore> records_;
  std::unique_ptr<SsdTier> tier_;
  ThreadedExecutor io_;  // destroyed before the objects that its work refers to
};

}  // namespace ashlar::storage
