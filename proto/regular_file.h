// SPDX-License-Identifier: Apache-2.0
// ReadRegularFile: reads a file whose path an operator gave, without waiting and within a bound.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ashlar {

// Configuration, certificates, keys and the like are far smaller.
inline constexpr size_t kMaxConfigFileBytes = size_t{4} << 20;

// Returns the bytes of the regular file at `path`, which may be a symbolic link. INVALID_ARGUMENT for anything else,
// such as a FIFO or a device, which could block the reader or never end, and for more than `max_bytes`; NOT_FOUND,
// PERMISSION_DENIED and the like when the file cannot be read. Errors begin with `field`, unless it is empty.
absl::StatusOr<std::string> ReadRegularFile(absl::string_view field, const std::string& path, size_t max_bytes);

}  // namespace ashlar
