// SPDX-License-Identifier: Apache-2.0
// CheckOwner: refuses files and directories that another user controls.
#pragma once

#include <sys/stat.h>

#include <string>

#include "absl/status/status.h"

namespace ashlar::storage {

// FAILED_PRECONDITION, with the path and the remedy, unless the open file or directory belongs to this process's user
// and a regular file has no other hard link.
absl::Status CheckOwner(const std::string& path, const struct stat& info);

// Returns the status for opening `path` with O_NOFOLLOW that failed with ELOOP.
absl::Status IsLink(const std::string& path);

}  // namespace ashlar::storage
