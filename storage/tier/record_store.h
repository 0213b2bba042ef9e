// SPDX-License-Identifier: Apache-2.0
// RecordStore: small named records, written in atomic, durable batches. They describe what is where on a disk.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::storage {

// Callable from any thread, one call at a time.
class RecordStore {
 public:
  struct Change {
    std::string name;
    std::optional<std::string> value;  // empty: delete the record if it exists
  };

  virtual ~RecordStore() = default;

  // Calls `visit` for every record in ascending order of names. Stops at the first error and returns it; DATA_LOSS if
  // the store itself is damaged.
  virtual absl::Status Load(absl::FunctionRef<absl::Status(std::string_view name, std::string_view value)> visit) = 0;

  // Makes all changes in order, or none. OK: they are durable. After an error either may be the case, even after a
  // crash; a later successful batch decides for the names in it.
  virtual absl::Status Write(std::span<const Change> batch) = 0;
};

// Called for each warning and error of the store itself, on any of its threads.
using RecordLog = std::function<void(bool error, std::string_view line)>;

// Opens RocksDB in the directory `path`, creating it if missing. FAILED_PRECONDITION if another process has it open,
// DATA_LOSS if it is damaged, RESOURCE_EXHAUSTED and UNAVAILABLE as in DiskError. Errors name the path. Damage in the
// log of recent batches only loses the damaged batches.
//
// After the disk refused a batch, the next call reopens the store first.
absl::StatusOr<std::unique_ptr<RecordStore>> OpenRecordStore(const std::string& path, RecordLog log = nullptr);

}  // namespace ashlar::storage
