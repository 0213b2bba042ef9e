// SPDX-License-Identifier: Apache-2.0
// Ways to store values on a disk, measured in the same way: the SSD tier, RocksDB's BlobDB, and the plain disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::bench {

// Values numbered from 0. A value is written when it is durable; the value that it replaces is then gone.
class DiskEngine {
 public:
  virtual ~DiskEngine() = default;

  // Erases all values and stores `values` of `value_bytes` each, a multiple of an extent.
  virtual absl::Status Fill(size_t values, uint64_t value_bytes) = 0;
  // Writes or reads all values, each once, in this order, with at most `depth` in flight. Returns when all are done.
  virtual absl::Status Write(const std::vector<uint32_t>& order, int depth) = 0;
  virtual absl::Status Read(const std::vector<uint32_t>& order, int depth) = 0;
};

// Each keeps its files in `folder` and removes none. `round_bytes`: size of all values of a round.
absl::StatusOr<std::unique_ptr<DiskEngine>> OpenRawDisk(const std::string& folder, uint64_t round_bytes);
absl::StatusOr<std::unique_ptr<DiskEngine>> OpenTierEngine(const std::string& folder, uint64_t round_bytes);
absl::StatusOr<std::unique_ptr<DiskEngine>> OpenBlobDb(const std::string& folder, uint64_t round_bytes);

}  // namespace ashlar::bench
