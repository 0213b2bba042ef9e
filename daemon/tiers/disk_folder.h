// The folder of the ssd tier: its owner and mode, and the setting aside of damaged files.
#pragma once

#include <ctime>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::daemon {

// The database of records in that folder.
std::string RecordsFolder(const std::string& folder);

// Makes the folder, and those that lead to it, if there is none. The folder and the tier's files become readable and
// writable to the daemon's user alone (0700 and 0600), also if an earlier daemon left them otherwise: names of tenants,
// keys and lengths tell what is cached. Files of another user stay as they are, with a warning in the log. Errors as
// storage::DiskError.
absl::Status MakePrivate(const std::string& folder);

// The number of set-aside databases that are kept, the latest ones.
inline constexpr size_t kSetAsideKept = 2;

// Gives the damaged records another name in the same folder, records.damaged- and `now` (UTC), which it returns, and
// removes all but the latest kSetAsideKept of these. The slab stays in place: without records its bytes are nobody's,
// and a second slab of its size would find no room.
absl::StatusOr<std::string> SetAside(const std::string& folder, std::time_t now);

}  // namespace ashlar::daemon
