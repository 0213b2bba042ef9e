// SPDX-License-Identifier: Apache-2.0
// DiskError: whether a disk's error is worth trying again.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ashlar::storage {

// The status of a call that failed with `error` (an errno). RESOURCE_EXHAUSTED: the file system is full. UNAVAILABLE:
// it is read-only, or the device fails. Every other code says that to try again would be of no use.
absl::Status DiskError(int error, absl::string_view what);

// Returns whether the status has one of these two codes: the disk may later do what it refuses now.
bool MayPass(const absl::Status& status);

}  // namespace ashlar::storage
