// The folder of the ssd tier: whose it is, and what becomes of files in it that are damaged.
#pragma once

#include <ctime>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::daemon {

// The database of records in that folder.
std::string RecordsFolder(const std::string& folder);

// Makes the folder, and those that lead to it, if there is none. It and what the tier has in it become readable and
// writable to the daemon's user alone (0700 and 0600), also where an earlier daemon left it otherwise: names of
// tenants, keys and lengths tell what is cached. What belongs to another user stays as it is, with a warning in the
// log. Errors as storage::DiskError.
absl::Status MakePrivate(const std::string& folder);

// How many databases that were set aside are kept, of those the latest.
inline constexpr size_t kSetAsideKept = 2;

// Gives the damaged records another name in the same folder, records.damaged- and `now` (UTC), which it returns, and
// removes all but the latest kSetAsideKept of such. The slab stays where it is: without records its bytes are nobody's,
// and a second one of its size would find no room.
absl::StatusOr<std::string> SetAside(const std::string& folder, std::time_t now);

}  // namespace ashlar::daemon
