// SPDX-License-Identifier: Apache-2.0
// CheckOwner: refuses files and folders that another user controls.
#pragma once

#include <sys/stat.h>

#include <string>

#include "absl/status/status.h"

namespace ashlar::storage {

// FAILED_PRECONDITION, which names the path and the remedy, unless the open file or folder belongs to this process's
// user and, if it is a regular file, has no second name (hard link).
absl::Status CheckOwner(const std::string& path, const struct stat& info);

// The status of opening `path` with O_NOFOLLOW that failed with ELOOP.
absl::Status IsLink(const std::string& path);

}  // namespace ashlar::storage
