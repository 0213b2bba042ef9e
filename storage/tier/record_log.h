// SPDX-License-Identifier: Apache-2.0
// ScanRecordLog: reads RocksDB's log of its latest batches around damage.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace ashlar::storage {

// A log as RocksDB writes it (docs of its "Write Ahead Log File Format"): blocks of 32 KiB, of fragments that each have
// a checksum; one or several fragments make a batch. RocksDB's own recovery skips the rest of a block behind a damaged
// fragment, because that fragment's length may be wrong; it so loses batches that are whole.
struct RecordLogScan {
  std::vector<std::string> batches;  // all that are whole, in order
  bool whole_behind_damage = false;  // some of them lie behind a damaged place
};
RecordLogScan ScanRecordLog(std::string_view bytes);
// Returns a log of exactly these batches.
std::string EncodeRecordLog(const std::vector<std::string>& batches);

// Writes every log in RocksDB's folder `path` anew, without its damaged batches, if it has whole batches behind damage.
// Each log is replaced at once and durably, or not at all. Returns how many. A log that is damaged at its end alone, as
// after a power loss, stays as it is. Call it before the folder is opened.
absl::StatusOr<int> RepairRecordLogs(const std::string& path);

}  // namespace ashlar::storage
