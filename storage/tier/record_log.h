// SPDX-License-Identifier: Apache-2.0
// ScanRecordLog: reads RocksDB's log of recent batches past damage.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace ashlar::storage {

// A log in RocksDB's format (its "Write Ahead Log File Format"): blocks of 32 KiB with checksummed fragments; one or
// more fragments form a batch. After a damaged fragment, RocksDB's own recovery skips the rest of the block, because
// the length may be wrong, and so loses intact batches.
struct RecordLogScan {
  std::vector<std::string> batches;  // all intact batches, in order
  bool whole_after_damage = false;   // some of them come after damage
};
RecordLogScan ScanRecordLog(std::string_view bytes);
// Returns a log of exactly these batches.
std::string EncodeRecordLog(const std::vector<std::string>& batches);

// Rewrites every log in RocksDB's directory `path` without its damaged batches, if it has intact batches after damage.
// Each log is replaced atomically and durably. Returns the number of rewritten logs. A log that is only damaged at its
// end, as after a power loss, is not changed. Call it before opening the directory.
absl::StatusOr<int> RepairRecordLogs(const std::string& path);

}  // namespace ashlar::storage
