// SPDX-License-Identifier: Apache-2.0
// The directory of the ssd tier: owner and mode, and renaming damaged files.
#pragma once

#include <ctime>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {

// Returns the path of the record database in the directory.
std::string RecordsFolder(const std::string& folder);

// Creates the directory and its parents if missing, and returns it open. The directory and the tier's files get modes
// 0700 and 0600, even if an earlier daemon left them otherwise: names of tenants, keys and lengths reveal what is
// cached. FAILED_PRECONDITION, with the name and the remedy, if the directory or a file of the tier belongs to another
// user, a file is a link, or other users can write to the directory. Other errors as storage::DiskError.
absl::StatusOr<UniqueFd> OpenPrivate(const std::string& folder);

// Number of renamed databases that are kept, the latest ones.
inline constexpr size_t kQuarantinesKept = 2;

// Renames the damaged database to records.damaged-`now` (UTC), returns the new name, and removes all but the latest
// kQuarantinesKept of them. The slab stays: without records its bytes are unused, and a second slab would not fit.
absl::StatusOr<std::string> QuarantineRecords(const std::string& folder, std::time_t now);

}  // namespace ashlar::daemon
