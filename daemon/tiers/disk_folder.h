// SPDX-License-Identifier: Apache-2.0
// The folder of the ssd tier: its owner and mode, and the setting aside of damaged files.
#pragma once

#include <ctime>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {

// The database of records in that folder.
std::string RecordsFolder(const std::string& folder);

// Makes the folder, and those that lead to it, if there is none, and returns it open. The folder and the tier's files
// become readable and writable to the daemon's user alone (0700 and 0600), also if an earlier daemon left them
// otherwise: names of tenants, keys and lengths tell what is cached. FAILED_PRECONDITION, with the name and the remedy,
// where the folder or one of the tier's files belongs to another user, a file is a link, or every user may write to the
// folder. Other errors as storage::DiskError.
absl::StatusOr<UniqueFd> OpenPrivate(const std::string& folder);

// The number of set-aside databases that are kept, the latest ones.
inline constexpr size_t kSetAsideKept = 2;

// Gives the damaged records another name in the same folder, records.damaged- and `now` (UTC), which it returns, and
// removes all but the latest kSetAsideKept of these. The slab stays in place: without records its bytes are nobody's,
// and a second slab of its size would find no room.
absl::StatusOr<std::string> SetAside(const std::string& folder, std::time_t now);

}  // namespace ashlar::daemon
