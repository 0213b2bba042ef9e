// SPDX-License-Identifier: Apache-2.0
// ReadRegularFile: reads a file that an operator named, with a size limit and without blocking.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ashlar {

// Larger than any configuration, certificate or key.
inline constexpr size_t kMaxConfigFileBytes = size_t{4} << 20;

// Returns the contents of the regular file at `path`, which may be a symbolic link. INVALID_ARGUMENT if the file is
// larger than `max_bytes` or not regular, such as a FIFO or a device, which could block or never end. NOT_FOUND,
// PERMISSION_DENIED and the like if the file cannot be read. Messages begin with `field` unless it is empty.
absl::StatusOr<std::string> ReadRegularFile(absl::string_view field, const std::string& path, size_t max_bytes);

}  // namespace ashlar
