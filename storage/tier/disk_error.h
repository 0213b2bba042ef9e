// SPDX-License-Identifier: Apache-2.0
// DiskError: tells whether a disk error may be temporary.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ashlar::storage {

// Returns the status of a call that failed with `error` (an errno). RESOURCE_EXHAUSTED: the file system is full.
// UNAVAILABLE: it is read-only, or the device fails. Other codes are permanent.
absl::Status DiskError(int error, absl::string_view what);

// Returns whether the status has one of these two codes, so that a retry may succeed.
bool MayPass(const absl::Status& status);

}  // namespace ashlar::storage
