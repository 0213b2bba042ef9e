// SPDX-License-Identifier: Apache-2.0
// RecordStore: small records by name, written in atomic, durable batches. They say what lies where on a disk.
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
    std::optional<std::string> value;  // none: the record is deleted, if there is one
  };

  virtual ~RecordStore() = default;

  // Calls `visit` for every record, in ascending order of names. Ends with the first error, which it returns; DATA_LOSS
  // where the store itself is damaged.
  virtual absl::Status Load(absl::FunctionRef<absl::Status(std::string_view name, std::string_view value)> visit) = 0;

  // Makes all changes in order, or none. OK: they are durable. An error leaves open which of the two it is, also after
  // a crash; a later batch that succeeds decides for the names in it.
  virtual absl::Status Write(std::span<const Change> batch) = 0;
};

// Told of each warning and error of the store itself, on any of its threads.
using RecordLog = std::function<void(bool error, std::string_view line)>;

// Opens RocksDB in the folder `path`, which is made if there is none. FAILED_PRECONDITION while another process has it,
// DATA_LOSS if it is damaged, RESOURCE_EXHAUSTED and UNAVAILABLE as DiskError. Errors name the path. Of the latest
// batches, which lie in a log, damage loses those that it has struck, and none behind them.
//
// After a batch that the disk refused, the next call opens the store anew before it works.
absl::StatusOr<std::unique_ptr<RecordStore>> OpenRecordStore(const std::string& path, RecordLog log = nullptr);

}  // namespace ashlar::storage
